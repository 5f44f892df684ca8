"""When a lease on real KubeRay and real Ray is whole, and what is said, and done, while it is not.

One lease serves the first four tests: whoever comes later adopts it. What kills hosts or bends the TPU webhook
needs the testbed; the rest also runs on a cluster that `RAYTPU_TEST_KUBECONFIG` names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.flows.leases import stands
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.readiness import Readiness
from tests.cluster.leases import LIMIT_S, ONE, RBAC, V4, acquired, backend, released, small_with, whole
from tests.testbed.client import Testbed
from tests.testbed.faults import KubernetesFaults
from tests.waiting import eventually_async

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

TPU = "google.com/tpu"
NODES = "cloud.google.com/gke-tpu-accelerator=tpu-v4-podslice,cloud.google.com/gke-tpu-topology=2x2x2"
#: Labels of KubeRay.
REPLICA, HOST = "ray.io/worker-group-replica-index", "ray.io/replica-host-index"
#: Owner of the lease that is handed on by adoption.
SHARED = "readiness"


@pytest.fixture(scope="module")
def gke(kubernetes: KubernetesFaults, namespace: str) -> GkeBackend:
    """With the rights of deploy/gke/rbac.yaml and no more."""
    return backend(kubernetes.kubeconfig_for(RBAC, namespace), namespace=namespace)


def says(gke: GkeBackend, lease: SliceLease, *words: str) -> Callable[[], Awaitable[Readiness | None]]:
    """A look that answers the report once it holds all these words."""

    async def look() -> Readiness | None:
        report = await gke.observe(lease)
        assert not report.ready
        return report if all(word in report.describe() for word in words) else None

    return look


async def seen(gke: GkeBackend, lease: SliceLease, *words: str) -> Readiness:
    report = await eventually_async(says(gke, lease, *words), f"the report says {words}", limit_s=LIMIT_S)
    assert report is not None
    return report


def three_hosts(cluster: KubernetesFaults) -> list[str]:
    """Nodes for one slice and half of another, of those on which nobody has chips; a named cluster may have many."""
    busy = {
        pod.spec.node_name
        for pod in cluster.core.list_pod_for_all_namespaces(field_selector="status.phase=Running").items
        if any(TPU in (one.resources.limits or {}) for one in pod.spec.containers)
    }
    pools: dict[str, list[str]] = {}
    for node in cluster.core.list_node(label_selector=NODES).items:
        if not node.spec.unschedulable and node.metadata.name not in busy:
            pools.setdefault(node.metadata.labels["cloud.google.com/gke-nodepool"], []).append(node.metadata.name)
    first, second, *_ = [hosts for hosts in pools.values() if len(hosts) == ONE.shape.hosts]
    return [*first, second[0]]


async def test_three_of_four_hosts_name_the_pod_that_waits_and_the_schedulers_reason(
    kubernetes: KubernetesFaults, gke: GkeBackend, namespace: str
) -> None:
    """F14."""
    with kubernetes.no_node_fits(NODES, but=three_hosts(kubernetes)):
        lease = await acquired(gke, SHARED)
        report = await seen(gke, lease, "3 of 4 hosts labelled", "waits for a node: 0/", " nodes are available")
        hosts = kubernetes.core.list_namespaced_pod(namespace, label_selector="ray.io/node-type=worker").items
        (late,) = [pod.metadata for pod in hosts if pod.spec.node_name is None]
        assert report.phase is Phase.PROVISIONING
        assert f"pod {late.name} (worker {late.labels[HOST]}) waits for a node: 0/" in report.describe()
        assert "1 of 2 slices whole" in report.describe()
    report = await whole(gke, lease)
    assert sorted(host.worker_id or 0 for one in report.slices for host in one.hosts) == [0, 0, 1, 1]


async def test_a_host_that_vanishes_breaks_its_slice_which_is_replaced_whole(
    slices: Testbed, gke: GkeBackend, namespace: str
) -> None:
    """F13: SIGKILL of a node; the other slice stays as it is."""
    lease = await acquired(gke, SHARED)
    before = await whole(gke, lease)
    slices.kill_node("v4-2x2x2-1-0")

    async def broken() -> list[str]:
        return (await gke.observe(lease)).broken

    (lost,) = await eventually_async(broken, "the slice is broken", limit_s=LIMIT_S)
    assert not await stands(gke, lease)
    there = _pods(slices, namespace)
    waiting = asyncio.create_task(whole(gke, lease))

    async def replaced() -> bool:
        return len(_pods(slices, namespace) - there) == 2

    await eventually_async(replaced, "both pods of the slice are new", limit_s=LIMIT_S)
    slices.start_node("v4-2x2x2-1-0")
    after = await waiting

    def hosts(report: Readiness, keep: bool) -> set[str]:
        return {host.node_id for one in report.slices for host in one.hosts if (one.name == lost) is not keep}

    assert hosts(before, True) == hosts(after, True)
    assert hosts(before, False).isdisjoint(hosts(after, False))


def _pods(slices: Testbed, namespace: str) -> set[str]:
    return {one.metadata.uid for one in slices.core.list_namespaced_pod(namespace).items}


async def test_kuberays_word_ready_is_not_believed_while_pods_are_pending(
    kubernetes: KubernetesFaults, gke: GkeBackend, namespace: str
) -> None:
    """kuberay#2188: `state: ready` stays, once all pods ran."""
    lease = await acquired(gke, SHARED)
    await whole(gke, lease)
    (pod,) = kubernetes.core.list_namespaced_pod(namespace, label_selector=f"{REPLICA}=0,{HOST}=1").items
    with kubernetes.no_node_fits(NODES):
        kubernetes.core.delete_namespaced_pod(pod.metadata.name, namespace)
        report = await seen(gke, lease, "waits for a node: 0/")
        there = kubernetes.custom.get_namespaced_custom_object("ray.io", "v1", namespace, "rayclusters", lease.id)
        assert there["status"]["state"] == "ready"
        assert not report.ready
        assert not report.stands
    await whole(gke, lease)


async def test_a_replica_that_is_recreated_under_us_never_counts_by_its_old_hosts(
    kubernetes: KubernetesFaults, gke: GkeBackend, namespace: str
) -> None:
    """Somebody deletes a pod: KubeRay makes the whole slice anew. The release afterwards leaves nothing."""
    lease = await acquired(gke, SHARED)
    before = await whole(gke, lease)
    pods = kubernetes.core.list_namespaced_pod(namespace, label_selector=f"{REPLICA}=0").items
    kubernetes.core.delete_namespaced_pod(pods[0].metadata.name, namespace)

    async def not_whole() -> bool:
        return not (await gke.observe(lease)).ready

    await eventually_async(not_whole, "the loss is seen", limit_s=LIMIT_S)
    after = await whole(gke, lease)
    old = {host.node_id for host in before.slices[0].hosts}
    assert old.isdisjoint(host.node_id for one in after.slices for host in one.hosts)

    await released(gke, lease)
    assert kubernetes.count("ray.io/v1", "RayCluster", OWNER, namespace) == 0
    assert kubernetes.count("v1", "Pod", "ray.io/cluster", namespace) == 0


async def test_pods_that_are_ready_before_ray_has_labelled_them_are_waited_for(
    kubernetes: KubernetesFaults, namespace: str
) -> None:
    """Kubernetes and KubeRay call everything ready; Ray itself starts later on one host than on the other."""
    late = {
        "name": "ray-worker",
        "command": ["until [ -e /tmp/go ]; do sleep 0.2; done"],  # KubeRay puts it before its own
        "readinessProbe": {"exec": {"command": ["true"]}},
    }
    options = small_with(host_template={"containers": [late]})
    gke = backend(kubernetes.kubeconfig_for(RBAC, namespace), namespace=namespace, **options)
    lease = await acquired(gke, "late-labels", ONE)
    hosts = f"ray.io/cluster={lease.id},ray.io/node-type=worker"

    async def all_ready() -> list[str]:
        pods = kubernetes.core.list_namespaced_pod(namespace, label_selector=hosts).items
        there = kubernetes.custom.get_namespaced_custom_object("ray.io", "v1", namespace, "rayclusters", lease.id)
        rows = {row["type"]: row["status"] for row in there.get("status", {}).get("conditions", [])}
        return sorted(pod.metadata.name for pod in pods) if rows.get("RayClusterProvisioned") == "True" else []

    first, second = await eventually_async(all_ready, "KubeRay calls every pod ready", limit_s=LIMIT_S)
    await seen(gke, lease, "0 of 2 hosts labelled", "Ray has not labelled it yet")
    kubernetes.run_in(first, "touch", "/tmp/go", namespace=namespace)
    report = await seen(gke, lease, "1 of 2 hosts labelled", f"pod {second} (worker ", "Ray has not labelled it yet")
    assert report.phase is Phase.LABELLED
    assert report.stands  # late, not lost
    kubernetes.run_in(second, "touch", "/tmp/go", namespace=namespace)
    await whole(gke, lease)
    await released(gke, lease)


@pytest.mark.parametrize("part", ["worker", "head"])
async def test_a_pod_whose_host_stays_dead_is_taken_away_and_made_anew(
    slices: Testbed, namespace: str, part: str
) -> None:
    """F13: its Node object stays, its pod ends for ever, and KubeRay makes none in its place.

    Nobody looked while Ray alone could tell.
    """
    soon = [
        {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 3}
        for taint in ("not-ready", "unreachable")
    ]
    options = small_with(head_template={"tolerations": soon}, host_template={"tolerations": soon})
    gke = backend(slices.kubeconfig_for(RBAC, namespace), namespace=namespace, **options)
    lease = await acquired(gke, f"dead-{part}", ONE)
    before = await whole(gke, lease)
    selector = f"ray.io/cluster={lease.id},ray.io/node-type={part}"
    victim = slices.core.list_namespaced_pod(namespace, label_selector=selector).items[0]
    slices.kill_node(victim.spec.node_name)
    try:

        async def told() -> Readiness | None:
            found = await gke.observe(lease)
            return found if "is being deleted, and its host is gone" in found.describe() else None

        report = await eventually_async(told, "the host is taken for gone", limit_s=LIMIT_S)
        assert report is not None
        assert f"pod {victim.metadata.name} " in report.describe()
        assert report.broken == [before.slices[0].name]
        assert victim.metadata.uid in _pods(slices, namespace)
        waiting = asyncio.create_task(whole(gke, lease))

        async def gone() -> bool:
            return victim.metadata.uid not in _pods(slices, namespace)

        await eventually_async(gone, "its pod is gone", limit_s=LIMIT_S)
    finally:
        slices.start_node(victim.spec.node_name)
    after = await waiting
    old = {host.node_id for host in before.slices[0].hosts}
    assert old.isdisjoint(host.node_id for one in after.slices for host in one.hosts)
    await released(gke, lease)


@pytest.mark.parametrize("fault", ["duplicate_ids", "crash_heads"])
async def test_what_the_webhook_does_wrong_is_named(slices: Testbed, gke: GkeBackend, fault: str) -> None:
    """F19: two pods with one worker id. F21: a head that crash-loops, with its reason and its last words."""
    faults: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "duplicate_ids": lambda: slices.webhook_faults(duplicate_ids=True),
        "crash_heads": lambda: slices.webhook_faults(crash_heads=True),
    }
    words = {
        "duplicate_ids": ("slice-0: pods ", " all have TPU_WORKER_ID 0"),
        "crash_heads": ("head pod ", "CrashLoopBackOff", "exit code 13", "its last words: ", "lets this head crash"),
    }
    with faults[fault]():
        lease = await acquired(gke, fault.replace("_", "-"), ONE)
        report = await seen(gke, lease, *words[fault])
        assert not report.broken
    await released(gke, lease)


async def test_an_image_that_cannot_be_pulled_is_named(
    kubernetes: KubernetesFaults, gke: GkeBackend, namespace: str
) -> None:
    # No registry has this name; that of the testbed has everything that is called Ray.
    image = "example.invalid/nobodys:1"
    other = backend(kubernetes.kubeconfig_for(RBAC, namespace), namespace=namespace, image=image)
    lease = await acquired(other, "no-image", ONE)
    await seen(other, lease, "head pod ", "Pull", image)
    await released(other, lease)


async def test_nobody_waits_for_nodes_that_are_not_there_without_saying_so(
    kubernetes: KubernetesFaults, gke: GkeBackend
) -> None:
    with kubernetes.no_node_fits(NODES):
        lease = await acquired(gke, "no-nodes", V4)
        report = await seen(gke, lease, "0 of 4 hosts labelled", "node(s) were unschedulable")
        assert report.phase is Phase.PROVISIONING
        await released(gke, lease)
