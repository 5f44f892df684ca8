"""A local backend whose "Ray" is a shell that sleeps beside a sleeping child: everything else is real."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.local import LocalBackend, processes
from raytpu_ops.backends.local.cluster import Cluster
from raytpu_ops.backends.local.commands import Commands
from raytpu_ops.backends.local.layout import Root
from raytpu_ops.backends.local.record import LeaseRecord
from raytpu_ops.tpu import capacity
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.spec import SliceSpec
from tests.session import SESSION_DIR

#: Ray's arguments follow and are ignored. The child stands for Ray's workers.
FAKE_RAY = ("/bin/sh", "-c", "sleep 1000 & sleep 1000; true", "fake-ray")


@pytest.fixture
def root() -> Iterator[Path]:
    """A short private root; fails the test that leaves a process behind."""
    path = Path(tempfile.mkdtemp(prefix="", dir=SESSION_DIR)).resolve()
    yield path
    left = processes.marked(path)
    for member in left:
        with suppress(psutil.Error):
            member.process.send_signal(signal.SIGKILL)
    shutil.rmtree(path, ignore_errors=True)
    assert left == [], "a test must release what it acquired"


@pytest.fixture
def owner() -> Owner:
    return Owner(dag_id="digits", run_id="manual__2026-01-01T00:00:00+00:00", task_id="provision")


@pytest.fixture
def plan() -> Plan:
    """Two slices of two hosts each."""
    return plan_of(2)


def plan_of(num_slices: int, topology: str = "2x2x2", ladder: object = None) -> Plan:
    spec = SliceSpec.of("v4", topology, num_slices=num_slices)
    return Plan(backend="local", spec=spec, ladder=capacity.ladder(ladder), lease_for=timedelta(hours=1))


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    return plan_of


@pytest.fixture
def cluster(root: Path) -> Iterator[Cluster]:
    """The leases of a private root, all released afterwards."""
    made = Cluster(Root(root), Commands(FAKE_RAY), grace_s=0.2)
    yield made
    for lease in made.leases():
        released = made.release(lease.id)
        assert released.left == []


@pytest.fixture
def backend(root: Path, cluster: Cluster) -> LocalBackend:
    return LocalBackend(root, ray_start=FAKE_RAY)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Wait for a condition that nothing announces."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "what was waited for never came"
            time.sleep(0.02)

    return wait


@pytest.fixture
def mains(root: Path, until: Callable[[Callable[[], object]], None]) -> Callable[[], Counter[str]]:
    """How many main processes each part has: those that lead a session, once each has become its program."""

    def leaders() -> list[processes.Marked]:
        found = []
        for member in processes.marked(root):
            with suppress(ProcessLookupError):
                if os.getsid(member.process.pid) == member.process.pid:
                    found.append(member)
        return found

    def count() -> Counter[str]:
        until(lambda: all(processes.MARK_PART in member.marks for member in leaders()))
        return Counter(member.marks[processes.MARK_PART] for member in leaders())

    return count


@pytest.fixture
def pids(root: Path, mains: Callable[[], Counter[str]], until: Callable[..., None]) -> Callable[[], set[int]]:
    """Every process of the root, once each main process has started its two children."""

    def settled() -> set[int]:
        wanted = 3 * mains().total()
        until(lambda: len(processes.marked(root)) == wanted)
        return {member.process.pid for member in processes.marked(root)}

    return settled


@pytest.fixture
def environment_of(cluster: Cluster, until: Callable[[Callable[[], object]], None]) -> Callable[..., dict[str, str]]:
    """The environment of a part's main process, once it has become its program."""

    def read(record: LeaseRecord, part: str) -> dict[str, str]:
        identity = cluster.part(record, part).identity
        assert identity is not None
        process = psutil.Process(identity.pid)
        until(lambda: processes.MARK_PART in process.environ())
        return process.environ()

    return read


@pytest.fixture
def kill_part(cluster: Cluster) -> Callable[[LeaseRecord, str], None]:
    """SIGKILL one process of a lease and everything below it."""

    def kill(record: LeaseRecord, part: str) -> None:
        assert cluster.kill(record, [part]) == []

    return kill
