"""Real local clusters: two for the whole session, and what it takes to make one of one's own."""

from __future__ import annotations

import asyncio
import os
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
from raytpu_ops.ray.states import RayNode
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


def nodes_of(backend: LocalBackend, lease: SliceLease) -> list[RayNode]:
    """Every Ray node of a lease, dead ones too."""

    async def run() -> list[RayNode]:
        async with backend.ray(lease) as ray:
            return await ray.nodes()

    return asyncio.run(run())


def acquire_whole(backend: LocalBackend, owner: Owner, spec: SliceSpec, limit_s: float = READY_LIMIT_S) -> SliceLease:
    """Acquire a lease and wait until it is whole; acquire it again where a part of it is dead, as a task's retry does.

    Ray ends a node that has not started within 30 s, which happens where many other things run.
    """
    deadline = time.monotonic() + limit_s
    while True:
        lease = acquire(backend, owner, spec)
        while not (report := observe(backend, lease)).ready:
            assert time.monotonic() < deadline, report.describe()
            if report.fatal is not None or report.broken:
                print(f"acquired again: {report.describe()}")
                break
            time.sleep(0.5)
        else:
            return lease


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
    owner = owner_of(name)
    try:
        lease = acquire_whole(backend, owner, spec)
        yield Leased(backend, lease, time.monotonic() - begun)
    finally:
        made = asyncio.run(backend.find(owner))
        left = [] if made is None else asyncio.run(backend.release(made)).left
    assert left == []
    for url in (lease.ray.address, lease.ray.serve_address or ""):
        host, _, port = url.removeprefix("http://").rpartition(":")
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0, f"{url} still answers"


class Standing:
    """A lease that several test modules use: whole for whoever asks, whatever became of it before.

    :param lease: as it is now; a repair changes the names of its slices.
    :param seconds: see :class:`Leased`.
    """

    def __init__(self, made: Leased) -> None:
        self.backend = made.backend
        self.lease = made.lease
        self.seconds = made.seconds

    def whole(self, slices: int = 2) -> SliceLease:
        """The lease, once so many of its slices are whole; what is broken is replaced only where there are fewer."""
        found = asyncio.run(self.backend.find(self.lease.owner))
        report = None if found is None else observe(self.backend, found)
        enough = report is not None and report.fatal is None and len(report.slices) - len(report.broken) >= slices
        if found is None or not enough:
            found = acquire_whole(self.backend, self.lease.owner, self.lease.spec)
        self.lease = found
        return found

    def whole_slices(self) -> list[str]:
        """Names of the slices that are whole now."""
        return [item.name for item in observe(self.backend, self.lease).slices if item.whole]


@pytest.fixture(scope="session")
def two_slices() -> Iterator[Standing]:
    """Two slices of v4 2x2x2 on this machine; their start costs most of a minute of processor time."""
    # A name that no other session uses: addresses follow from it.
    name, spec = f"two-slices-{os.getpid()}", SliceSpec.of("v4", "2x2x2", num_slices=2)
    with private_root() as root, leased(root, name, spec) as made:
        yield Standing(made)


@pytest.fixture(scope="session")
def local_slice() -> Iterator[Leased]:
    """One whole slice of v4 2x2x2 on this machine, for jobs that Airflow's tasks run."""
    with private_root() as root, leased(root, f"one-slice-{os.getpid()}", SliceSpec.of("v4", "2x2x2")) as made:
        yield made
