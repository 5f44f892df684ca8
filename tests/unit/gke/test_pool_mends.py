"""Tasks that mend one lease at the same time, or one after another that was killed, make the same node pools."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from raytpu_ops.backends.gke.pools_api import PoolsApi
from raytpu_ops.tpu.capacity import Spot
from raytpu_ops.tpu.errors import CapacityUnavailable, Preempted
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.naming import node_pool_name
from raytpu_ops.tpu.spec import SliceSpec
from tests.unit.gke.conftest import ME
from tests.unit.gke.pool_killer import Killer
from tests.unit.gke.pool_world import LEASE_ID, POOLS, World, acquired
from tests.unit.gke.test_pool_returns import broken

AGAIN = node_pool_name(ME, 1, 1)


@pytest.fixture
async def lease(world: World) -> SliceLease:
    world.google.container.at_once = 5
    return await world.granted(Spot())


def made(world: World) -> list[str]:
    """Pools that were made after the lease was granted, in order."""
    return [name.rpartition("/")[2] for name in world.google.container.made[len(POOLS) :]]


@pytest.mark.parametrize("at_once", [1, 5])
@pytest.mark.parametrize("how", ["gone", "ERROR"])
async def test_two_tasks_that_mend_at_once_make_the_same_pool(world: World, lease: SliceLease, how: str, at_once: int):
    """F12, F34: neither takes what the other makes for a pool that nobody wants."""
    world.google.container.at_once = at_once
    broken(world, POOLS[1], how)

    one, other = await asyncio.gather(*(world.backend().repair(lease) for _ in range(2)))

    assert one == other
    assert one.created["node pool"] == [POOLS[0], AGAIN]
    assert made(world) == [AGAIN]
    assert {name: pool.status.name for name, pool in world.pools.items()} == {POOLS[0]: "RUNNING", AGAIN: "RUNNING"}


@pytest.mark.parametrize("pauses", range(0, 16, 2))
async def test_one_that_comes_while_another_mends_takes_nothing_from_it(world: World, lease: SliceLease, pauses: int):
    """F34: however far the first has come, its pool stays, and there is no other."""
    broken(world, POOLS[1], "ERROR")
    first = asyncio.create_task(world.backend().repair(lease))
    seen, came = 0, asyncio.Event()

    def later() -> None:
        nonlocal seen
        seen += 1
        if seen > pauses:
            came.set()

    world.meanwhile = later
    await asyncio.wait([asyncio.ensure_future(came.wait()), first], return_when=asyncio.FIRST_COMPLETED)
    await world.backend().repair(lease)

    assert (await first).created["node pool"] == [POOLS[0], AGAIN]
    assert made(world) == [AGAIN]
    assert {name: pool.status.name for name, pool in world.pools.items()} == {POOLS[0]: "RUNNING", AGAIN: "RUNNING"}


async def test_a_mend_that_is_cut_at_any_point_is_finished_by_the_next_under_the_same_name(
    world: World, killer: Killer
):
    """F39: also where the name of the new pool was written down, and nobody has made it."""
    container = world.google.container
    container.at_once = 5
    container.delays.create = container.delays.delete = 4

    async def lost() -> SliceLease:
        killer.rests()
        world.empty()
        lease = await world.granted()
        broken(world, POOLS[1], "ERROR")
        container.made.clear()
        return lease

    lease = await lost()
    killer.rests()
    await world.backend().repair(lease)
    every = killer.calls
    assert every > 15

    for number in range(every):
        lease = await lost()
        killer.at(number, answered=True)
        with pytest.raises(asyncio.CancelledError):
            await world.backend().repair(lease)
        killer.rests()

        await world.sleep(10)
        mended = await world.backend().repair(lease)
        await world.sleep(10)

        lease = await world.backend().find(ME) or mended
        assert lease.created["node pool"] == [POOLS[0], AGAIN], number
        assert {name: pool.status.name for name, pool in world.pools.items()} == {
            POOLS[0]: "RUNNING",
            AGAIN: "RUNNING",
        }, number
        assert [name.rpartition("/")[2] for name in container.made] == [AGAIN], number


async def test_a_replacement_that_did_not_come_is_tried_anew_under_another_name(world: World, lease: SliceLease):
    """F12, F34: both tasks hear of it, and their next tries make one pool."""
    broken(world, POOLS[1], "gone")
    world.google.faults.stockout()
    both = await asyncio.gather(*(world.backend().repair(lease) for _ in range(2)), return_exceptions=True)
    assert [type(one) for one in both] == [CapacityUnavailable] * 2
    assert made(world) == [AGAIN]

    one, other = await asyncio.gather(*(world.backend().repair(lease) for _ in range(2)))

    assert one == other
    assert made(world) == [AGAIN, node_pool_name(ME, 1, 2)]
    assert sorted(world.pools) == sorted(one.created["node pool"])


async def test_a_pool_that_is_lost_while_another_is_mended_is_mended_as_well(world: World, lease: SliceLease):
    broken(world, POOLS[1], "gone")

    def lost_as_well() -> None:
        world.meanwhile = lambda: None
        broken(world, POOLS[0], "gone")

    world.meanwhile = lost_as_well
    mended = await world.backend().repair(lease)

    assert mended.created["node pool"] == [node_pool_name(ME, 0, 1), AGAIN]
    assert sorted(world.pools) == sorted(mended.created["node pool"])


async def test_what_a_former_lease_made_by_such_a_name_is_none_of_this_ones(world: World, lease: SliceLease):
    """F06: GKE tells of operations for long, and a run that is cleared has the names that it had before."""
    broken(world, POOLS[1], "gone")
    world.google.faults.stockout()
    with pytest.raises(CapacityUnavailable):
        await world.backend().repair(lease)
    await world.released(lease)
    lease = await world.granted(Spot())
    broken(world, POOLS[1], "gone")

    mended = await world.backend().repair(lease)

    assert mended.created["node pool"] == [POOLS[0], AGAIN]


async def test_it_is_waited_for_as_long_as_the_lease_was(world: World):
    """F10: by the deadlines of the plan, not by those that a backend has by itself."""
    world.google.container.at_once = 5
    backend = world.backend()
    lease = await backend.acquire(await world.plan(backend, provisioning=timedelta(hours=2)), ME)
    world.settle()
    broken(world, POOLS[1], "gone")
    world.google.container.delays.create = 1e7
    begun = world.now

    with pytest.raises(CapacityUnavailable, match=f"the provisioning deadline .* {AGAIN} is being made"):
        await world.backend().repair(lease)

    assert 0 <= (world.now - begun - timedelta(hours=2)).total_seconds() < 60


async def test_nothing_is_made_for_a_lease_that_is_given_back(world: World, lease: SliceLease):
    broken(world, POOLS[1], "gone")
    released: list[object] = []

    def gives_back() -> None:
        world.meanwhile = lambda: None
        released.append(asyncio.ensure_future(world.backend().release(lease)))

    world.google.container.delays.create = 600
    world.meanwhile = gives_back
    with pytest.raises(Preempted, match=f"lease {LEASE_ID} was released, so its lost node pools are not replaced"):
        await world.backend().repair(lease)

    assert released
    await world.released(lease)
    assert world.left == {}


async def test_where_nobody_may_look_a_replacement_goes_as_well_for_a_task_that_does_not_know_it(
    world: World, lease: SliceLease
):
    """F32: the RayCluster names it."""
    broken(world, POOLS[1], "gone")
    await world.backend().repair(lease)
    world.google.deny("container.clusters.get")

    await world.backend().release(lease)

    assert {name: pool.status.name for name, pool in world.pools.items()} == {POOLS[0]: "STOPPING", AGAIN: "STOPPING"}


@pytest.mark.parametrize("num_slices", [1, 2])
async def test_a_pool_that_is_made_behind_the_back_of_a_release_is_taken_away(
    world: World, monkeypatch: pytest.MonkeyPatch, num_slices: int
):
    """F39: the release looked, and was over, before Google was asked for the pool."""
    lease = await acquired(world, Spot(), SliceSpec.of("v4", "2x2x2", num_slices=num_slices))
    world.settle()
    broken(world, POOLS[0], "gone")
    create = PoolsApi.create

    async def late(google: PoolsApi, *told: Any) -> Any:
        monkeypatch.setattr(PoolsApi, "create", create)
        while (await world.backend().release(lease)).left:
            await world.sleep(10)
        return await create(google, *told)

    monkeypatch.setattr(PoolsApi, "create", late)
    with pytest.raises(Preempted, match="was released, so its lost node pools are not replaced"):
        await world.backend().repair(lease)
    assert world.left == {}
