"""Kueue and the `gke` backend: queued is shown as queued, goes on by itself, and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.flows.leases import give_back, stands, wait_whole
from raytpu_ops.tpu.deadlines import Deadlines, Phase, Schedule
from raytpu_ops.tpu.errors import DeadlineExceeded
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.tpu.spec import SliceSpec
from tests.cluster.leases import V4, acquired, backend
from tests.testbed.client import Testbed
from tests.waiting import eventually_async

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

VERSION = "kueue.x-k8s.io/v1beta2"
RBAC = Path(__file__).parents[2] / "deploy" / "gke" / "rbac.yaml"
ONE = SliceSpec.of("v4", "2x2x2")


def make(testbed: Testbed, kind: str, name: str, body: dict[str, Any], namespace: str | None = None) -> None:
    whole = {"apiVersion": VERSION, "kind": kind, "metadata": {"name": name}, **body}
    testbed.dynamic.resources.get(api_version=VERSION, kind=kind).create(body=whole, namespace=namespace)


@pytest.fixture(scope="module")
def namespace(queued: Testbed) -> Iterator[str]:
    """A namespace with a LocalQueue whose quota is two slices of two hosts."""

    def group(resources: dict[str, str], flavor: str) -> dict[str, Any]:
        quotas = [{"name": name, "nominalQuota": quota} for name, quota in resources.items()]
        return {"coveredResources": list(resources), "flavors": [{"name": flavor, "resources": quotas}]}

    labels = {"cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice"}
    make(queued, "ResourceFlavor", "v4", {"spec": {"nodeLabels": labels}})
    make(queued, "ResourceFlavor", "any", {"spec": {}})
    make(queued, "WorkloadPriorityClass", "high", {"value": 1000})
    groups = [group({"google.com/tpu": "16"}, "v4"), group({"cpu": "100", "memory": "100Gi"}, "any")]
    preemption = {"withinClusterQueue": "LowerPriority"}
    make(
        queued,
        "ClusterQueue",
        "tpus",
        {"spec": {"namespaceSelector": {}, "resourceGroups": groups, "preemption": preemption}},
    )
    with queued.namespace("gke-kueue") as name:
        make(queued, "LocalQueue", "team", {"spec": {"clusterQueue": "tpus"}}, name)
        yield name


@pytest.fixture
def gke(queued: Testbed, namespace: str) -> GkeBackend:
    return backend(queued.kubeconfig_for(RBAC, namespace), namespace=namespace, queue="team")


async def released(gke: GkeBackend, lease: SliceLease) -> None:
    await give_back(gke, lease, by=datetime.now(UTC) + timedelta(minutes=2), say=print, poll_s=0.5)


async def in_phase(gke: GkeBackend, lease: SliceLease, phase: Phase, words: str = "") -> Readiness:
    async def look() -> Readiness | None:
        report = await gke.observe(lease)
        return report if report.phase is phase and words in report.describe() else None

    return await eventually_async(look, f"{lease.id} is {phase}: {words}")


async def test_over_quota_is_queued_in_kueues_words_and_goes_on_when_quota_is_freed(
    queued: Testbed, gke: GkeBackend
) -> None:
    first = await acquired(gke, "first", ONE)
    await in_phase(gke, first, Phase.PROVISIONING)
    second = await acquired(gke, "second", V4)
    report = await in_phase(gke, second, Phase.QUEUED, "insufficient unused quota for google.com/tpu in flavor v4")
    assert "queued by Kueue in LocalQueue team" in report.describe()
    assert queued.count("v1", "Pod", f"ray.io/cluster={second.id}") == 0

    await released(gke, first)
    report = await in_phase(gke, second, Phase.PROVISIONING)
    assert report.since is not None
    await released(gke, second)
    assert queued.count("ray.io/v1", "RayCluster", OWNER) == 0


async def test_a_release_while_queued_leaves_nothing(queued: Testbed, gke: GkeBackend, namespace: str) -> None:
    lease = await acquired(gke, "too-large", SliceSpec.of("v4", "2x2x2", num_slices=3))
    await in_phase(gke, lease, Phase.QUEUED, "insufficient quota")
    await released(gke, lease)
    assert queued.count("ray.io/v1", "RayCluster", OWNER) == 0
    assert queued.count(VERSION, "Workload") == 0
    assert [one.metadata.name for one in queued.core.list_namespaced_secret(namespace).items if one.data] == []


async def test_the_queue_has_a_deadline_of_its_own_and_the_error_says_kueues_reason(gke: GkeBackend) -> None:
    lease = await acquired(gke, "impatient", SliceSpec.of("v4", "2x2x2", num_slices=3))
    await in_phase(gke, lease, Phase.QUEUED, "insufficient quota")
    deadlines = Deadlines.of({"queued": 3, "provisioning": 600, "labelled": 600})
    with pytest.raises(DeadlineExceeded, match="the queued deadline .* insufficient quota for google.com/tpu"):
        await wait_whole(gke, lease, schedule=Schedule.start(deadlines), say=print, poll_s=0.5)
    await released(gke, lease)


async def test_one_that_kueue_preempts_is_queued_again_and_what_ran_on_it_does_not_stand(
    queued: Testbed, gke: GkeBackend, namespace: str
) -> None:
    low = await acquired(gke, "low", V4)
    await in_phase(gke, low, Phase.PROVISIONING)
    important = backend(
        queued.kubeconfig_for(RBAC, namespace), namespace=namespace, queue="team", queue_priority="high"
    )
    high = await acquired(important, "high", V4)
    report = await in_phase(gke, low, Phase.QUEUED, "lost its quota: Preempted")
    assert report.since is not None
    assert not await stands(gke, low)
    await released(important, high)
    await in_phase(gke, low, Phase.PROVISIONING)
    await released(gke, low)


async def test_a_queue_that_does_not_exist_is_named(queued: Testbed, gke: GkeBackend, namespace: str) -> None:
    other = backend(queued.kubeconfig_for(RBAC, namespace), namespace=namespace, queue="no-such")
    lease = await acquired(other, "nowhere", ONE)
    report = await in_phase(other, lease, Phase.QUEUED, "no-such")
    assert "LocalQueue" in report.describe()
    await released(other, lease)
