"""What befalls node pools in the fake, and what it refuses, as GKE does."""

from __future__ import annotations

from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import container_v1

from tests.google_fake import GoogleFake
from tests.google_fake.fake import CLUSTER, PROJECT, ZONE
from tests.google_fake.pool_life import Cluster
from tests.unit.google.requests_to_google import PARENT, POOL, flex, pool, single

Gke = container_v1.ClusterManagerClient
Status = container_v1.NodePool.Status
Operation = container_v1.Operation
SPECIFIC = {
    "consume_reservation_type": "SPECIFIC_RESERVATION",
    "key": "compute.googleapis.com/reservation-name",
    "values": ["team-a"],
}


def ends(google: GoogleFake, gke: Gke, asked: container_v1.NodePool) -> tuple[Operation, container_v1.NodePool]:
    """Make a pool and wait: its operation and what became of it."""
    operation = gke.create_node_pool(parent=CLUSTER, node_pool=asked)
    google.advance(200)
    done = gke.get_operation(name=f"{PARENT}/operations/{operation.name}")
    assert done.status == Operation.Status.DONE
    return done, gke.get_node_pool(name=f"{CLUSTER}/nodePools/{asked.name}")


@pytest.mark.parametrize("words", ["stockout", "exhausted"])
def test_f01_a_stock_out_leaves_a_pool_in_error_and_an_operation_that_is_done(
    google: GoogleFake, gke: Gke, words: str
) -> None:
    getattr(google.faults, words)()
    done, left = ends(google, gke, pool())
    assert "does not have enough resources available" in done.error.message
    assert f"zones/{ZONE}" in done.status_message
    assert done.nodepool_conditions[0].code == container_v1.StatusCondition.Code.GCE_STOCKOUT
    assert (left.status, left.status_message) == (Status.ERROR, done.error.message)

    gke.delete_node_pool(name=POOL)
    google.advance(200)
    assert ends(google, gke, pool())[1].status == Status.RUNNING


def test_a_stock_out_of_one_zone_or_name_spares_others(google: GoogleFake, gke: Gke) -> None:
    google.faults.stockout(name="pool-s1", times=None)
    google.faults.stockout(zone="elsewhere", times=None)
    assert ends(google, gke, pool())[1].status == Status.RUNNING
    assert ends(google, gke, pool(name="pool-s1"))[1].status == Status.ERROR


@pytest.mark.parametrize("scope", ["region", "zone", "reservation"])
def test_quota_that_is_used_up_is_an_error_of_the_operation(google: GoogleFake, gke: Gke, scope: str) -> None:
    google.faults.quota(scope)
    done, left = ends(google, gke, pool({"reservation_affinity": SPECIFIC}))
    assert done.error.code == 8
    assert {"region": "us-central2", "zone": "Quota limit", "reservation": "team-a"}[scope] in done.error.message
    assert left.status == Status.ERROR


def test_f02_a_create_whose_answer_is_lost_is_carried_out(google: GoogleFake, gke: Gke) -> None:
    google.faults.lost("CreateNodePool")
    with pytest.raises(exceptions.DeadlineExceeded):
        gke.create_node_pool(parent=CLUSTER, node_pool=pool())
    assert gke.get_node_pool(name=POOL).status == Status.PROVISIONING


def test_f02_a_connection_that_is_cut_is_no_answer(google: GoogleFake, gke: Gke) -> None:
    google.faults.cut("CreateNodePool")
    with pytest.raises(exceptions.ServiceUnavailable):
        gke.create_node_pool(parent=CLUSTER, node_pool=pool())
    assert POOL in google.node_pools()


def test_f03_a_name_is_given_once_also_to_a_stranger(google: GoogleFake, gke: Gke) -> None:
    google.container.put(CLUSTER, pool({"resource_labels": {"team": "b"}}))
    with pytest.raises(exceptions.AlreadyExists, match="Already exists"):
        gke.create_node_pool(parent=CLUSTER, node_pool=pool())
    assert gke.get_node_pool(name=POOL).config.resource_labels == {"team": "b"}


def test_f04_a_cluster_does_one_thing_at_a_time_and_names_it(google: GoogleFake, gke: Gke) -> None:
    busy = google.container.occupy(CLUSTER, 300)
    with pytest.raises(exceptions.FailedPrecondition, match=f"incompatible operation {busy}"):
        gke.create_node_pool(parent=CLUSTER, node_pool=pool())
    google.advance(301)
    first = gke.create_node_pool(parent=CLUSTER, node_pool=pool())
    with pytest.raises(exceptions.FailedPrecondition, match=first.name):
        gke.create_node_pool(parent=CLUSTER, node_pool=pool(name="pool-s1"))
    with pytest.raises(exceptions.FailedPrecondition, match=first.name):
        gke.delete_node_pool(name=POOL)


def test_f04_other_clusters_are_free(google: GoogleFake, gke: Gke) -> None:
    other = google.add_cluster(CLUSTER + "-2")
    google.container.occupy(CLUSTER, 300)
    gke.create_node_pool(parent=other.name, node_pool=pool())


@pytest.mark.parametrize("after", [None, 7.5])
def test_f05_too_many_requests_say_or_do_not_say_when_to_come_back(
    google: GoogleFake, gke: Gke, after: float | None
) -> None:
    google.faults.too_many("CreateNodePool", retry_after=after)
    with pytest.raises(exceptions.ResourceExhausted) as refused:
        gke.create_node_pool(parent=CLUSTER, node_pool=pool())
    waits = [
        one.retry_delay.ToTimedelta().total_seconds() for one in refused.value.details if hasattr(one, "retry_delay")
    ]
    assert waits == ([after] if after else [])
    assert refused.value.reason == "RATE_LIMIT_EXCEEDED"
    gke.create_node_pool(parent=CLUSTER, node_pool=pool())


@pytest.mark.parametrize(
    ("fault", "error"), [("unavailable", exceptions.ServiceUnavailable), ("internal", exceptions.InternalServerError)]
)
def test_f07_describing_fails_while_the_pool_is_there(
    google: GoogleFake, gke: Gke, fault: str, error: type[Exception]
) -> None:
    google.container.put(CLUSTER, pool())
    getattr(google.faults, fault)("GetNodePool", 2)
    for _ in range(2):
        with pytest.raises(error):
            gke.get_node_pool(name=POOL, retry=None)
    assert gke.get_node_pool(name=POOL).name == "pool-s0"


def test_f08_a_pool_that_stops_keeps_its_name_until_it_is_gone(google: GoogleFake, gke: Gke) -> None:
    google.container.put(CLUSTER, pool())
    gke.delete_node_pool(name=POOL)
    google.container.at_once = 2
    with pytest.raises(exceptions.AlreadyExists):
        gke.create_node_pool(parent=CLUSTER, node_pool=pool())
    assert gke.get_node_pool(name=POOL).status == Status.STOPPING


def test_f12_nodes_that_are_taken_back_leave_the_pool_without_them(google: GoogleFake, gke: Gke) -> None:
    google.container.put(CLUSTER, pool({"spot": True}))
    google.container.preempt(POOL)
    assert google.container.clusters[CLUSTER].sizes == {"pool-s0": 0}
    assert gke.get_node_pool(name=POOL).status == Status.RUNNING
    google.container.vanish(POOL)
    with pytest.raises(exceptions.NotFound):
        gke.get_node_pool(name=POOL)


def test_f42_tpu7x_with_a_topology_is_accepted_and_ends_in_error(google: GoogleFake, gke: Gke) -> None:
    asked = pool({"machine_type": "tpu7x-standard-4t"}, initial_node_count=2)
    asked.placement_policy = {"type_": "COMPACT", "tpu_topology": "2x2x2"}
    done, left = ends(google, gke, asked)
    assert "Use workload policy instead" in done.error.message
    assert left.status == Status.ERROR


def test_tpu7x_takes_a_workload_policy_that_is_there(google: GoogleFake, gke: Gke) -> None:
    asked = pool({"machine_type": "tpu7x-standard-4t"}, initial_node_count=2, placement_policy={"policy_name": "w"})
    with pytest.raises(exceptions.NotFound, match="resource policy w"):
        gke.create_node_pool(parent=CLUSTER, node_pool=asked)
    google.compute.put_policy("w", "2x2x2", region="us-central2", project=PROJECT)
    assert ends(google, gke, asked)[1].status == Status.RUNNING


def test_a_reservation_has_so_many_machines_and_no_more(google: GoogleFake, gke: Gke) -> None:
    google.compute.add_reservation("team-a", "ct6e-standard-4t", 6, zone=ZONE, project=PROJECT)
    assert ends(google, gke, pool({"reservation_affinity": SPECIFIC}))[1].status == Status.RUNNING
    done, left = ends(google, gke, pool({"reservation_affinity": SPECIFIC}, name="pool-s1"))
    assert "required 4 and short of 2" in done.error.message
    assert left.status == Status.ERROR
    unknown = {**SPECIFIC, "values": ["team-b"]}
    done, _ = ends(google, gke, pool({"reservation_affinity": unknown}, name="pool-s2"))
    assert 'reservation "team-b" not found' in done.error.message


def test_a_flex_start_pool_is_there_without_nodes_until_it_scales(google: GoogleFake, gke: Gke) -> None:
    assert ends(google, gke, flex())[1].status == Status.RUNNING
    assert google.container.clusters[CLUSTER].sizes == {"pool-s0": 0}
    google.container.scale_up(POOL, 4)
    google.advance(100)
    assert google.container.clusters[CLUSTER].sizes == {"pool-s0": 4}


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (pool(name="Pool"), "node_pool.name"),
        (pool(name="p" * 41), "40 characters"),
        (pool(initial_node_count=3), "needs 4 nodes"),
        (pool(placement_policy={"type_": "COMPACT", "tpu_topology": "3x3"}), "Invalid TPU topology"),
        (pool(placement_policy={"tpu_topology": "4x4"}), "COMPACT"),
        (single(placement_policy={"type_": "COMPACT", "tpu_topology": "2x2"}), "single-host TPU slice pool"),
        (pool({"machine_type": "e2-medium"}), "has no TPUs"),
        (pool({"machine_type": "ct6e-standard-3t"}), "Invalid TPU topology"),
        (pool({"machine_type": "ct9-standard"}), "does not exist in zone"),
        (pool(locations=["us-east1-b"]), "Location"),
        (flex(initial_node_count=4), "zero nodes"),
        (flex(autoscaling={"enabled": True, "max_node_count": 4}), "location policy ANY"),
        (flex({"reservation_affinity": {}}), "NO_RESERVATION"),
        (flex(management={"auto_repair": True}), "auto-repair"),
        (flex({"spot": True}), "Spot"),
        (pool({"spot": True, "reservation_affinity": SPECIFIC}), "Spot VMs cannot consume"),
        (pool({"reservation_affinity": {**SPECIFIC, "values": []}}), "one value"),
        (pool({"resource_labels": {"Owner": "a"}}), "Label keys"),
        (pool({"resource_labels": {"owner": "A"}}), "Label values"),
        (pool({"resource_labels": {"owner": "a" * 64}}), "63"),
        (pool({"labels": {"owner": "a" * 64}}), "node label value"),
        (pool({"metadata": {"a.b": "c"}}), "Metadata key"),
        (pool({"metadata": {"kube-env": "c"}}), "reserved"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_makes_no_sense_is_refused(gke: Gke, asked: container_v1.NodePool, word: str) -> None:
    with pytest.raises(exceptions.InvalidArgument, match=word):
        gke.create_node_pool(parent=CLUSTER, node_pool=asked)


@pytest.mark.parametrize("method", ["get_cluster", "get_node_pool", "list_node_pools", "create_node_pool"])
def test_a_cluster_that_is_missing_is_not_found(google: GoogleFake, gke: Gke, method: str) -> None:
    name = CLUSTER + "-2"
    arguments: dict[str, dict[str, Any]] = {
        "get_cluster": {"name": name},
        "get_node_pool": {"name": f"{name}/nodePools/a"},
        "list_node_pools": {"parent": name},
        "create_node_pool": {"parent": name, "node_pool": pool()},
    }
    with pytest.raises(exceptions.NotFound):
        getattr(gke, method)(**arguments[method])


def test_nodes_that_come_and_go_hold_up_their_operation(google: GoogleFake, gke: Gke) -> None:
    nodes = _Nodes()
    google.container.watchers.append(nodes)
    gke.create_node_pool(parent=CLUSTER, node_pool=pool())
    google.advance(300)
    assert (nodes.there, gke.get_node_pool(name=POOL).status) == ({"pool-s0": 4}, Status.PROVISIONING)
    nodes.slow = False
    google.advance(1)
    assert gke.get_node_pool(name=POOL).status == Status.RUNNING

    nodes.slow = True
    gke.delete_node_pool(name=POOL)
    google.advance(300)
    assert (nodes.there, gke.get_node_pool(name=POOL).status) == ({}, Status.STOPPING)
    nodes.slow = False
    google.advance(1)
    assert google.node_pools() == {}


def test_capacity_that_runs_for_a_while_is_taken_back_when_that_is_over(google: GoogleFake, gke: Gke) -> None:
    nodes = _Nodes()
    nodes.slow = False
    google.container.watchers.append(nodes)
    ends(google, gke, flex({"max_run_duration": "3600s"}))
    google.container.scale_up(POOL, 4)
    google.advance(100)
    assert nodes.there == {"pool-s0": 4}
    google.advance(3600)
    assert nodes.there == {}


class _Nodes:
    """What boots nodes, slowly."""

    def __init__(self) -> None:
        self.there: dict[str, int] = {}
        self.slow = True

    def grown(self, cluster: Cluster, asked: container_v1.NodePool) -> None:
        self.there[asked.name] = cluster.sizes[asked.name]

    def shrunk(self, cluster: Cluster, asked: container_v1.NodePool) -> None:
        self.there.pop(asked.name, None)

    def busy(self, cluster: Cluster, asked: container_v1.NodePool) -> bool:
        return self.slow
