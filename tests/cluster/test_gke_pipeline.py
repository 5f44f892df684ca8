"""The whole pipeline in a real Airflow on real KubeRay: two slices of two hosts, train, serve, evaluate, release."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.backends.gke.rights import RIGHTS
from raytpu_ops.demo.airflow import AirflowInstance
from raytpu_ops.demo.airflow_api import FINAL_RUN_STATES
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
PARAMS: dict[str, Any] = {"backend": "gke", "epochs": 6}
#: What only a hang takes.
LIMIT_S = 1500.0
OUTAGE_S = 20.0
#: Phase -> the request, made in no phase before it, that the API server's outage meets: held until that begins, and
#: never answered; of the log's tails not the first, which breaks before that. A question that went out may have reached
#: the model, and its task must not ask twice: `evaluate` is met between two, by Kubernetes' word for one that reached
#: nobody.
MET: dict[str, dict[str, Any]] = {
    "plan": {"action": "hang", "method": "GET", "path": "/rayclusters/", "times": 1},
    "provision": {"action": "hang", "method": "PATCH", "path": "/rayclusters/", "times": 1},
    "labelled": {"action": "hang", "method": "GET", "path": "/pods", "times": 1},
    "train": {"action": "hang", "method": "GET", "path": "/logs/tail", "after": 1, "times": 1},
    "serve": {"action": "hang", "method": "PUT", "path": "/serve/applications", "times": 1},
    "evaluate": {"action": "status", "method": "POST", "path": ":serve/proxy/", "status": 429},
    "release": {"action": "hang", "method": "DELETE", "path": "/rayclusters/", "times": 1},
}
AT_WORK = ("running", "deferred")
#: Of `evaluate` a question may have been under way all the same, and then costs a try.
ONE_TRY = [phase for phase in MET if phase != "evaluate"]


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
    """The run ends, and with the right results."""
    state = airflow.api.wait_run(DAG, run, deadline_s=LIMIT_S)["state"]
    if state != "success":
        for task in airflow.api.tasks(DAG, run):
            print(task["task_id"], task["state"], *airflow.api.last_log(DAG, run, task["task_id"]), sep="\n  ")
    assert state == "success"
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


@pytest.mark.core
def test_the_pipeline_runs_from_nothing_to_a_served_model_and_back(
    kubernetes: KubernetesFaults, namespace: str, airflow: AirflowInstance
) -> None:
    run = started(airflow)
    check(airflow, run)
    lines = str(airflow.api.log_events(DAG, run, "train", 1))
    assert "epoch 6: loss" in lines
    assert left(kubernetes, namespace) == []


def test_an_api_server_that_is_away_for_a_while_in_each_phase_changes_nothing(
    slices: Testbed, namespace: str, airflow: AirflowInstance
) -> None:
    """F28, F30, F41. No watch breaks, for the package opens none; what it holds open is the tail of the log.

    And all of it needed no other rights than those of deploy/gke/rbac.yaml that it is for, by the API server's record.
    """
    run = ""
    met: dict[str, set[tuple[str, int]]] = {}
    broken: dict[str, int] = {}
    slices.requests(forget=True)
    for phase, request in MET.items():
        with slices.api_fault(**request) as counts:
            run = run or started(airflow)
            broken[phase] = _meets(slices, airflow, run, phase, counts)
            assert _state(airflow, run, phase) in AT_WORK
            with slices.api_down():
                time.sleep(OUTAGE_S)
                assert _state(airflow, run, phase) in AT_WORK
        met[phase] = {(one["method"], one["status"]) for one in slices.requests(forget=True) if one["fault"]}

    check(airflow, run)
    assert broken["train"]
    assert met == {phase: {(one["method"], one.get("status", 0))} for phase, one in MET.items()}
    assert {task: airflow.api.task(DAG, run, task)["try_number"] for task in ONE_TRY} == dict.fromkeys(ONE_TRY, 1)
    epochs = [line for line in airflow.api.log(DAG, run, "train", 1) if re.search(r"epoch \d+: loss", line)]
    assert len(epochs) == len(set(epochs)) == 4 * PARAMS["epochs"]  # each host says each once
    eventually(lambda: not left(slices, namespace), "nothing is left")
    asked, granted = slices.asked(namespace), {(right.group, right.path, right.verb) for right in RIGHTS}
    assert asked <= granted
    assert {one for one in granted if one[1] == "services/proxy"} <= asked


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

    check(airflow, run)
    assert "Preempted" in _log(airflow, run, 1)
    again = _log(airflow, run, 2)
    assert "going on after epoch" in again
    assert api.xcom(DAG, run, "train")["submission_id"].endswith("-a1")
    eventually(lambda: not left(slices, namespace), "nothing is left")


def _log(airflow: AirflowInstance, run: str, attempt: int) -> str:
    if airflow.api.task(DAG, run, "train")["try_number"] < attempt:
        return ""
    return str(airflow.api.log_events(DAG, run, "train", attempt))


def _meets(
    slices: Testbed, airflow: AirflowInstance, run: str, phase: str, counts: Callable[[], dict[str, int]]
) -> int:
    """Wait until a phase has met its fault; every websocket breaks meanwhile.

    :return: how many did.
    """
    broken = 0

    def seen() -> bool:
        nonlocal broken
        broken += slices.cut_tunnels()
        if counts()["hits"]:
            return True
        state = airflow.api.run(DAG, run)["state"]
        assert state not in FINAL_RUN_STATES, f"the run is {state}, and {phase} did not ask the API server"
        return False

    eventually(seen, f"{phase} asks the API server", limit_s=LIMIT_S)
    return broken


def _state(airflow: AirflowInstance, run: str, task: str) -> str | None:
    state: str | None = airflow.api.task(DAG, run, task)["state"]
    return state
