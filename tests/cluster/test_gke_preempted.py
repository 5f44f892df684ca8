"""Work on a lease that loses what it stands on: it ends as preempted, and its retry goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="tests on a cluster need the extra `dev`")

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.flows.jobs import JobRequest, run_job
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.errors import Preempted
from raytpu_ops.tpu.lease import SliceLease
from tests.cluster.leases import (
    LIMIT_S,
    ONE,
    RBAC,
    acquired,
    backend,
    released,
    requested,
    small_with,
    whole,
)
from tests.cluster.queues import quota
from tests.testbed.faults import KubernetesFaults
from tests.waiting import eventually_async

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


async def at_work(gke: GkeBackend, lease: SliceLease, lines: list[str]) -> tuple[JobRequest, asyncio.Task[Any]]:
    """A command that runs for long, once it runs; what it prints goes to ``lines``."""
    request = await requested(gke, lease, "sh", "-c", "echo at work; sleep 900")
    working = asyncio.create_task(run_job(gke, lease, request, emit=lines.append, say=print))

    async def runs() -> bool:
        if working.done():
            working.result()
        return any("at work" in line for line in lines)

    await eventually_async(runs, "it is at work", limit_s=LIMIT_S)
    return request, working


async def runs_once_more(gke: GkeBackend, lease: SliceLease, lines: list[str]) -> None:
    """What the retry of a task does once the lease is whole again, and the release after it."""
    await whole(gke, lease)
    again = await requested(gke, lease, "echo", "once more")
    result = await run_job(gke, lease, again, emit=lines.append, say=print)
    assert len(result["hosts"]) == 2
    assert sum("once more" in line for line in lines) == 2
    await released(gke, lease)


async def test_work_whose_head_stays_away_ends_as_preempted_and_its_retry_waits_for_another_head(
    any_queued_slice: KubernetesFaults,
) -> None:
    """F22: not after the deadline for running, for which the slices would be paid."""
    cluster = any_queued_slice
    with cluster.namespace("gke-headless") as namespace:
        # Its head alone comes to these nodes by a label that is taken away: others' pods find them as before.
        plain, mark = "!cloud.google.com/gke-tpu-accelerator", f"raytpu.test/{namespace}"
        options = small_with(head_template={"nodeSelector": {mark: "true"}})
        gke = backend(cluster.kubeconfig_for(RBAC, namespace), namespace=namespace, **options)
        lines: list[str] = []
        with cluster.labelled(plain, mark):
            lease = await acquired(gke, "headless", ONE)
            await whole(gke, lease)
            request, working = await at_work(gke, lease, lines)
        (head,) = cluster.core.list_namespaced_pod(namespace, label_selector="ray.io/node-type=head").items
        cluster.core.delete_namespaced_pod(head.metadata.name, namespace)
        with pytest.raises(Preempted, match="or Ray its head") as ended:
            await working
        assert request.attempt.submission_id in str(ended.value)
        # Also a look before the next change: only looks are sent again where a connection has idled for too long.
        (head,) = cluster.core.list_namespaced_pod(namespace, label_selector="ray.io/node-type=head").items
        assert head.spec.node_name is None
        report = await gke.observe(lease)
        assert report.lost
        assert not report.stands
        assert "waits for a node: 0/" in report.describe()
        with cluster.labelled(plain, mark):
            await runs_once_more(gke, lease, lines)


async def test_work_that_kueue_preempts_ends_as_preempted_and_its_retry_runs_when_the_quota_is_back(
    any_queued_slice: KubernetesFaults,
) -> None:
    cluster = any_queued_slice
    with cluster.namespace("gke-preempted") as namespace, quota(cluster, namespace, chips=8) as queue:
        kubeconfig = cluster.kubeconfig_for(RBAC, namespace)
        gke = backend(kubeconfig, namespace=namespace, queue=queue.name)
        important = backend(kubeconfig, namespace=namespace, queue=queue.name, queue_priority=queue.priority)

        lease = await acquired(gke, "low", ONE)
        await whole(gke, lease)
        lines: list[str] = []
        request, working = await at_work(gke, lease, lines)

        high = await acquired(important, "high", ONE)
        with pytest.raises(Preempted) as ended:
            await working
        assert request.attempt.submission_id in str(ended.value)

        async def queued_again() -> bool:
            report = await gke.observe(lease)
            return report.phase is Phase.QUEUED and "lost its quota: Preempted" in report.describe()

        await eventually_async(queued_again, "the lease is queued again")
        await released(important, high)

        await runs_once_more(gke, lease, lines)
        assert cluster.count("ray.io/v1", "RayCluster", OWNER, namespace) == 0
