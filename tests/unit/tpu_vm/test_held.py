"""What Google deletes only when it has come or gone (PROVISIONING, SUSPENDING), by force too: told until it goes.

Chips that come after the ladder was given up would bill until the reaper's round.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from raytpu_ops.backends.tpu_vm import giving_back
from raytpu_ops.backends.tpu_vm.giving_back import HELD_WITHIN
from raytpu_ops.tpu.capacity import OnDemand, Spot
from raytpu_ops.tpu.errors import DeadlineExceeded, Misconfigured
from tests.google_fake import GoogleFake, refusals
from tests.google_fake.fake import PROJECT, ZONE
from tests.google_fake.tpu_queue import Held
from tests.unit.tpu_vm.conftest import ME, Make, nothing_left, planned, state, until

#: Google refuses the request, or takes it and refuses it in its operation; and gives up what it makes, or goes on.
WAYS = {
    f"{'operation' if by_operation else 'call'}, {'gives up' if gives_up else 'goes on'}": Held(by_operation, gives_up)
    for by_operation in (False, True)
    for gives_up in (False, True)
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def held(google: GoogleFake, request: pytest.FixtureRequest) -> Held:
    google.tpu.held = request.param
    return google.tpu.held


async def test_a_step_that_is_given_up_while_hosts_are_made_is_the_next_steps_turn(
    google: GoogleFake, make: Make, held: Held
):
    """F10, F11."""
    backend = make(zones=[ZONE])
    google.tpu.delays.provision = 40 * 60
    google.clock.after(10 * 60, lambda: setattr(google.tpu.delays, "provision", 60))
    said: list[str] = []

    lease = await backend.acquire(
        planned([Spot(), OnDemand()], provisioning=timedelta(minutes=20)), ME, say=said.append
    )

    assert lease.capacity["kind"] == "on_demand"
    assert len(lease.attempts) == 1
    assert len(google.queued_resources()) == 1
    if not held.by_operation:
        assert any("is PROVISIONING, in which Google deletes nothing" in line for line in said)


async def test_what_google_takes_away_still_is_asked_for_anew_when_it_is_gone(
    google: GoogleFake, make: Make, held: Held
):
    """F12."""
    google.tpu.delays.suspend = 20 * 60
    lease = await make().acquire(planned(Spot()), ME)
    google.tpu.preempt(f"projects/{PROJECT}/locations/{ZONE}/nodes/{lease.created['slice'][0]}")
    assert state(google) == "SUSPENDING"

    anew = await make().repair(lease)

    assert anew.created["slice"] != lease.created["slice"]
    assert len(google.queued_resources()) == 1


async def test_what_is_rolled_back_while_hosts_are_made_is_waited_for(google: GoogleFake, make: Make, held: Held):
    """F32."""
    google.tpu.delays.provision = 40 * 60
    google.faults.inject("GetNode", "INVALID_ARGUMENT", 1)
    with pytest.raises(Misconfigured) as caught:
        await make().acquire(planned(Spot()), ME)
    assert "may be left" not in str(caught.value)
    assert nothing_left(google)


async def test_a_release_while_hosts_are_made_has_the_time_that_takes(google: GoogleFake, make: Make, held: Held):
    """F36."""
    google.tpu.delays.provision = 40 * 60
    asking = make()
    task = asyncio.create_task(asking.acquire(planned(Spot()), ME))
    await until(google.nodes)
    task.cancel()
    backend = make()
    lease = await backend.find(ME)
    assert lease is not None
    released = await backend.release(lease)
    assert released.left
    assert released.held == HELD_WITHIN
    for _ in range(100):
        if not (released := await backend.release(lease)).left:
            break
        google.advance(60)
    assert released.left == []
    assert released.held == timedelta(0)
    assert nothing_left(google)


async def test_what_somebody_else_told_to_go_in_the_same_moment_is_not_held(google: GoogleFake, make: Make):
    """F36: it was ACTIVE when it was looked at; a release has no two hours more for it."""
    lease = await make().acquire(planned(Spot()), ME)
    refused = refusals.not_in_state("DeleteQueuedResource", "DELETING", ["ACTIVE", "FAILED"])
    google.faults.inject("DeleteQueuedResource", refused, after=True)

    released = await make().release(lease)

    assert state(google) == "DELETING"
    assert released.held == timedelta(0)
    assert not any("in which Google deletes nothing" in line for line in released.left)


async def test_what_google_holds_for_ever_ends_the_climb_and_is_named(
    google: GoogleFake, make: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(giving_back, "HELD_WITHIN", timedelta(minutes=30))
    google.tpu.held = Held(gives_up=False)
    google.tpu.delays.provision = float("inf")
    before = google.clock.now()
    with pytest.raises(
        DeadlineExceeded, match=r"releasing deadline .* is PROVISIONING, in which Google deletes nothing"
    ):
        await make().acquire(planned(Spot()), ME)
    # Queued, and held once: what was waited for when the step was given up has no such time more in the roll-back.
    assert google.clock.now() - before < timedelta(minutes=30 + 30 + 15 + 5)


async def test_what_is_let_go_and_never_goes_has_the_usual_time(google: GoogleFake, make: Make):
    google.tpu.held = Held()
    google.tpu.delays.delete = 10 * 3600
    google.tpu.delays.provision = float("inf")
    before = google.clock.now()
    with pytest.raises(DeadlineExceeded, match="releasing deadline"):
        await make().acquire(planned(Spot(), provisioning=timedelta(minutes=10), releasing=timedelta(minutes=10)), ME)
    assert google.clock.now() - before < timedelta(hours=1)
