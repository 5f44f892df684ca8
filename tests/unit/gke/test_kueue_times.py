"""How long a lease lasts that Kueue lets wait: hours in its queue are no hours with slices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.flows.reaping import Reaped, nobody_knows, reap
from raytpu_ops.tpu.capacity import OnDemand
from raytpu_ops.tpu.lease import SliceLease
from tests.unit.gke import seen
from tests.unit.gke.conftest import ME, Time
from tests.unit.gke.fake_kube import RAY_CLUSTERS, FakeKube

HOUR = 3600


@pytest.fixture
def backend(make: Callable[..., GkeBackend]) -> GkeBackend:
    return make(queue="team")


@pytest.fixture
async def plan(backend: GkeBackend) -> Plan:
    """Two hours, after four in the queue at most."""
    return await backend.plan(seen.SPEC, [OnDemand()], lease_for=timedelta(hours=2))


def turned(kube: FakeKube, lease: SliceLease, *, suspend: bool, halted: bool, at_s: float) -> None:
    """Kueue wants its pods or not, and KubeRay has seen to it since."""
    made = copy.deepcopy(kube.all(RAY_CLUSTERS)[lease.id])
    made["spec"]["suspend"] = suspend
    made["status"] = {"conditions": [seen.condition("RayClusterSuspended", halted, seconds=at_s)]}
    kube.store(RAY_CLUSTERS, made)


async def reaped(backend: GkeBackend, hours: float) -> Reaped:
    """What a reaper would do so long after the lease was made."""
    by = datetime.now(UTC) + timedelta(seconds=5)
    return await reap(backend, nobody_knows, seen.at(hours * HOUR), by=by, say=print, dry_run=True)


async def due(backend: GkeBackend, hours: float) -> bool:
    done = await reaped(backend, hours)
    assert len(done.released) + len(done.kept) == 1
    return bool(done.released)


async def test_one_that_waits_in_the_queue_is_not_taken_for_it(kube: FakeKube, backend: GkeBackend, lease: SliceLease):
    assert not await due(backend, 3)

    turned(kube, lease, suspend=True, halted=True, at_s=2)
    assert not await due(backend, 3)


async def test_one_whose_task_died_in_the_queue_is_taken_when_the_queues_time_is_over_too(
    kube: FakeKube, backend: GkeBackend, lease: SliceLease
):
    """F09: nobody else gives it back once its run is forgotten."""
    turned(kube, lease, suspend=True, halted=True, at_s=2)

    assert not await due(backend, 6)
    assert await due(backend, 6.1)


async def test_the_time_begins_when_kueue_grants_the_quota(kube: FakeKube, backend: GkeBackend, lease: SliceLease):
    turned(kube, lease, suspend=False, halted=False, at_s=3 * HOUR)

    assert not await due(backend, 4.9)
    assert await due(backend, 5)
    (found,) = await backend.list_leases()
    assert (found.granted_at, found.expires_at) == (seen.at(3 * HOUR), seen.at(5 * HOUR))


async def test_between_kueues_word_and_kuberays_it_is_not_taken(kube: FakeKube, backend: GkeBackend, lease: SliceLease):
    """Both write on the RayCluster, one after the other."""
    turned(kube, lease, suspend=False, halted=True, at_s=2)

    assert not await due(backend, 3.5)


async def test_one_that_kueue_took_back_has_all_its_time_again(kube: FakeKube, backend: GkeBackend, lease: SliceLease):
    turned(kube, lease, suspend=True, halted=True, at_s=10 * HOUR)
    assert not await due(backend, 15.9)

    turned(kube, lease, suspend=False, halted=False, at_s=15 * HOUR)
    assert not await due(backend, 16.9)
    assert await due(backend, 17)


async def test_a_retry_that_adopts_it_and_a_release_that_finds_it_know_the_same(
    kube: FakeKube, time: Time, backend: GkeBackend, lease: SliceLease, plan: Plan
):
    turned(kube, lease, suspend=False, halted=False, at_s=3 * HOUR)
    time.passes(4 * HOUR)

    assert (await backend.acquire(plan, ME)).expires_at == seen.at(5 * HOUR)
    found = await backend.find(ME)
    assert found is not None
    assert found.expires_at == seen.at(5 * HOUR)


async def test_without_a_queue_the_time_begins_when_it_is_made(kube: FakeKube, make: Callable[..., GkeBackend]):
    backend = make()
    plan = await backend.plan(seen.SPEC, [OnDemand()], lease_for=timedelta(hours=2))
    lease = await backend.acquire(plan, ME)
    turned(kube, lease, suspend=False, halted=False, at_s=2)

    assert await due(backend, 2)
