"""The process that works on a lease with node pools ends between any two calls: the next one finishes its work."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import pytest

from raytpu_ops.tpu.capacity import OnDemand, Spot
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake.gate import Call
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import NAMESPACE
from tests.unit.gke.pool_killer import Killer
from tests.unit.gke.pool_world import POOLS, World

#: With a policy of its own, so that every kind of thing is made.
SPEC = SliceSpec.of("7x", "2x2x2", num_slices=2)


@pytest.fixture
def quick(world: World) -> World:
    """Everything is there, or gone, at the next look: fewer looks, and every point of each kind is met."""
    container = world.google.container
    container.at_once = 5
    container.delays.create = container.delays.fail = container.delays.delete = 4
    world.google.compute.delay = 4
    return world


def anew(world: World) -> None:
    """As if nothing had ever been, but for a rung that has no chips."""
    world.empty()
    world.google.faults.stockout(name=POOLS[0])


async def acquired(world: World) -> SliceLease:
    backend = world.backend()
    lease = await backend.acquire(await world.plan(backend, [Spot(), OnDemand()], SPEC), ME)
    world.settle()
    return lease


async def reaped(world: World) -> None:
    """What the reaper does: it knows of no lease but those that it finds."""
    for _ in range(200):
        backend = world.backend()
        found = await backend.list_leases()
        if not found:
            return
        for lease in found:
            await backend.release(lease)
        await world.sleep(10)
    raise AssertionError(f"still there: {world.left}")


async def points(killer: Killer, act: Callable[[], Awaitable[object]]) -> range:
    """Behind each call of something that is done once, undisturbed; what is there is the same before the next one."""
    killer.rests()
    await act()
    return range(killer.calls)


async def test_an_acquire_that_is_cut_at_any_point_is_finished_by_the_next(quick: World, killer: Killer):
    """F39: through a rung that fails to one that grants."""
    backend = quick.backend()
    plan = await quick.plan(backend, [Spot(), OnDemand()], SPEC)
    anew(quick)
    every = await points(killer, lambda: backend.acquire(plan, ME))
    assert len(every) > 30

    for number in every:
        anew(quick)
        killer.at(number, answered=True)
        with pytest.raises(asyncio.CancelledError):
            await quick.backend().acquire(plan, ME)
        killer.rests()

        lease = await quick.backend().acquire(plan, ME)

        assert (lease.capacity["kind"], len(lease.attempts)) == ("on_demand", 1), number
        assert {name: pool.status.name for name, pool in quick.pools.items()} == dict.fromkeys(POOLS, "RUNNING")
        assert {kind: len(names) for kind, names in quick.left.items() if kind in ("policies", "rayclusters")} == {
            "policies": 1,
            "rayclusters": 1,
        }
        assert await quick.backend().find(ME) == lease


async def test_an_acquire_that_is_cut_at_any_point_leaves_nothing_that_the_reaper_does_not_find(
    quick: World, killer: Killer
):
    """F09."""
    anew(quick)
    plan = await quick.plan(quick.backend(), [Spot(), OnDemand()], SPEC)
    for number in await points(killer, lambda: quick.backend().acquire(plan, ME)):
        anew(quick)
        killer.at(number, answered=True)
        with pytest.raises(asyncio.CancelledError):
            await quick.backend().acquire(plan, ME)
        killer.rests()

        await reaped(quick)

        assert quick.left == {}, number


@pytest.mark.parametrize("by", ["the reaper", "the next lease"])
async def test_a_release_that_is_cut_at_any_point_is_finished(quick: World, killer: Killer, by: str):
    """F09: nobody remembers the lease, and it may be that nothing but its workload policy is left at Google."""
    anew(quick)
    lease = await acquired(quick)
    every = await points(killer, lambda: quick.released(lease))
    assert len(every) > 20

    for number in every:
        killer.rests()
        anew(quick)
        lease = await acquired(quick)
        killer.at(number, answered=True)
        with pytest.raises(asyncio.CancelledError):
            await quick.released(lease)
        killer.rests()

        if by == "the next lease":
            again = await acquired(quick)
            assert {name: pool.status.name for name, pool in quick.pools.items()} == dict.fromkeys(POOLS, "RUNNING")
            await quick.released(again)
        await reaped(quick)

        assert quick.left == {}, number


async def test_a_roll_back_that_is_cut_at_any_point_is_finished_by_the_next(quick: World, killer: Killer):
    """By the try that adopts what is left, and fails as the one before."""
    backend = quick.backend()
    plan = await quick.plan(backend, Spot(), SPEC)

    async def fails() -> None:
        try:
            await quick.backend().acquire(plan, ME)
        except Exception:  # noqa: BLE001 - which one, other tests tell
            return
        raise AssertionError("it was granted")

    def nothing() -> None:
        anew(quick)
        quick.google.faults.stockout(name=POOLS[1], times=None)

    nothing()
    every = await points(killer, fails)
    for number in every:
        nothing()
        killer.at(number, answered=True)
        with pytest.raises(asyncio.CancelledError):
            await fails()
        killer.rests()

        await fails()

        assert quick.left == {}, number


#: Acquires, as a trigger of Airflow does.
_ACQUIRER = """
import asyncio, json, sys
from google.oauth2.credentials import Credentials
from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.tpu.lease import Owner

class Access:
    def __init__(self, endpoints, token):
        self.selectors, self.endpoints, self.token = {}, endpoints, token
    async def project(self):
        return "tpu-project"
    async def credentials(self, *, renew=False):
        return Credentials(self.token)

job = json.loads(sys.argv[1])
access = KubeconfigAccess(job["kubeconfig"])
backend = GkeBackend(access, cloud=Access(job["endpoints"], job["token"]), **job["options"])
asyncio.run(backend.acquire(Plan.model_validate(job["plan"]), Owner.model_validate(job["owner"])))
"""


@pytest.mark.parametrize("made", [False, True], ids=["before-it-is-made", "after-it-was-made"])
async def test_a_process_that_is_killed_while_it_makes_a_pool_leaves_what_the_next_one_adopts(quick: World, made: bool):
    """SIGKILL from Google's side, in the middle of the call."""
    backend = quick.backend()
    plan = await quick.plan(backend)
    process: list[asyncio.subprocess.Process] = []

    def kills(_: Call) -> bool:
        os.kill(process[0].pid, signal.SIGKILL)
        return True

    quick.google.faults.inject("CreateNodePool", "UNAVAILABLE", when=kills, after=made)
    job = {
        "kubeconfig": quick.access.selectors["kubeconfig"],
        "endpoints": quick.google.endpoints,
        "token": quick.google.tokens.new("airflow"),
        "options": {"namespace": NAMESPACE, "node_pools": backend.settings.node_pools.to_text()},
        "plan": plan.model_dump(mode="json"),
        "owner": ME.model_dump(mode="json"),
    }
    process.append(await asyncio.create_subprocess_exec(sys.executable, "-c", _ACQUIRER, json.dumps(job)))
    assert await process[0].wait() == -signal.SIGKILL
    assert len(quick.google.container.made) == int(made)

    await quick.backend().acquire(plan, ME)

    assert sorted(quick.pools) == POOLS
    assert len(quick.google.container.made) == len(POOLS)
