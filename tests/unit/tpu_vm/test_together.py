"""Several tasks of one owner at once: they climb one ladder together, and a release by hand ends all of them.

Two tasks that repair after a preemption, a process that should be dead and its retry, one trigger in two triggerers.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from raytpu_ops.backends.tpu_vm.granting import FOLLOWED_WITHIN
from raytpu_ops.tpu.capacity import OnDemand, Queued, Spot
from raytpu_ops.tpu.errors import CapacityUnavailable, Misconfigured, Preempted
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.readiness import Readiness
from tests.google_fake import GoogleFake
from tests.google_fake.fake import PROJECT, ZONE
from tests.google_fake.gate import Call
from tests.google_fake.together import Together
from tests.unit.tpu_vm.conftest import ME, NAME, OTHER, ZONES, Make, full, nothing_left, planned, state

#: Seconds by which the second one is late: in step, a look behind, while the first step goes, and when it is gone.
LATE = (0, 3, 42, 55, 88, 95, 97, 104, 150)
LADDER = [Spot(), OnDemand()]


@pytest.fixture
def together(google: GoogleFake) -> Together:
    return Together(google)


async def taken_back(google: GoogleFake, make: Make, zones: list[str]) -> SliceLease:
    """A lease that was granted, and whose slices Google took."""
    lease = await make(zones=zones).acquire(planned(LADDER), ME)
    google.tpu.preempt(f"projects/{PROJECT}/locations/{zones[0]}/nodes/{lease.created['slice'][0]}")
    google.advance(120)
    return lease


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("zones", [ZONES, [ZONE]], ids=["two zones", "one zone"])
async def test_two_that_climb_at_once_end_on_the_same_slices(
    google: GoogleFake, make: Make, together: Together, late: float, zones: list[str]
):
    """F34, F39: what fails under one of them is no end for the other, and neither takes what the other asked for."""
    refused = len(zones) * 2 - 1
    google.faults.stockout(times=refused)
    backends = [make(zones=zones, sleep=together.sleep) for _ in range(2)]

    one, other = await together.run(
        (0, lambda: backends[0].acquire(planned(LADDER), ME)),
        (late, lambda: backends[1].acquire(planned(LADDER), ME)),
    )

    assert isinstance(one, SliceLease), one
    assert other == one
    assert len(google.tpu.made) == refused + 1
    assert len(google.queued_resources()) == 1


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("zones", [ZONES, [ZONE]], ids=["two zones", "one zone"])
async def test_two_that_repair_at_once_end_on_the_same_slices(
    google: GoogleFake, make: Make, together: Together, late: float, zones: list[str]
):
    """F12: also where the second one begins while nothing stands, or what stands was just refused."""
    lease = await taken_back(google, make, zones)
    google.faults.stockout(times=1)
    backends = [make(zones=zones, sleep=together.sleep) for _ in range(2)]

    one, other = await together.run(
        (0, lambda: backends[0].repair(lease)),
        (late, lambda: backends[1].repair(lease)),
    )

    assert isinstance(one, SliceLease), one
    assert other == one
    assert one.created["slice"] != lease.created["slice"]
    assert len(google.queued_resources()) == 1


@pytest.mark.parametrize("late", LATE)
async def test_a_task_that_looks_while_another_one_repairs_is_told_to_repair_too(
    google: GoogleFake, make: Make, together: Together, late: float
):
    """F12: what it ran on is lost, and not the lease: with a retry it goes on as the other one does."""
    lease = await taken_back(google, make, ZONES)
    google.faults.stockout(times=1)
    backend, looking = make(sleep=together.sleep), make(sleep=together.sleep)
    _, report = await together.run((0, lambda: backend.repair(lease)), (late, lambda: looking.observe(lease)))
    assert isinstance(report, Readiness), report
    assert report.lost
    assert (report.fatal, report.broken) == (None, lease.created["slice"])


async def test_a_repair_goes_on_where_another_one_was_killed(google: GoogleFake, make: Make):
    """F12, F39: what stands was refused, and whoever asked for it is dead; it is not the end of the lease."""
    lease = await taken_back(google, make, ZONES)
    google.faults.stockout(times=1)
    loop = asyncio.get_running_loop()
    killed = asyncio.ensure_future(make().repair(lease))

    def dies(call: Call) -> bool:
        if state(google) != "FAILED":
            return False
        loop.call_soon_threadsafe(killed.cancel)
        return True

    fault = google.faults.inject("DeleteQueuedResource", "UNAVAILABLE", None, when=dies)
    await asyncio.wait([killed])
    google.faults.answers.remove(fault)
    assert killed.cancelled()
    assert state(google) == "FAILED"

    anew = await make().repair(lease)

    assert anew.created["queued resource"] == [f"{OTHER}/{NAME}"]
    assert len(anew.attempts) == 1
    assert len(google.queued_resources()) == 1


@pytest.mark.parametrize("late", LATE)
async def test_two_that_find_no_capacity_both_end(google: GoogleFake, make: Make, together: Together, late: float):
    google.faults.stockout(times=None)
    backends = [make(sleep=together.sleep) for _ in range(2)]
    ends = await together.run(
        (0, lambda: backends[0].acquire(planned(LADDER), ME)),
        (late, lambda: backends[1].acquire(planned(LADDER), ME)),
    )
    assert {type(end) for end in ends} <= {CapacityUnavailable, Preempted}
    assert CapacityUnavailable in {type(end) for end in ends}
    assert nothing_left(google)


@pytest.mark.parametrize("goes_in_s", [0, 45])
@pytest.mark.parametrize("released_at", [20, 64, 73])
async def test_a_release_by_hand_ends_all_of_them(
    google: GoogleFake, make: Make, together: Together, released_at: float, goes_in_s: float
):
    """Nothing is asked for again, and nobody waits for long."""
    google.tpu.delays.queue, google.tpu.delays.delete = float("inf"), goes_in_s
    plan = planned(Queued(timedelta(days=30)), queued=timedelta(days=20))
    backends = [make(sleep=together.sleep) for _ in range(2)]
    begun = google.clock.now()

    async def release() -> None:
        lease = await make().find(ME)
        assert lease is not None
        await make().release(lease)

    one, other, released = await together.run(
        (0, lambda: backends[0].acquire(plan, ME)),
        (3, lambda: backends[1].acquire(plan, ME)),
        (released_at, release),
    )

    assert released is None
    for end in (one, other):
        assert isinstance(end, Preempted)
        assert "deleted by somebody else" in str(end)
    assert google.clock.now() - begun < timedelta(seconds=released_at + goes_in_s + 30) + FOLLOWED_WITHIN
    assert google.tpu.made == [full()]
    assert nothing_left(google)


async def test_one_that_should_be_dead_leaves_alone_what_came_after_it(
    google: GoogleFake, make: Make, together: Together
):
    """F39: its lease was released, and the task was cleared with another ladder."""
    google.tpu.delays.queue = float("inf")
    old, new = make(sleep=together.sleep), make(sleep=together.sleep)

    async def anew() -> SliceLease:
        lease = await new.find(ME)
        assert lease is not None
        await new.release(lease)
        google.tpu.delays.queue = 30
        return await new.acquire(planned(Spot()), ME)

    dead, lease = await together.run(
        (0, lambda: old.acquire(planned(Queued(timedelta(days=30)), queued=timedelta(days=20)), ME)),
        (60, anew),
    )

    assert isinstance(dead, Misconfigured)
    assert isinstance(lease, SliceLease), lease
    assert await make().find(ME) == lease


@pytest.mark.parametrize("denied", ["GetQueuedResource", "GetNode"])
async def test_one_that_is_refused_just_after_another_was_granted_the_slices_leaves_them(
    google: GoogleFake, make: Make, denied: str
):
    """F34: two triggerers have one trigger; a job of the other one's task may run there already."""
    granted: list[SliceLease] = []

    async def sleep(seconds: float) -> None:
        await google.clock.sleep(seconds)
        if not granted and google.queued_resources() and state(google) == "ACTIVE":
            granted.append(await make().acquire(planned(Spot()), ME))
            google.faults.inject(denied, "PERMISSION_DENIED", 1)

    said: list[str] = []
    lease = await make(sleep=sleep).acquire(planned(Spot()), ME, say=said.append)

    assert [lease] == granted
    assert "this one failed" in said[-1]
    assert google.asked("DeleteQueuedResource") == google.asked("DeleteNode") == []
    assert state(google) == "ACTIVE"
