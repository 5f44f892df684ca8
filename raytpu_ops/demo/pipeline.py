"""One run of the example DAG in a real Airflow, watched phase by phase.

What a phase's seconds are: from the end of the phase before it (the first: from the start of the
run) to the end of its task, so that Airflow's own scheduling counts and the phases add up to the
run. Not here: how any of it looks (``report.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from raytpu_ops.demo.airflow_api import FINAL_RUN_STATES, AirflowApi
from raytpu_ops.demo.places import DAG_ID
from raytpu_ops.tpu.errors import DeadlineExceeded
from raytpu_ops.tpu.lease import SliceLease

#: Phase and task of the DAG that it ends with, in the order in which they run.
PHASES: dict[str, str] = {
    "plan": "plan",
    "provision": "provision",
    "labelled": "labelled",
    "train": "train",
    "serve": "serve",
    "evaluate": "evaluate",
    "release": "release",
}
#: Airflow's states of a task, in the demo's words.
_WORDS = {
    None: "waiting",
    "scheduled": "next",
    "queued": "next",
    "restarting": "running",
    "deferred": "running",
    "success": "done",
    "up_for_retry": "failed, to be tried again",
    "upstream_failed": "not run",
    "skipped": "not run",
}


@dataclass(frozen=True)
class PhaseState:
    """A phase at one moment.

    :param phase: its name.
    :param state: in words: waiting, next, running, done, failed, not run.
    :param tries: how often its task was started.
    :param since: when its task's latest try began, UTC.
    :param ended: when its task ended for good, UTC.
    """

    phase: str
    state: str
    tries: int = 0
    since: datetime | None = None
    ended: datetime | None = None


@dataclass(frozen=True)
class Snapshot:
    """The run at one moment."""

    run_state: str
    started: datetime
    phases: tuple[PhaseState, ...]

    def seconds(self, now: datetime | None = None) -> dict[str, float]:
        """Phase to its seconds; a phase that runs counts up to ``now``, one that has not begun is left out."""
        out: dict[str, float] = {}
        before = self.started
        for phase in self.phases:
            end = phase.ended or ((now or datetime.now(UTC)) if phase.since else None)
            if end is None:
                continue
            out[phase.phase] = max(0.0, (end - before).total_seconds())
            before = max(before, end)
        return out


@dataclass
class Finished:
    """A run that is over, with what its tasks handed on."""

    run_id: str
    last: Snapshot
    outputs: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        """Airflow's own word for the run."""
        return self.last.run_state == "success"

    @property
    def lease(self) -> SliceLease | None:
        """The lease that was granted, if it came that far."""
        value = self.outputs.get("labelled") or self.outputs.get("provision")
        return SliceLease.from_xcom(value) if value else None

    @property
    def accuracy(self) -> float | None:
        """Of the served model, on the held-out digits."""
        value = (self.outputs.get("evaluate") or {}).get("accuracy")
        return None if value is None else float(value)


def run_pipeline(
    api: AirflowApi,
    params: dict[str, Any],
    *,
    deadline_s: float,
    watch: Callable[[str, Snapshot], None] = lambda run_id, snapshot: None,
    poll_s: float = 0.5,
) -> Finished:
    """Trigger the example DAG and follow it to its end.

    :param api: a healthy Airflow that has the example DAGs.
    :param params: values for the DAG's params.
    :param deadline_s: seconds until the run must be over.
    :param watch: is told about every look.
    :raises DeadlineExceeded: the run goes on; the message says what its tasks are at.
    """
    api.wait_for_dag(DAG_ID)
    api.unpause(DAG_ID)
    run_id = api.trigger(DAG_ID, params)
    until = time.monotonic() + deadline_s
    while True:
        snapshot = look(api, run_id)
        watch(run_id, snapshot)
        if snapshot.run_state in FINAL_RUN_STATES:
            return _finished(api, run_id, snapshot)
        if time.monotonic() > until:
            states = ", ".join(f"{phase.phase} {phase.state}" for phase in snapshot.phases)
            raise DeadlineExceeded(f"run {run_id} of {DAG_ID} is not over after {deadline_s:.0f} s: {states}")
        time.sleep(poll_s)


def look(api: AirflowApi, run_id: str) -> Snapshot:
    """The run as it is now."""
    run = api.run(DAG_ID, run_id)
    tasks = {task["task_id"]: task for task in api.tasks(DAG_ID, run_id)}
    started = _instant(run["start_date"]) or _instant(run["queued_at"]) or datetime.now(UTC)
    phases = tuple(_phase(phase, tasks.get(task_id)) for phase, task_id in PHASES.items())
    return Snapshot(run["state"], started, phases)


def _phase(phase: str, task: dict[str, Any] | None) -> PhaseState:
    if task is None:
        return PhaseState(phase, "waiting")
    state = _WORDS.get(task["state"], task["state"])
    return PhaseState(
        phase=phase,
        state=state,
        tries=task["try_number"],
        since=_instant(task["start_date"]),
        ended=_instant(task["end_date"]) if state in {"done", "failed", "not run"} else None,
    )


def _finished(api: AirflowApi, run_id: str, snapshot: Snapshot) -> Finished:
    finished = Finished(run_id, snapshot)
    for state in snapshot.phases:
        task_id = PHASES[state.phase]
        if state.state == "done":
            finished.outputs[state.phase] = api.xcom(DAG_ID, run_id, task_id)
        elif state.state == "failed":
            finished.failures[state.phase] = api.last_log(DAG_ID, run_id, task_id)
    return finished


def _instant(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
