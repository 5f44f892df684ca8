"""The life of a lease in a real Airflow: whatever becomes of the tasks, nothing is left and nothing is made twice."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from raytpu_ops.backends.local import LocalBackend, faults, processes
from raytpu_ops.demo.airflow import AirflowInstance
from raytpu_ops.tpu.lease import SliceLease
from tests.session import LOCAL_ROOT
from tests.waiting import eventually

pytestmark = [pytest.mark.airflow, pytest.mark.ray, pytest.mark.timeout(900)]

LIMIT_S = 300.0


def leases() -> list[SliceLease]:
    return asyncio.run(LocalBackend(LOCAL_ROOT).list_leases())


def start(airflow: AirflowInstance, dag_id: str, **params: str) -> str:
    airflow.api.wait_for_dag(dag_id)
    airflow.api.unpause(dag_id)
    return airflow.api.trigger(dag_id, params)


def states(airflow: AirflowInstance, dag_id: str, run_id: str) -> dict[str, str]:
    return {task["task_id"]: task["state"] for task in airflow.api.tasks(dag_id, run_id)}


def nothing_is_left() -> bool:
    return leases() == [] and processes.marked(LOCAL_ROOT) == [] and not LOCAL_ROOT.exists()


def test_after_no_capacity_the_retry_gets_slices_and_they_are_used_and_gone(airflow_instance: AirflowInstance) -> None:
    dag, api = "case_slices_blocking", airflow_instance.api
    faults.no_capacity(root=LOCAL_ROOT)
    run = start(airflow_instance, dag)

    assert api.wait_run(dag, run, deadline_s=LIMIT_S)["state"] == "success"

    assert "CapacityUnavailable" in str(api.log_events(dag, run, "provision", 1))
    readiness = api.xcom(dag, run, "labelled", "readiness")
    assert [one["hosts_wanted"] for one in readiness["slices"]] == [1]
    assert nothing_is_left()


def test_a_run_whose_work_failed_is_red_and_its_slices_are_gone(airflow_instance: AirflowInstance) -> None:
    dag = "case_slices_deferred"
    run = start(airflow_instance, dag, function="case_code:fail")

    assert airflow_instance.api.wait_run(dag, run, deadline_s=LIMIT_S)["state"] == "failed"

    assert states(airflow_instance, dag, run) == {
        "plan": "success",
        "provision": "success",
        "labelled": "success",
        "job": "failed",
        "release": "success",
        "released": "failed",
    }
    assert nothing_is_left()


def test_what_a_killed_provision_made_is_adopted_and_released_when_the_run_is_marked_failed(
    airflow_instance: AirflowInstance,
) -> None:
    """The second half is F36."""
    dag, api = "case_killed_provision", airflow_instance.api
    run = start(airflow_instance, dag)
    eventually(lambda: len(leases()) == 1, "the first try has made its lease", limit_s=LIMIT_S)
    eventually(lambda: "lingering" in str(api.log_events(dag, run, "provision", 1)), "it lingers", limit_s=LIMIT_S)
    made = {one.process.pid for one in processes.marked(LOCAL_ROOT) if "start" in one.process.cmdline()}

    os.kill(api.task(dag, run, "provision")["pid"], signal.SIGKILL)
    api.wait_task(dag, run, "labelled", deadline_s=LIMIT_S, states=["success"])
    kept = {one.process.pid for one in processes.marked(LOCAL_ROOT) if "start" in one.process.cmdline()}
    assert kept == made
    assert api.task(dag, run, "provision")["try_number"] == 2

    api.wait_task(dag, run, "job", deadline_s=LIMIT_S, states=["deferred"])
    at_gate = "the job waits at the gate"
    eventually(lambda: "waiting at the gate" in str(api.log_events(dag, run, "job", 1)), at_gate, limit_s=LIMIT_S)
    api.mark_run(dag, run, "failed")
    api.wait_task(dag, run, "release", deadline_s=LIMIT_S, states=["success"])
    assert api.wait_run(dag, run, deadline_s=LIMIT_S)["state"] == "failed"
    assert nothing_is_left()
