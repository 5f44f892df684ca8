"""Waiting until a lease is whole, and giving it back until nothing is left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TypeVar

from raytpu_ops.backends.base import Backend, Released
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.errors import Preempted, RemoteUnavailable
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.waits import Done, Pending, Wait, wait_async

Say = Callable[[str], None]
Answer = TypeVar("Answer")

#: A lease whose slices break this often within one wait stands on ground that does not hold.
MAX_REPAIRS = 3


async def wait_whole(
    backend: Backend, lease: SliceLease, *, by: datetime, say: Say, poll_s: float = 1.0
) -> tuple[SliceLease, Readiness]:
    """Wait until every slice of the lease is whole; a slice that breaks on the way is replaced whole.

    :param by: the instant, UTC, at which the phase ``labelled`` is over.
    :param say: takes a line for the log whenever the report changes.
    :param poll_s: seconds between two looks.
    :return: the lease as it is after replacements, and the report.
    :raises Preempted: Ray's head is gone, or slices broke more than :data:`MAX_REPAIRS` times.
    :raises DeadlineExceeded: naming every host that is missing.
    """
    repairs = 0
    while not (report := await _whole_or_broken(backend, lease, by=by, say=say, poll_s=poll_s)).ready:
        if repairs == MAX_REPAIRS:
            raise Preempted(
                f"lease {lease.id}: slices were replaced {MAX_REPAIRS} times and broke again: {report.describe()}. "
                "Try another zone or kind of capacity."
            )
        say(f"Replacing {', '.join(report.broken)}: {report.describe()}")
        lease = await backend.repair(lease)
        repairs += 1
    return lease, report


async def _whole_or_broken(backend: Backend, lease: SliceLease, *, by: datetime, say: Say, poll_s: float) -> Readiness:
    def judge(report: Readiness) -> Pending | Done[Readiness]:
        if report.fatal:
            raise _lost(lease, report)
        if report.ready or report.broken:
            return Done(report)
        return Pending(report.describe())

    decider = Wait(f"lease {lease.id}", judge, deadline=by, phase=Phase.LABELLED, poll_s=poll_s, on_progress=say)
    return await wait_async(lambda: backend.observe(lease), decider)


async def stands(backend: Backend, lease: SliceLease) -> bool:
    """Whether what runs on the lease still has all its hosts; one that is only late counts as there."""
    report = await backend.observe(lease)
    return not report.broken and report.fatal is None


async def reach(
    backend: Backend, lease: SliceLease, act: Callable[[], Awaitable[Answer]], *, by: datetime, say: Say
) -> Answer:
    """Do something with the lease's Ray that is safe to do again, while it does not answer: again.

    :param act: one or more idempotent calls.
    :param by: the instant, UTC, after which its silence is an error.
    :raises Preempted: when the lease's head is gone for good.
    """

    async def look() -> Answer:
        try:
            return await act()
        except RemoteUnavailable:
            report = await backend.observe(lease)
            if report.fatal:
                raise _lost(lease, report) from None
            raise

    decider: Wait[Answer, Answer] = Wait(
        f"Ray of lease {lease.id}", Done, deadline=by, phase=Phase.LABELLED, poll_s=1.0, on_progress=say
    )
    return await wait_async(look, decider)


def _lost(lease: SliceLease, report: Readiness) -> Preempted:
    return Preempted(f"lease {lease.id}: {report.fatal}. Clear the task that provisioned it to get a new one.")


async def give_back(backend: Backend, lease: SliceLease, *, by: datetime, say: Say, poll_s: float = 3.0) -> Released:
    """Release the lease, again and again until nothing of it is left.

    :param by: the instant, UTC, at which the phase ``releasing`` is over.
    :return: everything that was removed.
    :raises DeadlineExceeded: naming what is left, which still bills.
    """
    removed: list[str] = []

    def judge(released: Released) -> Pending | Done[Released]:
        removed.extend(thing for thing in released.removed if thing not in removed)
        if not released.left:
            return Done(Released(removed=removed))
        return Pending(f"still there and billing: {'; '.join(released.left)}")

    decider = Wait(f"lease {lease.id}", judge, deadline=by, phase=Phase.RELEASING, poll_s=poll_s, on_progress=say)
    return await wait_async(lambda: backend.release(lease), decider)
