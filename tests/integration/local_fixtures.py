"""A real local cluster for a test module: two slices of v4 2x2x2, four hosts, leased once and released at the end."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from raytpu_ops.backends.local import LocalBackend, processes
from raytpu_ops.tpu import capacity
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.tpu.spec import SliceSpec
from tests.session import SESSION_DIR

#: Generous: a machine that runs other things beside the tests is slow, and only a hang takes this long.
READY_LIMIT_S = 240.0


@dataclass(frozen=True)
class Leased:
    """A lease that is whole.

    :param seconds: from the call of ``acquire`` until Ray had labelled every host.
    """

    backend: LocalBackend
    lease: SliceLease
    seconds: float


def owner_of(task_id: str) -> Owner:
    """An owner for a test's lease."""
    return Owner(dag_id="tests", run_id="manual__2026-01-01T00:00:00+00:00", task_id=task_id)


def acquire(backend: LocalBackend, owner: Owner, spec: SliceSpec) -> SliceLease:
    """Acquire a lease, which is not ready yet."""

    async def run() -> SliceLease:
        plan = await backend.plan(spec, capacity.ladder(), lease_for=timedelta(hours=1))
        return await backend.acquire(plan, owner)

    return asyncio.run(run())


def observe(backend: LocalBackend, lease: SliceLease) -> Readiness:
    """How whole a lease is."""
    return asyncio.run(backend.observe(lease))


def wait_until_ready(backend: LocalBackend, lease: SliceLease, limit_s: float = READY_LIMIT_S) -> Readiness:
    """Wait until a lease is whole; fails with what is missing."""
    deadline = time.monotonic() + limit_s
    while not (report := observe(backend, lease)).ready:
        assert report.fatal is None, report.fatal
        assert time.monotonic() < deadline, report.describe()
        time.sleep(0.5)
    return report


def wait_for_report(backend: LocalBackend, lease: SliceLease, text: str, limit_s: float = READY_LIMIT_S) -> Readiness:
    """Wait until the report on a lease says something."""
    deadline = time.monotonic() + limit_s
    while text not in (report := observe(backend, lease)).describe():
        assert time.monotonic() < deadline, f"{text!r} never came: {report.describe()}"
        time.sleep(0.5)
    return report


@contextmanager
def private_root() -> Iterator[Path]:
    """A root folder of its own; fails when anything is left in it or running below it."""
    root = Path(tempfile.mkdtemp(prefix="", dir=SESSION_DIR)).resolve()
    try:
        yield root
        left = [process.process.cmdline() for process in processes.marked(root)]
        assert left == [], "processes were left behind"
        assert not root.exists(), "the root was left behind"
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def leased(root: Path, name: str, spec: SliceSpec) -> Iterator[Leased]:
    """A whole lease under a root, released afterwards; fails when its ports stay open."""
    backend = LocalBackend(root)
    begun = time.monotonic()
    lease = acquire(backend, owner_of(name), spec)
    try:
        wait_until_ready(backend, lease)
        yield Leased(backend, lease, time.monotonic() - begun)
    finally:
        released = asyncio.run(backend.release(lease))
    assert released.left == []
    for url in (lease.ray.address, lease.ray.serve_address or ""):
        host, _, port = url.removeprefix("http://").rpartition(":")
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0, f"{url} still answers"


@pytest.fixture(scope="module")
def local_slices() -> Iterator[Leased]:
    """Two whole slices of v4 2x2x2 on this machine, for all tests of a module."""
    with private_root() as root, leased(root, "module", SliceSpec.of("v4", "2x2x2", num_slices=2)) as made:
        yield made


@pytest.fixture(scope="module")
def local_slice() -> Iterator[Leased]:
    """One whole slice of v4 2x2x2 on this machine, for all tests of a module."""
    with private_root() as root, leased(root, "module", SliceSpec.of("v4", "2x2x2")) as made:
        yield made
