"""Google is away while a task repairs: what was seen before is no news, and a lease is not given up for it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from raytpu_ops.backends.tpu_vm.backend import BACK_WITHIN
from raytpu_ops.tpu.capacity import Queued, Spot
from raytpu_ops.tpu.errors import Preempted
from raytpu_ops.tpu.lease import SliceLease
from tests.google_fake import GoogleFake
from tests.google_fake.together import Together
from tests.unit.tpu_vm.conftest import ME, Make, planned


def away(google: GoogleFake, begins_s: float, ends_s: float) -> None:
    """Nobody gets an answer from then until then."""
    start = google.clock.now()

    def now(call: object) -> bool:
        return timedelta(seconds=begins_s) <= google.clock.now() - start < timedelta(seconds=ends_s)

    google.faults.inject("tpu.*", "UNAVAILABLE", None, when=now)


async def gone(google: GoogleFake, make: Make) -> SliceLease:
    """A lease of which nothing stands."""
    lease = await make().acquire(planned(Spot()), ME)
    await make().release(lease)
    google.advance(300)
    return lease


async def test_what_was_gone_before_google_fell_silent_may_be_granted_anew_after_it(google: GoogleFake, make: Make):
    """F07, F12."""
    lease = await gone(google, make)
    together = Together(google)
    away(google, 30, 200)
    repairing, asking = make(sleep=together.sleep), make(sleep=together.sleep)
    one, other = await together.run(
        (0, lambda: repairing.repair(lease)), (205, lambda: asking.acquire(planned(Spot()), ME))
    )
    assert isinstance(other, SliceLease), other
    assert one == other


async def test_who_waits_for_another_request_does_not_count_the_time_in_which_nobody_could_make_one(
    google: GoogleFake, make: Make
):
    """F07: the one that was waited for is deleted, Google falls silent, and a minute after that somebody asks anew."""
    plan, together = planned(Queued(timedelta(hours=9)), queued=timedelta(hours=9)), Together(google)
    google.tpu.delays.queue = float("inf")
    google.clock.after(180, lambda: setattr(google.tpu.delays, "queue", 30))
    away(google, 190, 310)
    waiting, deleting, asking = (make(sleep=together.sleep) for _ in range(3))

    async def delete() -> None:
        lease = await deleting.find(ME)
        assert lease is not None
        await deleting.release(lease)

    one, deleted, other = await together.run(
        (0, lambda: waiting.acquire(plan, ME)), (100, delete), (370, lambda: asking.acquire(plan, ME))
    )
    assert deleted is None
    assert isinstance(other, SliceLease), other
    assert one == other


async def test_a_lease_that_is_gone_is_given_up_when_google_answers_again(google: GoogleFake, make: Make):
    lease = await gone(google, make)
    away(google, 30, 200)
    with pytest.raises(Preempted, match="does not exist any more"):
        await make().repair(lease)


async def test_a_repair_that_gets_no_answer_ends_and_leaves_the_lease_as_it_is(google: GoogleFake, make: Make):
    lease = await gone(google, make)
    away(google, 30, 10**6)
    before = google.clock.now()
    assert await make().repair(lease) == lease
    assert google.clock.now() - before <= BACK_WITHIN + timedelta(minutes=1)
