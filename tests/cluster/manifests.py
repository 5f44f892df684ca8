"""Manifests for tests of the testbed itself, written out by hand: nothing of the package makes them."""

from __future__ import annotations

from typing import Any

IMAGE = "rayproject/ray:2.60.0"


def ray_cluster(
    name: str,
    *,
    slices: int = 2,
    topology: str = "2x2x2",
    hosts: int = 2,
    accelerator: str = "tpu-v4-podslice",
    chips: int = 4,
    image: str = IMAGE,
    labels: dict[str, str] | None = None,
    without_ray: bool = False,
) -> dict[str, Any]:
    """A RayCluster with one group of TPU slices; without Ray its pods are KubeRay's, and do nothing."""
    label = {"app.kubernetes.io/name": "kuberay"}
    grace = 1 if without_ray else 5  # a `sleep` hears no SIGTERM

    def container(kind: str, resources: dict[str, str]) -> dict[str, Any]:
        small = {"cpu": "100m", "memory": "256Mi"}
        return {
            "name": kind,
            "image": image,
            "resources": {"requests": {**small, **resources}, "limits": {"cpu": "2", "memory": "4Gi", **resources}},
        }

    worker: dict[str, Any] = {
        "groupName": "slices",
        "replicas": slices,
        "minReplicas": slices,
        "maxReplicas": slices,
        "numOfHosts": hosts,
        "rayStartParams": {"num-cpus": "1"},
        "template": {
            "metadata": {"labels": label},
            "spec": {
                "terminationGracePeriodSeconds": grace,
                "nodeSelector": {
                    "cloud.google.com/gke-tpu-accelerator": accelerator,
                    "cloud.google.com/gke-tpu-topology": topology,
                },
                "tolerations": [
                    {"key": "google.com/tpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"}
                ],
                "containers": [container("ray-worker", {"google.com/tpu": str(chips)})],
            },
        },
    }
    head: dict[str, Any] = {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
        "template": {
            "metadata": {"labels": label},
            "spec": {"terminationGracePeriodSeconds": grace, "containers": [container("ray-head", {})]},
        },
    }
    if without_ray:
        for one in (head, worker):
            one["template"]["metadata"]["annotations"] = {"ray.io/overwrite-container-cmd": "true"}
            one["template"]["spec"]["containers"][0]["command"] = ["sleep", "600"]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": name, "namespace": "default", "labels": {**label, **(labels or {})}},
        "spec": {
            "rayVersion": "2.60.0",
            "authOptions": {"mode": "token"},
            "headGroupSpec": head,
            "workerGroupSpecs": [worker],
        },
    }


def host_pod(
    name: str, *command: str, replica: int = 0, host: int = 0, image: str = IMAGE, topology: str = "2x2x2"
) -> dict[str, Any]:
    """A pod as KubeRay would make it for one host of a v4 slice, with a command instead of Ray."""
    labels = {
        "app.kubernetes.io/name": "kuberay",
        "ray.io/cluster": "by-hand",
        "ray.io/group": "slices",
        "ray.io/worker-group-replica-name": f"slices-{replica}",
        "ray.io/worker-group-replica-index": str(replica),
        "ray.io/replica-host-index": str(host),
    }
    container = {
        "name": "host",
        "image": image,
        "command": list(command or ("sleep", "600")),
        "resources": {"limits": {"google.com/tpu": "4"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": {
                "cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice",
                "cloud.google.com/gke-tpu-topology": topology,
            },
            "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}],
            "containers": [container],
        },
    }


def plain_pod(name: str, *command: str, image: str = IMAGE) -> dict[str, Any]:
    """A pod without chips."""
    container = {"name": "plain", "image": image, "command": list(command or ("sleep", "600"))}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}, "spec": spec}
