"""The `gke` backend where KubeRay does not number the hosts of a slice, and GKE's TPU webhook counts them itself.

That is KubeRay 1.5, or a newer one without its gate RayMultiHostIndexing: a pod that is gone is replaced alone,
where one that numbers them makes the slice anew. What the webhook hands out then: `test_legacy_ids.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.tpu.readiness import Readiness
from tests.cluster.leases import LIMIT_S, RBAC, V4, acquired, backend, released, whole
from tests.testbed.client import Testbed
from tests.waiting import eventually_async

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]


def hosts(testbed: Testbed, namespace: str) -> list[Any]:
    return list(testbed.core.list_namespaced_pod(namespace, label_selector="ray.io/node-type=worker").items)


def check(report: Readiness) -> None:
    """Two whole slices, each with the ids 0 and 1."""
    assert [sorted(host.worker_id or 0 for host in one.hosts) for one in report.slices] == [[0, 1], [0, 1]]


def nodes_of(report: Readiness) -> dict[str, set[str]]:
    """Slice -> Ray's ids of its hosts."""
    return {one.name: {host.node_id for host in one.hosts} for one in report.slices}


async def test_a_lease_of_unnumbered_hosts_is_whole_again_after_each_loss_and_leaves_nothing(slices: Testbed) -> None:
    """F13."""
    gates = "RayMultiHostIndexing=false"
    with slices.operator_gates(gates), slices.namespace("gke-unnumbered") as namespace:
        gke = backend(slices.kubeconfig_for(RBAC, namespace), namespace=namespace)
        lease = await acquired(gke, "provision", V4)
        first = await whole(gke, lease)
        check(first)
        pods = hosts(slices, namespace)
        assert not any("ray.io/replica-host-index" in pod.metadata.labels for pod in pods)

        async def not_whole() -> bool:
            return not (await gke.observe(lease)).ready

        slices.core.delete_namespaced_pod(pods[0].metadata.name, namespace)
        await eventually_async(not_whole, "the loss of a pod is seen", limit_s=LIMIT_S)
        second = await whole(gke, lease)
        check(second)
        assert sum(nodes_of(first)[name] == there for name, there in nodes_of(second).items()) == 1

        async def broken() -> list[str]:
            return (await gke.observe(lease)).broken

        node = hosts(slices, namespace)[0].spec.node_name
        slices.kill_node(node)
        (lost,) = await eventually_async(broken, "the slice is broken", limit_s=LIMIT_S)
        there = {pod.metadata.uid for pod in hosts(slices, namespace)}
        waiting = asyncio.create_task(whole(gke, lease))

        async def replaced() -> bool:
            return len({pod.metadata.uid for pod in hosts(slices, namespace)} - there) >= 2

        await eventually_async(replaced, "both pods of the slice are new", limit_s=LIMIT_S)
        slices.start_node(node)
        third = await waiting
        check(third)
        assert nodes_of(third)[lost].isdisjoint(nodes_of(second)[lost])
        (other,) = nodes_of(third).keys() - {lost}
        assert nodes_of(third)[other] == nodes_of(second)[other]

        await released(gke, lease)
        assert slices.count("ray.io/v1", "RayCluster", OWNER, namespace) == 0
        assert slices.count("v1", "Pod", "ray.io/cluster", namespace) == 0
