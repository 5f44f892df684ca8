"""Kueue and the `gke` backend: queued is shown as queued, goes on by itself, and leaves nothing.

On a cluster that `RAYTPU_TEST_KUBECONFIG` names, these tests make a queue of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.flows.leases import give_back, stands, wait_whole
from raytpu_ops.flows.reaping import nobody_knows, reap
from raytpu_ops.tpu.deadlines import Deadlines, Phase, Schedule
from raytpu_ops.tpu.errors import DeadlineExceeded
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.tpu.spec import SliceSpec
from tests.cluster.leases import V4, acquired, backend
from tests.cluster.queues import Queue, quota, workloads
from tests.testbed.faults import KubernetesFaults, wait_until
from tests.waiting import eventually_async

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RBAC = Path(__file__).parents[2] / "deploy" / "gke" / "rbac.yaml"
ONE = SliceSpec.of("v4", "2x2x2")


@pytest.fixture(scope="module")
def namespace(any_queue: KubernetesFaults) -> Iterator[str]:
    with any_queue.namespace("gke-kueue") as name:
        yield name


@pytest.fixture(scope="module")
def queue(any_queue: KubernetesFaults, namespace: str) -> Iterator[Queue]:
    """The quota is two slices of two hosts."""
    with quota(any_queue, namespace, chips=16) as made:
        yield made


@pytest.fixture
def gke(any_queue: KubernetesFaults, namespace: str, queue: Queue) -> GkeBackend:
    return backend(any_queue.kubeconfig_for(RBAC, namespace), namespace=namespace, queue=queue.name)


def leases(cluster: KubernetesFaults, namespace: str) -> int:
    return cluster.count("ray.io/v1", "RayCluster", OWNER, namespace)


async def released(gke: GkeBackend, lease: SliceLease) -> None:
    await give_back(gke, lease, by=datetime.now(UTC) + timedelta(minutes=2), say=print, poll_s=0.5)


async def queued(gke: GkeBackend, lease: SliceLease, words: str) -> Readiness:
    return await _in_phase(gke, lease, (Phase.QUEUED,), words)


async def admitted(gke: GkeBackend, lease: SliceLease) -> Readiness:
    """Its pods are wanted; where there are nodes they may have one already."""
    return await _in_phase(gke, lease, (Phase.PROVISIONING, Phase.LABELLED), "")


async def _in_phase(gke: GkeBackend, lease: SliceLease, phases: tuple[Phase, ...], words: str) -> Readiness:
    async def look() -> Readiness | None:
        report = await gke.observe(lease)
        return report if report.phase in phases and words in report.describe() else None

    return await eventually_async(look, f"{lease.id} is {' or '.join(phases)}: {words}")


async def test_over_quota_is_queued_in_kueues_words_and_goes_on_when_quota_is_freed(
    any_queue: KubernetesFaults, gke: GkeBackend, namespace: str, queue: Queue
) -> None:
    first = await acquired(gke, "first", ONE)
    await admitted(gke, first)
    second = await acquired(gke, "second", V4)
    report = await queued(gke, second, f"insufficient unused quota for google.com/tpu in flavor {queue.flavor}")
    assert f"queued by Kueue in LocalQueue {queue.name}" in report.describe()
    assert any_queue.count("v1", "Pod", f"ray.io/cluster={second.id}", namespace) == 0

    await released(gke, first)
    report = await admitted(gke, second)
    assert report.since is not None
    await released(gke, second)
    assert leases(any_queue, namespace) == 0


async def test_a_release_while_queued_leaves_nothing(
    any_queue: KubernetesFaults, gke: GkeBackend, namespace: str
) -> None:
    lease = await acquired(gke, "too-large", SliceSpec.of("v4", "2x2x2", num_slices=3))
    await queued(gke, lease, "insufficient quota")
    await released(gke, lease)
    assert leases(any_queue, namespace) == 0
    wait_until(lambda: not workloads(any_queue, namespace), 60, "a Workload is left")
    assert [one.metadata.name for one in any_queue.core.list_namespaced_secret(namespace).items if one.data] == []


async def test_the_queue_has_a_deadline_of_its_own_and_the_error_says_kueues_reason(gke: GkeBackend) -> None:
    lease = await acquired(gke, "impatient", SliceSpec.of("v4", "2x2x2", num_slices=3))
    await queued(gke, lease, "insufficient quota")
    deadlines = Deadlines.of({"queued": 3, "provisioning": 600, "labelled": 600})
    with pytest.raises(DeadlineExceeded, match="the queued deadline .* insufficient quota for google.com/tpu"):
        await wait_whole(gke, lease, schedule=Schedule.start(deadlines), say=print, poll_s=0.5)
    await released(gke, lease)


async def test_one_that_kueue_preempts_is_queued_again_and_what_ran_on_it_does_not_stand(
    any_queue: KubernetesFaults, gke: GkeBackend, namespace: str, queue: Queue
) -> None:
    low = await acquired(gke, "low", V4)
    await admitted(gke, low)
    important = backend(
        any_queue.kubeconfig_for(RBAC, namespace), namespace=namespace, queue=queue.name, queue_priority=queue.priority
    )
    high = await acquired(important, "high", V4)
    report = await queued(gke, low, "lost its quota: Preempted")
    assert report.since is not None
    assert not await stands(gke, low)
    await released(important, high)
    await admitted(gke, low)
    await released(gke, low)


async def test_the_reaper_takes_a_lease_by_its_time_with_slices_and_not_by_that_in_the_queue(
    any_queue: KubernetesFaults, gke: GkeBackend, namespace: str
) -> None:
    """A lease for an hour that waited for longer is not over before it has begun."""
    first = await acquired(gke, "first", V4)
    await admitted(gke, first)
    second = await acquired(gke, "second", V4)
    await queued(gke, second, "insufficient unused quota")
    assert await kept(gke, second, datetime.now(UTC) + timedelta(hours=1.5))
    assert not await kept(gke, second, datetime.now(UTC) + timedelta(hours=5.5))

    freed = datetime.now(UTC)
    await released(gke, first)
    await admitted(gke, second)
    wait_until(lambda: resumed(any_queue, namespace, second), 60, "KubeRay has not seen that it may begin")
    (there,) = await gke.list_leases()
    assert there.granted_at >= freed - timedelta(seconds=1)  # Kubernetes writes whole seconds
    assert there.expires_at - there.granted_at == timedelta(hours=1)
    assert await kept(gke, second, there.expires_at - timedelta(seconds=1))
    assert not await kept(gke, second, there.expires_at)

    by = datetime.now(UTC) + timedelta(minutes=2)
    done = await reap(gke, nobody_knows, there.expires_at, by=by, say=print)
    assert (len(done.released), done.left) == (1, [])
    assert leases(any_queue, namespace) == 0


async def kept(gke: GkeBackend, lease: SliceLease, now: datetime) -> bool:
    """Whether a reaper would let it be then."""
    by = datetime.now(UTC) + timedelta(minutes=2)
    done = await reap(gke, nobody_knows, now, by=by, say=print, dry_run=True)
    assert done.left == []
    return any(line.startswith(lease.id) for line in done.kept)


def resumed(cluster: KubernetesFaults, namespace: str, lease: SliceLease) -> bool:
    """Whether KubeRay says that its pods are wanted."""
    there = cluster.custom.get_namespaced_custom_object("ray.io", "v1", namespace, "rayclusters", lease.id)
    rows = {row["type"]: row["status"] for row in there.get("status", {}).get("conditions", [])}
    return rows.get("RayClusterSuspended") == "False"


async def test_a_queue_that_does_not_exist_is_named(any_queue: KubernetesFaults, namespace: str) -> None:
    other = backend(any_queue.kubeconfig_for(RBAC, namespace), namespace=namespace, queue="no-such")
    lease = await acquired(other, "nowhere", ONE)
    report = await queued(other, lease, "no-such")
    assert "LocalQueue" in report.describe()
    await released(other, lease)
