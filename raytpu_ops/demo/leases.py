"""The local backend's leases below one root, seen and released from outside Airflow, synchronously."""

from __future__ import annotations

import asyncio
from pathlib import Path

from raytpu_ops.backends.base import Backend, Released, make_backend
from raytpu_ops.tpu.errors import RayTpuError
from raytpu_ops.tpu.lease import SliceLease


def local_backend(root: Path | None) -> Backend:
    """The local backend with that root; None for the user's default root."""
    return make_backend("local", **({"root": str(root)} if root else {}))


def list_all(root: Path | None) -> list[SliceLease]:
    """Every lease that the real processes and records below ``root`` show."""
    return asyncio.run(local_backend(root).list_leases())


def release_all(root: Path | None) -> Released:
    """Release every lease below ``root``; one that fails does not keep the others from being released."""
    return asyncio.run(_release_all(local_backend(root)))


async def _release_all(backend: Backend) -> Released:
    removed: list[str] = []
    left: list[str] = []
    for lease in await backend.list_leases():
        try:
            released = await backend.release(lease)
        except RayTpuError as error:
            left.append(f"{lease.id}: {error}")
            continue
        removed += released.removed
        left += released.left
    return Released(removed=removed, left=left)
