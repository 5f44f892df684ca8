"""Waiting for a lease and giving it back."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime, timedelta

import pytest

from raytpu_ops.backends.base import Released
from raytpu_ops.flows.leases import found, give_back, reach, stands, wait_whole
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.errors import CapacityUnavailable, DeadlineExceeded, Preempted, RemoteUnavailable
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.readiness import Readiness
from tests.unit.flows.conftest import BROKEN, LOST, TOO_LATE, WAITING, WHOLE, schedule


def soon(seconds: float = 30) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


async def test_a_whole_lease_is_handed_on_as_it_is(backend, lease):
    assert await wait_whole(backend, lease, schedule=schedule(), say=print) == (lease, WHOLE)


async def test_what_is_missing_is_told_once_for_each_change(backend, lease):
    backend.reports = [WAITING, WAITING, WAITING, WHOLE]
    told: list[str] = []

    await wait_whole(backend, lease, schedule=schedule(), say=told.append, poll_s=0.01)

    assert len([line for line in told if "host 1 is not there" in line]) == 1


async def test_a_broken_slice_is_replaced_and_the_new_lease_handed_on(backend, lease):
    backend.reports = [BROKEN, WAITING, WHOLE]

    handed_on, _ = await wait_whole(backend, lease, schedule=schedule(), say=print, poll_s=0.01)

    assert handed_on.created == {"slice": ["s0-r1"]}


async def test_a_lost_head_ends_the_wait_at_once(backend, lease):
    backend.reports = [LOST]

    with pytest.raises(Preempted, match=f"lease {lease.id}: the Ray head is dead"):
        await wait_whole(backend, lease, schedule=schedule(), say=print)


async def test_the_deadline_names_the_lease_and_what_is_missing(backend, lease):
    backend.reports = [WAITING]

    with pytest.raises(DeadlineExceeded, match=rf"{lease.id}.*labelled.*host 1 is not there"):
        await wait_whole(backend, lease, schedule=schedule(**TOO_LATE), say=print)


async def test_hosts_that_were_taken_back_and_do_not_come_again_are_a_lack_of_capacity(backend, lease):
    """F12: with the retries of that class, not with the one of a start-up that hung."""
    backend.reports = [WAITING.model_copy(update={"taken_back": True})]

    with pytest.raises(CapacityUnavailable, match=rf"{lease.id}.*host 1 is not there.*were taken back"):
        await wait_whole(backend, lease, schedule=schedule(**TOO_LATE), say=print)


async def test_a_lease_that_is_whole_at_its_deadline_is_whole(backend, lease):
    """F33: the state is looked at before a time-out is declared."""
    assert await wait_whole(backend, lease, schedule=schedule(**TOO_LATE), say=print) == (lease, WHOLE)


async def test_hours_in_a_queue_do_not_eat_into_the_time_for_labels(backend, lease):
    """F10: each phase has its own deadline, and it counts from when the phase began."""
    began = datetime.now(UTC)
    queued = WAITING.model_copy(update={"phase": Phase.QUEUED, "since": began - timedelta(hours=3)})
    labelled = WAITING.model_copy(update={"since": began})
    backend.reports = [queued, queued, labelled, labelled, WHOLE]
    told: list[str] = []

    await wait_whole(
        backend, lease, schedule=schedule(ago=3 * 3600, queued=4 * 3600, labelled=60), say=told.append, poll_s=0.01
    )

    assert [line.partition(":")[0] for line in told] == ["queued", "labelled"]


async def test_a_phase_that_is_older_than_the_waiting_counts_from_the_waiting(backend, lease):
    """A retry has the whole of each deadline before it."""
    backend.reports = [WAITING.model_copy(update={"since": datetime.now(UTC) - timedelta(days=1)}), WHOLE]

    assert await wait_whole(backend, lease, schedule=schedule(labelled=60), say=print, poll_s=0.01) == (lease, WHOLE)


async def test_a_queue_that_takes_too_long_is_named(backend, lease):
    backend.reports = [WAITING.model_copy(update={"phase": Phase.QUEUED})]

    with pytest.raises(DeadlineExceeded, match=r"the queued deadline .* host 1 is not there"):
        await wait_whole(backend, lease, schedule=schedule(ago=61, queued=60), say=print)


@pytest.mark.parametrize(
    "phases",
    [
        [Phase.LABELLED],
        [Phase.PROVISIONING],
        [Phase.PROVISIONING, Phase.LABELLED],
        [Phase.QUEUED, Phase.PROVISIONING],
        [Phase.QUEUED, Phase.PROVISIONING, Phase.LABELLED],
    ],
)
async def test_hosts_that_are_made_anew_for_ever_end_the_wait(backend, lease, phases):
    """KubeRay replaces a pod that crashes, and the new one begins its phase anew."""
    looks = itertools.cycle(phases)

    async def observe(_: SliceLease) -> Readiness:
        return WAITING.model_copy(update={"phase": next(looks), "since": datetime.now(UTC)})

    backend.observe = observe

    async with asyncio.timeout(30):
        with pytest.raises(DeadlineExceeded, match=r"deadline .* host 1 is not there"):
            await wait_whole(
                backend, lease, schedule=schedule(provisioning=0.1, labelled=0.1), say=lambda _: None, poll_s=0.01
            )


async def test_a_ray_whose_head_is_made_anew_for_ever_ends_the_call(backend, lease):
    async def observe(_: SliceLease) -> Readiness:
        return WAITING.model_copy(update={"since": datetime.now(UTC)})

    async def silent() -> None:
        raise RemoteUnavailable("no answer")

    backend.observe = observe

    async with asyncio.timeout(30):
        with pytest.raises(DeadlineExceeded, match="labelled deadline .* no answer"):
            await reach(backend, lease, silent, schedule=schedule(provisioning=0.1, labelled=0.1), say=lambda _: None)


async def test_hosts_that_are_made_anew_once_have_their_time(backend, lease):
    """Those of a spot slice that went while they came up."""
    now = datetime.now(UTC)
    backend.reports = [
        WAITING.model_copy(update={"since": now - timedelta(seconds=59)}),
        WAITING.model_copy(update={"phase": Phase.PROVISIONING, "since": now}),
        WAITING.model_copy(update={"since": now + timedelta(seconds=60)}),
        WHOLE,
    ]

    waited = wait_whole(backend, lease, schedule=schedule(ago=59, provisioning=60, labelled=60), say=print, poll_s=0.01)

    assert await waited == (lease, WHOLE)


@pytest.mark.parametrize("phase", [Phase.PROVISIONING, Phase.LABELLED])
async def test_a_slice_that_was_just_replaced_has_time_of_its_own(backend, lease, phase):
    """Its old pods are ending and its new ones not made yet: all that is known is when the lease was granted."""
    granted = datetime.now(UTC) - timedelta(hours=1)
    coming = WAITING.model_copy(update={"phase": phase, "since": granted})
    backend.reports = [BROKEN, coming, coming, WHOLE]

    _, report = await wait_whole(
        backend, lease, schedule=schedule(ago=3600, provisioning=60, labelled=60), say=print, poll_s=0.01
    )

    assert report == WHOLE


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.PROVISIONING])
async def test_what_ran_on_slices_that_are_queued_again_does_not_stand(backend, lease, phase):
    backend.reports = [WAITING.model_copy(update={"phase": phase})]

    assert not await stands(backend, lease)


async def test_release_goes_on_until_nothing_is_left(backend, lease):
    backend.releases = [
        Released(removed=["host 0"], left=["host 1: still ending"]),
        Released(removed=["host 1"]),
    ]

    released = await give_back(backend, lease, by=soon(), say=print, poll_s=0.01)

    assert released == Released(removed=["host 0", "host 1"])


async def test_a_release_that_leaves_something_is_an_error_that_names_it(backend, lease):
    backend.releases = [Released(left=["node pool p1: in use"])]

    with pytest.raises(DeadlineExceeded, match="billing: node pool p1: in use"):
        await give_back(backend, lease, by=soon(-1), say=print)


async def test_what_the_far_side_does_not_let_go_of_yet_has_more_time(backend, lease):
    """Also where the deadline has passed before: a triggerer restarted meanwhile."""
    held = Released(left=["queued resource a is PROVISIONING"], held=timedelta(hours=2))
    backend.releases = [held, Released(left=["queued resource a is being deleted"]), Released()]
    assert await give_back(backend, lease, by=soon(-1), say=print, poll_s=0.01) == Released()

    backend.releases = [held]
    with pytest.raises(DeadlineExceeded, match="billing: queued resource a is PROVISIONING"):
        await give_back(backend, lease, by=soon(-7201), say=print)


async def test_time_that_was_given_once_is_not_taken_away_when_less_is_needed(backend, lease):
    """The far side lets go late, and what is left then takes its time."""
    going = Released(left=["node pool a is being deleted"], held=timedelta(minutes=4))
    held = Released(left=["node pool a is PROVISIONING"], held=timedelta(hours=1))
    backend.releases = [held, going, Released()]
    assert await give_back(backend, lease, by=soon(-1800), say=print, poll_s=0.01) == Released()


async def test_a_backend_that_does_not_say_whether_there_is_a_lease_is_waited_for_until_the_deadline(backend, lease):
    """However long it would try by itself."""
    backend.find = lambda owner: asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match=r"releasing deadline .* backend 'memory' did not say"):
        await found(backend, lease.owner, by=datetime.now(UTC) + timedelta(milliseconds=20))
