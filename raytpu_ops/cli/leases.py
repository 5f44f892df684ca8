"""``raytpu leases``, ``release`` and ``reap``: what a backend shows, and how a person gives it back."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from raytpu_ops.backends.base import Backend, Released, silent
from raytpu_ops.cli.backends import ELSEWHERE, Where, looked
from raytpu_ops.tpu.deadlines import Deadlines, Phase
from raytpu_ops.tpu.errors import InvalidSpec, RayTpuError
from raytpu_ops.tpu.lease import SliceLease

if TYPE_CHECKING:
    from rich.console import Console

    from raytpu_ops.flows.reaping import Reaped

#: What a line of the table needs beside the lease's id; below that each lease gets lines of its own.
_BESIDE_ID = 76
#: Said of those that there are where others may be.
_READ = " that can be read"
_HEADS = ("lease", "owner", "slices", "age", "expires in", "whole?")


def show(where: Where, *, as_json: bool, verbose: bool = False) -> int:
    """Print the leases; the exit code: 1 where there may be others, which can't be read.

    :param where: the backend that is asked.
    :param verbose: everything that is missing, too.
    """
    rows, place, unread = asyncio.run(_rows(where.open()))
    if not rows and not as_json:
        print(f"no leases {place}{_READ if unread else ''}")
        return 1 if unread else 0
    _aside(f"raytpu: leases {place}")
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        from rich.console import Console

        _print(Console(highlight=False), rows, verbose=verbose)
    return 1 if unread else 0


def _print(console: Console, rows: list[dict[str, Any]], *, verbose: bool) -> None:
    """A table, or where that is too narrow for an id that can be copied, a few lines for each lease."""
    from rich.table import Table
    from rich.text import Text

    now = datetime.now(UTC)
    cells = [_cells(row, now, verbose=verbose) for row in rows]
    longest = max(len(row["id"]) for row in rows)
    if console.width < longest + _BESIDE_ID:
        for one in cells:
            print(one[0])
            for name, value in zip(_HEADS[1:], one[1:], strict=True):
                print(f"    {name:<12}{value}")
        return
    table = Table()
    for name in _HEADS:
        table.add_column(name, no_wrap=name != "whole?" and name != "owner", overflow="fold")
    for one in cells:
        table.add_row(*(Text(cell) for cell in one))
    console.print(table)


def _cells(row: dict[str, Any], now: datetime, *, verbose: bool) -> tuple[str, ...]:
    age = now - datetime.fromisoformat(row["granted_at"])
    rest = datetime.fromisoformat(row["expires_at"]) - now
    short = {True: "yes", False: "no", None: "unknown"}[row["whole"]]
    return (
        row["id"],
        row["owner"],
        row["slices"],
        _words(age),
        _words(rest) if rest > timedelta(0) else "expired",
        f"{short}: {row['readiness']}" if verbose else short,
    )


def release(lease_id: str, where: Where) -> int:
    """Give a lease back, wait until nothing is left and print what is gone; the exit code.

    :raises InvalidSpec: there is no such lease.
    """
    released = asyncio.run(_release(where.open(), lease_id))
    for line in released.removed:
        print(f"removed: {line}")
    for line in released.left:
        print(f"left: {line}")
    return 1 if released.left else 0


def reap(where: Where, *, dry_run: bool) -> int:
    """Give back every lease that has expired, and print what became of each; the exit code.

    Whether a lease's run is over is nothing that this knows; ``ReapTpuSlicesOperator`` does.
    """
    from raytpu_ops.flows.reaping import nobody_knows
    from raytpu_ops.flows.reaping import reap as reap_expired

    async def done_and_where() -> tuple[Reaped, str]:
        by, backend = Deadlines.of(None).at(Phase.RELEASING), where.open()
        done = await reap_expired(backend, nobody_knows, datetime.now(UTC), by=by, say=silent, dry_run=dry_run)
        return done, await looked(backend)

    done, place = asyncio.run(done_and_where())
    for line in done.released:
        print(f"{'would release' if dry_run else 'released'}: {line}")
    for line in done.left:
        print(f"left: {line}")
    if not done.released and not done.left:
        print(f"nothing has expired {place}")
    return 1 if done.left else 0


async def _release(backend: Backend, lease_id: str) -> Released:
    from raytpu_ops.flows.leases import give_back

    found, unread = await _listed(backend)
    # More than one where the owner asked in other zones later.
    named = [lease for lease in found if lease.id == lease_id]
    if not named:
        there = ", ".join(dict.fromkeys(lease.id for lease in found)) or f"none{_READ if unread else ''}"
        raise InvalidSpec(f"lease {lease_id!r} does not exist {await looked(backend)}; there are {there}: {ELSEWHERE}")
    by = Deadlines.of(None).at(Phase.RELEASING)
    removed, left = [], []
    for lease in named:
        try:
            removed += (await give_back(backend, lease, by=by, say=_aside)).removed
        except RayTpuError as error:
            left.append(str(error))
    return Released(removed=removed, left=left)


async def _listed(backend: Backend) -> tuple[list[SliceLease], bool]:
    """The leases, and whether there may be others, which can't be read and bill all the same; those are told."""
    unread: list[str] = []
    found = await backend.list_leases(unread.append)
    for line in unread:
        _aside(line)
    return found, bool(unread)


async def _rows(backend: Backend) -> tuple[list[dict[str, Any]], str, bool]:
    """The leases, where they are, and whether there may be others."""
    found, unread = await _listed(backend)
    return [await _row(backend, lease) for lease in found], await looked(backend), unread


async def _row(backend: Backend, lease: SliceLease) -> dict[str, Any]:
    try:
        report = await backend.observe(lease)
        whole: bool | None = all(one.whole for one in report.slices) and bool(report.slices)
        readiness = report.describe()
    except RayTpuError as error:
        whole, readiness = None, str(error)
    return {
        "id": lease.id,
        "owner": lease.owner.key,
        "backend": lease.backend,
        "slices": str(lease.spec),
        "granted_at": lease.granted_at.isoformat(),
        "expires_at": lease.expires_at.isoformat(),
        "dashboard": lease.ray.address,
        "whole": whole,
        "readiness": readiness,
    }


def _aside(line: str) -> None:
    """What a person reads and no program."""
    print(line, file=sys.stderr)


def _words(span: timedelta) -> str:
    minutes, seconds = divmod(int(span.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
