"""The rules of GKE's TPU webhook for KubeRay, played: pods are mutated, RayClusters validated.

Facts from ai-on-gke/kuberay-tpu-webhook; `test_tpu_webhook.py` has one test for each rule.
Objects go in and answers come out; not here: HTTP and TLS (`admission.py`), where pods come from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

TPU = "google.com/tpu"
CLUSTER, GROUP = "ray.io/cluster", "ray.io/group"
REPLICA_NAME, REPLICA_INDEX = "ray.io/worker-group-replica-name", "ray.io/worker-group-replica-index"
HOST_INDEX, LEGACY_INDEX = "ray.io/replica-host-index", "replicaIndex"
TOPOLOGY, ACCELERATOR = "cloud.google.com/gke-tpu-topology", "cloud.google.com/gke-tpu-accelerator"
NODE_POOL = "cloud.google.com/gke-nodepool"
#: First ports of what has one port for each container.
PROCESS_PORT, MEGASCALE_PORT = 8471, 8081
#: KubeRay cuts service names to this many characters; a cut keeps the end.
_SERVICE_NAME = 50

Object = dict[str, Any]


class Refused(Exception):
    """The webhook answers 403; the message is what it logs."""


@dataclass(frozen=True)
class Place:
    """Where a pod stands: which slice of its group, which host of that slice."""

    slice: int
    host: int


def mutate(pod: Object, known: Iterable[Object] = (), *, duplicates: bool = False) -> list[Object]:
    """The JSON patch for a pod that is being created.

    :param pod: as the API server sends it.
    :param known: pods of its group, as the webhook's cache has them; counted only where the pod lacks
        KubeRay's indexing labels.
    :param duplicates: the fault: every host of a slice becomes host 0.
    :raises Refused: when the pod lacks what the webhook needs.
    """
    containers = pod["spec"].get("containers") or []
    if not any(chips_of(one) for one in containers):
        return []
    labels = pod["metadata"].get("labels") or {}
    selector = pod["spec"].get("nodeSelector") or {}
    cluster, group, topology = labels.get(CLUSTER), labels.get(GROUP), selector.get(TOPOLOGY)
    if not cluster:
        raise Refused(f"pod lacks the label {CLUSTER}")
    if not group:
        raise Refused(f"pod lacks the label {GROUP}")
    if not topology:
        raise Refused(f"pod lacks the node selector {TOPOLOGY}")
    hosts = hosts_of(topology, sum(chips_of(one) for one in containers))
    patch: list[Object] = []
    if REPLICA_INDEX in labels and HOST_INDEX in labels:
        place = Place(_number(labels, REPLICA_INDEX), _number(labels, HOST_INDEX))
    else:
        place = legacy_place(known, hosts)
        patch.append(_add(f"/metadata/labels/{LEGACY_INDEX}", f"{group}-{place.slice}"))
    if duplicates:
        place = Place(place.slice, 0)
    if hosts > 1:
        patch += [
            _add("/spec/hostname", f"{group}-{place.slice}-{place.host}"),
            _add("/spec/subdomain", headless_service(cluster)),
            _add("/spec/affinity", affinity(labels, f"{group}-{place.slice}")),
        ]
    seven = selector.get(ACCELERATOR, "").startswith("tpu7x")
    patch += _environment(containers, cluster, group, hosts, place, seven=seven)
    return patch


def validate(cluster: Object) -> str | None:
    """Why a RayCluster is refused, None if it is not.

    :param cluster: as the API server sends it.
    :raises Refused: for a group that asks for TPUs and lacks the topology or `numOfHosts`.
    """
    for group in cluster.get("spec", {}).get("workerGroupSpecs") or []:
        spec = group.get("template", {}).get("spec", {})
        chips = sum(chips_of(one) for one in spec.get("containers") or [])
        if not chips:
            continue
        if not group.get("numOfHosts"):
            raise Refused(f"group {group.get('groupName')}: numOfHosts is not set")
        topology = (spec.get("nodeSelector") or {}).get(TOPOLOGY)
        if not topology:
            raise Refused(f"group {group.get('groupName')}: no node selector {TOPOLOGY}")
        if hosts_of(topology, chips) != group["numOfHosts"]:
            return "Number of workers in worker group not equal to specified topology"
    return None


def chips_of(container: Object) -> int:
    """Chips that a container asks for; the limit counts where there is no request."""
    resources = container.get("resources") or {}
    for kind in ("requests", "limits"):
        asked = int((resources.get(kind) or {}).get(TPU, 0))
        if asked:
            return asked
    return 0


def hosts_of(topology: str, chips: int) -> int:
    """Hosts of a slice, by what one pod asks for.

    :param topology: `2x2x2`.
    :param chips: that the pod asks for.
    :raises Refused: for a topology that is not made of numbers.
    """
    try:
        return max(prod(int(part) for part in topology.split("x")) // chips, 1)
    except ValueError:
        raise Refused(f"topology {topology!r} is not made of numbers") from None


def headless_service(cluster: str) -> str:
    """KubeRay's name for it, cut as KubeRay cuts it.

    :param cluster: name of the RayCluster.
    """
    name = f"{cluster}-headless"[-_SERVICE_NAME:]
    return f"r{name[1:]}" if name[0].isdigit() or not name[0].isalnum() else name


def legacy_place(pods: Iterable[Object], hosts: int) -> Place:
    """What the webhook gives out by counting the pods that it knows.

    Pods that it does not know yet are counted as absent; that is how ids were given out twice.

    :param pods: of the group.
    :param hosts: of a slice.
    """
    taken: dict[int, set[int]] = {}
    for pod in pods:
        index = (pod["metadata"].get("labels") or {}).get(LEGACY_INDEX)
        if not index or pod["metadata"].get("deletionTimestamp"):
            continue
        containers = [one for one in pod["spec"]["containers"] if chips_of(one)]
        worker = _value(containers[0], "TPU_WORKER_ID") if containers else ""
        if not worker:
            raise Refused("an existing TPU worker has no TPU_WORKER_ID")
        taken.setdefault(int(index.rsplit("-", 1)[-1]), set()).add(int(worker) // len(containers))
    with_room = [index for index, ids in taken.items() if len(ids) < hosts]
    chosen = min(with_room) if with_room else len(taken)
    ids = taken.get(chosen, set())
    return Place(chosen, next(host for host in range(len(ids) + 1) if host not in ids))


def affinity(labels: dict[str, str], legacy: str) -> Object:
    """One slice, one node pool: drawn to its own hosts, away from every other slice and cluster.

    :param labels: of the pod.
    :param legacy: the value of `replicaIndex` where KubeRay gives no replica name.
    """
    named = REPLICA_NAME in labels and HOST_INDEX in labels
    key, value = (REPLICA_NAME, labels[REPLICA_NAME]) if named else (LEGACY_INDEX, legacy)

    def term(*rules: tuple[str, str, str | None], **more: object) -> Object:
        expressions = [
            {"key": name, "operator": operator, **({"values": [word]} if word is not None else {})}
            for name, operator, word in rules
        ]
        return {"labelSelector": {"matchExpressions": expressions}, "topologyKey": NODE_POOL, **more}

    everywhere = {
        "matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system"]}]
    }
    mine = labels[CLUSTER]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    return {
        "podAffinity": {required: [term((key, "In", value), (CLUSTER, "In", mine))]},
        "podAntiAffinity": {
            required: [
                term((key, "NotIn", value), (CLUSTER, "In", mine)),
                term((CLUSTER, "NotIn", mine), (key, "Exists", None), namespaceSelector=everywhere),
            ]
        },
    }


def _environment(
    containers: list[Object], cluster: str, group: str, hosts: int, place: Place, *, seven: bool
) -> list[Object]:
    patch: list[Object] = []
    service = headless_service(cluster)
    names = [f"{group}-{place.slice}-{host}.{service}" for host in range(hosts)]
    counted = [index for index, one in enumerate(containers) if chips_of(one)]
    for order, index in enumerate(counted):
        container = containers[index]
        worker = place.host * len(counted) + order if seven else place.host
        wanted: dict[str, str | Object] = {}
        if _has(container, "MEGASCALE_NUM_SLICES"):
            first = f"{group}-0-0.{service}"
            wanted["MEGASCALE_SLICE_ID"] = str(place.slice)
            wanted["MEGASCALE_COORDINATOR_ADDRESS"] = f"{first}:{MEGASCALE_PORT}" if seven else first
            wanted["MEGASCALE_PORT"] = str(MEGASCALE_PORT + order if seven else MEGASCALE_PORT)
        if hosts > 1:
            wanted["TPU_WORKER_HOSTNAMES"] = ",".join(names)
            if seven:
                ports = range(PROCESS_PORT, PROCESS_PORT + len(counted))
                wanted["TPU_PROCESS_ADDRESSES"] = ",".join(f"{name}:{port}" for name in names for port in ports)
                wanted["TPU_PROCESS_PORT"] = str(PROCESS_PORT + order)
        wanted["TPU_WORKER_ID"] = str(worker)
        wanted["TPU_NAME"] = f"{group}-{place.slice}"
        wanted["TPU_DEVICE_PLUGIN_HOST_IP"] = {"fieldRef": {"fieldPath": "status.hostIP"}}
        wanted["TPU_DEVICE_PLUGIN_ADDR"] = "$(TPU_DEVICE_PLUGIN_HOST_IP):2112"
        present = bool(container.get("env"))
        for name, value in wanted.items():
            if _value(container, name) == value or not _gives_way(container, name, order):
                continue
            entry = {"name": name, "value": value} if isinstance(value, str) else {"name": name, "valueFrom": value}
            path = f"/spec/containers/{index}/env"
            patch.append(_add(f"{path}/-", entry) if present else _add(path, [entry]))
            present = True
    return patch


def _gives_way(container: Object, name: str, order: int) -> bool:
    """What the pod's author set stays, but for defaults that would be wrong on more than one host."""
    value = _value(container, name)
    if name == "TPU_DEVICE_PLUGIN_HOST_IP":
        return not _has(container, name)
    if name == "TPU_WORKER_HOSTNAMES":
        return value in ("", "localhost")
    if name == "TPU_PROCESS_ADDRESSES":
        return value == "" or "localhost" in value
    if name == "TPU_WORKER_ID":
        return value in ("", str(order))
    return value == ""


def _value(container: Object, name: str) -> str:
    found = [one.get("value") or "" for one in container.get("env") or [] if one["name"] == name]
    return found[0] if found else ""


def _has(container: Object, name: str) -> bool:
    return any(one["name"] == name and (one.get("value") or one.get("valueFrom")) for one in container.get("env") or [])


def _number(labels: dict[str, str], key: str) -> int:
    try:
        return int(labels[key])
    except ValueError:
        raise Refused(f"label {key}={labels[key]!r} is not a number") from None


def _add(path: str, value: object) -> Object:
    return {"op": "add", "path": path, "value": value}
