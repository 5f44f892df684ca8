"""What a release ends and removes, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.local import processes
from raytpu_ops.backends.local.cluster import Cluster
from raytpu_ops.backends.local.commands import Commands
from raytpu_ops.backends.local.launch import IDENTITY, start_time
from raytpu_ops.backends.local.layout import HEAD, Root
from raytpu_ops.tpu.errors import Preempted
from raytpu_ops.tpu.lease import Owner

Pids = Callable[[], set[int]]
Until = Callable[[Callable[[], object]], None]


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_nothing_is_left(cluster: Cluster, root: Path, plan: Plan, owner: Owner, pids: Pids) -> None:
    record = cluster.acquire(plan, owner)
    before = pids()
    assert len(before) == 15  # five shells, each with two children
    released = cluster.release(record.id)
    assert released.left == []
    assert any("processes" in line for line in released.removed)
    assert not [pid for pid in before if alive(pid)]
    assert not root.exists()


def test_again_is_a_success(cluster: Cluster, plan: Plan, owner: Owner) -> None:
    record = cluster.acquire(plan, owner)
    cluster.release(record.id)
    assert cluster.release(record.id).model_dump() == {"removed": [], "left": []}


def test_of_a_lease_that_never_was_creates_nothing(cluster: Cluster, root: Path) -> None:
    root.rmdir()
    assert cluster.release("never-was").model_dump() == {"removed": [], "left": []}
    assert not root.exists()


def test_who_ignores_sigterm_is_killed(root: Path, plan: Plan, owner: Owner) -> None:
    stubborn = Cluster(Root(root), Commands(("/bin/sh", "-c", "trap '' TERM; sleep 1000", "stubborn")), grace_s=0.2)
    record = stubborn.acquire(plan, owner)
    assert stubborn.release(record.id).left == []
    assert processes.marked(root) == []


def test_a_child_that_threw_its_environment_away_is_ended(root: Path, plan: Plan, owner: Owner, until: Until) -> None:
    shy = Cluster(Root(root), Commands(("/bin/sh", "-c", "env -i sleep 1000 & wait", "shy")), grace_s=0.2)
    record = shy.acquire(plan, owner)
    identity = shy.part(record, HEAD).identity
    assert identity is not None
    main = psutil.Process(identity.pid)
    until(lambda: any(child.name() == "sleep" for child in main.children()))
    children = main.children()
    assert shy.release(record.id).left == []
    assert not [child for child in children if alive(child.pid)]


def test_workers_whose_main_process_is_gone_are_ended(cluster: Cluster, plan: Plan, owner: Owner, until: Until) -> None:
    record = cluster.acquire(plan, owner)
    identity = cluster.part(record, "1").identity
    assert identity is not None
    main = psutil.Process(identity.pid)
    until(main.children)
    orphans = main.children()
    main.kill()
    psutil.wait_procs([main], timeout=10)
    assert alive(orphans[0].pid)
    assert cluster.release(record.id).left == []
    assert not alive(orphans[0].pid)


def test_processes_without_a_folder_are_found_and_ended(cluster: Cluster, root: Path, plan: Plan, owner: Owner) -> None:
    record = cluster.acquire(plan, owner)
    for path in sorted(record.folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    record.folder.rmdir()
    assert cluster.leases() == [record.lease()]
    assert cluster.release(record.id).left == []
    assert processes.marked(root) == []


def test_a_process_with_a_lease_of_another_version_hides_no_other(
    cluster: Cluster, root: Path, plan: Plan, owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    record = cluster.acquire(plan, owner)
    marks = {processes.MARK_ROOT: str(root), processes.MARK_LEASE: "old", processes.MARK_GRANT: '{"colour": "red"}'}
    with subprocess.Popen(["/bin/sleep", "1000"], env=marks):
        assert cluster.leases() == [record.lease()]
        assert "carries a lease of another version" in caplog.text
        assert cluster.release("old").left == []


def test_a_folder_without_processes_is_found_and_removed(cluster: Cluster, plan: Plan, owner: Owner) -> None:
    record = cluster.acquire(plan, owner)
    assert cluster.kill(record, record.parts) == []
    assert cluster.leases() == [record.lease()]
    released = cluster.release(record.id)
    assert released.left == []
    assert released.removed == [f"folder {record.folder}"]


def test_another_lease_of_the_root_goes_on(cluster: Cluster, plan: Plan, owner: Owner) -> None:
    mine = cluster.acquire(plan, owner)
    other = cluster.acquire(plan, owner.model_copy(update={"map_index": 7}))
    assert cluster.release(mine.id).left == []
    assert all(cluster.part(other, part).alive for part in other.parts)
    assert cluster.leases() == [other.lease()]


def test_a_lease_of_the_same_name_under_another_root_goes_on(
    cluster: Cluster, root: Path, plan: Plan, owner: Owner
) -> None:
    mine = cluster.acquire(plan, owner)
    elsewhere = Cluster(Root(f"{root}x"), cluster.commands, grace_s=0.2)
    other = elsewhere.acquire(plan, owner)
    try:
        assert other.id == mine.id
        assert cluster.release(mine.id).left == []
        assert all(elsewhere.part(other, part).alive for part in other.parts)
    finally:
        assert elsewhere.release(other.id).left == []


def test_a_stranger_who_got_the_pid_of_a_dead_host_is_left_alone(cluster: Cluster, plan: Plan, owner: Owner) -> None:
    record = cluster.acquire(plan, owner)
    assert cluster.kill(record, ["1"]) == []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        note = record.folder / "1" / IDENTITY
        note.write_text(note.read_text().replace(str(record_pid(cluster, record.id)), str(stranger.pid)))
        assert cluster.part(record, "1").identity.pid == stranger.pid  # type: ignore[union-attr]
        assert cluster.part(record, "1").dead
        assert cluster.release(record.id).left == []
        assert stranger.poll() is None


def record_pid(cluster: Cluster, lease_id: str) -> int:
    record = cluster.read(lease_id)
    assert record is not None
    identity = cluster.part(record, "1").identity
    assert identity is not None
    return identity.pid


def test_whoever_releases_from_within_a_host_does_not_end_itself(
    cluster: Cluster, plan: Plan, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = cluster.acquire(plan, owner)
    me = processes.Marked(psutil.Process(), dict(cluster.commands.marks(record)))
    really = processes.marked
    monkeypatch.setattr(processes, "marked", lambda root, **given: [*really(root, **given), me])
    assert cluster.release(record.id).left == []


def test_repair_without_a_head_leaves_nothing_of_the_old_cluster(
    cluster: Cluster, plan: Plan, owner: Owner, kill_part: Callable[..., None]
) -> None:
    record = cluster.acquire(plan, owner)
    kill_part(record, HEAD)
    repaired = cluster.repair(record.id)
    assert sorted(path.name for path in repaired.folder.iterdir() if path.is_dir()) == sorted(repaired.parts)
    assert all(cluster.part(repaired, part).alive for part in repaired.parts)
    assert not set(repaired.parts) - {HEAD} & set(record.parts)


def test_repair_of_what_was_released_says_provision_again(cluster: Cluster, plan: Plan, owner: Owner) -> None:
    record = cluster.acquire(plan, owner)
    cluster.release(record.id)
    with pytest.raises(Preempted, match=r"no record.*provision again"):
        cluster.repair(record.id)


def test_repair_of_a_whole_lease_changes_nothing(cluster: Cluster, plan: Plan, owner: Owner, pids: Pids) -> None:
    record = cluster.acquire(plan, owner)
    before = pids()
    assert cluster.repair(record.id) == record
    assert pids() == before


def test_identity_is_pid_and_start_time() -> None:
    me = processes.ProcessId(os.getpid(), start_time(os.getpid()), 0.0)
    assert me.alive()
    assert not processes.ProcessId(os.getpid(), "1@another-boot", 0.0).alive()


def test_a_zombie_is_not_alive(until: Until) -> None:
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as child:
        started = start_time(child.pid)
        assert child.stdout is not None
        child.stdout.read()  # end of file: it is gone, and nobody has waited for it yet
        until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        assert not processes.ProcessId(child.pid, started or "gone", 0.0).alive()


def test_without_proc_a_process_born_after_the_note_is_a_stranger() -> None:
    born = psutil.Process().create_time()
    assert processes.ProcessId(os.getpid(), None, born + 1).alive()
    assert not processes.ProcessId(os.getpid(), None, born - 60).alive()
    with subprocess.Popen(["true"]) as child:
        child.wait()
    assert not processes.ProcessId(child.pid, None, born + 1e6).alive()
