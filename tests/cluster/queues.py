"""Kueue's queues for tests: a quota of chips in names of its own, on whatever cluster; gone afterwards."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.testbed.faults import KubernetesFaults, wait_until

VERSION = "kueue.x-k8s.io/v1beta2"


@dataclass(frozen=True)
class Queue:
    """What a test names.

    :param name: of the LocalQueue.
    :param flavor: of the chips, as Kueue's reasons call them.
    :param priority: a WorkloadPriorityClass above none.
    """

    name: str
    flavor: str
    priority: str


@contextmanager
def quota(cluster: KubernetesFaults, namespace: str, chips: int) -> Iterator[Queue]:
    """A LocalQueue whose quota is some chips of v4; who is more important takes them from the others.

    :param cluster: with Kueue.
    :param namespace: of the LocalQueue.
    :param chips: the quota.
    """
    mark = secrets.token_hex(3)
    queue = Queue(f"team-{mark}", f"v4-{mark}", f"high-{mark}")
    labels = {"cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice"}
    groups = [
        _group({"google.com/tpu": str(chips)}, queue.flavor),
        _group({"cpu": "100", "memory": "100Gi"}, f"any-{mark}"),
    ]
    preemption = {"withinClusterQueue": "LowerPriority"}
    spec = {"namespaceSelector": {}, "resourceGroups": groups, "preemption": preemption}
    with ExitStack() as made:
        for kind, name, body, where in (
            ("ResourceFlavor", queue.flavor, {"spec": {"nodeLabels": labels}}, None),
            ("ResourceFlavor", f"any-{mark}", {"spec": {}}, None),
            ("WorkloadPriorityClass", queue.priority, {"value": 1000}, None),
            ("ClusterQueue", queue.name, {"spec": spec}, None),
            ("LocalQueue", queue.name, {"spec": {"clusterQueue": queue.name}}, namespace),
        ):
            made.enter_context(_there(cluster, kind, name, body, where))
        yield queue


def workloads(cluster: KubernetesFaults, namespace: str) -> list[dict[str, Any]]:
    """Kueue's Workloads of a namespace.

    :param cluster: with Kueue.
    :param namespace: where.
    """
    found: list[dict[str, Any]] = (
        cluster.dynamic.resources.get(api_version=VERSION, kind="Workload").get(namespace=namespace).to_dict()["items"]
    )
    return found


def _group(resources: dict[str, str], flavor: str) -> dict[str, Any]:
    quotas = [{"name": name, "nominalQuota": quota} for name, quota in resources.items()]
    return {"coveredResources": list(resources), "flavors": [{"name": flavor, "resources": quotas}]}


@contextmanager
def _there(
    cluster: KubernetesFaults, kind: str, name: str, body: dict[str, Any], namespace: str | None
) -> Iterator[None]:
    from kubernetes.dynamic.exceptions import NotFoundError

    resource = cluster.dynamic.resources.get(api_version=VERSION, kind=kind)
    whole = {"apiVersion": VERSION, "kind": kind, "metadata": {"name": name}, **body}
    resource.create(body=whole, namespace=namespace)

    def gone() -> bool:
        try:
            resource.get(name=name, namespace=namespace)
        except NotFoundError:
            return True
        return False

    try:
        yield
    finally:
        resource.delete(name=name, namespace=namespace)
        wait_until(gone, 60, f"{kind} {name} is still in deletion")
