"""The demo from start to end: a real Airflow, one run of the example DAG, the report, nothing left.

Whatever happens (an error, Ctrl-C, SIGTERM), leases are released and Airflow is stopped before the
command ends; after SIGKILL the guard does it.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from raytpu_ops.demo.airflow import MARK, AirflowInstance
from raytpu_ops.demo.airflow_api import AirflowApi
from raytpu_ops.demo.leases import release_all
from raytpu_ops.demo.leftovers import left_behind
from raytpu_ops.demo.pipeline import PHASES, Finished, Snapshot, run_pipeline
from raytpu_ops.demo.places import DAG_ID, example_dags, removed_on_error, temporary_folder
from raytpu_ops.demo.report import Progress, print_report, progress
from raytpu_ops.demo.signals import INTERRUPTED, ctrl_c_ignored, ends_like_ctrl_c
from raytpu_ops.tpu.errors import RayTpuError

#: Seconds between two looks into the log of the phase that runs.
_LOG_EVERY_S = 2.0


def run_demo(console: Console, params: dict[str, Any], *, home: Path | None, plain: bool, deadline_s: float) -> int:
    """Run the demo; the exit code: 0 only for a green run that left nothing.

    :param params: values for the DAG's params.
    :param home: where Airflow's home and the checkpoints stay afterwards; None keeps nothing.
    :param deadline_s: seconds until the run must be over.
    """
    began = time.monotonic()
    place = temporary_folder()
    base = home.absolute() if home else place
    local_root = place / "local"
    with removed_on_error(place):
        instance = AirflowInstance(
            base / "airflow",
            example_dags(),
            env={"RAYTPU_LOCAL_ROOT": str(local_root), "RAYTPU_DEMO_STORAGE": str(base / "storage")},
            local_root=local_root,
            temporary=[place],
        )
    run: Finished | None = None
    trouble: str | None = None
    code = 1
    with progress(console, plain=plain) as shown:
        try:
            with ends_like_ctrl_c():
                instance.start(say=lambda text: shown.step(f"Airflow: {text}"))
                shown.step(f"Airflow is up at {instance.url} after {time.monotonic() - began:.0f} s")
                run = run_pipeline(instance.api, params, deadline_s=deadline_s, watch=_Watch(instance.api, shown))
        except KeyboardInterrupt:
            trouble, code = "interrupted", INTERRUPTED
        except RayTpuError as error:
            trouble = str(error)
        finally:
            left = _clean_up(shown, instance, local_root, place)
    if run is not None:
        print_report(console, run)
    if trouble:
        console.print(trouble, markup=False, highlight=False, style="red", soft_wrap=True)
    console.print(f"left behind: {'; '.join(left) or 'nothing (no lease, process, port or folder)'}", highlight=False)
    if run is not None and run.succeeded and not left:
        code = 0
    console.print(_last_line(run, code, time.monotonic() - began, left), highlight=False, style="bold")
    return code


class _Watch:
    """Hands each look on, with the latest line of the log of the phase that runs."""

    def __init__(self, api: AirflowApi, shown: Progress) -> None:
        self._api = api
        self._shown = shown
        self._line: str | None = None
        self._looked = 0.0

    def __call__(self, run_id: str, snapshot: Snapshot) -> None:
        running = next((p for p in snapshot.phases if p.state == "running" and p.tries), None)
        if running is None:
            self._line = None
        elif time.monotonic() - self._looked > _LOG_EVERY_S:
            self._looked = time.monotonic()
            try:
                lines = self._api.log(DAG_ID, run_id, PHASES[running.phase], running.tries)
            except RayTpuError:
                lines = []  # the log is an extra; the run itself is looked at elsewhere
            self._line = next((line for line in reversed(lines) if line and not line.startswith("::")), None)
        self._shown.show(snapshot, self._line)


def _clean_up(shown: Progress, instance: AirflowInstance, local_root: Path, place: Path) -> list[str]:
    with ctrl_c_ignored():
        shown.step("stopping Airflow")
        left = instance.stop()
        shown.step("releasing what is left of leases")
        try:
            left += release_all(local_root).left
        except RayTpuError as error:
            left.append(str(error))
        shutil.rmtree(place, ignore_errors=True)
        marks = [(MARK, instance.mark), ("RAYTPU_ROOT", str(local_root.resolve()))]
        left += left_behind(local_root=local_root, marks=marks, folders=[place, instance.temp], ports=[instance.port])
    return left


def _last_line(run: Finished | None, code: int, seconds: float, left: list[str]) -> str:
    if code == 0 and run is not None and run.accuracy is not None:
        return f"demo: passed in {seconds:.0f} s; accuracy {run.accuracy:.2f}; nothing left"
    if code == INTERRUPTED:
        return f"demo: interrupted after {seconds:.0f} s; {'not everything is gone' if left else 'nothing left'}"
    failed = ", ".join(run.failures) if run and run.failures else ""
    why = f" in {failed}" if failed else (" because something was left" if left and run and run.succeeded else "")
    return f"demo: failed{why} after {seconds:.0f} s"
