"""``raytpu leases`` and ``raytpu release``: what a backend shows, and how a person gives it back."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from raytpu_ops.backends.base import Backend, make_backend
from raytpu_ops.tpu.errors import InvalidSpec, RayTpuError
from raytpu_ops.tpu.lease import SliceLease


def show(backend_name: str, root: Path | None, *, as_json: bool) -> None:
    """Print the leases.

    :param backend_name: the backend that is asked.
    :param root: root folder of the local backend; None for the user's own.
    """
    rows = asyncio.run(_rows(_backend(backend_name, root)))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not rows:
        console.print("no leases", highlight=False)
        return
    table = Table()
    for name in ("lease", "owner", "slices", "age", "expires in", "whole"):
        table.add_column(name, overflow="fold")
    now = datetime.now(UTC)
    for row in rows:
        age = now - datetime.fromisoformat(row["granted_at"])
        rest = datetime.fromisoformat(row["expires_at"]) - now
        table.add_row(
            row["id"],
            row["owner"],
            row["slices"],
            _words(age),
            _words(rest) if rest > timedelta(0) else "expired",
            row["readiness"],
        )
    console.print(table)


def release(lease_id: str, backend_name: str, root: Path | None) -> int:
    """Give a lease back and print what is gone; the exit code.

    :raises InvalidSpec: there is no such lease.
    """
    backend = _backend(backend_name, root)
    released = asyncio.run(_release(backend, lease_id))
    for line in released.removed:
        print(f"removed: {line}")
    for line in released.left:
        print(f"left: {line}")
    return 1 if released.left else 0


async def _release(backend: Backend, lease_id: str) -> Any:
    found = {lease.id: lease for lease in await backend.list_leases()}
    if lease_id not in found:
        raise InvalidSpec(
            f"lease {lease_id!r} does not exist on {backend.name}; there are {', '.join(found) or 'none'}"
        )
    return await backend.release(found[lease_id])


async def _rows(backend: Backend) -> list[dict[str, Any]]:
    return [await _row(backend, lease) for lease in await backend.list_leases()]


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


def _backend(name: str, root: Path | None) -> Backend:
    return make_backend(name, **({"root": str(root)} if root else {}))


def _words(span: timedelta) -> str:
    minutes, seconds = divmod(int(span.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
