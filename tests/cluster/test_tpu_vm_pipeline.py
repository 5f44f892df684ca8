"""The whole pipeline in a real Airflow on played TPU VMs: two slices of two, train, serve, evaluate, release.

Only Google's API and the machines are played: the VMs run the startup script as it is, and real Ray on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="Google's clients are part of the extra `dev`")
pytest.importorskip("airflow.providers.google.common.hooks.base_google", reason="needs the extra `google`")

from raytpu_ops.backends.google.roles import TPU_VM
from raytpu_ops.backends.tpu_vm.record import TOKEN
from raytpu_ops.demo.airflow import AirflowInstance
from tests.cluster.vm_leases import quick, small
from tests.google_fake import Clock, GoogleFake, zone
from tests.google_fake.fake import PROJECT, ZONE
from tests.google_fake.roles import Watch
from tests.google_fake.vms import BootsVms
from tests.leaks import Argv, leaks
from tests.session import SESSION_DIR
from tests.waiting import eventually

if why := zone.missing():
    pytest.skip(why, allow_module_level=True)

pytestmark = [pytest.mark.cluster, pytest.mark.airflow, pytest.mark.ray, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).parents[2]
DAG = "tpu_train_and_serve"
TASKS = ("plan", "provision", "labelled", "train", "serve", "evaluate", "release")
#: What only a hang takes.
LIMIT_S = 1200.0


@pytest.fixture(scope="module")
def storage() -> Path:
    """A folder that stands for a bucket: every VM and Airflow know it by the same name."""
    folder = SESSION_DIR / "vm-storage"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def google() -> Iterator[GoogleFake]:
    """Everybody has the rights of our role and no others."""
    with GoogleFake(clock=Clock(speed=20)) as fake:
        quick(fake)
        watch = Watch(fake, TPU_VM)
        yield fake
        assert watch.missing == set()


@pytest.fixture(scope="module")
def vms(google: GoogleFake, storage: Path) -> BootsVms:
    return google.boots_vms(shared=[storage])


@pytest.fixture(scope="module")
def airflow(google: GoogleFake, storage: Path) -> Iterator[AirflowInstance]:
    """An Airflow that is a service account to Google, by a key that stands in a connection."""
    extra = {**small(), "gcp_conn_id": "accounting", "google_endpoints": google.endpoints}
    key = {"keyfile_dict": json.dumps(google.key())}
    environment = {
        "AIRFLOW_CONN_RAY_TPU_DEFAULT": json.dumps({"conn_type": "ray_tpu", "extra": extra}),
        "AIRFLOW_CONN_ACCOUNTING": json.dumps({"conn_type": "google_cloud_platform", "extra": key}),
        "RAYTPU_DEMO_STORAGE": str(storage),
        **google.environment,
    }
    home = SESSION_DIR / "vm-home"
    instance = AirflowInstance(home, [REPOSITORY / "dags"], env=environment, temporary=[SESSION_DIR])
    instance.start()
    try:
        yield instance
    finally:
        assert instance.stop() == []


def started(airflow: AirflowInstance, **params: object) -> str:
    airflow.api.wait_for_dag(DAG)
    airflow.api.unpause(DAG)
    return airflow.api.trigger(DAG, {"backend": "tpu_vm", "epochs": 6, **params})


def logs(airflow: AirflowInstance, run: str) -> str:
    tasks = airflow.api.tasks(DAG, run)
    return "\n".join(
        "\n  ".join([task["task_id"], str(task["state"]), *airflow.api.last_log(DAG, run, task["task_id"])])
        for task in tasks
    )


def check(google: GoogleFake, vms: BootsVms, airflow: AirflowInstance, run: str) -> dict[str, Any]:
    """The run is green, its model was trained on all hosts and served, and nothing is left.

    :return: what the tasks handed on.
    """
    state = airflow.api.wait_run(DAG, run, deadline_s=LIMIT_S)["state"]
    if state != "success":
        print(logs(airflow, run))
        for node in google.nodes():
            print(node, vms.log(node, 0)[-3000:], vms.log(node, 1)[-3000:], sep="\n")
    assert state == "success"
    found: dict[str, Any] = {task: airflow.api.xcom(DAG, run, task) for task in TASKS[1:]}
    workers = found["train"]["workers"]
    assert sorted(int(one["worker_id"]) for one in workers) == [0, 0, 1, 1]
    ids = {one["slice"]: one["megascale"]["MEGASCALE_SLICE_ID"] for one in workers}
    assert sorted(ids.values()) == ["0", "1"]
    assert found["evaluate"]["accuracy"] >= 0.95
    assert found["release"]["left"] == []
    assert google.queued_resources() == {}
    assert google.nodes() == {}
    assert not any(vms.status().values())
    return found


@pytest.mark.core
def test_the_pipeline_runs_from_nothing_to_a_served_model_and_back(
    google: GoogleFake, vms: BootsVms, airflow: AirflowInstance
) -> None:
    """The first zone has nothing: the ladder's second step is granted."""
    google.faults.stockout(zone=ZONE)
    with Argv() as argv:
        run = started(airflow)
        found = check(google, vms, airflow, run)

    lease = found["provision"]
    assert {one["slice"] for one in found["train"]["workers"]} == set(lease["created"]["slice"])
    assert "epoch 6: loss" in str(airflow.api.log_events(DAG, run, "train", 1))
    # What was tried before is in the lease and in the log.
    assert len(lease["attempts"]) == 1
    assert ZONE in lease["attempts"][0]
    assert "no more capacity" in str(airflow.api.log_events(DAG, run, "provision", 1))

    # No secret was told.
    created = google.asked("CreateQueuedResource")
    tokens = {one.request.queued_resource.tpu.node_spec[0].node.metadata[TOKEN] for one in created}
    labels = [dict(one.request.queued_resource.tpu.node_spec[0].node.labels) for one in created]
    assert len(tokens) == 2
    assert leaks(google.secrets | tokens, airflow.home, argv=argv.lines, labels=labels) == []


def test_a_slice_that_google_takes_back_in_training_costs_one_try_and_the_next_has_others(
    google: GoogleFake, vms: BootsVms, airflow: AirflowInstance
) -> None:
    """F12, F13: the retry asks for all slices anew, goes on from the checkpoint, and the tasks behind it follow."""
    api, run = airflow.api, started(airflow, epochs=60)
    eventually(lambda: "epoch 3: loss" in _log(airflow, run, 1), "it trains", limit_s=LIMIT_S)
    lease = api.xcom(DAG, run, "provision")
    [where] = lease["created"]["queued resource"]
    taken = lease["created"]["slice"][1]
    google.tpu.preempt(f"projects/{PROJECT}/locations/{where.partition('/')[0]}/nodes/{taken}")

    found = check(google, vms, airflow, run)

    assert "Preempted" in _log(airflow, run, 1)
    assert "Google took the slices back" in _log(airflow, run, 2)
    assert "going on after epoch" in _log(airflow, run, 2)
    assert {one["slice"] for one in found["train"]["workers"]}.isdisjoint(lease["created"]["slice"])
    assert [api.task(DAG, run, task)["try_number"] for task in ("provision", "labelled", "train")] == [1, 1, 2]


def _log(airflow: AirflowInstance, run: str, attempt: int) -> str:
    if airflow.api.task(DAG, run, "train")["try_number"] < attempt:
        return ""
    return str(airflow.api.log_events(DAG, run, "train", attempt))
