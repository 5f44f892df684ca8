"""What GKE is asked to make for each slice, and what its answers are taken for."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from google.cloud.container_v1 import NodePool
from google.rpc.status_pb2 import Status

from raytpu_ops.backends.gke.node_pools import (
    DIGEST,
    NodePoolView,
    OperationView,
    Wanted,
    failure,
    misfit,
    nodes_of,
    own_nodes,
    scene,
)
from raytpu_ops.backends.gke.pool_settings import NodePools
from raytpu_ops.backends.gke.reconciling import refuse_strangers
from raytpu_ops.backends.gke.record import LEASE, OWNER, RECORD
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.backends.google.fields import is_zone, region_of
from raytpu_ops.tpu.capacity import FlexStart, OnDemand, Queued, Reservation, Spot
from raytpu_ops.tpu.errors import CapacityUnavailable, InvalidSpec, Misconfigured
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.naming import lease_id, node_pool_name
from raytpu_ops.tpu.shapes import catalogue, resolve
from tests.google_fake import pool_rules

ME = Owner(dag_id="Digits & more", run_id="manual__2026-11-30T08:00:00+00:00", task_id="provision", map_index=3)
ZONE = "us-east5-b"
NAMES = (node_pool_name(ME, 0), node_pool_name(ME, 1))
RUNGS = [
    OnDemand(),
    Spot(),
    Reservation("team-a"),
    Reservation("projects/other-1/reservations/b"),
    FlexStart(3600),
    Queued(3600),
]


def wanted(rung: Any = None, shape: Any = None, **options: Any) -> Wanted:
    return Wanted(
        owner=ME,
        lease=lease_id(ME),
        shape=shape or resolve("v6e", "4x4"),
        rung=rung or OnDemand(),
        zone=ZONE,
        names=NAMES,
        options=NodePools(**options),
    )


def request(*args: Any, **options: Any) -> NodePool:
    """As Google's own types have it, which refuse fields that there are not."""
    return NodePool(wanted(*args, **options).request(NAMES[0], "{}"))


@pytest.mark.parametrize("rung", RUNGS, ids=str)
def test_every_shape_is_a_request_that_gke_takes(rung: Any):
    """F42: TPU7x of several hosts never has a topology, all others of several hosts have one."""
    for shape in catalogue():
        pool = request(rung, shape)
        pool_rules.check_name(pool.name)
        pool_rules.check(pool, [ZONE], [lease_id(ME)])
        assert pool_rules.late_failure(pool) is None
        hosts = pool.autoscaling.total_max_node_count if rung.waits_in_queue else pool.initial_node_count
        assert hosts == shape.hosts
        assert bool(pool.placement_policy.tpu_topology) == (shape.placement == "compact")
        assert bool(pool.placement_policy.policy_name) == (shape.placement == "workload")


def test_a_pool_says_whose_it_is_and_keeps_everybody_else_out():
    pool = request(labels={"team": "a"}, tags=["tpu"])

    for labels in (pool.config.labels, pool.config.resource_labels):
        assert (labels[OWNER], labels[LEASE], labels["team"]) == (ME.digest, lease_id(ME), "a")
    [taint] = pool.config.taints
    selector, tolerations = own_nodes(lease_id(ME))
    assert selector.items() <= dict(pool.config.labels).items()
    assert tolerations == [{"key": taint.key, "operator": "Equal", "value": taint.value, "effect": "NoSchedule"}]
    assert pool.config.metadata == {RECORD: "{}"}
    assert pool.locations == [ZONE]


def test_each_kind_of_capacity_is_asked_for_in_its_own_way():
    spot, shared, flex = request(Spot()), request(RUNGS[3]), request(FlexStart(timedelta(hours=2)))

    assert spot.config.spot
    assert shared.config.reservation_affinity.values == ["projects/other-1/reservations/b"]
    assert flex.config.flex_start
    assert flex.config.max_run_duration == timedelta(hours=2)
    assert (flex.initial_node_count, flex.autoscaling.total_max_node_count) == (0, 4)
    assert not flex.management.auto_repair
    assert not flex.queued_provisioning.enabled
    queued = request(Queued(60))
    assert (queued.queued_provisioning.enabled, queued.config.flex_start) == (True, True)
    assert (queued.initial_node_count, queued.autoscaling.total_max_node_count) == (0, 4)
    assert not queued.config.max_run_duration
    assert request().management.auto_repair
    assert not request().config.reservation_affinity


def test_a_users_workload_policy_is_taken_as_it_is():
    """F42."""
    ironwood = resolve("7x", "2x2x2")

    assert request(shape=ironwood, workload_policy="ours").placement_policy.policy_name == "ours"
    assert wanted(shape=ironwood, workload_policy="ours").own_policy is None
    assert wanted(shape=ironwood).own_policy == lease_id(ME)
    assert wanted(shape=resolve("7x", "2x2x1")).own_policy is None


def test_everything_that_users_may_say_of_nodes_reaches_the_request():
    said: dict[str, Any] = {
        "service_account": "nodes@p.iam.gserviceaccount.com",
        "disk_size_gb": 200,
        "disk_type": "hyperdisk-balanced",
        "image_type": "COS_CONTAINERD",
        "version": "1.34",
        "tags": "a, b",
        "pod_range": "pods",
        "private_nodes": True,
        "image_streaming": True,
        "secure_boot": True,
    }
    pool = request(**said)

    config = pool.config
    assert (config.service_account, config.disk_size_gb) == (said["service_account"], 200)
    assert (config.disk_type, config.image_type, pool.version) == ("hyperdisk-balanced", "COS_CONTAINERD", "1.34")
    assert list(config.tags) == ["a", "b"]
    assert (pool.network_config.pod_range, pool.network_config.enable_private_nodes) == ("pods", True)
    assert config.gcfs_config.enabled
    assert config.shielded_instance_config.enable_secure_boot
    assert {*said, "zones", "cluster", "reuse", "workload_policy", "labels", "price_per_chip_hour"} == {
        *NodePools.model_fields
    }


def test_the_digest_changes_with_what_is_asked_for_and_with_nothing_else():
    base = wanted()
    others = [wanted(rung) for rung in RUNGS[1:]]
    others += [replace(base, zone="us-east5-c"), wanted(disk_size_gb=99), wanted(shape=resolve("v6e", "4x8"))]

    assert len({base.digest, *(one.digest for one in others)}) == len(others) + 1
    assert base.digest == wanted().digest == wanted(cluster="projects/p/locations/l/clusters/c").digest
    assert {base.request(name, text)["config"]["labels"][DIGEST] for name in NAMES for text in ("{}", "x")} == {
        base.digest
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zones": ["us-east5"]}, r"node_pools.zones.0: must be a zone"),
        ({"zones": "us-east5-a,us-east5-a"}, "each name stands there once"),
        ({"cluster": "tpus"}, r"node_pools.cluster: must be 'projects/"),
        ({"labels": {"raytpu-owner": "x"}}, "must not begin with 'raytpu-'"),
        ({"labels": {"Team": "x"}}, "labels as Google and Kubernetes have them"),
        ({"labels": {"team": "x-"}}, "no dash or underscore at the end"),
        ({"tags": "tpu,Not a tag"}, r"node_pools.tags.1: must be a network tag"),
        ({"service_account": "trainer"}, r"node_pools.service_account: must be the e-mail address"),
        ({"disk_type": "hyper disk"}, r"node_pools.disk_type: must be a name"),
        ({"version": "'1.37'"}, r"node_pools.version: must be a name"),
        ({"reuse": ["Not_a_name"]}, r"node_pools.reuse: must be lower-case"),
        ({"zone": "us-east5-a"}, r"node_pools.zone: there is no such field"),
        ("no json", "node_pools: must be JSON"),
    ],
)
def test_options_that_are_none_are_refused_in_one_line(options: Any, said: str):
    with pytest.raises(InvalidSpec, match=said) as refused:
        Settings.of({"node_pools": options})
    assert "\n" not in str(refused.value)


def test_zones_for_ai_are_zones_and_regions_are_none():
    assert NodePools(zones=["us-central1-ai1a"]).zones == ["us-central1-ai1a"]
    assert [is_zone(name) for name in ("us-east5-b", "us-east5")] == [True, False]
    assert region_of("us-central1-ai1a") == "us-central1"
    assert region_of("us-east5") == "us-east5"


@pytest.mark.parametrize("option", ["queue", "compute_class"])
def test_nodes_come_in_one_way_only(option: str):
    with pytest.raises(InvalidSpec, match=f"node_pools and {option} don't go together"):
        Settings.of({"node_pools": True, option: "a"})


# What is there


def pool(name: str = NAMES[0], status: str = "RUNNING", digest: str | None = None, **changes: Any) -> NodePoolView:
    labels = {OWNER: ME.digest, DIGEST: digest or wanted().digest}
    return NodePoolView(name, status, **{"labels": labels, **changes})


def creation(name: str = NAMES[0], *, done: bool = True, error: Any = None) -> OperationView:
    return OperationView("operation-1", "CREATE_NODE_POOL", name, done, error)


BOTH = [pool(), pool(NAMES[1])]
STOCK_OUT = Status(code=8, message="[GCE_STOCKOUT]: the zone does not have enough resources available")


def test_it_is_whole_when_every_pool_runs():
    assert scene(wanted(), BOTH, [creation()]).is_whole
    assert scene(wanted(), [], []).absent == NAMES


def test_an_operation_that_still_runs_is_waited_for_though_the_pool_runs():
    """F06."""
    found = scene(wanted(), BOTH, [creation(done=False)])
    assert found.waiting == (f"{NAMES[0]} is being made",)


@pytest.mark.parametrize("pools", [BOTH, [pool(status="ERROR"), BOTH[1]], BOTH[1:]], ids=["runs", "error", "absent"])
def test_an_operation_that_is_done_with_an_error_has_failed_whatever_the_pool_says(pools: list[NodePoolView]):
    """F01, F06."""
    [failed] = scene(wanted(), pools, [creation(error=STOCK_OUT)]).failures
    assert isinstance(failed, CapacityUnavailable)
    assert NAMES[0] in str(failed)


def test_an_error_that_was_dealt_with_counts_no_more():
    failed = creation(error=STOCK_OUT)
    assert scene(wanted(), BOTH[1:], [failed], spent=[failed.name]).absent == (NAMES[0],)
    other = replace(failed, name="operation-2")
    assert scene(wanted(), BOTH[1:], [failed, other], spent=[failed.name]).failures


def test_a_pool_that_is_going_is_not_the_wanted_one():
    """F08."""
    found = scene(wanted(), [pool(status="STOPPING"), BOTH[1]], [])
    assert (found.absent, [one.name for one in found.doomed]) == ((), [NAMES[0]])
    assert not found.is_whole


@pytest.mark.parametrize("status", ["PROVISIONING", "RECONCILING", "STATUS_UNSPECIFIED"])
def test_a_pool_counts_when_it_runs_and_not_before(status: str):
    """F08: there is no other word for it, and its operation may not be told of yet."""
    found = scene(wanted(), [pool(status=status), BOTH[1]], [])
    assert found.waiting == (f"{NAMES[0]} is {status}",)


@pytest.mark.parametrize("changed", [{"digest": "of-another-step"}, {"name": node_pool_name(ME, 7)}], ids=str)
def test_a_pool_of_ours_that_is_not_as_it_is_wanted_goes_first(changed: dict[str, Any]):
    """F03."""
    left = pool(**changed)
    found = scene(wanted(), [left, BOTH[1]], [])
    assert found.doomed == (left,)
    assert left.name not in found.absent


def test_somebody_elses_pool_is_neither_adopted_nor_deleted():
    """F03."""
    theirs = pool(labels={"team": "b"})
    found = scene(wanted(), [theirs, BOTH[1]], [])
    assert (found.doomed, found.absent) == ((), ())
    with pytest.raises(Misconfigured, match=f"node pool {NAMES[0]} exists and was not made for .*: delete it, or"):
        refuse_strangers([theirs, BOTH[1]], NAMES, ME)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (STOCK_OUT, CapacityUnavailable),
        (Status(code=13, message="Internal error"), CapacityUnavailable),
        (Status(code=7, message="Required permission"), Misconfigured),
        ("GCE_STOCKOUT: not enough resources", CapacityUnavailable),
        (None, CapacityUnavailable),
    ],
    ids=str,
)
def test_a_pool_that_failed_is_worth_another_rung_unless_asking_again_cannot_help(status: Any, kind: type[Exception]):
    """F01."""
    assert type(failure(status, "create node pool a")) is kind


# Pools of somebody else's


V6E = resolve("v6e", "4x4")
GOOD = NodePoolView("one", "RUNNING", machine_type="ct6e-standard-4t", topology="4x4", nodes=4, labels={"team": "a"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"machine_type": "e2-medium"}, "its machines are e2-medium, not ct6e-standard-4t"),
        ({"topology": "4x8"}, "its topology is 4x8, not 4x4"),
        ({"topology": ""}, "its topology is that of one host, not 4x4"),
        ({"nodes": 8}, "it was made with 8 nodes, and the slice has 4 hosts"),
        ({"status": "ERROR", "complaint": "no"}, "node pool one is ERROR: no"),
    ],
    ids=str,
)
def test_a_pool_of_somebody_elses_has_to_be_such_a_slice(changes: dict[str, Any], said: str | None):
    assert misfit(replace(GOOD, **changes), V6E) == said


def test_pods_find_the_named_pools_and_no_others():
    two = replace(GOOD, name="two", taints=(("team", "a", "NoSchedule"),))

    assert nodes_of([GOOD], [two]) == ({"cloud.google.com/gke-nodepool": "one"}, [])
    found = nodes_of([GOOD, two], [replace(GOOD, labels={"team": "b"})])
    assert found is not None
    assert found.selector == {"team": "a"}
    assert found.tolerations == [{"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"}]
    assert nodes_of([GOOD, two], [replace(GOOD, name="three")]) is None
    assert nodes_of([GOOD, replace(two, labels={})], []) is None
