"""An Airflow with the example DAGs that stays up in the foreground, for people who want to click."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console

from raytpu_ops.demo.airflow import AirflowInstance
from raytpu_ops.demo.leases import release_all
from raytpu_ops.demo.places import DAG_ID, example_dags, removed_on_error, temporary_folder
from raytpu_ops.demo.signals import ctrl_c_ignored, ends_like_ctrl_c
from raytpu_ops.tpu.errors import RayTpuError


def run_ui(console: Console, *, home: Path, port: int | None) -> int:
    """Keep an Airflow up until Ctrl-C; the exit code.

    :param home: its AIRFLOW_HOME, which stays: users, runs and logs are there the next time.
    :param port: its port on 127.0.0.1; None takes a free one.
    """
    place = temporary_folder()
    local_root = place / "local"
    env = {"RAYTPU_LOCAL_ROOT": str(local_root), "RAYTPU_DEMO_STORAGE": str(home.absolute() / "storage")}
    if schedule := os.environ.get("RAYTPU_DEMO_SCHEDULE"):
        env["RAYTPU_DEMO_SCHEDULE"] = schedule
    with removed_on_error(place):
        instance = AirflowInstance(
            home,
            example_dags(),
            port=port,
            env=env,
            # The example DAGs run when somebody asks for it; paused, they would only look broken.
            settings={"core": {"dags_are_paused_at_creation": "False"}},
            local_root=local_root,
            temporary=[place],
        )
    code = 0
    try:
        with ends_like_ctrl_c():
            instance.start(say=lambda text: console.print(f"Airflow: {text}", highlight=False))
            _welcome(console, instance, local_root)
            while not instance.ended():
                time.sleep(1)
            console.print("\n".join(instance.ended()), style="red", markup=False, highlight=False)
            code = 1
    except KeyboardInterrupt:
        pass  # the ordinary way out
    except RayTpuError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        code = 1
    finally:
        left = _clean_up(console, instance, local_root, place)
    console.print(f"left behind: {'; '.join(left) or 'nothing'}", highlight=False)
    return 1 if left else code


def _welcome(console: Console, instance: AirflowInstance, local_root: Path) -> None:
    for line in (
        "",
        f"Airflow is up: {instance.url}/dags/{DAG_ID}",
        f"  user {instance.username}, password {instance.password}",
        "  trigger the DAG there; its form has generation, topology, slices and epochs",
        "From another terminal, its leases and faults for them:",
        f"  {_command()} leases --root {local_root}",
        f"  {_command()} fault slow-host --root {local_root}",
        f"Your own DAGs: put their files into {example_dags()}",
        "Ctrl-C stops it and releases whatever its runs hold.",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _command() -> str:
    """The raytpu command as a shell finds it: by its path where it is not on PATH, as in a checkout's .venv."""
    return "raytpu" if shutil.which("raytpu") else str(Path(sys.executable).with_name("raytpu"))


def _clean_up(console: Console, instance: AirflowInstance, local_root: Path, place: Path) -> list[str]:
    with ctrl_c_ignored():
        console.print("stopping Airflow, releasing leases", highlight=False)
        left = instance.stop()
        try:
            left += release_all(local_root).left
        except RayTpuError as error:
            left.append(str(error))
        shutil.rmtree(place, ignore_errors=True)
    return left
