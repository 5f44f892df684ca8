"""Waiting until a lease is whole, and giving it back until nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import TypeVar

from raytpu_ops.backends.base import Backend, Released, Say
from raytpu_ops.ray.health import GRACE_S
from raytpu_ops.tpu.deadlines import Phase, Schedule
from raytpu_ops.tpu.errors import CapacityUnavailable, DeadlineExceeded, Preempted, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.waits import Done, Pending, Wait, utc_now, wait_async

Answer = TypeVar("Answer")

#: A lease whose slices break this often within one wait stands on ground that does not hold.
MAX_REPAIRS = 3


async def wait_whole(
    backend: Backend, lease: SliceLease, *, schedule: Schedule, say: Say, poll_s: float = 1.0
) -> tuple[SliceLease, Readiness]:
    """Wait until every slice of the lease is whole; a slice that breaks on the way is replaced whole.

    Hours in a queue do not eat into the minutes in which hosts come up and are labelled: each phase
    has its own deadline, which counts from when the far side says that it began. A slice that was
    replaced has all of them before it again; what the far side makes anew by itself, once more.

    :param schedule: the deadlines of the phases ``queued``, ``provisioning`` and ``labelled``.
    :param say: takes a line for the log whenever the report changes.
    :param poll_s: seconds between two looks.
    :return: the lease as it is after replacements, and the report.
    :raises Preempted: Ray's head is gone, or slices broke more than :data:`MAX_REPAIRS` times.
    :raises DeadlineExceeded: naming every host that is missing.
    :raises CapacityUnavailable: the same, where hosts that were there had their machines taken back (F12).
    """
    repairs = 0
    while not (report := await _whole_or_broken(backend, lease, schedule, say=say, poll_s=poll_s)).ready:
        if repairs == MAX_REPAIRS:
            raise Preempted(
                f"lease {lease.id}: slices were replaced {MAX_REPAIRS} times and broke again: {report.describe()}. "
                "Try another zone or kind of capacity."
            )
        say(f"Replacing {', '.join(report.broken)}: {report.describe()}")
        lease = await backend.repair(lease, say=say)
        schedule = schedule.model_copy(update={"begun": utc_now()})
        repairs += 1
    return lease, report


async def _whole_or_broken(
    backend: Backend, lease: SliceLease, schedule: Schedule, *, say: Say, poll_s: float
) -> Readiness:
    taken_back = False

    def judge(report: Readiness) -> Pending | Done[Readiness]:
        nonlocal taken_back
        taken_back = report.taken_back
        if report.fatal:
            raise _lost(lease, report)
        if report.ready or report.broken:
            return Done(report)
        decider.enter(report.phase, bounds.until(report.phase, report.since))
        return Pending(f"{report.phase}: {report.describe()}")

    bounds = _Bounds(schedule)
    decider: Wait[Readiness, Readiness] = Wait(
        f"lease {lease.id}", judge, deadline=schedule.until(Phase.LABELLED), poll_s=poll_s, on_progress=say
    )
    try:
        return await wait_async(lambda: backend.observe(lease), decider)
    except DeadlineExceeded as error:
        if not taken_back:
            raise
        raise CapacityUnavailable(
            f"{error}; hosts that it had were taken back, and none came in their place: a retry waits for some again"
        ) from error


class _Bounds:
    """The deadlines of one wait for pods or hosts that may be made anew again and again.

    Each new one begins its phase anew, so one that crashes and is replaced for ever would put off a
    phase's own deadline for ever. Together the two phases last no longer than a first and a second round,
    without the time in a queue between them.

    :param schedule: the deadlines as they are without that.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._last: datetime | None = None
        self._queued: datetime | None = None

    def until(self, phase: Phase, since: datetime | None) -> datetime:
        """See :meth:`Schedule.until`."""
        asked = self._schedule.until(phase, since)
        if phase is Phase.QUEUED:
            self._queued = self._queued or utc_now()
        if phase not in (Phase.PROVISIONING, Phase.LABELLED):
            return asked
        if self._queued and self._last:
            self._last += utc_now() - self._queued
        self._queued = None
        deadlines = self._schedule.deadlines
        self._last = self._last or asked + 2 * (deadlines.provisioning + deadlines.labelled)
        return min(asked, self._last)


async def stands(backend: Backend, lease: SliceLease) -> bool:
    """Whether what runs on the lease still has its head and all its hosts; one that is only late counts as there."""
    return (await backend.observe(lease)).stands


async def reach(
    backend: Backend,
    lease: SliceLease,
    act: Callable[[], Awaitable[Answer]],
    *,
    schedule: Schedule,
    say: Say,
    phase: Phase = Phase.LABELLED,
) -> Answer:
    """Do something with the lease's Ray that is safe to do again, while it does not answer: again.

    :param act: one or more idempotent calls.
    :param schedule: its deadlines: silence beyond that of the phase is an error.
    :param phase: what the caller is at; while the lease waits in a queue or for hosts, those phases count.
    :raises Preempted: when the lease's head is gone with all that ran on it.
    """
    away: datetime | None = None
    bounds = _Bounds(schedule)

    async def look() -> Answer:
        nonlocal away
        try:
            return await act()
        except RemoteUnavailable:
            report = await backend.observe(lease)
            # A head that starts again by itself is there before a retry would be.
            away = (away or utc_now()) if report.headless else None
            if report.lost and (away is None or utc_now() - away >= timedelta(seconds=GRACE_S)):
                raise _lost(lease, report) from None
            here = phase if report.phase is Phase.LABELLED else report.phase
            decider.enter(here, bounds.until(here, report.since if here is report.phase else None))
            raise

    decider: Wait[Answer, Answer] = Wait(
        f"Ray of lease {lease.id}", Done, deadline=schedule.until(phase), phase=phase, poll_s=1.0, on_progress=say
    )
    return await wait_async(look, decider)


def _lost(lease: SliceLease, report: Readiness) -> Preempted:
    if report.fatal is None:
        helps = "replaces its slices" if report.broken else "waits for another head"
        return Preempted(f"lease {lease.id}: {report.describe()}. A retry of this task {helps}.")
    return Preempted(f"lease {lease.id}: {report.fatal}. Clear the task that provisioned it to get a new one.")


async def found(backend: Backend, owner: Owner, *, by: datetime) -> SliceLease | None:
    """The owner's lease, or None where there is none.

    :param by: the instant, UTC, at which the phase ``releasing`` is over.
    :raises DeadlineExceeded: the backend could not be asked until then.
    """
    try:
        async with asyncio.timeout(max(0.0, (by - utc_now()).total_seconds())):
            return await backend.find(owner)
    except TimeoutError:
        raise DeadlineExceeded(
            f"lease of {owner.key}: the releasing deadline {by:%Y-%m-%d %H:%M:%S}Z has passed, and backend "
            f"{backend.name!r} did not say whether there is one; clear this task once it answers, or run the reaper"
        ) from None


async def take_back(backend: Backend, owner: Owner) -> list[str]:
    """Tell everything that was made for an owner to go, without waiting until it is gone.

    :return: what is still there, in words.
    """
    lease = await backend.find(owner)
    return [] if lease is None else (await backend.release(lease)).left


async def give_back(
    backend: Backend, lease: SliceLease, *, by: datetime, say: Say, bears: bool = True, poll_s: float = 3.0
) -> Released:
    """Release the lease, again and again until nothing of it is left.

    :param by: the instant, UTC, at which the phase ``releasing`` is over.
    :param bears: it is over later where the far side does not let go of something before that, and the backend says
        how much later. Not for who comes again soon and has more to do.
    :return: everything that was removed.
    :raises DeadlineExceeded: naming what is left, which still bills.
    """
    removed: list[str] = []
    last = by

    def judge(released: Released) -> Pending | Done[Released]:
        nonlocal last
        removed.extend(thing for thing in released.removed if thing not in removed)
        if not released.left:
            return Done(Released(removed=removed))
        # What held it up at an earlier look took its part of the time.
        last = max(last, by + released.held) if bears else by
        decider.enter(Phase.RELEASING, last)
        return Pending(f"still there and billing: {'; '.join(released.left)}")

    decider: Wait[Released, Released] = Wait(
        f"lease {lease.id}", judge, deadline=by, phase=Phase.RELEASING, poll_s=poll_s, on_progress=say
    )
    return await wait_async(lambda: backend.release(lease), decider)
