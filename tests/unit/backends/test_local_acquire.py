"""A lease's processes: what they get, what they don't, and that asking again changes nothing."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.local import addresses, launch, processes
from raytpu_ops.backends.local.cluster import Cluster
from raytpu_ops.backends.local.commands import Commands
from raytpu_ops.backends.local.layout import HEAD, Root
from raytpu_ops.backends.local.record import LeaseRecord, read_token
from raytpu_ops.tpu.errors import Misconfigured, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner, SliceLease

Mains = Callable[[], Counter[str]]
Pids = Callable[[], set[int]]
Until = Callable[[Callable[[], object]], None]
EnvironmentOf = Callable[[LeaseRecord, str], dict[str, str]]
KillPart = Callable[[LeaseRecord, str], None]


def ended(cluster: Cluster, lease_id: str) -> None:
    released = cluster.release(lease_id)
    assert released.left == []


def test_head_and_every_host_run_once(cluster: Cluster, plan: Plan, owner: Owner, mains: Mains) -> None:
    record = cluster.acquire(plan, owner)
    assert mains() == Counter([HEAD, "1", "2", "3", "4"])
    assert all(cluster.part(record, part).alive for part in record.parts)


def test_hosts_get_the_variables_that_gke_would_inject(
    cluster: Cluster, plan: Plan, owner: Owner, environment_of: EnvironmentOf
) -> None:
    record = cluster.acquire(plan, owner)
    seen = set()
    for item, host in record.hosts:
        env = environment_of(record, host.part)
        seen.add((env["TPU_NAME"], env["TPU_WORKER_ID"]))
        assert (env["TPU_ACCELERATOR_TYPE"], env["TPU_TOPOLOGY"], env["TPU_SKIP_MDS_QUERY"]) == ("v4-16", "2x2x2", "1")
        assert (env[processes.MARK_SLICE], env[processes.MARK_HOST]) == (item.name, str(host.worker_id))
    assert seen == {(item.name, str(worker)) for item in record.slices for worker in (0, 1)}
    assert len({item.name for item in record.slices}) == 2


def test_the_callers_secrets_do_not_reach_the_hosts(
    cluster: Cluster,
    root: Path,
    plan: Plan,
    owner: Owner,
    environment_of: EnvironmentOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "postgresql://u:secret@db/x")
    monkeypatch.setenv("https_proxy", "http://u:secret@proxy")
    monkeypatch.setenv("WANTED", "yes")
    generous = Cluster(Root(root), Commands(cluster.commands.ray_start, pass_env=("WANTED",)))
    record = generous.acquire(plan, owner)
    for part in record.parts:
        env = environment_of(record, part)
        assert "secret" not in str(env)
        assert env["WANTED"] == "yes"


def test_no_token_in_command_lines_environments_or_the_lease(cluster: Cluster, plan: Plan, owner: Owner) -> None:
    record = cluster.acquire(plan, owner)
    token = read_token(record.folder)
    assert token is not None
    assert len(token) >= 32
    assert token not in record.lease().model_dump_json()
    for member in processes.marked(cluster.root.path):
        assert token not in str(member.process.cmdline())
        assert token not in str(member.marks)
    assert stat.S_IMODE((record.folder / "token").stat().st_mode) == 0o600


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="file descriptors are listed in /proc")
def test_hosts_inherit_no_file_descriptor(
    cluster: Cluster, plan: Plan, owner: Owner, until: Until, tmp_path: Path
) -> None:
    leaky = os.open(tmp_path / "open", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(leaky, True)
    try:
        record = cluster.acquire(plan, owner)
    finally:
        os.close(leaky)
    identity = cluster.part(record, "1").identity
    assert identity is not None
    until(lambda: "fake-ray" in psutil.Process(identity.pid).cmdline())
    targets = {str(fd.readlink()) for fd in Path(f"/proc/{identity.pid}/fd").iterdir()}
    folder = record.folder / "1"
    assert targets <= {os.devnull, str(folder / "log"), str(folder / "lock")}


def test_hosts_are_nobodys_children(cluster: Cluster, plan: Plan, owner: Owner) -> None:
    record = cluster.acquire(plan, owner)
    for part in record.parts:
        identity = cluster.part(record, part).identity
        assert identity is not None
        assert os.getpid() not in [parent.pid for parent in psutil.Process(identity.pid).parents()]


def test_addresses_and_ports_are_of_their_own(cluster: Cluster, plan: Plan, owner: Owner) -> None:
    record = cluster.acquire(plan, owner)
    hosts = [host.address for _, host in record.hosts]
    assert len({record.head_address, *hosts}) == 5
    assert all(address.startswith("127.") and address != "127.0.0.1" for address in (record.head_address, *hosts))
    assert len(record.ports) == 5 + 4
    assert all(not 10_002 <= port <= 19_999 for port in record.ports)


def test_two_leases_share_neither_addresses_nor_ports(cluster: Cluster, plan: Plan, owner: Owner) -> None:
    one = cluster.acquire(plan, owner)
    other = cluster.acquire(plan, owner.model_copy(update={"run_id": "another"}))
    assert one.id != other.id
    assert one.block != other.block
    assert not one.ports & other.ports


def test_acquiring_again_adopts(cluster: Cluster, plan: Plan, owner: Owner, pids: Pids) -> None:
    first = cluster.acquire(plan, owner)
    before = pids()
    assert cluster.acquire(plan, owner) == first
    assert pids() == before


def test_another_spec_is_refused_while_the_old_one_runs(
    cluster: Cluster, plan: Plan, owner: Owner, make_plan: Callable[..., Plan], mains: Mains
) -> None:
    record = cluster.acquire(plan, owner)
    with pytest.raises(
        Misconfigured, match=rf"{record.id}.* runs with 2 x v4 2x2x2.* but 1 x v4 2x2x2.*release"
    ) as caught:
        cluster.acquire(make_plan(1), owner)
    assert "\n" not in str(caught.value)
    assert mains() == Counter([HEAD, "1", "2", "3", "4"])


def test_another_spec_replaces_one_of_which_nothing_runs(
    cluster: Cluster, plan: Plan, owner: Owner, make_plan: Callable[..., Plan], mains: Mains
) -> None:
    record = cluster.acquire(plan, owner)
    assert cluster.kill(record, record.parts) == []
    assert cluster.acquire(make_plan(1), owner).spec.num_slices == 1
    assert mains() == Counter([HEAD, "1", "2"])


def test_a_lease_whose_head_died_starts_afresh(
    cluster: Cluster, plan: Plan, owner: Owner, kill_part: KillPart, mains: Mains
) -> None:
    first = cluster.acquire(plan, owner)
    token = read_token(first.folder)
    kill_part(first, HEAD)
    again = cluster.acquire(plan, owner)
    assert again.granted_at > first.granted_at
    assert read_token(again.folder) != token
    assert mains() == Counter([HEAD, "1", "2", "3", "4"])


def test_a_slice_that_lost_a_host_is_replaced_whole_under_a_fresh_name(
    cluster: Cluster, plan: Plan, owner: Owner, kill_part: KillPart, mains: Mains
) -> None:
    first = cluster.acquire(plan, owner)
    kill_part(first, first.slices[1].hosts[0].part)
    again = cluster.acquire(plan, owner)
    assert again.slices[0] == first.slices[0]
    assert again.slices[1].name == f"{first.slices[1].name}-r1"
    assert not {h.part for h in again.slices[1].hosts} & {h.part for h in first.slices[1].hosts}
    assert mains() == Counter([HEAD, "1", "2", "5", "6"])
    assert sorted(path.name for path in again.folder.iterdir() if path.is_dir()) == ["1", "2", "5", "6", "h"]


def test_processes_whose_record_was_lost_are_ended_before_new_ones_start(
    cluster: Cluster, plan: Plan, owner: Owner, mains: Mains, pids: Pids
) -> None:
    first = cluster.acquire(plan, owner)
    (first.folder / "lease.json").unlink()
    old = pids()
    cluster.acquire(plan, owner)
    assert not old & pids()
    assert mains() == Counter([HEAD, "1", "2", "3", "4"])


def test_a_failed_acquire_leaves_nothing(
    cluster: Cluster, root: Path, plan: Plan, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "__file__", str(root / "is-not-there.py"))
    with pytest.raises(RemoteUnavailable, match=r"could not be started; last lines of .*No such file"):
        cluster.acquire(plan, owner)
    assert processes.marked(root) == []
    assert not root.exists()


def test_an_acquire_that_fails_after_its_processes_started_ends_them(
    cluster: Cluster, root: Path, plan: Plan, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = cluster._launch

    def launch_and_fail(record: LeaseRecord, path: Path) -> None:
        really(record, path)
        assert len(processes.marked(root)) >= len(record.parts)
        raise RemoteUnavailable("pulled the plug")

    monkeypatch.setattr(cluster, "_launch", launch_and_fail)
    with pytest.raises(RemoteUnavailable, match="pulled the plug"):
        cluster.acquire(plan, owner)
    assert processes.marked(root) == []
    assert not root.exists()


def test_a_program_that_cannot_start_is_a_dead_host_with_its_reason_in_the_log(
    root: Path, plan: Plan, owner: Owner, until: Until
) -> None:
    broken = Cluster(Root(root), Commands(("/is/not/there",)))
    record = broken.acquire(plan, owner)
    try:
        assert all(broken.part(record, part).identity is not None for part in record.parts)
        until(lambda: broken.part(record, "1").dead)
        assert "No such file" in broken.part(record, "1").log.read_text()
    finally:
        ended(broken, record.id)


def test_where_there_is_one_address_hosts_start_one_after_another(
    cluster: Cluster, plan: Plan, owner: Owner, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "has_blocks", lambda: False)
    record = cluster.acquire(plan, owner)
    assert {record.head_address, *(host.address for _, host in record.hosts)} == {"127.0.0.1"}
    assert len({host.agent_port for _, host in record.hosts} | {record.agent_port}) == 5

    def runs(part: str) -> bool:
        """It became what it is to become, and no longer waits for the one before it."""
        identity = cluster.part(record, part).identity
        assert identity is not None
        return "fake-ray" in psutil.Process(identity.pid).cmdline()

    until(lambda: runs(HEAD))
    order = record.parts
    for before, part, later in zip(order, order[1:], [*order[2:], None], strict=False):
        assert not runs(part)
        socket = record.folder / before / "session_latest" / "sockets" / "raylet"
        socket.parent.mkdir(parents=True)
        socket.touch()
        until(partial(runs, part))
        assert later is None or not runs(later)


def test_a_lease_is_plain_json_that_any_task_can_read(cluster: Cluster, plan: Plan, owner: Owner) -> None:
    lease = cluster.acquire(plan, owner).lease()
    assert SliceLease.from_xcom(lease.to_xcom()) == lease
    assert lease.expires_at - lease.granted_at == plan.lease_for
    assert lease.ray.serve_address is not None
    assert lease.ray.serve_address != lease.ray.address
