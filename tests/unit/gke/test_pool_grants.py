"""Node pools come for a lease: rung by rung, zone by zone, through everything that Google may answer."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from google.cloud.container_v1 import NodePool

from raytpu_ops.backends.gke.record import OWNER, RECORD
from raytpu_ops.tpu.capacity import FlexStart, OnDemand, Queued, Reservation, Spot
from raytpu_ops.tpu.errors import CapacityUnavailable, InvalidSpec, Misconfigured, Preempted, RayTpuError
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake import refusals
from tests.google_fake.access import FakeAccess
from tests.google_fake.fake import CLUSTER, PROJECT, ZONE
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import FORBIDDEN, RAY_CLUSTERS, RESET
from tests.unit.gke.pool_world import BOTH_ZONES, LEASE_ID, OTHER_ZONE, POOLS, World, acquired
from tests.unit.gke.seen import SPEC

OTHER_CLUSTER = f"{CLUSTER}-2"


def dies() -> None:
    """The process that acquires ends, at its first pause."""
    raise asyncio.CancelledError


def creations(world: World) -> list[str]:
    return [one.partition(" ")[2] for one in world.asked("CreateNodePool")]


# Granted


async def test_a_lease_is_two_pools_and_a_raycluster_whose_pods_were_not_wanted_before(world: World):
    suspended: list[bool] = []

    def look(*_: object) -> bool:
        suspended.append(world.record(LEASE_ID)["spec"]["suspend"])
        return False

    world.google.faults.inject("CreateNodePool", "UNKNOWN", when=look)
    lease = await acquired(world)

    assert creations(world) == [POOLS[0], POOLS[1], POOLS[1]]  # the second waits for the first (F04)
    assert suspended == [True] * 3
    assert world.record(LEASE_ID)["spec"]["suspend"] is False
    assert {name: pool.status.name for name, pool in world.pools.items()} == dict.fromkeys(POOLS, "RUNNING")
    assert lease.created["node pool"] == POOLS
    assert (lease.capacity["kind"], lease.place["zone"], lease.attempts) == ("on_demand", ZONE, [])
    assert lease.granted_at > world.now - timedelta(seconds=10)
    assert lease.expires_at == lease.granted_at + timedelta(hours=12)
    assert await world.backend().find(ME) == lease
    assert SliceLease.from_xcom(json.loads(json.dumps(lease.to_xcom()))) == lease


async def test_pools_come_side_by_side_where_google_lets_them(world: World):
    world.google.container.at_once = 5
    began = world.now

    await acquired(world)

    assert creations(world) == POOLS
    assert world.now - began < timedelta(seconds=200)


async def test_the_record_is_on_every_pool(world: World):
    lease = await acquired(world)

    for pool in world.pools.values():
        record = json.loads(pool.config.metadata[RECORD])
        assert record["owner"]["run_id"] == ME.run_id
        assert record["digest"] == json.loads(world.record(lease.id)["metadata"]["annotations"][RECORD])["digest"]
        assert pool.config.resource_labels[OWNER] == ME.digest


async def test_a_lease_that_is_granted_is_handed_out_again_without_asking_google(world: World):
    """F02, F39."""
    lease = await world.granted()
    plan = await world.plan(world.backend())
    world.google.calls.clear()

    assert await world.backend().acquire(plan, ME) == lease
    assert world.google.calls == []


async def test_two_at_once_end_with_the_same_pools(world: World):
    """F34, F39: a zombie and its retry."""
    one, other = await asyncio.gather(acquired(world), acquired(world))

    assert one.id == other.id
    assert sorted(world.pools) == POOLS
    assert world.google.container.made == [f"{CLUSTER}/nodePools/{name}" for name in POOLS]


@pytest.mark.parametrize(
    ("project", "name"),
    [(PROJECT, "team-a"), ("other-1", "projects/other-1/reservations/team-a")],
    ids=["own", "shared"],
)
async def test_one_host_slices_and_reservations(world: World, project: str, name: str):
    """The project's own, and one that another project shares with it."""
    spec = SliceSpec.of("v6e", "2x2", num_slices=2)
    world.google.compute.add_reservation("team-a", "ct6e-standard-4t", 2, zone=ZONE, project=project)

    lease = await acquired(world, Reservation(name), spec)

    assert lease.capacity == {"kind": "reservation", "name": name, "within": None}
    affinities = [pool.config.reservation_affinity for pool in world.pools.values()]
    assert [list(one.values) for one in affinities] == [[name]] * 2
    assert [pool.initial_node_count for pool in world.pools.values()] == [1, 1]


async def test_flex_start_begins_with_empty_pools_and_is_granted_when_all_hosts_are_there(world: World):
    lease = await acquired(world, FlexStart(3600))

    assert world.nodes(lease.id) == SPEC.hosts
    assert any("its pods ask for their hosts" in line for line in world.said)
    assert world.record(lease.id)["spec"]["suspend"] is False


# What is refused before anything is made


@pytest.mark.parametrize(
    ("capacity", "options", "said"),
    [
        (Queued(60), {"node_pools": {"reuse": POOLS}}, "set its option node_pools, without reuse; or .* LocalQueue"),
        (Queued(60, within=90), {}, r"capacity\[0\]: within .* is longer than valid_for"),
        ([Spot(), OnDemand()], {"node_pools": {"reuse": POOLS}}, "takes one kind, 2 were given"),
        (None, {"node_pools": {"reuse": POOLS[:1]}}, "1 node pools are named, 2 x v4"),
        (
            None,
            {"node_pools": {"cluster": CLUSTER.replace(ZONE, "us-central2")}},
            "node_pools.zones: the cluster is a re",
        ),
        (
            None,
            {"node_pools": {"zones": "us-east5-b"}},
            "us-east5-b: cluster .* in their cluster's region, us-central2",
        ),
    ],
    ids=str,
)
async def test_what_can_never_work_is_refused_at_once(world: World, capacity: Any, options: dict[str, Any], said: str):
    with pytest.raises(InvalidSpec, match=said):
        await acquired(world, capacity, **options)
    assert world.asked("CreateNodePool") == []
    assert world.left == {}


async def test_a_plan_says_what_would_be_made_and_touches_nothing(two_zones: World):
    two_zones.google.compute.add_reservation("a", "tpu7x-standard-4t", 4, zone=ZONE, project=PROJECT)
    backend = two_zones.backend(node_pools={**BOTH_ZONES, "price_per_chip_hour": 2.0})
    plan = await two_zones.plan(backend, [Reservation("a"), Spot()], SliceSpec.of("7x", "2x2x2", num_slices=2))

    assert plan.creates[3:] == [
        f"2 GKE node pools in {ZONE} or {OTHER_ZONE}, each of 2 tpu7x-standard-4t nodes",
        "1 workload policy for topology 2x2x2",
    ]
    assert "tried in order: reservation a, then spot; each in every zone before the next" in plan.notes
    assert any("384.00 at 2 each" in note for note in plan.notes)
    assert two_zones.left == {}


async def test_a_plan_says_where_hosts_go_before_their_lease(world: World):
    plan = await world.plan(world.backend(), FlexStart(3600))
    assert "flex_start hosts are taken back after 1:00:00, the lease is for 12:00:00" in plan.notes
    long = await world.plan(world.backend(), FlexStart(timedelta(hours=12)))
    assert not any("taken back" in note for note in long.notes)


async def test_missing_permissions_are_told_before_anything_is_made(world: World):
    world.google.deny("container.operations.list")
    with pytest.raises(Misconfigured, match=r"lacks container.operations.list; the role raytpu_gke has"):
        await acquired(world)
    assert world.left == {}


async def test_a_clusters_path_names_the_project_where_the_account_has_none(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    async def nobody_says(self: FakeAccess) -> str:
        raise Misconfigured("project_id is missing")

    monkeypatch.setattr(FakeAccess, "project", nobody_says)
    lease = await acquired(world, node_pools={"cluster": CLUSTER})
    assert lease.created["node pool"] == POOLS


# The ladder


@pytest.mark.parametrize("words", ["stockout", "exhausted"])
async def test_a_stock_out_is_cleared_away_and_the_next_rung_is_tried(world: World, words: str):
    """F01, F06: the pool exists in ERROR, its operation is DONE with an error."""
    getattr(world.google.faults, words)(name=POOLS[1])

    lease = await acquired(world, [Spot(), OnDemand()])

    assert lease.capacity["kind"] == "on_demand"
    [tried] = lease.attempts
    assert tried.startswith(f"spot in {ZONE}: Google, create node pool {POOLS[1]}: ")
    assert "does not have enough resources" in tried
    assert any(line.startswith(f"spot in {ZONE}: ") for line in world.said)
    assert sorted(world.pools) == POOLS
    assert not any(pool.config.spot for pool in world.pools.values())


async def test_a_pool_in_error_counts_though_google_tells_of_its_operation_no_more(world: World):
    """F01: a task that comes back hours later sees the pool alone."""
    operations = world.google.container.operations

    def forgets() -> None:
        for name in [name for name, one in operations.items() if one.status.name == "DONE"]:
            del operations[name]

    world.meanwhile = forgets
    world.google.faults.stockout(name=POOLS[1])

    lease = await acquired(world, [Spot(), OnDemand()])

    [tried] = lease.attempts
    assert "does not have enough resources" in tried
    assert sorted(world.pools) == POOLS


async def test_each_rung_is_tried_in_every_zone_before_the_next_is(two_zones: World):
    two_zones.google.faults.stockout(name=POOLS[0], times=3)

    lease = await acquired(two_zones, [Spot(), OnDemand()], node_pools=BOTH_ZONES)

    assert [line.partition(":")[0] for line in lease.attempts] == [
        f"spot in {ZONE}",
        f"spot in {OTHER_ZONE}",
        f"on_demand in {ZONE}",
    ]
    assert lease.place["zone"] == OTHER_ZONE
    assert {tuple(pool.locations) for pool in two_zones.pools.values()} == {(OTHER_ZONE,)}


async def test_at_the_end_of_the_ladder_the_error_has_all_that_was_tried_and_nothing_is_left(world: World):
    world.google.faults.quota("region", name=POOLS[0], times=None)

    with pytest.raises(CapacityUnavailable) as refused:
        await acquired(world, [Spot(), OnDemand()])

    said = str(refused.value)
    assert "2 of 2 tries failed" in said
    assert said.count("Quota 'TPUS_PER_TPU_FAMILY' exceeded") == 2
    assert "\n" not in said
    assert "left:" not in said
    assert world.left == {}


async def test_a_rung_has_its_own_time_and_its_pools_are_gone_before_the_next(world: World):
    delays = world.google.container.delays
    delays.create = 600

    def goes_on() -> None:
        if any(line.startswith("spot in") for line in world.said):
            delays.create = 180

    world.meanwhile = goes_on
    backend = world.backend()
    plan = await world.plan(backend, [Spot(within=200), OnDemand()], releasing=timedelta(hours=2))
    lease = await backend.acquire(plan, ME, say=world.said.append)

    [tried] = lease.attempts
    assert "the provisioning deadline" in tried
    assert lease.capacity["kind"] == "on_demand"
    # The time that it takes to take pools away is none of the next rung's.
    assert world.now - lease.granted_at < timedelta(seconds=10)


async def test_flex_start_that_nobody_grants_gives_way_with_its_pods_unwanted_again(world: World):
    world.google.container.delays.scale_up = 1e6
    world.google.container.at_once = 5

    lease = await acquired(world, [FlexStart(3600, within=300), OnDemand()])

    assert lease.attempts[0].startswith(f"flex_start in {ZONE}: lease {LEASE_ID}")
    assert "0 of 4 hosts are there" in lease.attempts[0]
    assert not any(pool.config.flex_start for pool in world.pools.values())


async def test_while_it_climbs_the_lease_says_so_and_the_reaper_leaves_it_alone(world: World):
    backend = world.backend()
    plan = await world.plan(backend, FlexStart(3600))
    world.meanwhile = dies
    with pytest.raises(asyncio.CancelledError):
        await backend.acquire(plan, ME)

    [lease] = await world.backend().list_leases()
    report = await world.backend().observe(lease)

    assert "its node pools are not all there yet, flex_start in us-central2-b is being tried" in report.describe()
    assert lease.expires_at > world.now + plan.lease_for
    assert not report.ready


# What Google answers


@pytest.mark.parametrize("fault", ["lost", "cut"])
async def test_a_create_whose_answer_is_lost_is_adopted(world: World, fault: str):
    """F02: looked for before it is made again."""
    getattr(world.google.faults, fault)("CreateNodePool")

    await acquired(world)

    assert creations(world).count(POOLS[0]) == 1
    assert world.google.container.made == [f"{CLUSTER}/nodePools/{name}" for name in POOLS]


async def test_already_exists_on_a_retry_is_looked_at(world: World):
    """F03: Google says so before its list has it."""
    world.google.faults.inject("CreateNodePool", refusals.exists(POOLS[0]))

    await acquired(world)

    assert sorted(world.pools) == POOLS


async def test_a_strangers_pool_of_that_name_is_named_and_left_alone(world: World):
    """F03."""
    theirs = NodePool(name=POOLS[1], config={"labels": {"team": "b"}})
    world.google.container.put(CLUSTER, theirs)

    with pytest.raises(Misconfigured, match=f"node pool {POOLS[1]} exists and was not made for {ME.key}"):
        await acquired(world)

    assert world.left == {"pools": [POOLS[1]]}
    assert world.pools[POOLS[1]].status.name == "RUNNING"
    assert world.kube.count("patch rayclusters") == 0
    assert world.asked("CreateNodePool", "DeleteNodePool") == []


async def test_another_operation_on_the_cluster_is_waited_for_by_its_name(world: World):
    """F04: and asked for again only when it is over."""
    busy = world.google.container.occupy(CLUSTER, 300)

    await acquired(world)

    assert any(f"Google works on {busy} first" in line for line in world.said)
    refused = [call for call in world.google.calls if call.method == "CreateNodePool" and call.status != "OK"]
    assert len(refused) == 2  # by the foreign operation, and by the first pool's


async def test_another_operation_that_does_not_end_is_a_matter_of_the_rungs_deadline(world: World):
    busy = world.google.container.occupy(CLUSTER, 1e6)

    with pytest.raises(
        CapacityUnavailable, match=f"deadline .* has passed; last seen: .* Google works on {busy} first"
    ):
        await acquired(world, Spot(within=300))

    assert world.left == {}


@pytest.mark.parametrize("retry_after", [None, 30.0])
async def test_too_many_requests_are_backed_off_from(world: World, retry_after: float | None):
    """F05: later and later, and not before Google wants it."""
    world.google.faults.too_many("CreateNodePool", times=4, retry_after=retry_after)

    await acquired(world)

    tried = [call.at for call in world.google.asked("CreateNodePool")][:5]
    pauses = [(after - before).total_seconds() for before, after in pairwise(tried)]
    assert all(pause >= (retry_after or 0) for pause in pauses)
    assert retry_after or pauses[3] > pauses[0] > 0

    assert any("does not answer, trying again: Google" in line for line in world.said)
    assert sorted(world.pools) == POOLS


@pytest.mark.parametrize("fault", ["unavailable", "internal"])
async def test_a_google_that_is_away_makes_nothing_absent(world: World, fault: str):
    """F07: no second pool, and no wrong deletion."""
    getattr(world.google.faults, fault)("container.List*", times=5)

    await acquired(world)

    assert len(world.google.container.made) == 2
    assert world.asked("DeleteNodePool") == []


async def test_a_pool_that_is_still_going_is_waited_for(world: World):
    """F08: a lease before this one was just released. Its RayCluster stays until its pools are gone, so that whoever
    looks for leases finds it; the next one of the owner sees to the rest of it first."""
    lease = await world.granted()
    for _ in range(3):
        await world.backend().release(lease)
        world.kube.settle()
    assert {name: pool.status.name for name, pool in world.pools.items()} == {POOLS[0]: "STOPPING", POOLS[1]: "RUNNING"}
    assert LEASE_ID in world.kube.all(RAY_CLUSTERS)
    assert [one.id for one in await world.backend().list_leases()] == [LEASE_ID]

    again = await acquired(world)

    assert again.granted_at > lease.granted_at
    assert world.google.container.made[2:] == [f"{CLUSTER}/nodePools/{name}" for name in POOLS]
    assert {pool.status.name for pool in world.pools.values()} == {"RUNNING"}


@pytest.mark.parametrize("changed", [{"workload_policy": "ours"}, {"cluster": OTHER_CLUSTER}], ids=str)
async def test_a_former_lease_is_given_back_where_it_was_made_and_with_what_it_was_made(
    world: World, changed: dict[str, Any]
):
    """Its release was killed, and then somebody changed the connection."""
    world.google.add_cluster(OTHER_CLUSTER)
    world.google.compute.put_policy("ours", "2x2x2", region="us-central2", project=PROJECT)
    spec = SliceSpec.of("7x", "2x2x2", num_slices=2)
    lease = await acquired(world, spec=spec)
    await world.backend().release(lease)
    world.kube.settle()

    await acquired(world, spec=spec, node_pools=changed)

    policies = sorted(name.rpartition("/")[2] for name in world.google.compute.policies)
    own = [] if "workload_policy" in changed else [LEASE_ID]
    assert policies == [*own, "ours"]
    assert list(world.google.node_pools()) == [f"{changed.get('cluster', CLUSTER)}/nodePools/{name}" for name in POOLS]


async def test_errors_of_a_former_lease_are_none_of_this_ones(world: World):
    world.google.faults.stockout(name=POOLS[0])
    with pytest.raises(CapacityUnavailable):
        await acquired(world, Spot())
    assert world.left == {}

    assert (await acquired(world, Spot())).attempts == []


async def test_a_token_that_ends_in_a_long_wait_is_renewed(world: World):
    """F38."""
    given = world.google.tokens.given
    before: list[int] = []

    def an_hour_is_over() -> None:
        world.google.expire_tokens()
        world.meanwhile = lambda: None
        before.append(len(given))

    world.meanwhile = an_hour_is_over
    await acquired(world)

    assert [len(given)] == [before[0] + 1]
    assert sorted(world.pools) == POOLS


async def test_what_google_never_grants_is_no_matter_for_another_rung(world: World):
    world.google.faults.org_policy("CreateNodePool")

    with pytest.raises(Misconfigured, match="an organization policy forbids it"):
        await acquired(world, [Spot(), OnDemand()])

    assert len(creations(world)) == 1
    assert world.left == {}


@pytest.mark.parametrize("at_once", [1, 5])
async def test_create_allowed_and_looking_denied_deletes_what_has_the_leases_names(world: World, at_once: int):
    """F32: nobody pays for it, and that it can't be seen is told with the label by which the reaper finds it."""
    world.google.container.at_once = at_once

    def denied() -> None:
        if world.pools:
            world.google.deny("container.clusters.get")

    world.meanwhile = denied
    with pytest.raises(Misconfigured) as refused:
        await acquired(world)

    said = str(refused.value)
    assert f"left: node pool {POOLS[0]} was told to go if it is there, and can't be looked at; " in said
    assert "; Google, list node pools" in said
    assert f"raytpu-owner={ME.digest}" in said
    await world.sleep(200)
    assert list(world.left) == ["rayclusters"]
    world.meanwhile = lambda: None
    world.google.allow()
    [found] = await world.backend().list_leases()
    await world.released(found)
    assert world.left == {}


async def test_a_roll_back_is_waited_for_and_what_does_not_go_is_named(world: World):
    """F01."""
    world.google.faults.stockout(name=POOLS[0])
    world.google.faults.inject("DeleteNodePool", "PERMISSION_DENIED", times=None)

    with pytest.raises(Misconfigured, match=r"left: .*delete node pool .*raytpu-owner="):
        await acquired(world, Spot())

    assert list(world.left) == ["pools", "rayclusters"]


async def test_a_roll_back_that_takes_too_long_says_what_is_left(world: World):
    """F32: a deletion that hangs at Google ends in the error that the reaper's reader needs, and in time."""
    world.google.faults.stockout(name=POOLS[0])
    world.google.container.delays.delete = 1e6

    with pytest.raises(RayTpuError, match=rf"; left: .*node pool {POOLS[0]} .*raytpu-owner={ME.digest}"):
        await acquired(world, Spot())

    assert list(world.left) == ["pools", "rayclusters"]


async def test_a_raycluster_that_is_deleted_meanwhile_ends_it_with_nothing_left(world: World):
    """By a person, or a reaper that knew better: a dead try does not bring it back."""

    def deleted() -> None:
        world.meanwhile = lambda: None
        world.kube.forget(RAY_CLUSTERS, LEASE_ID)

    world.meanwhile = deleted
    with pytest.raises(Preempted, match=f"{LEASE_ID} was deleted while capacity for it was being acquired"):
        await acquired(world)

    assert world.left == {}
    assert world.kube.count("patch rayclusters") == 1


async def test_a_kubernetes_that_is_away_in_between_is_waited_for(world: World):
    world.kube.fails("patch rayclusters", RESET, RESET)
    world.kube.fails("get rayclusters", RESET, RESET, RESET)

    await acquired(world)

    assert sorted(world.pools) == POOLS


async def test_without_the_right_to_write_it_down_no_pool_is_made(world: World):
    world.kube.fails("patch rayclusters", FORBIDDEN, always=True)

    with pytest.raises(Misconfigured, match=r"deploy/gke/rbac.yaml"):
        await acquired(world)

    assert world.asked("CreateNodePool") == []


async def test_a_deadline_that_passed_before_anybody_looked_makes_nothing(world: World):
    """A retry that comes late: the rung's time is over, so what it made before goes, and nothing new comes."""
    backend = world.backend()
    plan = await world.plan(backend, Spot(within=300))
    world.meanwhile = dies
    with pytest.raises(asyncio.CancelledError):
        await backend.acquire(plan, ME)
    world.meanwhile = lambda: None
    world.google.container.vanish(f"{CLUSTER}/nodePools/{POOLS[0]}")
    world.google.advance(3600)
    world.google.calls.clear()

    with pytest.raises(CapacityUnavailable, match="the provisioning deadline"):
        await backend.acquire(plan, ME)

    assert world.asked("CreateNodePool") == []
    assert world.left == {}


# TPU7x


async def test_7x_gets_a_workload_policy_that_goes_with_its_pools(world: World):
    """F42."""
    spec = SliceSpec.of("7x", "2x2x2", num_slices=2)
    lease = await acquired(world, spec=spec)

    [policy] = world.google.compute.policies.values()
    assert policy["workloadPolicy"] == {"type": "HIGH_THROUGHPUT", "acceleratorTopology": "2x2x2"}
    assert {pool.placement_policy.policy_name for pool in world.pools.values()} == {policy["name"]}
    await world.released(lease)
    assert world.left == {}


@pytest.mark.parametrize("answer", ["ALREADY_EXISTS", "DEADLINE_EXCEEDED"])
async def test_a_policy_that_was_made_though_google_says_otherwise_is_adopted(world: World, answer: str):
    """F02, F03, F42: the answer got lost, or two tries make it at once."""
    world.google.faults.inject("resourcePolicies.insert", answer, after=True)

    await acquired(world, spec=SliceSpec.of("7x", "2x2x2"))

    assert len(world.google.compute.made) == 1


async def test_7x_takes_a_policy_of_the_users_and_leaves_it(world: World):
    spec = SliceSpec.of("7x", "2x2x2")
    world.google.compute.put_policy("ours", "2x2x2", region="us-central2", project=PROJECT)
    options = {"node_pools": {"workload_policy": "ours"}}

    lease = await acquired(world, spec=spec, **options)
    await world.released(lease, **options)

    assert list(world.left) == ["policies"]


# Pools of somebody else's


def theirs(world: World, name: str, /, autoscaling: Any = None, **labels: str) -> None:
    placement = {"type_": "COMPACT", "tpu_topology": "2x2x2"}
    config = {"machine_type": "ct4p-hightpu-4t", "labels": labels}
    size = {"autoscaling": {"enabled": True, **autoscaling}} if autoscaling else {"initial_node_count": 2}
    pool = NodePool(name=name, config=config, placement_policy=placement, **size)
    world.google.container.put(CLUSTER, pool)


async def test_named_pools_are_used_and_neither_made_nor_deleted(world: World):
    for name in ("team-1", "team-2"):
        theirs(world, name, team="a")
    theirs(world, "other", team="b")
    options = {"node_pools": {"reuse": ["team-1", "team-2"]}}

    lease = await acquired(world, **options)
    host = world.record(lease.id)["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert host["nodeSelector"]["team"] == "a"
    assert "suspend" not in world.record(lease.id)["spec"]
    await world.released(lease, **options)

    assert world.left == {"pools": ["team-1", "team-2", "other"]}
    assert world.asked("CreateNodePool", "DeleteNodePool") == []


@pytest.mark.parametrize("most", ["max_node_count", "total_max_node_count"])
async def test_a_named_pool_may_come_from_zero(world: World, most: str):
    """``gcloud … --num-nodes 0 --enable-autoscaling --max-nodes 2``, or ``--total-max-nodes``."""
    theirs(world, "team-1", {most: 2})

    await acquired(world, spec=SliceSpec.of("v4", "2x2x2"), node_pools={"reuse": ["team-1"]})

    assert list(world.pools) == ["team-1"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["team-1", "absent"], "node pool absent can't be a slice of v4 2x2x2.*: there is none of that name"),
        (["team-1", "plain"], "node pool plain can't be a slice of .*: its machines are e2-medium"),
        (["team-1", "other"], "can't be sent to team-1, other alone"),
    ],
    ids=str,
)
async def test_named_pools_that_are_no_such_slices_are_refused(world: World, names: list[str], said: str):
    theirs(world, "team-1", team="a")
    theirs(world, "other", team="b")
    world.google.container.put(CLUSTER, NodePool(name="plain", initial_node_count=2))

    with pytest.raises(Misconfigured, match=said):
        await acquired(world, node_pools={"reuse": names})

    assert world.kube.all(RAY_CLUSTERS) == {}


async def test_a_pool_that_would_fit_is_not_taken_unless_it_is_named(world: World):
    theirs(world, "team-1", team="a")
    theirs(world, "team-2", team="a")

    await acquired(world)

    assert sorted(world.pools) == sorted([*POOLS, "team-1", "team-2"])


async def test_which_cluster_it_is_has_to_be_said(world: World):
    backend = world.backend(node_pools={"cluster": None})
    with pytest.raises(Misconfigured, match=r"set node_pools.cluster to 'projects/"):
        await world.plan(backend)


async def test_a_cluster_that_is_reached_by_its_name_needs_no_path(world: World):
    world.access.selectors = {"cluster_name": "tpus", "location": ZONE}
    lease = await acquired(world, node_pools={"cluster": None})
    assert json.loads(lease.place["node_pools"])["cluster"] == CLUSTER
