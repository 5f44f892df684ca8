"""Giving back what nobody gives back any more: leases that outlived their time, or the run that they served.

For what Airflow never tears down: a run beyond its ``dagrun_timeout``, and a provisioning task whose
process was killed outright in its last try. Not here: how to learn whether a run is over; the
caller knows, and where it does not, nothing is taken before its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from raytpu_ops.backends.base import Backend, Say
from raytpu_ops.flows.leases import give_back
from raytpu_ops.tpu.errors import RayTpuError
from raytpu_ops.tpu.lease import Owner, SliceLease

#: Whether the run of a lease's owner is over; None where nobody can tell.
IsOver = Callable[[Owner], Awaitable[bool | None]]


class Reaped(BaseModel):
    """What a reaper did.

    :param released: leases that were given back, or would be: id, owner and why, one line each.
    :param kept: leases that stay, with the reason.
    :param left: what could not be given back and still bills, with the reason.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    released: list[str] = Field(default_factory=list)
    kept: list[str] = Field(default_factory=list)
    left: list[str] = Field(default_factory=list)


async def nobody_knows(owner: Owner) -> bool | None:
    """For callers that know no Airflow: only time counts."""
    return None


async def reap(
    backend: Backend, is_over: IsOver, now: datetime, *, by: datetime, say: Say, dry_run: bool = False
) -> Reaped:
    """Release every lease of the backend that has expired, or whose run is over.

    One that cannot be released does not keep the others; the next call tries it again.

    :param is_over: asked for each lease that has not expired.
    :param now: the instant, UTC, by which leases expire.
    :param by: the instant, UTC, until which what was told to go is waited for.
    :param say: takes a line for each lease.
    :param dry_run: release nothing, say what would be.
    """
    due: list[tuple[str, SliceLease]] = []
    kept: list[str] = []
    unread: list[str] = []
    for lease in await backend.list_leases(unread.append):
        why, takes = await _judge(lease, is_over, now)
        line = f"{lease.id} of {lease.owner.key}: {why}"
        say(f"{'Would release' if dry_run else 'Releasing'} {line}" if takes else f"Keeping {line}")
        if takes:
            due.append((line, lease))
        else:
            kept.append(line)
    failures = [""] * len(due)
    if not dry_run:
        failures = await asyncio.gather(*(_release(backend, lease, by, say) for _, lease in due))
    return Reaped(
        released=[line for (line, _), failure in zip(due, failures, strict=True) if not failure],
        kept=kept,
        left=[*unread, *(failure for failure in failures if failure)],
    )


async def _judge(lease: SliceLease, is_over: IsOver, now: datetime) -> tuple[str, bool]:
    """Why, and whether it is to be released."""
    until = f"{lease.expires_at:%Y-%m-%d %H:%M:%S} UTC"
    if lease.expires_at <= now:
        return f"it expired at {until}", True
    over = await is_over(lease.owner)
    if over:
        return "its run is over", True
    return f"{'nobody can tell whether its run is over' if over is None else 'its run goes on'}, until {until}", False


async def _release(backend: Backend, lease: SliceLease, by: datetime, say: Say) -> str:
    """What keeps the lease from being gone, which names it; empty once it is."""
    try:
        # What Google holds is told again in the next round, which begins only when this one is over.
        await give_back(backend, lease, by=by, say=say, bears=False)
    except RayTpuError as error:
        return f"{lease.id}: {error}"
    return ""
