"""Faults that wait for a lease, and those that strike one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.local import faults, processes
from raytpu_ops.backends.local.cluster import Cluster
from raytpu_ops.backends.local.layout import HEAD
from raytpu_ops.tpu.capacity import OnDemand, Reservation, Spot
from raytpu_ops.tpu.errors import CapacityUnavailable, InvalidSpec
from raytpu_ops.tpu.lease import Owner

Mains = Callable[[], Counter[str]]
Until = Callable[[Callable[[], object]], None]


def test_no_capacity_strikes_as_often_as_it_was_told(
    cluster: Cluster, root: Path, plan: Plan, owner: Owner, mains: Mains
) -> None:
    faults.no_capacity(2, root=root)
    for _ in range(2):
        with pytest.raises(CapacityUnavailable, match="no capacity for any of 1 rungs: on_demand: no capacity"):
            cluster.acquire(plan, owner)
        assert mains() == Counter()
    assert cluster.acquire(plan, owner).attempts == []
    assert faults.waiting(root) == []


def test_a_lease_that_is_adopted_needs_no_capacity(cluster: Cluster, root: Path, plan: Plan, owner: Owner) -> None:
    record = cluster.acquire(plan, owner)
    faults.no_capacity(root=root)
    assert cluster.acquire(plan, owner) == record
    assert len(faults.waiting(root)) == 1
    faults.clear(root)


def test_a_kind_of_capacity_that_is_none_is_refused(root: Path) -> None:
    with pytest.raises(InvalidSpec, match="'spott' is no kind of capacity; did you mean 'spot'"):
        faults.no_capacity(rungs=("spott",), root=root)
    assert faults.waiting(root) == []


def test_only_the_named_rungs_are_refused(
    cluster: Cluster, root: Path, owner: Owner, make_plan: Callable[..., Plan]
) -> None:
    faults.no_capacity(rungs=("reservation", "spot"), root=root)
    record = cluster.acquire(make_plan(1, "2x2x1", [Reservation("team-a"), Spot(), OnDemand()]), owner)
    assert record.capacity["kind"] == "on_demand"
    assert record.attempts == [
        "reservation: no capacity (injected fault)",
        "spot: no capacity (injected fault)",
    ]
    assert record.lease().attempts == record.attempts
    assert faults.waiting(root) == []


def test_a_fault_for_rungs_that_nobody_asks_for_goes_on_waiting(
    cluster: Cluster, root: Path, plan: Plan, owner: Owner
) -> None:
    faults.no_capacity(rungs=("spot",), root=root)
    assert cluster.acquire(plan, owner).attempts == []
    assert [fault.kind for fault in faults.waiting(root)] == ["no_capacity"]
    faults.clear(root)


def test_a_slow_host_exists_and_waits(cluster: Cluster, root: Path, plan: Plan, owner: Owner, until: Until) -> None:
    faults.slow_host(1, 0, 600, root=root)
    record = cluster.acquire(plan, owner)
    slow = record.slices[1].hosts[0]
    assert slow.delay_s == 600
    assert [host.delay_s for _, host in record.hosts if host != slow] == [0, 0, 0]

    def runs(part: str) -> bool:
        identity = cluster.part(record, part).identity
        assert identity is not None
        return "fake-ray" in psutil.Process(identity.pid).cmdline()

    until(lambda: all(runs(part) for part in record.parts if part != slow.part))
    assert cluster.part(record, slow.part).alive
    assert not runs(slow.part)
    assert faults.waiting(root) == []


def test_a_slow_host_that_is_released_never_starts(cluster: Cluster, root: Path, plan: Plan, owner: Owner) -> None:
    faults.slow_host(0, 0, 600, root=root)
    record = cluster.acquire(plan, owner)
    assert cluster.release(record.id).left == []
    assert processes.marked(root) == []


def test_a_duplicate_worker_id_is_that_of_the_host_before(
    cluster: Cluster, root: Path, plan: Plan, owner: Owner, environment_of: Callable[..., dict[str, str]]
) -> None:
    faults.duplicate_worker_id(0, 1, root=root)
    record = cluster.acquire(plan, owner)
    shown = {}
    for item, host in record.hosts:
        shown[item.index, host.worker_id] = environment_of(record, host.part)["TPU_WORKER_ID"]
    assert shown == {(0, 0): "0", (0, 1): "0", (1, 0): "0", (1, 1): "1"}


def test_a_replaced_slice_is_free_of_the_fault(cluster: Cluster, root: Path, plan: Plan, owner: Owner) -> None:
    faults.duplicate_worker_id(0, 1, root=root)
    record = cluster.acquire(plan, owner)
    again = cluster.repair(record.id, [record.slices[0].name])
    assert [host.label for host in again.slices[0].hosts] == [0, 1]


def test_a_killed_host_takes_its_children_along_and_nobody_else(
    cluster: Cluster, root: Path, plan: Plan, owner: Owner, mains: Mains
) -> None:
    record = cluster.acquire(plan, owner)
    struck = faults.kill_host(record.lease(), 1, 1, root=root)
    assert struck == [f"{record.slices[1].name}/1 at {record.slices[1].hosts[1].address}"]
    assert mains() == Counter([HEAD, "1", "2", "3"])
    assert {member.marks[processes.MARK_PART] for member in processes.marked(root)} == {HEAD, "1", "2", "3"}


def test_a_preempted_slice_loses_every_host(
    cluster: Cluster, root: Path, plan: Plan, owner: Owner, mains: Mains
) -> None:
    record = cluster.acquire(plan, owner)
    faults.preempt_slice(record.id, record.slices[0].name, root=root)
    assert mains() == Counter([HEAD, "3", "4"])
    faults.preempt_slice(record.id, "1", root=root)  # as it comes from a command line
    assert mains() == Counter([HEAD])


def test_strikes_say_what_there_is(cluster: Cluster, root: Path, plan: Plan, owner: Owner) -> None:
    record = cluster.acquire(plan, owner)
    with pytest.raises(InvalidSpec, match=f"lease nobody-1 is not under {root}; there are: {record.id}"):
        faults.preempt_slice("nobody-1", 0, root=root)
    with pytest.raises(InvalidSpec, match=rf"has no slice 5; it has 0 \({record.slices[0].name}\), 1 "):
        faults.preempt_slice(record.id, 5, root=root)
    with pytest.raises(InvalidSpec, match="has no worker 9; it has 0 to 1"):
        faults.kill_host(record.id, 0, 9, root=root)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda root: faults.no_capacity(0, root=root), "times"),
        (lambda root: faults.slow_host(-1, root=root), "slice"),
        (lambda root: faults.slow_host(seconds=-3.0, root=root), "seconds"),
        (lambda root: faults.duplicate_worker_id(worker=-1, root=root), "worker"),
    ],
)
def test_nonsense_is_refused_in_one_line(root: Path, make: Callable[[Path], object], word: str) -> None:
    with pytest.raises(InvalidSpec, match=f"fault .*{word}") as caught:
        make(root)
    assert "\n" not in str(caught.value)
    assert faults.waiting(root) == []


def test_faults_that_wait_keep_the_root_and_clearing_them_removes_it(root: Path, cluster: Cluster) -> None:
    faults.no_capacity(root=root)
    cluster.root.tidy()
    assert len(faults.waiting(root)) == 1
    faults.clear(root)
    assert not root.exists()
