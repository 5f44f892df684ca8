"""A task that comes to slices which do not stand waits for them in the triggerer, and no other task does."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import TaskDeferred

from raytpu_ops.operators.base import RayTpuOperator
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.readiness import Readiness, SliceReport
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.triggers.leases import SlicesReadyTrigger

NOW = datetime.now(UTC)
LEASE = SliceLease(
    id="d-provision-1",
    owner=Owner(dag_id="d", run_id="r", task_id="provision"),
    backend="local",
    spec=SliceSpec.of("v4", "2x2x2", num_slices=2),
    ray=RayEndpoint(address="http://127.0.0.1:8265"),
    granted_at=NOW,
    expires_at=NOW + timedelta(hours=1),
)
CONTEXT: Any = {"ti": SimpleNamespace(dag_id="d", run_id="r", task_id="train", map_index=-1)}


def one(name: str, **changes: Any) -> SliceReport:
    return SliceReport(name=name, hosts_wanted=2, **changes)


WHOLE, LATE = [one("s0"), one("s1")], [one("s0"), one("s1", missing=["worker 1"])]
HALF, NONE = [one("s0"), one("s1", broken=True)], [one("s0", broken=True), one("s1", broken=True)]


@pytest.mark.parametrize(
    ("report", "waits"),
    [
        (Readiness(slices=WHOLE, head_alive=True), False),
        (Readiness(slices=LATE, head_alive=True), False),
        (Readiness(slices=WHOLE, head_alive=False), False),  # only silent
        (Readiness(slices=HALF, head_alive=True), False),
        (Readiness(slices=LATE, fatal="it is gone"), False),
        (Readiness(slices=WHOLE, headless=True), True),
        (Readiness(slices=HALF, headless=True), True),
        (Readiness(slices=NONE), True),
        (Readiness(slices=LATE, phase=Phase.QUEUED), True),
        (Readiness(slices=LATE, phase=Phase.PROVISIONING, head_alive=True), True),
    ],
)
def test_it_waits_without_a_worker_slot_where_nothing_can_run(report: Readiness, waits: bool) -> None:
    async def observe(lease: SliceLease) -> Readiness:
        return report

    with DAG("d", schedule=None):
        task = RayTpuOperator(task_id="train")
    backend: Any = SimpleNamespace(observe=observe)

    if not waits:
        assert task.until_whole(CONTEXT, backend, LEASE, None) == LEASE
        return
    with pytest.raises(TaskDeferred) as deferred:
        task.until_whole(CONTEXT, backend, LEASE, None)
    assert isinstance(deferred.value.trigger, SlicesReadyTrigger)
    assert deferred.value.method_name == "resume_whole"
