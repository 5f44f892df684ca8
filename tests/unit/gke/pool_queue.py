"""Leases whose nodes Google queues, in the world of `pool_world.py`."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from raytpu_ops.tpu.capacity import Queued
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.spec import SliceSpec
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import REQUESTS
from tests.unit.gke.pool_world import World
from tests.unit.gke.seen import SPEC

QUEUED = Queued(timedelta(hours=20), within=timedelta(minutes=50))


async def acquired(world: World, capacity: Any = QUEUED, spec: SliceSpec = SPEC, **deadlines: Any) -> SliceLease:
    """A lease; everything that may come side by side does."""
    world.google.container.at_once = 5
    backend = world.backend()
    lease = await backend.acquire(await world.plan(backend, capacity, spec, **deadlines), ME, say=world.said.append)
    world.settle()
    return lease


def requests(world: World) -> dict[str, Any]:
    """ProvisioningRequests, by name."""
    return world.kube.all(REQUESTS)


def never(world: World) -> None:
    """Google grants nothing that is queued."""
    world.google.container.delays.scale_up = 1e7


def dies() -> None:
    """The process ends, at a pause."""
    raise asyncio.CancelledError
