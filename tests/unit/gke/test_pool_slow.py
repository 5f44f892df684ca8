"""GKE tries for 35 minutes to make a node pool for which there are no machines, and deletes none before it is through.

What waits for that goes on with a time of its own when GKE is through, and what GKE says then counts.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from google.cloud.container_v1 import NodePool

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.tpu.capacity import OnDemand, Spot
from raytpu_ops.tpu.deadlines import Deadlines
from raytpu_ops.tpu.errors import CapacityUnavailable, Misconfigured, Preempted
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.naming import node_pool_name
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake.fake import CLUSTER, ZONE
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import RAY_CLUSTERS
from tests.unit.gke.pool_world import POOLS, RUNNING, World, acquired
from tests.unit.gke.test_pool_returns import lose_a_slice

#: Seconds: akka/akka-core#32992, GoogleCloudPlatform/cluster-toolkit#6278.
TRIES_S = 35 * 60
ONE = SliceSpec.of("v4", "2x2x2")
RELEASING = Deadlines().releasing


AT_ONCE = pytest.mark.parametrize("at_once", [1, 5], ids=["one at a time", "side by side"])


@pytest.fixture
def slow(world: World) -> World:
    """The next pool is tried for 35 minutes, then there are no machines."""
    world.google.container.delays.fail = TRIES_S
    world.google.faults.stockout()
    return world


async def killed(world: World, backend: GkeBackend) -> SliceLease:
    """The task that acquired ends while GKE tries."""

    def dies() -> None:
        if world.pools:
            raise asyncio.CancelledError

    world.meanwhile = dies
    with pytest.raises(asyncio.CancelledError):
        await backend.acquire(await world.plan(backend, Spot(), ONE), ME)
    world.meanwhile = lambda: None
    [lease] = await backend.list_leases()
    return lease


@AT_ONCE
async def test_the_next_rung_is_tried_when_google_is_through(slow: World, at_once: int):
    """F01: though the rung's own time was over long before."""
    slow.google.container.at_once = at_once
    backend, began = slow.backend(), slow.now

    lease = await backend.acquire(await slow.plan(backend, [Spot(within=600), OnDemand()], ONE), ME)

    assert lease.capacity["kind"] == "on_demand"
    assert [line.partition(": ")[0] for line in lease.attempts] == [f"spot in {ZONE}"]
    assert slow.now - began > timedelta(seconds=TRIES_S)


async def test_at_the_end_of_the_ladder_nothing_is_left_and_there_was_no_capacity(slow: World):
    with pytest.raises(CapacityUnavailable) as refused:
        await acquired(slow, Spot(within=600), ONE)

    assert "left: " not in str(refused.value)
    assert slow.left == {}


async def test_one_pool_that_is_refused_takes_the_other_away_when_google_is_through(slow: World):
    """What was asked for in vain is rolled back, and its error is that of the refusal."""
    slow.google.container.at_once = 5
    slow.google.faults.inject(
        "CreateNodePool", "INVALID_ARGUMENT", None, when=lambda call: call.resource.endswith(POOLS[1])
    )

    with pytest.raises(Misconfigured) as refused:
        await acquired(slow, [Spot(), OnDemand()])

    assert "left: " not in str(refused.value)
    assert slow.left == {}


async def test_a_former_lease_that_google_still_makes_is_waited_for(slow: World):
    """F08."""
    backend, began = slow.backend(), slow.now
    await backend.release(await killed(slow, backend))

    lease = await acquired(slow, OnDemand(), ONE)

    assert lease.attempts == []
    assert slow.now - began > timedelta(seconds=TRIES_S)


async def test_a_mend_whose_lease_is_released_takes_its_pool_away_when_google_is_through(world: World):
    lease = await world.granted()
    world.google.container.delays.fail = TRIES_S
    world.google.faults.stockout()
    world.google.container.vanish(f"{CLUSTER}/nodePools/{POOLS[1]}")
    lose_a_slice(world.kube)
    again = node_pool_name(ME, 1, 1)

    def released() -> None:
        if again in world.pools:
            world.meanwhile = lambda: None
            world.kube.forget(RAY_CLUSTERS, lease.id)

    world.meanwhile = released
    with pytest.raises(Preempted, match="was released"):
        await world.backend().repair(lease)

    assert again not in world.pools


async def test_a_mend_whose_lease_is_released_waits_for_what_google_makes_for_another_lease(world: World):
    """F04: its replacement runs, and is not deleted before GKE is through with somebody else's pool."""
    lease = await world.granted()
    container = world.google.container
    container.vanish(f"{CLUSTER}/nodePools/{POOLS[1]}")
    lose_a_slice(world.kube)
    again, began = node_pool_name(ME, 1, 1), world.now

    def released() -> None:
        if again in world.pools and world.pools[again].status == RUNNING:
            world.meanwhile = lambda: None
            world.kube.forget(RAY_CLUSTERS, lease.id)
            theirs = container.put(CLUSTER, NodePool(name="theirs", status=NodePool.Status.PROVISIONING))
            container.occupy(CLUSTER, TRIES_S)
            world.google.clock.after(TRIES_S, lambda: setattr(theirs, "status", RUNNING))

    world.meanwhile = released
    with pytest.raises(Preempted, match="was released"):
        await world.backend().repair(lease)

    assert again not in world.pools
    assert world.now - began > timedelta(seconds=TRIES_S)


@AT_ONCE
async def test_a_release_goes_on_until_google_is_through(slow: World, at_once: int):
    slow.google.container.at_once = at_once
    backend, began = slow.backend(), slow.now
    lease = await killed(slow, backend)
    released = await backend.release(lease)
    by = began + RELEASING + released.held
    while released.left:
        await slow.sleep(10)
        released = await backend.release(lease)

    assert slow.left == {}
    assert began + timedelta(seconds=TRIES_S) < slow.now < by
