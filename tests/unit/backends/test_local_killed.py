"""The acquiring process is killed, or runs twice, at any moment: there is one cluster in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.local import launch, processes
from raytpu_ops.backends.local.cluster import Cluster
from raytpu_ops.backends.local.layout import HEAD
from raytpu_ops.backends.local.record import LeaseRecord
from raytpu_ops.tpu.lease import Owner
from tests.killing import killed, start

Mains = Callable[[], Counter[str]]
Pids = Callable[[], set[int]]
Until = Callable[[Callable[[], object]], None]
WHOLE = Counter([HEAD, "1", "2", "3", "4"])


# 1 folder made, 2 token written, 3 record written, 4 launch planned, 5 launched, 6 all identities noted.
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6])
def test_killed_while_acquiring_then_again(
    cluster: Cluster, plan: Plan, owner: Owner, mains: Mains, steps: int
) -> None:
    killed(cluster, plan, owner, steps=steps)
    started = mains()
    record = cluster.acquire(plan, owner)
    assert mains() == WHOLE
    assert all(cluster.part(record, part).alive for part in record.parts)
    if steps == 6:
        assert started == WHOLE


@pytest.mark.parametrize("steps", [1, 3, 4, 6])
def test_killed_while_acquiring_then_released(
    cluster: Cluster, root: Path, plan: Plan, owner: Owner, steps: int
) -> None:
    killed(cluster, plan, owner, steps=steps)
    lease_id = next(iter([lease.id for lease in cluster.leases()]), None)
    if lease_id is None:  # killed before anything was written down: acquiring again cleans up
        lease_id = cluster.acquire(plan, owner).id
    assert cluster.release(lease_id).left == []
    assert processes.marked(root) == []
    assert not root.exists()


# 1 slice replaced in the record, 2 strays ended, 3 launch planned, 4 launched.
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_killed_while_repairing_then_again(
    cluster: Cluster, plan: Plan, owner: Owner, mains: Mains, steps: int
) -> None:
    record = cluster.acquire(plan, owner)
    assert cluster.kill(record, ["3"]) == []
    killed(cluster, plan, owner, steps=steps, verb="repair")
    again = cluster.repair(record.id)
    assert again.slices[1].name == f"{record.slices[1].name}-r1"
    assert mains() == Counter([HEAD, "1", "2", "5", "6"])


def test_killed_while_releasing_then_again(cluster: Cluster, root: Path, plan: Plan, owner: Owner) -> None:
    record = cluster.acquire(plan, owner)
    killed(cluster, plan, owner, steps=1, verb="release")
    assert [lease.id for lease in cluster.leases()] == [record.id]
    assert cluster.release(record.id).left == []
    assert not root.exists()


def test_the_program_that_starts_hosts_is_killed_half_way(
    cluster: Cluster, plan: Plan, owner: Owner, mains: Mains, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = cluster._launch

    def half(record: LeaseRecord, path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text())[:2]))
        really(record, path)
        os.kill(os.getpid(), signal.SIGUSR1)

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    # The process dies without rolling back: as after SIGKILL, nothing of it runs on.
    monkeypatch.setattr(cluster, "_launch", half)
    monkeypatch.setattr(cluster, "_discard", lambda _lease_id: None)
    before = signal.signal(signal.SIGUSR1, die)
    try:
        with pytest.raises(Killed):
            cluster.acquire(plan, owner)
    finally:
        signal.signal(signal.SIGUSR1, before)
    monkeypatch.undo()
    until(lambda: mains() == Counter([HEAD, "1"]))
    cluster.acquire(plan, owner)
    assert mains() == WHOLE


def test_the_same_launch_twice_starts_each_process_once(
    cluster: Cluster, plan: Plan, owner: Owner, mains: Mains, pids: Pids, until: Until
) -> None:
    record = cluster.acquire(plan, owner)
    before = pids()
    for _ in range(2):
        subprocess.run([sys.executable, launch.__file__, str(record.folder / "launch.json")], check=True, timeout=60)
    until(lambda: {member.process.pid for member in processes.marked(cluster.root.path)} == before)
    assert mains() == WHOLE


def test_two_processes_acquire_for_one_owner_at_once(cluster: Cluster, plan: Plan, owner: Owner, mains: Mains) -> None:
    with start(cluster, plan, owner, steps=0) as one, start(cluster, plan, owner, steps=0) as other:
        granted = {one.communicate(timeout=60)[0], other.communicate(timeout=60)[0]}
    assert (one.returncode, other.returncode) == (0, 0)
    assert len(granted) == 1
    assert mains() == WHOLE
