"""GKE tries for 35 minutes to make a node pool for which there are no machines, and deletes none before it is through.

What waits for that goes on with a time of its own when GKE is through, and what GKE says then counts.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.tpu.capacity import Spot
from raytpu_ops.tpu.deadlines import Deadlines
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.spec import SliceSpec
from tests.unit.gke.conftest import ME
from tests.unit.gke.pool_world import World

#: Seconds: akka/akka-core#32992, GoogleCloudPlatform/cluster-toolkit#6278.
TRIES_S = 35 * 60
ONE = SliceSpec.of("v4", "2x2x2")
RELEASING = Deadlines().releasing


@pytest.fixture(params=[1, 5], ids=["one at a time", "side by side"])
def slow(world: World, request: pytest.FixtureRequest) -> World:
    """The next pool is tried for 35 minutes, then there are no machines."""
    world.google.container.at_once = request.param
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


async def test_a_release_goes_on_until_google_is_through(slow: World):
    backend, began = slow.backend(), slow.now
    lease = await killed(slow, backend)
    released = await backend.release(lease)
    by = began + RELEASING + released.held
    while released.left:
        await slow.sleep(10)
        released = await backend.release(lease)

    assert slow.left == {}
    assert began + timedelta(seconds=TRIES_S) < slow.now < by
