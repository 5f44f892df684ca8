"""Node pools of the fake Google with real nodes: they come with the pool, for the pods that wait, and go with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")
pytest.importorskip("google.cloud.container_v1", reason="Google's clients are part of the extra `dev`")

from google.api_core import exceptions
from google.cloud import container_v1

from tests.cluster.manifests import host_pod
from tests.google_fake import Clock, GoogleFake
from tests.google_fake.access import FakeAccess
from tests.google_fake.fake import CLUSTER, ZONE
from tests.google_fake.pool_life import Delays
from tests.testbed.client import Testbed
from tests.testbed.faults import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

POOL = f"{CLUSTER}/nodePools/team-a-s0"
TAINT = {"key": "raytpu-lease", "value": "a", "effect": "NO_SCHEDULE"}
Gke = container_v1.ClusterManagerClient


@pytest.fixture
def google(slices: Testbed) -> Iterator[GoogleFake]:
    with GoogleFake(clock=Clock(speed=20)) as fake:
        fake.container.delays = Delays(create=90, delete=60)  # real nodes take their time beside
        fake.boots_nodes(slices)
        yield fake
    assert not [name for name in slices.nodes() if name.startswith("team-a")]


@pytest.fixture
async def gke(google: GoogleFake) -> Gke:
    credentials = await FakeAccess(google).credentials()
    return Gke(credentials=credentials, client_options={"api_endpoint": google.endpoints["container"]})


def asked(**more: Any) -> dict[str, Any]:
    """A slice of one v4 host."""
    config = {"machine_type": "ct4p-hightpu-4t", "labels": {"raytpu-lease": "a"}, "taints": [TAINT]}
    return {"name": "team-a-s0", "initial_node_count": 1, **more, "config": {**config, **more.get("config", {})}}


def status(gke: Gke) -> str:
    """The pool's status; empty where there is none."""
    try:
        return str(gke.get_node_pool(name=POOL).status.name)
    except exceptions.NotFound:
        return ""


def test_a_pool_that_runs_has_its_nodes_and_one_that_is_gone_has_none(
    slices: Testbed, google: GoogleFake, gke: Gke
) -> None:
    gke.create_node_pool(parent=CLUSTER, node_pool=asked(config={"spot": True}))
    wait_until(lambda: status(gke) == "RUNNING", 180, lambda: f"the pool does not run: {status(gke)}")
    node = slices.core.read_node("team-a-s0-0")
    labels = node.metadata.labels
    wanted = {
        "cloud.google.com/gke-nodepool": "team-a-s0",
        "cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice",
        "cloud.google.com/gke-tpu-topology": "2x2x1",
        "cloud.google.com/gke-spot": "true",
        "topology.kubernetes.io/zone": ZONE,
        "raytpu-lease": "a",
    }
    assert wanted.items() <= labels.items()
    assert {"raytpu-lease", "google.com/tpu"} <= {one.key for one in node.spec.taints}
    assert node.status.allocatable["google.com/tpu"] == "4"

    google.container.preempt(POOL)
    wait_until(lambda: "team-a-s0-0" not in slices.nodes(), 60, "the node outlives its preemption")
    gke.delete_node_pool(name=POOL)
    wait_until(lambda: not status(gke), 60, "the pool outlives its deletion")


def test_a_pool_of_flex_start_gets_nodes_when_somebody_waits_for_them(
    slices: Testbed, google: GoogleFake, gke: Gke
) -> None:
    more = {
        "initial_node_count": 0,
        "autoscaling": {"enabled": True, "max_node_count": 1, "location_policy": "ANY"},
        "config": {"flex_start": True, "reservation_affinity": {"consume_reservation_type": "NO_RESERVATION"}},
    }
    gke.create_node_pool(parent=CLUSTER, node_pool=asked(**more))
    wait_until(lambda: status(gke) == "RUNNING", 60, lambda: f"the pool does not run: {status(gke)}")
    assert "team-a-s0-0" not in slices.nodes()

    pod = host_pod("flex", replica=0, topology="2x2x1")
    pod["spec"]["nodeSelector"]["raytpu-lease"] = "a"
    pod["spec"].setdefault("tolerations", []).append({"key": "raytpu-lease", "operator": "Exists"})
    slices.core.create_namespaced_pod("default", pod)
    try:
        wait_until(lambda: "team-a-s0-0" in slices.nodes(), 180, "no node comes for the pod that waits")
    finally:
        slices.core.delete_namespaced_pod("flex", "default", grace_period_seconds=0)
    gke.delete_node_pool(name=POOL)
    wait_until(lambda: not status(gke), 60, "the pool outlives its deletion")
    assert "team-a-s0-0" not in slices.nodes()
