"""A release while another task climbs or repairs: what that one asks for afterwards goes as well, and it ends."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from raytpu_ops.backends.tpu_vm import TpuVmBackend
from raytpu_ops.backends.tpu_vm.settling import SETTLES_WITHIN
from raytpu_ops.tpu.capacity import OnDemand, Spot
from raytpu_ops.tpu.errors import Preempted
from raytpu_ops.tpu.lease import SliceLease
from tests.google_fake import GoogleFake
from tests.google_fake.fake import PROJECT, ZONE
from tests.google_fake.together import Together
from tests.unit.tpu_vm.conftest import ME, ZONES, Make, nothing_left, planned
from tests.unit.tpu_vm.test_together import taken_back

LADDER = [Spot(), OnDemand()]
#: In every state of a climb that is refused twice: asked for, refused, going, gone, asked for elsewhere, granted.
#: Every fourth second, in turns, for the two ways in which a climb begins.
MOMENTS = {"acquire": range(0, 260, 8), "repair": range(4, 260, 8)}


async def released(
    backend: TpuVmBackend, lease: SliceLease | None, sleep: Callable[[float], Awaitable[None]]
) -> list[str]:
    """What was left on the way, for a release task; or for a person, who has no lease and looks until there is one."""
    while lease is None:
        lease = await backend.find(ME)
        await sleep(0 if lease else 3)
    lines = []
    while left := (await backend.release(lease)).left:
        lines += left
        await sleep(3)
    return lines


@pytest.mark.parametrize("how", MOMENTS)
async def test_a_release_at_any_moment_of_a_climb_leaves_nothing_that_comes_back(
    google: GoogleFake, make: Make, how: str
):
    """F39."""
    bad = []
    for moment in MOMENTS[how]:
        together, lease = Together(google), None
        if how == "repair":
            lease = await taken_back(google, make, ZONES)
        google.faults.stockout(times=2)
        climbing, releasing = make(sleep=together.sleep), make(sleep=together.sleep)
        climb = functools.partial(climbing.acquire, planned(LADDER), ME)
        if lease is not None:
            climb = functools.partial(climbing.repair, lease)
        end, lines = await together.run(
            (0, climb), (moment, functools.partial(released, releasing, lease, together.sleep))
        )
        assert isinstance(lines, list), (moment, lines)
        # What was granted before the release came is an end, too.
        if not isinstance(end, Preempted | SliceLease) or not nothing_left(google):
            bad.append((moment, end))
        for one in await make().list_leases():
            await released(make(), one, google.clock.sleep)
        google.faults.clear()
    assert not bad


async def test_a_lease_that_is_whole_is_released_without_a_wait(google: GoogleFake, make: Make):
    lease = await make().acquire(planned(LADDER), ME)
    lines = await released(make(), lease, google.clock.sleep)
    assert any("is being deleted" in line for line in lines)
    assert not any("asking for it anew" in line for line in lines)


async def test_a_lease_that_google_took_back_is_looked_at_for_a_while_after_it_is_gone(google: GoogleFake, make: Make):
    """F12: a task that repairs may be at work; what is left says until when."""
    lease = await make().acquire(planned(LADDER), ME)
    google.tpu.preempt(f"projects/{PROJECT}/locations/{ZONE}/nodes/{lease.created['slice'][0]}")
    backend = make()
    assert (await backend.release(lease)).removed
    google.advance(300)
    [line] = (await backend.release(lease)).left
    until = google.clock.now() + SETTLES_WITHIN
    assert nothing_left(google)
    assert f"another task may be asking for it anew; looked at until {until:%H:%M:%S} UTC" in line
    google.advance(SETTLES_WITHIN.total_seconds() - 1)
    assert (await backend.release(lease)).left == [line]
    google.advance(2)
    assert (await backend.release(lease)).left == []


async def test_a_release_that_finds_nothing_looks_again(google: GoogleFake, make: Make):
    """F39: between what a climb deleted and what it asks for next, nothing stands."""
    lease = await make().acquire(planned(LADDER), ME)
    await released(make(), lease, google.clock.sleep)
    begun = google.clock.now()
    assert all("asking for it anew" in line for line in await released(make(), lease, google.clock.sleep))
    assert SETTLES_WITHIN <= google.clock.now() - begun < SETTLES_WITHIN + timedelta(seconds=10)
