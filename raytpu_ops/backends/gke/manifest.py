"""A spec becomes a RayCluster: one group of slices, wired as KubeRay and GKE's TPU webhook want it.

Pure: nothing is asked and nothing is sent. Sources: KubeRay's ray.io/v1 types; GKE's documentation
on TPUs with KubeRay; the rules of ai-on-gke/kuberay-tpu-webhook.
Not here: whose cluster it is found again by (``record.py``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from raytpu_ops.backends.gke.merge import merged
from raytpu_ops.backends.gke.settings import Resources, Settings
from raytpu_ops.backends.gke.templates import check_containers, check_shape
from raytpu_ops.tpu.capacity import AnyCapacity
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.spec import SliceSpec

API_VERSION = "ray.io/v1"
KIND = "RayCluster"
#: The worker group; hosts of slice 0 are told that it is called ``slice-0``.
GROUP = "slice"
HEAD_CONTAINER, HOST_CONTAINER = "ray-head", "ray-worker"
#: Ports of the head's service, by name.
PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": 8000}
#: GKE's TPU webhook looks at nothing without it (F17).
WEBHOOK_LABEL = ("app.kubernetes.io/name", "kuberay")
TPU = "google.com/tpu"
#: The label that GKE gives to each node.
POOL_LABEL = "cloud.google.com/gke-nodepool"
#: Ends sooner than Kubernetes' 30 s: nothing of a host is worth waiting for once it is told to go.
_GRACE_S = 10


class Nodes(NamedTuple):
    """The nodes that a lease's hosts run on, where it is not for labels of a kind of capacity to find them.

    :param selector: labels that they have and no others.
    :param tolerations: for their taints.
    """

    selector: dict[str, str]
    tolerations: list[dict[str, str]]


def ray_cluster(
    name: str, spec: SliceSpec, rung: AnyCapacity, settings: Settings, nodes: Nodes | None = None
) -> dict[str, Any]:
    """The manifest, without labels and annotations that say whose it is.

    :param name: of the RayCluster, at most 53 characters.
    :param spec: what is wanted.
    :param rung: the kind of capacity.
    :param settings: the backend's options.
    :param nodes: the nodes of the hosts; default such as the kind of capacity brings.
    :raises InvalidSpec: an override takes away what the webhook, KubeRay or Ray needs.
    """
    labels = {**settings.labels, WEBHOOK_LABEL[0]: WEBHOOK_LABEL[1]}
    metadata: dict[str, Any] = {"name": name, "namespace": settings.namespace, "labels": dict(labels)}
    if settings.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = settings.queue
    if settings.queue_priority:
        metadata["labels"]["kueue.x-k8s.io/priority-class"] = settings.queue_priority
    check_shape("head_template", settings.head_template)
    check_shape("host_template", settings.host_template)
    head = merged(_head(settings, labels), settings.head_template, "head_template")
    host = merged(_host(spec, nodes or _of_kind(rung), settings, labels), settings.host_template, "host_template")
    _check("head_template", head, HEAD_CONTAINER)
    _check("host_template", host, HOST_CONTAINER, spec)
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            "rayVersion": settings.ray_version,
            # Kueue lifts it when there is quota; where Kueue does not run, nothing jumps a queue.
            **({"suspend": True} if settings.queue else {}),
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                "rayStartParams": {"dashboard-host": "0.0.0.0", **settings.head_start_params},  # noqa: S104 - in a pod
                "template": head,
            },
            "workerGroupSpecs": [
                {
                    "groupName": GROUP,
                    "replicas": spec.num_slices,
                    "minReplicas": spec.num_slices,
                    "maxReplicas": spec.num_slices,
                    "numOfHosts": spec.shape.hosts,
                    "rayStartParams": dict(settings.host_start_params),
                    "template": host,
                }
            ],
        },
    }


def digest(manifest: Mapping[str, Any], *more: object) -> str:
    """Sixteen hex digits that change with the manifest's spec.

    :param more: plain JSON that it is to change with as well.
    """
    counted = [manifest["spec"], *more] if more else manifest["spec"]
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16]


def _head(settings: Settings, labels: Mapping[str, str]) -> dict[str, Any]:
    container = _container(HEAD_CONTAINER, settings)
    container["ports"] = [{"name": name, "containerPort": port} for name, port in PORTS.items()]
    requests = _requests(settings.head)
    container["resources"] = {"requests": requests, "limits": {"memory": requests["memory"]}}
    return {"metadata": {"labels": dict(labels)}, "spec": {**_pod(settings), "containers": [container]}}


def _host(spec: SliceSpec, nodes: Nodes, settings: Settings, labels: Mapping[str, str]) -> dict[str, Any]:
    shape = spec.shape
    chips = {TPU: str(shape.chips_per_host)}
    container = _container(HOST_CONTAINER, settings)
    # No limit of memory: a host belongs to one pod, and what is left unused there helps nobody.
    container["resources"] = {"requests": {**_requests(settings.host), **chips}, "limits": chips}
    selector, tolerations = dict(nodes.selector), nodes.tolerations
    if settings.compute_class:
        selector["cloud.google.com/compute-class"] = settings.compute_class
    return {
        "metadata": {"labels": dict(labels)},
        "spec": {
            **_pod(settings),
            "nodeSelector": {**shape.node_selector, **selector},
            "tolerations": [*shape.tolerations, *tolerations],
            "containers": [container],
        },
    }


def _pod(settings: Settings) -> dict[str, Any]:
    return {
        # Ray asks nothing of Kubernetes: a job must not find a token there.
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _GRACE_S,
        # The user of Ray's images.
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 100,
            "fsGroup": 100,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"serviceAccountName": settings.service_account} if settings.service_account else {}),
    }


def _container(name: str, settings: Settings) -> dict[str, Any]:
    return {
        "name": name,
        "image": settings.image,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _requests(resources: Resources) -> dict[str, str]:
    return {"cpu": resources.cpu, "memory": resources.memory}


def _of_kind(rung: AnyCapacity) -> Nodes:
    """Labels and taints by which GKE finds, or makes, nodes of that kind of capacity."""
    if rung.kind == "spot":
        key = "cloud.google.com/gke-spot"
        return Nodes({key: "true"}, [{"key": key, "operator": "Equal", "value": "true", "effect": "NoSchedule"}])
    if rung.kind == "flex_start":
        return Nodes({"cloud.google.com/gke-flex-start": "true"}, [])
    if rung.kind == "reservation":
        project, _, name = rung.name.rpartition("/reservations/")
        selector = {"cloud.google.com/reservation-name": name, "cloud.google.com/reservation-affinity": "specific"}
        if project:
            selector["cloud.google.com/reservation-project"] = project.removeprefix("projects/")
        return Nodes(selector, [])
    return Nodes({}, [])


def _check(setting: str, template: Mapping[str, Any], main: str, spec: SliceSpec | None = None) -> None:
    """What a person's template may not take away.

    :param main: name of Ray's container, which KubeRay takes to be the first.
    :param spec: for hosts.
    """
    key, value = WEBHOOK_LABEL
    if template.get("metadata", {}).get("labels", {}).get(key) != value:
        raise InvalidSpec(
            f"{setting}: the label {key}={value} is what GKE's TPU webhook goes by; leave it as it is, "
            "without it no host gets its TPU variables"
        )
    pod = template.get("spec", {})
    containers = pod.get("containers") or []
    if not containers or containers[0].get("name") != main:
        raise InvalidSpec(f"{setting}: the first container must be {main!r}, where Ray runs")
    check_containers(setting, pod, main)
    if spec is None:
        return
    shape = spec.shape
    for label, wanted in shape.node_selector.items():
        if pod.get("nodeSelector", {}).get(label) != wanted:
            raise InvalidSpec(f"{setting}: the node selector {label}={wanted} follows from the spec; leave it as it is")
    resources = containers[0].get("resources", {})
    for part in ("requests", "limits"):
        chips = resources.get(part, {}).get(TPU)
        if str(chips) != str(shape.chips_per_host):
            raise InvalidSpec(
                f"{setting}: hosts of {shape} have {shape.chips_per_host} chips; {part} of {TPU} says {chips}"
            )
