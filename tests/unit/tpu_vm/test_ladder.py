"""Up the ladder: each rung in each zone, one after the other, each for its own time."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from raytpu_ops.backends.tpu_vm import TpuVmBackend
from raytpu_ops.tpu.capacity import OnDemand, Queued, Reservation, Spot
from raytpu_ops.tpu.errors import CapacityUnavailable, DeadlineExceeded, Misconfigured
from tests.google_fake import GoogleFake
from tests.google_fake.fake import ZONE
from tests.google_fake.gate import Call
from tests.google_fake.refusals import Code, Refusal
from tests.unit.tpu_vm.conftest import ME, NAME, OTHER, Make, full, nothing_left, planned, state, until


async def test_each_rung_is_tried_in_each_zone_and_all_is_on_record(google: GoogleFake, backend: TpuVmBackend):
    """F01, F06."""
    google.faults.stockout(times=3)
    said: list[str] = []
    lease = await backend.acquire(planned([Reservation("team-a"), Spot()]), ME, say=said.append)

    assert google.tpu.made == [full(), full(OTHER), full(), full(OTHER)]
    assert list(google.queued_resources()) == [full(OTHER)]
    assert lease.capacity["kind"] == "spot"
    assert lease.created["queued resource"] == [f"{OTHER}/{NAME}"]
    assert [line.partition(": ")[0] for line in lease.attempts] == [
        f"reservation team-a in {ZONE}",
        f"reservation team-a in {OTHER}",
        f"spot in {ZONE}",
    ]
    assert all("no more capacity" in line for line in lease.attempts)
    assert sum("failed: " in line for line in said) == 3


async def test_the_end_of_the_ladder_names_every_try_and_leaves_nothing(google: GoogleFake, backend: TpuVmBackend):
    google.faults.stockout(times=None)
    with pytest.raises(CapacityUnavailable, match="4 of 4 tries failed: .*spot in us.*on_demand in europe"):
        await backend.acquire(planned([Spot(), OnDemand()]), ME)
    assert nothing_left(google)


@pytest.mark.parametrize("scope", ["region", "zone", "reservation"])
async def test_used_up_quota_is_capacity(google: GoogleFake, backend: TpuVmBackend, scope: str):
    google.faults.quota(scope, times=1)
    lease = await backend.acquire(planned(), ME)
    assert google.tpu.made == [full(), full(OTHER)]
    assert len(lease.attempts) == 1


async def test_a_zone_without_the_accelerator_is_passed_over(google: GoogleFake, backend: TpuVmBackend):
    # skypilot-org/skypilot#3840
    words = f"the accelerator v4-16 was not found in zone {ZONE}"
    google.faults.inject("CreateQueuedResource", Refusal(Code.INVALID_ARGUMENT, words), 1)
    lease = await backend.acquire(planned([Reservation("team-a"), Spot()]), ME)
    assert (lease.capacity["kind"], lease.created["queued resource"]) == ("reservation", [f"{OTHER}/{NAME}"])
    assert [line.partition(": ")[0] for line in lease.attempts] == [f"reservation team-a in {ZONE}"]


async def test_where_no_zone_has_the_accelerator_trying_later_does_not_help(google: GoogleFake, backend: TpuVmBackend):
    words = "the accelerator v4-16 was not found in zone"
    google.faults.inject("CreateQueuedResource", Refusal(Code.INVALID_ARGUMENT, words), None)
    with pytest.raises(Misconfigured, match=r"no zone that is named has what is asked for, 2 of 2 .*Name other zones"):
        await backend.acquire(planned([Spot()]), ME)
    assert nothing_left(google)


async def test_a_failed_one_is_deleted_at_once(google: GoogleFake, backend: TpuVmBackend):
    """F11: it bills quota for as long as it is there."""
    google.faults.stockout(times=1)
    await backend.acquire(planned(), ME)
    failed = next(call.at for call in google.asked("DeleteQueuedResource"))
    # accept, wait, queue, and one look
    assert failed - google.asked("CreateQueuedResource")[0].at <= timedelta(seconds=40 + 10 + 1)
    assert google.asked("DeleteQueuedResource")[0].request.force


async def test_the_next_step_begins_when_the_last_one_is_gone(google: GoogleFake, backend: TpuVmBackend):
    google.faults.stockout(times=1)
    await backend.acquire(planned(), ME)
    (deleted,) = google.asked("DeleteQueuedResource")
    first, second = google.asked("CreateQueuedResource")
    assert second.at - deleted.at >= timedelta(seconds=google.tpu.delays.delete)
    assert first.resource == full()


async def test_a_permanent_refusal_ends_the_climb(google: GoogleFake, backend: TpuVmBackend):
    google.faults.inject(
        "CreateQueuedResource", Refusal(Code.INVALID_ARGUMENT, "Runtime version is not supported."), None
    )
    with pytest.raises(Misconfigured, match="Runtime version is not supported"):
        await backend.acquire(planned([Spot(), OnDemand()]), ME)
    assert len(google.asked("CreateQueuedResource")) == 1
    assert nothing_left(google)


# Requests that are taken and come to nothing

NO_QUOTA = Refusal(
    Code.RESOURCE_EXHAUSTED,
    "Quota limit 'TPUV5sLitepodServingPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 4 in zone us-central2-b.",
)
NO_WORDS = Refusal(Code.RESOURCE_EXHAUSTED, "")
BAD = Refusal(Code.INVALID_ARGUMENT, "Cloud TPU received a bad request. Runtime version is not supported.")


@pytest.mark.parametrize("error", [NO_QUOTA, NO_WORDS], ids=["quota", "no words"])
@pytest.mark.parametrize("accept_s", [5, 25], ids=["never seen", "seen before"])
async def test_an_operation_that_ends_in_an_error_is_the_next_steps_turn(
    google: GoogleFake, backend: TpuVmBackend, error: Refusal, accept_s: float
):
    """F06: it is no lease that somebody deleted."""
    google.tpu.delays.accept = accept_s
    google.faults.late(error, times=3)
    before = google.clock.now()
    lease = await backend.acquire(planned([Spot(), OnDemand()]), ME)

    assert google.tpu.made == [full(), full(OTHER), full(), full(OTHER)]
    assert list(google.queued_resources()) == [full(OTHER)]
    assert [line.partition(": ")[0] for line in lease.attempts] == [
        f"spot in {ZONE}",
        f"spot in {OTHER}",
        f"on_demand in {ZONE}",
    ]
    assert all((error.message.rstrip(".") or "no reason given") in line for line in lease.attempts)
    assert google.clock.now() - before < timedelta(minutes=6)


async def test_an_operation_that_ends_in_a_refusal_for_good_ends_the_climb(google: GoogleFake, backend: TpuVmBackend):
    """F06."""
    google.faults.late(BAD, times=None)
    with pytest.raises(Misconfigured, match="Runtime version is not supported"):
        await backend.acquire(planned([Spot(), OnDemand()]), ME)
    assert google.tpu.made == [full()]
    assert nothing_left(google)


async def test_an_operation_that_goes_on_is_waited_for(google: GoogleFake, backend: TpuVmBackend):
    """F06: what is made is not there yet for those who look, and may still come to nothing."""
    google.tpu.delays.accept = 60
    google.faults.late(NO_QUOTA)
    made = google.tpu.made

    def unseen(call: Call) -> bool:
        return len(made) == 1 and call.resource in google.queued_resources()

    google.faults.inject("GetQueuedResource", "NOT_FOUND", None, when=unseen)
    lease = await backend.acquire(planned(Spot()), ME)
    assert made == [full(), full(OTHER)]
    assert [line.partition(": ")[0] for line in lease.attempts] == [f"spot in {ZONE}"]


async def test_a_request_of_a_task_that_died_that_comes_to_nothing_is_the_next_steps_turn(
    google: GoogleFake, make: Make
):
    """F06, F39: its operation is not known to the task that goes on, and nobody deletes what is CREATING."""
    google.tpu.delays.accept = 25
    google.faults.late(NO_QUOTA)
    plan = planned([Spot(), OnDemand()])
    died = asyncio.create_task(make().acquire(plan, ME))
    await until(google.queued_resources)
    died.cancel()
    before = google.clock.now()
    lease = await make().acquire(plan, ME)

    assert google.tpu.made == [full(), full(OTHER)]
    [tried] = lease.attempts
    assert tried.startswith(f"spot in {ZONE}: queued resource")
    assert "came to nothing while it was CREATING" in tried
    assert google.clock.now() - before < timedelta(minutes=4)


# Deadlines


async def test_hours_in_the_queue_do_not_eat_into_the_minutes_of_a_start(google: GoogleFake, backend: TpuVmBackend):
    """F10."""
    google.tpu.delays.queue = 35 * 60
    google.tpu.delays.provision = 8 * 60
    plan = planned(Queued(timedelta(hours=6)), queued=timedelta(minutes=40), provisioning=timedelta(minutes=10))
    lease = await backend.acquire(plan, ME)
    assert lease.attempts == []


async def test_a_queue_that_is_too_long_is_the_next_zones_turn(google: GoogleFake, backend: TpuVmBackend):
    """F10."""
    google.tpu.delays.queue = float("inf")
    plan = planned(Queued(timedelta(hours=9)), queued=timedelta(minutes=30))
    before = google.clock.now()
    with pytest.raises(CapacityUnavailable, match="nothing came free in time|the queued deadline .* has passed"):
        await backend.acquire(plan, ME)
    assert timedelta(hours=1) < google.clock.now() - before < timedelta(hours=1, minutes=10)
    assert nothing_left(google)


async def test_hosts_that_do_not_come_up_end_the_step(google: GoogleFake, backend: TpuVmBackend):
    """F10."""
    google.tpu.delays.provision = float("inf")
    with pytest.raises(CapacityUnavailable, match="the provisioning deadline .* has passed"):
        await backend.acquire(planned(Spot(), provisioning=timedelta(minutes=20)), ME)
    assert nothing_left(google)


async def test_triggerers_that_restart_do_not_put_off_the_end_of_a_step_without_a_node(google: GoogleFake, make: Make):
    """F10, F33: of what is PROVISIONING and has no node yet Google does not say since when."""
    google.tpu.delays.provision = float("inf")
    plan = planned(Spot(within=timedelta(minutes=5)), provisioning=timedelta(minutes=30))
    loop, before = asyncio.get_running_loop(), google.clock.now()
    google.clock.after(90, google.tpu.nodes.clear)
    for _ in range(5):
        task = asyncio.ensure_future(make(zones=[ZONE]).acquire(plan, ME))
        google.clock.after(20 * 60, lambda task=task: loop.call_soon_threadsafe(task.cancel))
        await asyncio.wait([task])
        if not task.cancelled():
            break
    with pytest.raises(CapacityUnavailable, match="the provisioning deadline .* has passed"):
        await task
    assert google.clock.now() - before < timedelta(minutes=5 + 30 + 5)


async def test_a_rung_may_have_a_time_of_its_own(google: GoogleFake, backend: TpuVmBackend):
    google.tpu.delays.queue = 15 * 60
    lease = await backend.acquire(planned([Spot(within=timedelta(minutes=10)), OnDemand()]), ME)
    assert lease.capacity["kind"] == "on_demand"
    assert len(lease.attempts) == 2


@pytest.mark.parametrize("rung", [Spot(), Queued(timedelta(days=9))], ids=lambda rung: rung.kind)
async def test_a_request_whose_task_died_is_not_granted_days_later(
    google: GoogleFake, backend: TpuVmBackend, rung: Spot | Queued
):
    """F09."""
    google.tpu.delays.queue = 5 * 3600
    task = asyncio.create_task(backend.acquire(planned(rung), ME))
    await until(google.queued_resources)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    google.advance(24 * 3600)
    assert state(google) == "FAILED"
    assert google.nodes() == {}


async def test_a_google_that_is_away_at_first_is_waited_for_no_longer_than_the_first_rung_says(
    google: GoogleFake, backend: TpuVmBackend
):
    google.faults.unavailable("*Queued*", None)
    begun = google.clock.now()

    with pytest.raises(DeadlineExceeded, match="provisioning deadline"):
        await backend.acquire(planned(Spot(within=timedelta(minutes=1))), ME)

    assert google.clock.now() - begun < timedelta(minutes=4)


async def test_a_zone_that_offers_other_accelerators_is_passed_over(google: GoogleFake, backend: TpuVmBackend):
    google.tpu.zones = {ZONE: frozenset({"v5p-8"}), OTHER: frozenset({"v4-16"})}
    lease = await backend.acquire(planned([Spot()]), ME)
    assert lease.created["queued resource"] == [f"{OTHER}/{NAME}"]
