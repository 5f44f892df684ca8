"""Leases whose nodes Google queues: seen, killed at any point, given back, mended."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.backends.gke.asking import ask
from raytpu_ops.backends.gke.record import read_record
from raytpu_ops.tpu.capacity import Queued, Spot
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.errors import CapacityUnavailable, Misconfigured
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.naming import node_pool_name
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.waits import Pending
from tests.google_fake.fake import CLUSTER, ZONE
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import FORBIDDEN, LOST, NAMESPACE, PODS, RAY_CLUSTERS, REQUESTS
from tests.unit.gke.pool_killer import Killer
from tests.unit.gke.pool_queue import QUEUED, acquired, dies, never, requests
from tests.unit.gke.pool_world import LEASE_ID, POOLS, World
from tests.unit.gke.seen import SPEC, condition

ONE = SliceSpec.of("v4", "2x2x2")

# Killed, released, found


async def test_while_it_queues_the_report_says_so_and_hours_of_it_are_no_start_up(world: World):
    """F10."""
    never(world)
    backend = world.backend()
    plan = await world.plan(backend, QUEUED)
    world.meanwhile = lambda: dies() if "hosts are there" in "".join(world.said) else None
    with pytest.raises(asyncio.CancelledError):
        await backend.acquire(plan, ME, say=world.said.append)

    [lease] = await world.backend().list_leases()
    report = await world.backend().observe(lease)

    assert report.phase is Phase.QUEUED
    assert f"ProvisioningRequest {POOLS[0]} is Accepted" in report.describe()
    assert not report.broken


async def test_a_release_while_it_queues_ends_the_queueing_first(world: World):
    never(world)
    backend = world.backend()
    plan = await world.plan(backend, QUEUED)
    world.meanwhile = lambda: dies() if requests(world) else None
    with pytest.raises(asyncio.CancelledError):
        await backend.acquire(plan, ME)
    world.meanwhile = lambda: None
    [lease] = await world.backend().list_leases()

    released = await world.backend().release(lease)

    assert released.removed[:2] == [f"ProvisioningRequest {name}" for name in POOLS]
    assert f"ProvisioningRequest {POOLS[0]} was told to go" in released.left
    await world.released(lease)
    assert world.left == {}


async def test_a_roll_back_ends_the_queueing_before_pools_go(world: World):
    never(world)
    asked: list[list[str]] = []

    def look(*_: object) -> bool:
        asked.append(list(requests(world)))
        return False

    def forbidden() -> None:
        if requests(world):
            world.kube.fails("patch rayclusters", FORBIDDEN, always=True)

    world.google.faults.inject("DeleteNodePool", "UNKNOWN", when=look)
    world.meanwhile = forbidden
    with pytest.raises(Misconfigured, match="cannot patch resource"):
        await acquired(world)

    assert asked
    assert asked == [[]] * len(asked)
    assert world.pools == {}


def anew(world: World) -> None:
    """As if nothing had ever been; the first rung fails in the queue, the next one is granted by it."""
    world.empty()
    world.queue.refusal = "none here"
    world.meanwhile = lambda: setattr(world.queue, "refusal", "" if climbed(world) else "none here")


def climbed(world: World) -> bool:
    there = world.kube.all(RAY_CLUSTERS)
    return bool(there) and '"step":1' in there[LEASE_ID]["metadata"]["annotations"]["raytpu-lease"]


async def test_it_is_finished_or_given_back_whole_whenever_its_process_dies(world: World, killer: Killer):
    """F39, F09: through a request that fails to one that is granted, in the next zone."""
    [cluster] = world.google.container.clusters.values()
    cluster.zones = (ZONE, "us-central2-a")
    delays = world.google.container.delays
    delays.create = delays.delete = delays.scale_up = 4
    options = {"node_pools": {"zones": list(cluster.zones)}}
    plan = await world.plan(world.backend(**options), QUEUED, ONE)

    anew(world)
    killer.rests()
    await world.backend(**options).acquire(plan, ME)
    every = killer.calls
    assert every > 30

    for number in range(every):
        anew(world)
        killer.at(number, answered=True)
        with pytest.raises(asyncio.CancelledError):
            await world.backend(**options).acquire(plan, ME)
        killer.rests()
        if number % 2:
            lease = await world.backend(**options).acquire(plan, ME)
            assert (len(lease.attempts), lease.place["zone"]) == (1, "us-central2-a"), number
            assert list(requests(world)) == list(world.pools) == POOLS[:1], number
            await world.released(lease, **options)
        for found in await world.backend(**options).list_leases():
            await world.released(found, **options)
        assert world.left == {}, number


# Mended


def lose(world: World, pool: str, how: str) -> None:
    """The nodes of slice 1 are gone, and its pods wait again."""
    if how == "revoked":
        world.queue.revoke(pool)
    else:
        world.google.container.vanish(f"{CLUSTER}/nodePools/{pool}")
    wait_again(world)
    world.settle()


def wait_again(world: World) -> None:
    """The pods of slice 1 have no nodes."""
    for name, pod in world.kube.all(PODS).items():
        if "slice-1" in name:
            pod["status"]["conditions"] = [condition("PodScheduled", False, "Unschedulable", "0/3 nodes")]
            pod["status"]["phase"] = "Pending"


@pytest.mark.parametrize("how", ["revoked", "gone"])
async def test_a_slice_whose_nodes_are_gone_is_queued_for_anew_on_another_pool(world: World, how: str):
    """F12."""
    lease, again = await acquired(world), node_pool_name(ME, 1, 1)
    lose(world, POOLS[1], how)

    report = await world.backend().observe(lease)
    assert len(report.broken) == 1
    assert ("CapacityRevoked" if how == "revoked" else f"node pool {POOLS[1]} is gone") in report.describe()
    mended = await world.backend().repair(lease)

    assert mended.created["node pool"] == [POOLS[0], again]
    assert list(world.pools) == [POOLS[0], again]
    # Its name stays, so that pods may say it.
    asked = {name: one["spec"]["podSets"][0]["podTemplateRef"]["name"] for name, one in requests(world).items()}
    assert asked == {POOLS[0]: POOLS[0], POOLS[1]: again}
    assert world.nodes(lease.id) == SPEC.hosts
    await world.released(lease)
    assert world.left == {}


async def test_a_replacement_that_google_never_has_says_so(world: World):
    lease = await acquired(world)
    lose(world, POOLS[1], "gone")
    world.queue.refusal = "no more of them"

    with pytest.raises(CapacityUnavailable, match=f"ProvisioningRequest {POOLS[1]} is Failed: no more of them"):
        await world.backend().repair(lease)

    await world.released(lease)
    assert world.left == {}


async def broken(world: World) -> SliceLease:
    """A lease whose second slice Google has taken back."""
    anew(world)
    world.meanwhile, world.queue.refusal = (lambda: None), ""
    lease = await acquired(world)
    lose(world, POOLS[1], "revoked")
    return lease


async def test_a_replacement_is_waited_for_as_long_as_the_place_in_the_queue_is_good_for(world: World):
    lease = await acquired(world, Queued(600))
    lose(world, POOLS[1], "gone")
    never(world)
    begun = world.now

    with pytest.raises(CapacityUnavailable, match="is Accepted: .* successfully queued"):
        await world.backend().repair(lease)

    assert 0 <= (world.now - begun).total_seconds() - 600 < 60


async def test_a_mend_that_is_cut_at_any_point_is_finished_by_the_next(world: World, killer: Killer):
    delays = world.google.container.delays
    delays.create = delays.delete = delays.scale_up = 4
    lease = await broken(world)
    killer.rests()
    await world.backend().repair(lease)
    every = killer.calls
    assert every > 15

    for number in range(every):
        lease = await broken(world)
        killer.at(number, answered=True)
        with pytest.raises(asyncio.CancelledError):
            await world.backend().repair(lease)
        killer.rests()

        while (report := await world.backend().observe(lease)).broken:
            lease = await world.backend().repair(lease)
        if report.phase is Phase.QUEUED:
            await world.sleep(10)
        lease = await world.backend().find(ME) or lease

        assert world.nodes(lease.id) == SPEC.hosts, number
        assert sorted(world.pools) == sorted(lease.created["node pool"]), number


@pytest.mark.parametrize("first", [Spot(), QUEUED], ids=["spot", "queued"])
async def test_requests_are_looked_for_only_where_some_may_be(world: World, first: Any):
    lease = await acquired(world, first)
    world.kube.calls.clear()
    await world.released(lease)
    assert (world.kube.count("list provisioningrequests") > 0) == (first is QUEUED)


async def test_an_answer_that_got_lost_makes_nothing_twice(world: World):
    """F02."""
    world.kube.fails("patch provisioningrequests", LOST, LOST)
    world.kube.fails("patch podtemplates", LOST, LOST)

    await acquired(world)

    assert list(requests(world)) == POOLS


@pytest.mark.parametrize("of", ["another RayCluster", "another pool"])
async def test_a_request_that_is_not_for_this_goes_first(world: World, of: str):
    """Its pods and its conditions are those of a lease, or of a pool, that is no more."""
    await acquired(world, spec=ONE)
    [request] = requests(world).values()
    if of == "another pool":
        request["spec"]["podSets"][0]["podTemplateRef"]["name"] = "before"
    else:
        request["metadata"]["ownerReferences"][0]["uid"] = "before"
    world.kube.store(REQUESTS, request)
    there = world.record(LEASE_ID)
    record = read_record(there)
    assert record is not None

    async with KubeApi(world.access, NAMESPACE) as kube:
        first = await ask(kube, there, record, timedelta(hours=1))
        assert requests(world) == {}
        await ask(kube, there, record, timedelta(hours=1))

    assert first == Pending(f"ProvisioningRequest {POOLS[0]} goes first")
    assert list(requests(world)) == POOLS[:1]


async def test_a_pool_whose_nodes_nobody_asks_for_any_more_is_asked_for_and_not_replaced(world: World):
    """A mend was killed before it could; or somebody took the request away, and then the nodes were."""
    lease = await acquired(world)
    world.google.container.preempt(f"{CLUSTER}/nodePools/{POOLS[1]}")
    world.kube.forget(REQUESTS, POOLS[1])
    wait_again(world)

    report = await world.backend().observe(lease)
    assert f"nobody asks for the nodes of node pool {POOLS[1]}" in report.describe()
    mended = await world.backend().repair(lease)

    assert mended.created["node pool"] == POOLS
    assert world.nodes(lease.id) == SPEC.hosts
    assert world.asked("DeleteNodePool") == []
