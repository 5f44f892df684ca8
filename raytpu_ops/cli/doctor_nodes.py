"""Whether a cluster's nodes can carry a lease: slices by chips and labels, the head by its size.

Judged by what a node has, not by what is free of it now: others' pods come and go, and a wait says which of its own
has no node. Not here: how nodes are asked for (``doctor_gke.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from raytpu_ops.backends.gke.manifest import POOL_LABEL, TPU
from raytpu_ops.backends.gke.room import MAKE_ROOM
from raytpu_ops.backends.gke.settings import Resources
from raytpu_ops.cli.doctor import Check
from raytpu_ops.tpu.shapes import ACCELERATOR_LABEL, TOPOLOGY_LABEL

#: The rows, in the order in which they are shown.
SLICES, HEAD = "TPU nodes", "node for the head"
#: By what hosts are placed, each with a word for its value: the first two are in the pods' selector, and with the last
#: the TPU webhook keeps a slice together. Nodes of GKE have them all.
_PLACED_BY = {ACCELERATOR_LABEL: "ACCELERATOR", TOPOLOGY_LABEL: "TOPOLOGY", POOL_LABEL: "POOL"}


def judge(nodes: Sequence[dict[str, Any]], head: Resources) -> list[Check]:
    """The rows about nodes.

    :param nodes: all of the cluster.
    :param head: what the head asks for.
    """
    return [_slices(nodes), _head(nodes, head)]


def _slices(nodes: Sequence[dict[str, Any]]) -> Check:
    pools: Counter[tuple[str, ...]] = Counter()
    #: Names of nodes by the labels that they lack.
    lacking: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        labels, chips = node["metadata"].get("labels") or {}, _allocatable(node).get(TPU, "0")
        if ACCELERATOR_LABEL in labels or chips != "0":
            kind = labels.get(ACCELERATOR_LABEL, "?"), labels.get(TOPOLOGY_LABEL, "?"), chips
            pools[(labels.get(POOL_LABEL, "no pool"), *kind)] += 1
            lacked = tuple(label for label in _PLACED_BY if label not in labels)
            lacking.setdefault(lacked, []).append(node["metadata"]["name"])
    if not pools:
        return Check(SLICES, True, "none now, which is fine where node pools scale up from nothing")
    placeable = lacking.pop((), [])
    words = [
        f"{pool}: {count} x {accelerator} {topology}, {chips} chips each"
        for (pool, accelerator, topology, chips), count in sorted(pools.items())
    ]
    if lacking:
        words += [f"{', '.join(names)} without {', '.join(labels)}" for labels, names in lacking.items()]
        return Check(SLICES, False, "; ".join(words), _how_to_label(lacking), needed=not placeable)
    if all(key[-1] == "0" for key in pools):
        help_ = f"the TPU device plugin brings {TPU}: kubectl get pods --namespace kube-system"
        return Check(SLICES, False, "; ".join(words), help_, needed=False)
    return Check(SLICES, True, "; ".join(words))


def _how_to_label(lacking: dict[tuple[str, ...], list[str]]) -> str:
    commands = [
        f"kubectl label node {' '.join(names)} {' '.join(f'{label}={_PLACED_BY[label]}' for label in labels)}"
        for labels, names in lacking.items()
    ]
    return f"{'; '.join(commands)} (one POOL for each slice; the others as `raytpu shapes --json` has them)"


def _head(nodes: Sequence[dict[str, Any]], head: Resources) -> Check:
    from kubernetes.utils import parse_quantity  # type: ignore[import-untyped]

    wanted = {"cpu": head.cpu, "memory": head.memory}
    # The head tolerates no taint unless a template of the user's says so.
    fit = [
        node["metadata"]["name"]
        for node in nodes
        if all(taint["effect"] == "PreferNoSchedule" for taint in node.get("spec", {}).get("taints") or [])
        and all(
            parse_quantity(_allocatable(node).get(name, "0")) >= parse_quantity(size) for name, size in wanted.items()
        )
    ]
    size = f"{head.cpu} CPU and {head.memory}"
    if fit:
        return Check(HEAD, True, f"{len(fit)} with room for {size}")
    return Check(
        HEAD,
        False,
        f"none without a taint has room for {size}",
        f"{MAKE_ROOM}; nothing is to be done where nodes come when pods ask",
        needed=False,
    )


def _allocatable(node: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = node.get("status", {}).get("allocatable") or {}
    return found
