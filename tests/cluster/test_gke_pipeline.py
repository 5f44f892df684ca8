"""The whole pipeline in a real Airflow on real KubeRay: two slices of two hosts, train, serve, evaluate, release."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.demo.airflow import AirflowInstance
from tests.cluster import needs
from tests.cluster.leases import small
from tests.session import SESSION_DIR
from tests.testbed.client import Testbed
from tests.testbed.faults import KubernetesFaults
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.airflow, pytest.mark.timeout(2400)]

REPOSITORY = Path(__file__).parents[2]
RBAC = REPOSITORY / "deploy" / "gke" / "rbac.yaml"
DAG = "tpu_train_and_serve"
PARAMS = {"backend": "gke", "epochs": 6}
#: What only a hang takes.
LIMIT_S = 1500.0
OUTAGE_S = 20.0


@pytest.fixture(scope="module")
def airflow(kubernetes: KubernetesFaults, namespace: str) -> Iterator[AirflowInstance]:
    """An Airflow whose connection reaches the cluster with the rights of deploy/gke/rbac.yaml and no more."""
    storage = needs.storage(kubernetes)
    extra = {
        **small(storage),
        "namespace": namespace,
        "kubeconfig": str(kubernetes.kubeconfig_for(RBAC, namespace)),
    }
    connection = json.dumps({"conn_type": "ray_tpu", "extra": extra})
    home = SESSION_DIR / "gke-home"
    environment = {"AIRFLOW_CONN_RAY_TPU_DEFAULT": connection, "RAYTPU_DEMO_STORAGE": f"{storage}/runs"}
    instance = AirflowInstance(home, [REPOSITORY / "dags"], env=environment, temporary=[SESSION_DIR])
    instance.start()
    try:
        yield instance
    finally:
        assert instance.stop() == []


def started(airflow: AirflowInstance, **params: object) -> str:
    airflow.api.wait_for_dag(DAG)
    airflow.api.unpause(DAG)
    return airflow.api.trigger(DAG, {**PARAMS, **params})


def left(cluster: KubernetesFaults, namespace: str) -> list[str]:
    kinds = [("ray.io/v1", "RayCluster"), ("v1", "Pod"), ("v1", "Secret"), ("v1", "Service")]
    ours = [kind for version, kind in kinds if cluster.count(version, kind, OWNER, namespace)]
    return ours + [kind for version, kind in kinds[1:] if cluster.count(version, kind, "ray.io/cluster", namespace)]


def results(airflow: AirflowInstance, run: str) -> dict[str, Any]:
    return {task: airflow.api.xcom(DAG, run, task) for task in ("labelled", "train", "serve", "evaluate", "release")}


def check(airflow: AirflowInstance, run: str) -> None:
    found = results(airflow, run)
    workers = found["train"]["workers"]
    assert sorted((one["slice"], int(one["worker_id"])) for one in workers) == [
        (f"slice-{number}", host) for number in (0, 1) for host in (0, 1)
    ]
    # Two distinct slices, and JAX was told so: each has an id of its own, the same on both of its hosts.
    ids = {one["slice"]: one["megascale"]["MEGASCALE_SLICE_ID"] for one in workers}
    assert sorted(ids.values()) == ["0", "1"]
    assert {one["megascale"]["MEGASCALE_NUM_SLICES"] for one in workers} == {"2"}
    assert found["evaluate"]["accuracy"] >= 0.95
    assert found["release"]["left"] == []


@pytest.mark.long
def test_the_pipeline_runs_from_nothing_to_a_served_model_and_back(
    kubernetes: KubernetesFaults, namespace: str, airflow: AirflowInstance
) -> None:
    run = started(airflow)
    state = airflow.api.wait_run(DAG, run, deadline_s=LIMIT_S)["state"]
    if state != "success":
        for task in airflow.api.tasks(DAG, run):
            print(task["task_id"], task["state"], *airflow.api.last_log(DAG, run, task["task_id"]), sep="\n  ")
    assert state == "success"
    check(airflow, run)
    lines = str(airflow.api.log_events(DAG, run, "train", 1))
    assert "epoch 6: loss" in lines
    assert left(kubernetes, namespace) == []


def test_an_api_server_that_is_away_for_a_while_in_each_phase_changes_nothing(
    slices: Testbed, namespace: str, airflow: AirflowInstance
) -> None:
    """And every watch is cut once."""
    over = threading.Event()
    outages: list[str] = []
    slices.requests(forget=True)
    with slices.api_down():  # while the run begins: provision meets nobody
        run = started(airflow)
        time.sleep(OUTAGE_S)
    outages.append("provision")

    def trouble() -> None:
        for phase in ("labelled", "train", "serve", "evaluate", "release"):
            while not over.is_set() and _state(airflow, run, phase) not in ("running", "deferred", "success"):
                over.wait(0.3)
            if over.is_set():
                return
            slices.cut_watches()
            slices.restart_api(OUTAGE_S)
            outages.append(phase)

    thread = threading.Thread(target=trouble)
    thread.start()
    try:
        state = airflow.api.wait_run(DAG, run, deadline_s=LIMIT_S)["state"]
    finally:
        over.set()
        thread.join()
    assert state == "success", outages
    check(airflow, run)
    assert airflow.api.task(DAG, run, "train")["try_number"] == 1
    assert len([name for name in outages if name in ("provision", "labelled", "train", "serve")]) == 4
    eventually(lambda: not left(slices, namespace), "nothing is left")


def test_a_host_that_vanishes_in_training_costs_one_try_and_the_next_goes_on_from_the_checkpoint(
    slices: Testbed, namespace: str, airflow: AirflowInstance
) -> None:
    """F13, F15: class Preempted, and one submission for each try."""
    node, api = "v4-2x2x2-1-1", airflow.api
    run = started(airflow, epochs=60)
    eventually(lambda: "epoch 3: loss" in _log(airflow, run, 1), "it trains", limit_s=LIMIT_S)
    slices.kill_node(node)
    eventually(lambda: api.task(DAG, run, "train")["try_number"] == 2, "there is a retry", limit_s=LIMIT_S)
    slices.start_node(node)

    assert api.wait_run(DAG, run, deadline_s=LIMIT_S)["state"] == "success"

    assert "Preempted" in _log(airflow, run, 1)
    again = _log(airflow, run, 2)
    assert "going on after epoch" in again
    assert api.xcom(DAG, run, "train")["submission_id"].endswith("-a1")
    check(airflow, run)
    eventually(lambda: not left(slices, namespace), "nothing is left")


def _log(airflow: AirflowInstance, run: str, attempt: int) -> str:
    if airflow.api.task(DAG, run, "train")["try_number"] < attempt:
        return ""
    return str(airflow.api.log_events(DAG, run, "train", attempt))


def _state(airflow: AirflowInstance, run: str, task: str) -> str | None:
    state: str | None = airflow.api.task(DAG, run, task)["state"]
    return state
