"""What the machine adds to Ray's report: who is dead and why, who still starts."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.local import health
from raytpu_ops.backends.local.cluster import Part
from raytpu_ops.backends.local.layout import HEAD
from raytpu_ops.backends.local.processes import ProcessId
from raytpu_ops.backends.local.record import LeaseRecord
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.readiness import HostReport, Readiness, SliceReport

NOTED = datetime(2026, 1, 1, 12, 0, 3, tzinfo=UTC)


@pytest.fixture
def record(plan: Plan, owner: Owner) -> LeaseRecord:
    made = LeaseRecord(
        id=naming.lease_id(owner),
        owner=owner,
        spec=plan.spec,
        capacity={"kind": "on_demand"},
        granted_at=NOTED,
        expires_at=NOTED + plan.lease_for,
        root="/tmp/rt",
        block="127.9.9",
        head_address="127.9.9.1",
        gcs_port=20_001,
        dashboard_port=20_002,
        serve_port=20_003,
        client_port=20_004,
        agent_port=20_005,
    )
    return made.with_slice(0).with_slice(1)


def parts_of(record: LeaseRecord, tmp_path: Path, *, dead: str | None = None) -> dict[str, Part]:
    identity = ProcessId(4242, "1@boot", NOTED.timestamp())
    return {part: Part(identity, part != dead, tmp_path / part) for part in record.parts}


def ray_of(record: LeaseRecord, *, hosts: int = 2) -> Readiness:
    """Ray knows the first ``hosts`` hosts of each slice."""
    return Readiness(
        head_alive=True,
        slices=[
            SliceReport(
                name=item.name,
                hosts_wanted=2,
                hosts=[
                    HostReport(
                        node_id=f"n{host.part}",
                        address=host.address,
                        worker_id=host.worker_id,
                        chips=4,
                        chips_free=4,
                    )
                    for host in item.hosts[:hosts]
                ],
                missing=[] if hosts == 2 else ["worker 1 of 2 not there yet"],
            )
            for item in record.slices
        ],
    )


def test_a_whole_lease_stays_whole(record: LeaseRecord, tmp_path: Path) -> None:
    ray = ray_of(record)
    assert health.with_processes(ray, record, parts_of(record, tmp_path)) == ray
    assert ray.ready


def test_a_dead_host_breaks_its_slice_before_ray_notices(record: LeaseRecord, tmp_path: Path) -> None:
    dead = record.slices[1].hosts[1].part
    (tmp_path / dead).write_text("starting\n\nSome Ray subprocesses exited unexpectedly:\n  raylet [exit code=-9]\n")
    report = health.with_processes(ray_of(record), record, parts_of(record, tmp_path, dead=dead))
    assert report.broken == [record.slices[1].name]
    assert not report.ready
    (reason,) = report.slices[1].missing
    assert f"worker 1 at {record.slices[1].hosts[1].address} is dead (process 4242 is gone)" in reason
    assert "raylet [exit code=-9]" in reason
    assert "\n" not in reason
    assert report.slices[0].whole


def test_with_a_dead_head_every_slice_is_broken(record: LeaseRecord, tmp_path: Path) -> None:
    report = health.with_processes(
        Readiness(problems=["Ray's head node is not alive"]), record, parts_of(record, tmp_path, dead=HEAD)
    )
    assert report.fatal is None
    assert report.broken == [item.name for item in record.slices]
    assert f"the Ray head at {record.head_address} is dead" in report.describe()
    assert not report.ready
    assert not report.head_alive


def test_a_head_that_starts_is_neither_fatal_nor_broken(record: LeaseRecord, tmp_path: Path) -> None:
    report = health.with_processes(
        Readiness(problems=["Ray's head node is not alive"]), record, parts_of(record, tmp_path)
    )
    assert report.fatal is None
    assert report.broken == []
    assert report.problems == [f"the Ray head at 127.9.9.1 is starting since 12:00:03 UTC, log {tmp_path / HEAD}"]
    assert [item.hosts_wanted for item in report.slices] == [2, 2]


def test_a_host_that_starts_is_named(record: LeaseRecord, tmp_path: Path) -> None:
    report = health.with_processes(ray_of(record, hosts=1), record, parts_of(record, tmp_path))
    late = record.slices[0].hosts[1]
    assert f"worker 1 at {late.address} is starting since 12:00:03 UTC" in report.describe()
    assert report.broken == []


def test_the_same_state_reads_the_same(record: LeaseRecord, tmp_path: Path) -> None:
    parts = parts_of(record, tmp_path)
    first, second = (health.with_processes(ray_of(record, hosts=1), record, parts).describe() for _ in range(2))
    assert first == second


def test_a_host_that_was_never_started_says_so(record: LeaseRecord, tmp_path: Path) -> None:
    parts = parts_of(record, tmp_path)
    part = record.slices[0].hosts[1].part
    parts[part] = Part(None, False, tmp_path / part)
    report = health.with_processes(ray_of(record, hosts=1), record, parts)
    assert "was not started: acquire again" in report.slices[0].missing[-1]
    assert report.broken == []


def test_hosts_that_share_an_address_are_told_apart_by_worker_id(record: LeaseRecord, tmp_path: Path) -> None:
    shared = record.model_copy(update={"block": "127.0.0.1", "slices": [], "next_part": 1}).with_slice(0).with_slice(1)
    report = health.with_processes(ray_of(shared, hosts=1), shared, parts_of(shared, tmp_path))
    for item in report.slices:
        assert len([reason for reason in item.missing if "is starting" in reason]) == 1
        assert any("worker 1 at 127.0.0.1 is starting" in reason for reason in item.missing)
