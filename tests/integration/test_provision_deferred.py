"""Provisioning that waits for a cloud, in a real triggerer; the cloud is played, so this is quick."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytpu_ops.demo.airflow import AirflowInstance
from tests.waiting import eventually

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(600)]

LIMIT_S = 240.0
DAG = "provision_alone"


def leases(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.lease")]


def waiting(airflow: AirflowInstance, folder: Path) -> str:
    """A run whose provisioning has made something and waits in the triggerer for the rest."""
    api = airflow.api
    api.wait_for_dag(DAG)
    api.unpause(DAG)
    run = api.trigger(DAG, {"folder": str(folder), "refuse": "slow"})
    api.wait_task(DAG, run, "provision", deadline_s=LIMIT_S, states=["deferred"])
    eventually(lambda: leases(folder), "something is made", limit_s=LIMIT_S)
    return run


def test_what_a_cloud_grants_late_is_handed_on(airflow_instance: AirflowInstance, tmp_path: Path) -> None:
    api = airflow_instance.api
    run = waiting(airflow_instance, tmp_path)

    (tmp_path / "gate").touch()

    assert api.wait_run(DAG, run, deadline_s=LIMIT_S)["state"] == "success"
    lease = api.xcom(DAG, run, "provision")
    assert [f"{lease['id']}.lease"] == leases(tmp_path)
    assert "waits for capacity" in str(api.log_events(DAG, run, "provision", 1))


def test_a_person_who_marks_it_failed_gets_everything_taken_back(
    airflow_instance: AirflowInstance, tmp_path: Path
) -> None:
    """No teardown runs here: the trigger gives back what was made so far."""
    api = airflow_instance.api
    run = waiting(airflow_instance, tmp_path)

    api.mark_task(DAG, run, "provision", "failed")

    eventually(lambda: not leases(tmp_path), "it is taken back", limit_s=LIMIT_S)
    assert api.wait_run(DAG, run, deadline_s=LIMIT_S)["state"] == "failed"


def test_a_clear_goes_on_with_what_is_there(airflow_instance: AirflowInstance, tmp_path: Path) -> None:
    api = airflow_instance.api
    run = waiting(airflow_instance, tmp_path)
    before = leases(tmp_path)

    api.clear(DAG, run, ["provision"])
    eventually(lambda: api.task(DAG, run, "provision")["try_number"] == 2, "the next try begins", limit_s=LIMIT_S)
    eventually(lambda: "adopting" in str(api.log_events(DAG, run, "provision", 2)), "it adopts", limit_s=LIMIT_S)
    (tmp_path / "gate").touch()

    assert api.wait_run(DAG, run, deadline_s=LIMIT_S)["state"] == "success"
    assert leases(tmp_path) == before
