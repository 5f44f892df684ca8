"""How an acquire of node pools begins: what it finds, what it may take back, how long it waits for what goes first."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from datetime import timedelta

import pytest

from raytpu_ops.backends.gke.record import RECORD, read_record
from raytpu_ops.tpu.capacity import OnDemand, Spot
from raytpu_ops.tpu.errors import DeadlineExceeded, Misconfigured
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake.fake import CLUSTER, PROJECT
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import AWAY, FORBIDDEN, LOST, RAY_CLUSTERS
from tests.unit.gke.pool_queue import dies
from tests.unit.gke.pool_world import LEASE_ID, POOLS, World, acquired

RUNNING = dict.fromkeys(POOLS, "RUNNING")


def states(world: World) -> dict[str, str]:
    """The pools and how they are."""
    return {name: pool.status.name for name, pool in world.pools.items()}


# A cluster that does not answer


async def test_a_lease_in_use_stays_whole_where_an_acquire_can_not_even_look(world: World):
    """Somebody cleared `provision` while a job runs, and the API server is away for longer than it is waited for."""
    lease = await world.granted()
    before = world.left
    world.kube.fails("", AWAY, always=True)

    with pytest.raises(DeadlineExceeded, match=f"apiserver is shutting down; what there is of lease {LEASE_ID} stays"):
        await acquired(world)

    assert world.asked("DeleteNodePool", "CreateNodePool") == []
    assert (states(world), world.left) == (RUNNING, before)
    world.kube.heals()
    assert await acquired(world) == lease


async def test_a_climb_that_a_restart_could_not_look_at_is_finished_by_the_next_try(world: World):
    """F39: what was made so far stays for it, and no second pool is made."""
    world.meanwhile = lambda: dies() if states(world) == RUNNING else None
    with pytest.raises(asyncio.CancelledError):
        await acquired(world)
    world.meanwhile = lambda: None
    world.kube.fails("", AWAY, always=True)
    with pytest.raises(DeadlineExceeded):
        await acquired(world)
    assert states(world) == RUNNING
    [lease] = await _found(world)
    assert lease == LEASE_ID  # the reaper's, where no try follows

    await acquired(world)

    assert world.google.container.made == [f"{CLUSTER}/nodePools/{name}" for name in POOLS]


async def _found(world: World) -> list[str]:
    world.kube.heals()
    return [lease.id for lease in await world.backend().list_leases()]


async def test_a_climb_that_was_adopted_is_rolled_back_where_its_own_time_ends(world: World):
    """Chips that nobody climbs for any more cost as much as others."""
    world.meanwhile = lambda: dies() if states(world).get(POOLS[0]) == "RUNNING" else None
    with pytest.raises(asyncio.CancelledError):
        await acquired(world, Spot(within=400))

    def away_once_adopted() -> None:
        world.kube.heals()
        if (world.now - begun).total_seconds() < 1500:
            world.kube.fails("", AWAY, always=True)

    begun = world.now
    world.meanwhile = away_once_adopted
    with pytest.raises(DeadlineExceeded, match="apiserver is shutting down"):
        await acquired(world, Spot(within=400))

    assert world.left == {}


@pytest.mark.parametrize("then", ["away", "forbidden"])
async def test_a_raycluster_that_may_have_been_made_is_taken_back(world: World, then: str):
    """F32: the answer got lost, and after that nobody could look."""
    fault = AWAY if then == "away" else FORBIDDEN
    world.kube.fails("patch rayclusters", LOST)
    begun = world.now

    def blind() -> None:
        world.kube.heals()
        if world.kube.count("patch rayclusters") and world.now - begun < timedelta(minutes=5, seconds=30):
            world.kube.fails("get rayclusters", fault, always=True)

    world.meanwhile = blind
    with pytest.raises(DeadlineExceeded if then == "away" else Misconfigured) as refused:
        await acquired(world)

    if then == "away":
        assert world.left == {}
    else:  # as little as asking for it again would
        assert f"raytpu-owner={ME.digest}" in str(refused.value)
        assert list(world.left) == ["rayclusters"]


def granted_to_another(world: World, **changed: str) -> None:
    """Another process of the owner's sees its pools run, and writes that down.

    :param changed: what else its record says.
    """
    for pool in world.pools.values():
        pool.status = type(pool).Status.RUNNING
    there = copy.deepcopy(world.kube.all(RAY_CLUSTERS)[LEASE_ID])
    record = read_record(there)
    assert record is not None
    assert record.pools is not None
    granted = record.model_copy(update={"pools": record.pools.model_copy(update={"granted": True}), **changed})
    there["metadata"]["annotations"][RECORD] = granted.model_dump_json()
    there["spec"]["suspend"] = False
    world.kube.store(RAY_CLUSTERS, there)


async def test_what_another_process_was_granted_meanwhile_is_handed_out(world: World):
    """F34: its look came just in time, this one's just before; both are of one owner."""
    world.google.container.delays.create = 1e6

    def say(line: str) -> None:
        if line.startswith("spot in "):
            granted_to_another(world)

    world.google.container.at_once = 5
    backend = world.backend()
    lease = await backend.acquire(await world.plan(backend, [Spot(within=300), OnDemand()]), ME, say=say)

    assert lease.capacity["kind"] == "spot"
    assert states(world) == RUNNING
    assert world.asked("DeleteNodePool") == []


def at_the_grant(world: World, then: Callable[[], object]) -> None:
    """Once the pools run another process is granted them, and this one, which is about to look, meets something."""

    def met() -> None:
        if states(world) == RUNNING:
            world.meanwhile = lambda: None
            granted_to_another(world)
            then()

    world.meanwhile = met


async def test_whose_rights_at_google_end_just_after_another_process_was_granted_the_slices_leaves_them(world: World):
    """F34: two triggerers have one trigger; a job of the other one's task may run there already."""
    at_the_grant(world, lambda: world.google.deny("container.clusters.get"))

    lease = await acquired(world)

    assert any("refused" in line or "lacks" in line for line in world.said)
    assert (lease.id, states(world)) == (LEASE_ID, RUNNING)
    assert world.asked("DeleteNodePool") == []
    assert world.kube.count("delete rayclusters") == 0
    world.google.allow()
    assert [one.id for one in await world.backend().list_leases()] == [LEASE_ID]
    await world.released(lease)
    assert world.left == {}


async def test_whose_rights_in_the_cluster_end_just_then_says_what_stays_and_deletes_nothing(world: World):
    """F32, F34: it can't see whether somebody uses them; the release task does not need to."""
    at_the_grant(world, lambda: world.kube.fails("", FORBIDDEN, always=True))

    stays = rf"left: .*once the cluster can be asked, .* by its label raytpu-owner={ME.digest}"
    with pytest.raises(Misconfigured, match=stays):
        await acquired(world)

    assert states(world) == RUNNING
    assert world.asked("DeleteNodePool") == []
    world.kube.heals()
    await world.released((await world.backend().list_leases())[0])
    assert world.left == {}


async def test_pools_that_nobody_can_have_been_granted_go_though_nobody_may_ask_the_cluster(world: World):
    """F32: one is not made yet, so no other process works on them; kept, they would come up and bill."""

    def blind() -> None:
        if states(world).get(POOLS[1]) == "PROVISIONING":
            world.kube.fails("", FORBIDDEN, always=True)

    world.meanwhile = blind
    with pytest.raises(Misconfigured):
        await acquired(world)

    assert states(world) == {}


async def test_a_try_that_should_be_dead_leaves_alone_the_lease_that_came_in_its_place(world: World):
    """F39: its task was cleared and asks for something else by now."""
    at_the_grant(world, lambda: granted_to_another(world, digest="0" * 16))

    with pytest.raises(Misconfigured, match="with another spec or other options"):
        await acquired(world)

    assert states(world) == RUNNING
    assert world.asked("DeleteNodePool") == []
    assert world.kube.count("delete rayclusters") == 0


# What goes first


async def test_a_former_lease_that_does_not_go_is_named(world: World):
    lease = await world.granted()
    world.google.container.delays.delete = 1e6
    await world.backend().release(lease)
    world.kube.settle()
    begun, backend = world.now, world.backend()
    plan = await world.plan(backend, releasing=timedelta(minutes=20))

    with pytest.raises(DeadlineExceeded, match=f"the releasing deadline .*node pool {POOLS[0]} .*; what there is of"):
        await backend.acquire(plan, ME)

    assert timedelta(minutes=20) <= world.now - begun < timedelta(minutes=21)
    assert world.kube.count("patch rayclusters") == 0


async def test_somebody_elses_workload_policy_is_refused_before_anything_is_made(world: World):
    """F03."""
    world.google.compute.put_policy(LEASE_ID, "2x2x2", region="us-central2", project=PROJECT)

    with pytest.raises(Misconfigured, match=f"resource policy {LEASE_ID} in us-central2 exists and was not made for"):
        await acquired(world, spec=SliceSpec.of("7x", "2x2x2"))

    assert world.kube.count("patch rayclusters") == 0
    assert list(world.left) == ["policies"]
