"""What GKE's cluster autoscaler decides: which pods wait for a slice, and whether a pool would help them.

Objects go in and answers come out; the messages are those of the real one, whose events people read.
Not here: booting and removing pools, and the events themselves (`autoscaler.py`). Node affinity is not
looked at: the TPU webhook replaces it on the hosts of a slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raytpu_ops.tpu.shapes import SliceShape
from tests.testbed.nodes import TPU_TAINT, Pool, parse
from tests.testbed.tpu_webhook import CLUSTER, LEGACY_INDEX, REPLICA_NAME, TPU, chips_of

Object = dict[str, Any]

NO_MATCH = "node(s) didn't match Pod's node affinity/selector"
UNTOLERATED = "node(s) had untolerated taint(s)"
TOO_FEW_CHIPS = f"Insufficient {TPU}"
AT_MOST = "max node group size reached"
BACKOFF = "in backoff after failed scale-up"
#: Node selectors that GKE meets by making the pool that way.
_ASKED = tuple(
    f"cloud.google.com/{name}"
    for name in (
        "compute-class",
        "gke-spot",
        "gke-flex-start",
        "reservation-name",
        "reservation-affinity",
        "reservation-project",
    )
)
_SPOT = "cloud.google.com/gke-spot"
#: Labels that every node has.
_EVERY_NODE = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}


@dataclass(frozen=True)
class Limit:
    """Slices of one shape that may be booted.

    :param pool: the word for one of them, `v4-2x2x2`.
    :param shape: of the slice.
    :param most: how many of them there may be at once.
    """

    pool: str
    shape: SliceShape
    most: int


def limits(specs: Iterable[str]) -> tuple[Limit, ...]:
    """Read what a run may boot.

    :param specs: `v4-2x2x2*4`: up to four such slices.
    :raises ValueError: for a word that is no pool, or one without TPUs.
    """
    found = []
    for spec in specs:
        pools = parse(spec)
        if pools[0].shape is None:
            raise ValueError(f"autoscaler: {spec!r} has no TPUs; plain nodes are there from the start")
        found.append(Limit(spec.partition("*")[0], pools[0].shape, len(pools)))
    return tuple(found)


def waiting(pods: Iterable[Object]) -> dict[str, list[Object]]:
    """Pods that the scheduler found no node with chips for, by slice, oldest first.

    :param pods: all of the cluster.
    """
    found: dict[str, list[Object]] = {}
    for pod in sorted(pods, key=lambda one: str(one["metadata"]["creationTimestamp"])):
        if _is_unschedulable(pod) and _chips(pod):
            found.setdefault(slice_of(pod), []).append(pod)
    return found


def placed(pods: Iterable[Object]) -> dict[str, set[str]]:
    """Name of each node that pods are on -> the slices that these belong to.

    :param pods: all of the cluster.
    """
    found: dict[str, set[str]] = {}
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if node and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            found.setdefault(node, set()).add(slice_of(pod))
    return found


def slice_of(pod: Object) -> str:
    """The slice that a pod is a host of; a pod that is none is alone.

    :param pod: of any kind.
    """
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    replica = labels.get(REPLICA_NAME) or labels.get(LEGACY_INDEX)
    return "/".join((metadata["namespace"], labels.get(CLUSTER, ""), replica)) if replica else str(metadata["uid"])


def asked_labels(pod: Object) -> dict[str, str]:
    """What the pod's selectors want a new pool to be: Spot, a ComputeClass, a reservation.

    :param pod: a host of the slice.
    """
    selector = pod["spec"].get("nodeSelector") or {}
    return {key: selector[key] for key in _ASKED if key in selector}


def taints_of(labels: dict[str, str]) -> list[dict[str, str]]:
    """Taints of a pool that GKE makes by itself.

    :param labels: what was asked for.
    """
    # Nobody comes to lie on capacity that may be taken away, unless he says so.
    spot = [{"key": _SPOT, "value": "true", "effect": "NoSchedule"}] if labels.get(_SPOT) == "true" else []
    return [TPU_TAINT, *spot]


def refusal(pod: Object, limit: Limit) -> str | None:
    """Why a new pool would not help a pod, in the scheduler's words; None if it would.

    :param pod: that waits.
    :param limit: of the pool.
    """
    asked = asked_labels(pod)
    labels = {**_EVERY_NODE, **Pool("", limit.shape.hosts, limit.shape, asked).node_labels}
    if not (pod["spec"].get("nodeSelector") or {}).items() <= labels.items():
        return NO_MATCH
    if not is_tolerated(pod, taints_of(asked)):
        return UNTOLERATED
    chips = _chips(pod)
    if chips < limit.shape.chips_per_host:
        return NO_MATCH  # on GKE a pod takes all chips of its host: so 2x4 is told from 2x4
    return TOO_FEW_CHIPS if chips > limit.shape.chips_per_host else None


def is_tolerated(pod: Object, taints: Iterable[dict[str, str]]) -> bool:
    """Whether a pod may come to nodes with these taints.

    :param pod: that waits.
    :param taints: of the nodes.
    """
    tolerations = pod["spec"].get("tolerations") or []
    return all(any(_tolerates(one, taint) for one in tolerations) for taint in taints)


def not_triggered(reasons: Iterable[str]) -> str:
    """The message of `NotTriggerScaleUp`.

    :param reasons: one for each pool that there could be.
    """
    counted = Counter(reasons)
    return f"pod didn't trigger scale-up: {', '.join(f'{counted[one]} {one}' for one in sorted(counted))}"


def _is_unschedulable(pod: Object) -> bool:
    if pod["spec"].get("nodeName") or pod["metadata"].get("deletionTimestamp"):
        return False
    conditions = pod.get("status", {}).get("conditions") or []
    return any(one["type"] == "PodScheduled" and one.get("reason") == "Unschedulable" for one in conditions)


def _chips(pod: Object) -> int:
    return sum(chips_of(one) for one in pod["spec"].get("containers") or [])


def _tolerates(toleration: dict[str, str], taint: dict[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint["value"]
