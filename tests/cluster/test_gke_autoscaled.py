"""The `gke` backend where no TPU node is there yet: its pods bring the slices, its release lets them go."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.flows.leases import give_back, wait_whole
from raytpu_ops.tpu.capacity import AnyCapacity, OnDemand, Spot
from raytpu_ops.tpu.deadlines import Deadlines, Phase, Schedule
from raytpu_ops.tpu.errors import DeadlineExceeded
from raytpu_ops.tpu.spec import SliceSpec
from tests.cluster.leases import V4, acquired, backend
from tests.testbed.client import Testbed
from tests.testbed.faults import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

RBAC = Path(__file__).parents[2] / "deploy" / "gke" / "rbac.yaml"


async def test_a_lease_brings_its_slices_each_in_a_pool_of_its_own_and_lets_them_go(growing: Testbed) -> None:
    told: list[str] = []
    with growing.namespace("gke-autoscaled") as namespace:
        gke = backend(growing.kubeconfig_for(RBAC, namespace), namespace=namespace)
        lease = await acquired(gke, "provision")
        schedule = Schedule.start({"provisioning": 600, "labelled": 600})
        _, report = await wait_whole(gke, lease, schedule=schedule, say=told.append)

        phases = [line.partition(":")[0] for line in told if line.partition(":")[0] in list(Phase)]
        assert phases[0] == Phase.PROVISIONING
        assert phases[-1] == Phase.LABELLED
        pools = growing.pools()
        assert len(pools) == 3
        addresses = {host.address for one in report.slices for host in one.hosts}
        assert len(addresses) == 4

        await give_back(gke, lease, by=datetime.now(UTC) + timedelta(minutes=3), say=print, poll_s=0.5)
        assert growing.count("ray.io/v1", "RayCluster", OWNER) == 0
    wait_until(lambda: set(growing.pools()) == {"cpu-0"}, 180, lambda: f"pools are left: {growing.status()}")


@pytest.mark.parametrize(
    ("capacity", "options", "label"),
    [
        (Spot(), {}, ("cloud.google.com/gke-spot", "true")),
        (OnDemand(), {"compute_class": "tpus"}, ("cloud.google.com/compute-class", "tpus")),
    ],
    ids=["Spot", "ComputeClass"],
)
async def test_a_lease_brings_the_kind_of_nodes_that_it_is_to_be_paid_with(
    growing: Testbed, capacity: AnyCapacity, options: dict[str, str], label: tuple[str, str]
) -> None:
    with growing.namespace("gke-asking") as namespace:
        gke = backend(growing.kubeconfig_for(RBAC, namespace), namespace=namespace, **options)
        lease = await acquired(gke, "provision", SliceSpec.of("v4", "2x2x1"), [capacity])
        schedule = Schedule.start({"provisioning": 600, "labelled": 600})
        await wait_whole(gke, lease, schedule=schedule, say=print)

        (pool,) = set(growing.pools()) - {"cpu-0"}
        (host,) = growing.core.list_namespaced_pod(namespace, label_selector="ray.io/node-type=worker").items
        assert host.spec.node_name == f"{pool}-0"
        assert growing.core.read_node(host.spec.node_name).metadata.labels.items() >= {label}

        await give_back(gke, lease, by=datetime.now(UTC) + timedelta(minutes=3), say=print, poll_s=0.5)
    wait_until(lambda: set(growing.pools()) == {"cpu-0"}, 180, lambda: f"pools are left: {growing.status()}")


async def test_a_stock_out_ends_at_the_deadline_of_its_own_phase_and_leaves_no_pool(growing: Testbed) -> None:
    with growing.namespace("gke-stock-out") as namespace, growing.stockout():
        gke = backend(growing.kubeconfig_for(RBAC, namespace), namespace=namespace)
        lease = await acquired(gke, "provision", V4)
        deadlines = Deadlines.of({"provisioning": 15, "labelled": 600})
        with pytest.raises(DeadlineExceeded, match="the provisioning deadline .* waits for a node: 0/1 nodes"):
            await wait_whole(gke, lease, schedule=Schedule.start(deadlines), say=print)
        await give_back(gke, lease, by=datetime.now(UTC) + timedelta(minutes=3), say=print, poll_s=0.5)
    wait_until(lambda: set(growing.pools()) == {"cpu-0"}, 180, lambda: f"pools are left: {growing.status()}")
