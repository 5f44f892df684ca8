"""The `gke` backend where no TPU node is there yet: its pods bring the slices, its release lets them go."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.flows.leases import wait_whole
from raytpu_ops.tpu.capacity import AnyCapacity, FlexStart, OnDemand, Reservation, Spot
from raytpu_ops.tpu.deadlines import Deadlines, Phase, Schedule
from raytpu_ops.tpu.errors import DeadlineExceeded
from raytpu_ops.tpu.spec import SliceSpec
from tests.cluster.leases import RBAC, V4, acquired, backend, released, schedule, whole
from tests.testbed.client import Testbed
from tests.testbed.faults import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


async def test_a_lease_brings_its_slices_each_in_a_pool_of_its_own_and_lets_them_go(growing: Testbed) -> None:
    told: list[str] = []
    with growing.namespace("gke-autoscaled") as namespace:
        gke = backend(growing.kubeconfig_for(RBAC, namespace), namespace=namespace)
        lease = await acquired(gke, "provision")
        _, report = await wait_whole(gke, lease, schedule=schedule(), say=told.append)

        phases = [line.partition(":")[0] for line in told if line.partition(":")[0] in list(Phase)]
        assert phases[0] == Phase.PROVISIONING
        assert phases[-1] == Phase.LABELLED
        pools = growing.pools()
        assert len(pools) == 3
        addresses = {host.address for one in report.slices for host in one.hosts}
        assert len(addresses) == 4

        await released(gke, lease)
        assert growing.count("ray.io/v1", "RayCluster", OWNER) == 0
    wait_until(lambda: set(growing.pools()) == {"cpu-0"}, 180, lambda: f"pools are left: {growing.status()}")


@pytest.mark.parametrize(
    ("capacity", "options", "labels"),
    [
        (Spot(), {}, {"gke-spot": "true"}),
        (FlexStart(timedelta(hours=2)), {}, {"gke-flex-start": "true"}),
        (Reservation("team-a"), {}, {"reservation-name": "team-a", "reservation-affinity": "specific"}),
        (OnDemand(), {"compute_class": "tpus"}, {"compute-class": "tpus"}),
    ],
    ids=["Spot", "FlexStart", "Reservation", "ComputeClass"],
)
async def test_a_lease_brings_the_kind_of_nodes_that_it_is_to_be_paid_with(
    growing: Testbed, capacity: AnyCapacity, options: dict[str, str], labels: dict[str, str]
) -> None:
    with growing.namespace("gke-asking") as namespace:
        gke = backend(growing.kubeconfig_for(RBAC, namespace), namespace=namespace, **options)
        lease = await acquired(gke, "provision", SliceSpec.of("v4", "2x2x1"), [capacity])
        await whole(gke, lease)

        (pool,) = set(growing.pools()) - {"cpu-0"}
        (host,) = growing.core.list_namespaced_pod(namespace, label_selector="ray.io/node-type=worker").items
        assert host.spec.node_name == f"{pool}-0"
        asked = {f"cloud.google.com/{name}": value for name, value in labels.items()}
        assert growing.core.read_node(host.spec.node_name).metadata.labels.items() >= asked.items()

        await released(gke, lease)
    wait_until(lambda: set(growing.pools()) == {"cpu-0"}, 180, lambda: f"pools are left: {growing.status()}")


async def test_a_stock_out_ends_at_the_deadline_of_its_own_phase_and_leaves_no_pool(growing: Testbed) -> None:
    with growing.namespace("gke-stock-out") as namespace, growing.stockout():
        gke = backend(growing.kubeconfig_for(RBAC, namespace), namespace=namespace)
        lease = await acquired(gke, "provision", V4)
        deadlines = Deadlines.of({"provisioning": 15, "labelled": 600})
        with pytest.raises(DeadlineExceeded, match="the provisioning deadline .* waits for a node: 0/1 nodes"):
            await wait_whole(gke, lease, schedule=Schedule.start(deadlines), say=print)
        await released(gke, lease)
    wait_until(lambda: set(growing.pools()) == {"cpu-0"}, 180, lambda: f"pools are left: {growing.status()}")
