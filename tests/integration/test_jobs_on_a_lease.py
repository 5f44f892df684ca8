"""What becomes of a job on a lease: real Airflow, real Ray, and kills at the worst moments.

One lease of one two-host slice serves the whole module; each test starts runs of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raytpu_ops.backends.local import faults
from raytpu_ops.backends.local.layout import HEAD
from raytpu_ops.demo.airflow import AirflowInstance
from raytpu_ops.ray.states import JobInfo, JobStatus
from raytpu_ops.tpu.errors import DeadlineExceeded
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.naming import submission_prefix
from tests.integration.local_fixtures import Leased
from tests.waiting import eventually

pytestmark = [pytest.mark.airflow, pytest.mark.ray, pytest.mark.timeout(900)]

#: Generous: only a hang takes this long.
LIMIT_S = 300.0
MODES = ("deferred", "blocking")


class Run:
    """One run of a one-task DAG on the module's lease."""

    def __init__(self, airflow: AirflowInstance, leased: Leased, dag_id: str, **params: Any) -> None:
        self.api = airflow.api
        self.leased = leased
        self.dag_id = dag_id
        self.api.wait_for_dag(dag_id)
        self.api.unpause(dag_id)
        self.task_id = "train" if "train" in dag_id else "job"
        self.id = self.api.trigger(dag_id, {"lease": leased.lease.to_xcom(), **params})

    @property
    def task(self) -> dict[str, Any]:
        return self.api.task(self.dag_id, self.id, self.task_id)

    @property
    def result(self) -> dict[str, Any]:
        value: dict[str, Any] = self.api.xcom(self.dag_id, self.id, self.task_id)
        return value

    def log(self, try_number: int = 1) -> list[str]:
        if self.task["try_number"] < try_number:
            return []  # a try that has not begun has no log
        return self.api.log(self.dag_id, self.id, self.task_id, try_number)

    def whole_log(self, try_number: int = 1) -> str:
        events = self.api.log_events(self.dag_id, self.id, self.task_id, try_number)
        return "\n".join(str(event) for event in events)

    def ends(self, state: str, limit_s: float = LIMIT_S) -> None:
        try:
            ended = self.api.wait_run(self.dag_id, self.id, deadline_s=limit_s)["state"]
        except DeadlineExceeded as error:
            ended = str(error)
        if ended != state:
            print(*self.api.last_log(self.dag_id, self.id, self.task_id, lines=80), sep="\n")
        assert ended == state

    def jobs(self) -> list[JobInfo]:
        """What Ray has of this run's task."""
        prefix = submission_prefix(Owner(dag_id=self.dag_id, run_id=self.id, task_id=self.task_id))

        async def ask() -> list[JobInfo]:
            async with self.leased.backend.ray(self.leased.lease) as ray:
                return [job for job in await ray.jobs() if job.submission_id.startswith(prefix)]

        return asyncio.run(ask())

    def until_at_gate(self) -> None:
        self.until(
            lambda: self._no_verdict_yet() and "waiting at the gate" in self._job_output(), "the job waits at the gate"
        )

    def until(self, holds: Callable[[], Any], what: str) -> None:
        eventually(holds, what, limit_s=LIMIT_S)

    def _no_verdict_yet(self) -> bool:
        assert self.task["state"] not in ("failed", "success"), self.api.last_log(self.dag_id, self.id, self.task_id)
        return True

    def _job_output(self) -> str:
        async def ask() -> str:
            async with self.leased.backend.ray(self.leased.lease) as ray:
                return "".join([await ray.job_logs(job.submission_id) for job in self.jobs_now])

        self.jobs_now = self.jobs()
        return asyncio.run(ask()) if self.jobs_now else ""


@pytest.fixture
def gate(short_dir: Path) -> Path:
    return short_dir / "gate"


def test_a_function_answers_from_every_host(airflow_instance: AirflowInstance, local_slice: Leased) -> None:
    run = Run(airflow_instance, local_slice, "case_job_deferred")

    run.ends("success")

    assert [host["value"] for host in run.result["hosts"]] == ["hello", "hello"]
    assert {host["worker_id"] for host in run.result["hosts"]} == {0, 1}
    assert sum(line.endswith("hello from a host") for line in run.log()) == 2


def test_user_code_that_raises_is_red_with_its_traceback(
    airflow_instance: AirflowInstance, local_slice: Leased
) -> None:
    """In both modes at once: each job waits until the slice is free."""
    runs = [Run(airflow_instance, local_slice, f"case_job_{mode}", function="case_code:fail") for mode in MODES]

    for run in runs:
        run.ends("failed")

        log = run.whole_log(1)
        assert "UserCodeFailed" in log
        assert "ValueError: broken on purpose" in log
        assert "Traceback (most recent call last)" in log
        assert [job.status for job in run.jobs()] == [JobStatus.FAILED] * 2


def test_a_task_killed_in_its_job_is_adopted_by_its_retry(
    airflow_instance: AirflowInstance, local_slice: Leased, gate: Path
) -> None:
    run = Run(airflow_instance, local_slice, "case_job_blocking", function="case_code:wait_for", args=[str(gate)])
    run.until_at_gate()

    os.kill(run.task["pid"], signal.SIGKILL)
    run.until(lambda: run.task["try_number"] == 2 and run.task["state"] == "running", "the retry runs")
    run.until(lambda: any("Adopted" in line for line in run.log(2)), "the retry adopts")
    gate.touch()
    run.ends("success")

    assert [job.status for job in run.jobs()] == [JobStatus.SUCCEEDED]
    assert [(host["worker_id"], host["value"]) for host in run.result["hosts"]] == [(0, "through"), (1, "through")]
    assert sum(line.endswith("through the gate") for line in run.log(2)) == 2


def test_a_job_marked_failed_by_hand_is_stopped(
    airflow_instance: AirflowInstance, local_slice: Leased, gate: Path
) -> None:
    def started(mode: str) -> Run:
        return Run(airflow_instance, local_slice, f"case_job_{mode}", function="case_code:wait_for", args=[str(gate)])

    first = started(MODES[0])
    first.until_at_gate()
    for run in (first, started(MODES[1])):  # the second has been queued behind the first
        run.until_at_gate()

        run.api.mark_task(run.dag_id, run.id, "job", "failed")

        run.until(lambda run=run: [job.status for job in run.jobs()] == [JobStatus.STOPPED], "Ray has stopped the job")
        run.ends("failed")


def test_a_triggerer_that_dies_stops_nothing_and_a_clear_starts_again(
    airflow_instance: AirflowInstance, local_slice: Leased, gate: Path
) -> None:
    """And whatever reads the job's log, each line of it comes once."""
    args = [str(gate), 100]
    run = Run(airflow_instance, local_slice, "case_job_deferred", function="case_code:wait_for", args=args)
    run.until(lambda: sum("waiting at the gate" in line for line in run.log()) == 2, "both lines are in the task's log")

    airflow_instance.kill_component("triggerer", grace_s=30)
    airflow_instance.start_component("triggerer")
    run.until(lambda: any("Adopted" in line for line in run.log()), "the new triggerer adopts")
    assert [job.status for job in run.jobs()] == [JobStatus.RUNNING]

    run.api.clear(run.dag_id, run.id, ["job"])
    run.until(lambda: len(run.jobs()) == 2, "a second job is submitted")
    gate.touch()
    run.ends("success")

    assert sorted(job.status for job in run.jobs()) == [JobStatus.STOPPED, JobStatus.SUCCEEDED]
    for try_number in (1, 2):
        lines = [line[line.index("line ") :] for line in run.log(try_number) if " of 100" in line]
        assert sorted(lines) == sorted(f"line {number} of 100" for number in range(100) for _ in range(2))


def test_a_host_that_dies_in_training_is_preemption_and_the_retry_resumes(
    airflow_instance: AirflowInstance, local_slice: Leased, gate: Path, short_dir: Path
) -> None:
    run = Run(airflow_instance, local_slice, "case_train_deferred", gate=str(gate), storage=str(short_dir / "store"))
    run.until_at_gate()
    record = asyncio.run(local_slice.backend.find(local_slice.lease.owner))
    assert record is not None

    faults.kill_host(record, 0, 1)
    run.ends("success", 2 * LIMIT_S)

    assert "Preempted" in run.whole_log(1)
    assert run.result["resumed_from_step"] == 2
    assert run.result["metrics"]["count"] == 4.0
    assert {worker["slice"] for worker in run.result["workers"]}.isdisjoint(record.created["slice"])


def test_where_the_head_is_dead_it_is_replaced_before_ray_is_asked_for_anything(
    airflow_instance: AirflowInstance, local_slice: Leased
) -> None:
    """Nothing of the lease is left then."""
    record = local_slice.backend._cluster.read(local_slice.lease.id)
    assert record is not None
    assert local_slice.backend._cluster.kill(record, [HEAD]) == []

    run = Run(airflow_instance, local_slice, "case_job_blocking")
    run.ends("success")

    assert [host["value"] for host in run.result["hosts"]] == ["hello", "hello"]
    assert "is dead" in run.whole_log(1)
    assert run.task["try_number"] == 1
