"""What Kubernetes, KubeRay, Kueue and Ray answer, as their JSON has it, for tests of what is made of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from raytpu_ops.backends.gke.health import Seen
from raytpu_ops.backends.gke.objects import ClusterView, PodView, WorkloadView
from raytpu_ops.ray.states import RayNode
from raytpu_ops.tpu.spec import SliceSpec

SPEC = SliceSpec.of("v4", "2x2x2", num_slices=2)
NAME = "dag-provision-1"
START = datetime(2026, 11, 30, 8, 0, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def text(seconds: float) -> str:
    return at(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(kind: str, true: bool = True, reason: str = "", message: str = "", seconds: float = 0) -> dict[str, Any]:
    return {
        "type": kind,
        "status": "True" if true else "False",
        "reason": reason,
        "message": message,
        "lastTransitionTime": text(seconds),
    }


def cluster(**changes: Any) -> dict[str, Any]:
    """A RayCluster that KubeRay counts as provisioned."""
    metadata = {
        "name": NAME,
        "uid": "u-1",
        "generation": 1,
        "creationTimestamp": text(0),
        "labels": changes.pop("labels", {}),
        **changes.pop("metadata", {}),
    }
    status = {
        "observedGeneration": 1,
        "state": "ready",
        "readyWorkerReplicas": 4,
        "desiredWorkerReplicas": 4,
        "conditions": [condition("HeadPodReady"), condition("RayClusterProvisioned")],
        **changes.pop("status", {}),
    }
    return {"metadata": metadata, "spec": {**changes}, "status": status}


def pod(number: int | None, host: int = 0, **changes: Any) -> dict[str, Any]:
    """A pod that runs and is ready: of host ``host`` of slice ``number``, or for None the head's."""
    head = number is None
    name = "head" if head else f"slice-{number}-host-{host}"
    main = "ray-head" if head else "ray-worker"
    env = (
        []
        if head
        else [{"name": "TPU_WORKER_ID", "value": str(host)}, {"name": "TPU_NAME", "value": f"slice-{number}"}]
    )
    labels = {"ray.io/node-type": "head" if head else "worker"}
    if not head:
        labels |= {"ray.io/worker-group-replica-index": str(number), "ray.io/replica-host-index": str(host)}
    state = {"running": {"startedAt": text(10)}}
    status = {
        "phase": "Running",
        "podIP": address(number, host),
        "conditions": [condition("PodScheduled", seconds=5), condition("Ready", seconds=20)],
        "containerStatuses": [{"name": main, "restartCount": 0, "state": state}],
        **changes.pop("status", {}),
    }
    return {
        "metadata": {
            "name": name,
            "uid": f"u-{name}",
            "creationTimestamp": text(1),
            "labels": {**labels, **changes.pop("labels", {})},
            **changes.pop("metadata", {}),
        },
        "spec": {"containers": [{"name": main, "env": changes.pop("env", env)}]},
        "status": status,
    }


def address(number: int | None, host: int = 0) -> str:
    return "10.0.0.1" if number is None else f"10.0.{number + 1}.{host + 1}"


def waiting(number: int | None, host: int, message: str) -> dict[str, Any]:
    """A pod for which the scheduler has found no node."""
    scheduled = condition("PodScheduled", False, "Unschedulable", message, seconds=2)
    return pod(
        number, host, status={"phase": "Pending", "podIP": None, "conditions": [scheduled], "containerStatuses": []}
    )


def node(number: int | None, host: int = 0, **changes: Any) -> RayNode:
    """A node as Ray shows it, labelled."""
    head = number is None
    labels = (
        {}
        if head
        else {
            **SPEC.shape.ray_labels,
            "ray.io/tpu-slice-name": f"slice-{number}",
            "ray.io/tpu-worker-id": str(host),
        }
    )
    values: dict[str, Any] = {
        "node_id": "head" if head else f"n{number}{host}",
        "address": address(number, host),
        "alive": True,
        "is_head": head,
        "labels": labels,
        "resources": {} if head else {"TPU": 4.0},
        "started_at": at(12),
    }
    return RayNode(**{**values, **changes})


def workload(*conditions: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"creationTimestamp": text(0)}, "status": {"conditions": list(conditions)}}


HOSTS = [(0, 0), (0, 1), (1, 0), (1, 1)]
PODS = [pod(None), *(pod(*place) for place in HOSTS)]
NODES = [node(None), *(node(*place) for place in HOSTS)]


def seen(
    the_cluster: dict[str, Any] | None = None,
    pods: list[dict[str, Any]] | None = None,
    nodes: list[RayNode] | None = NODES,
    the_workload: dict[str, Any] | None = None,
    now: float = 60,
    **changes: Any,
) -> Seen:
    """What was seen; by default of a lease that is whole."""
    return Seen(
        cluster=ClusterView.of(the_cluster or cluster()),
        at=at(now),
        pods=[PodView.of(one) for one in (PODS if pods is None else pods)],
        workload=WorkloadView.of(the_workload) if the_workload else None,
        nodes=nodes,
        **changes,
    )


def with_pods(*changed: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a whole lease, with these in the place of those of the same name."""
    by_name = {one["metadata"]["name"]: one for one in (*PODS, *changed)}
    return list(by_name.values())
