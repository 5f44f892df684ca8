"""Whether a lease's pods have room before chips are paid for: what they ask for, and which node pool may take the head.

With node pools of a lease's own no pod is asked for until all of them run, so a head without a node would be met only
then. Not here: what is free on nodes that run (only the cluster knows, and a lease has no right to look at nodes;
``raytpu doctor`` has), and the comparison with a machine (``google/machines.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raytpu_ops.backends.gke.node_pools import NodePoolView
from raytpu_ops.backends.gke.pools_api import PoolsApi
from raytpu_ops.backends.google.machines import Needs, too_much
from raytpu_ops.tpu.errors import InvalidSpec, RayTpuError
from raytpu_ops.tpu.shapes import catalogue
from raytpu_ops.tpu.words import shown

#: What somebody does for a head that has no node.
MAKE_ROOM = (
    "gcloud container node-pools create heads --cluster CLUSTER --location LOCATION --machine-type n2-standard-4 "
    "--num-nodes 1, or ask for less in the option head"
)
#: What sends a pod to nodes of the user's choice, of which a pool's description does not tell enough.
_PLACED_BY = ("nodeSelector", "affinity", "tolerations", "nodeName")


def needs_of(template: Mapping[str, Any]) -> Needs:
    """What a pod asks for, all its containers together.

    :param template: of the pod, merged.
    :raises InvalidSpec: a container asks for what is no amount.
    """
    cpus = memory = 0.0
    for container in template["spec"]["containers"]:
        resources = container.get("resources") or {}
        # What has a limit alone asks for that much.
        asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        cpus += _amount(asked.get("cpu", 0), container["name"])
        memory += _amount(asked.get("memory", 0), container["name"])
    return Needs(cpus, memory)


def _amount(value: object, container: str) -> float:
    # The one that reads Kubernetes' amounts; the extra `gke` brings it.
    from kubernetes.utils import parse_quantity  # type: ignore[import-untyped]

    try:
        return float(parse_quantity(value))
    except ValueError:
        raise InvalidSpec(
            f"container {container!r} asks for {shown(value)}: must be an amount as Kubernetes writes it, such as '4' "
            "or '16Gi'"
        ) from None


async def head_notes(google: PoolsApi, pools: Sequence[NodePoolView], template: Mapping[str, Any]) -> list[str]:
    """That the head may find no node, if so; by what the pools are, whatever else runs on them.

    :param google: tells of machines, and of the cluster.
    :param pools: all of the cluster's.
    :param template: of the head's pod, merged.
    :return: a note, or none.
    """
    if any(template["spec"].get(field) for field in _PLACED_BY):
        return []
    needs = needs_of(template)
    reasons: list[str] = []
    try:
        for pool in pools:
            why = _unfit(pool) or await _too_small(google, pool, needs)
            if not why:
                return []
            reasons.append(f"{pool.name} {why}")
        if await google.brings_nodes():
            return []
    except RayTpuError as error:
        return [f"whether there is a node for the head was not checked: {error}"]
    there = f": {'; '.join(reasons)}" if reasons else ""
    return [
        f"the head asks for {needs.cpus:g} CPUs and {needs.memory / 2**30:g} GiB, and no node pool of the cluster has "
        f"room for it{there}. If nothing else brings a node, the chips are paid for while it waits: {MAKE_ROOM}"
    ]


def _unfit(pool: NodePoolView) -> str:
    """Why no head can be on it, whatever its size."""
    if pool.is_lost:
        return f"is {pool.status}"
    if pool.machine_type in {shape.machine_type for shape in catalogue()}:
        return "has TPUs"
    if taints := [key for key, _, effect in pool.taints if effect != "PreferNoSchedule"]:
        return f"has the taint {', '.join(taints)}"
    return "" if pool.nodes else "has no nodes"


async def _too_small(google: PoolsApi, pool: NodePoolView, needs: Needs) -> str:
    machine = await google.machine(pool.zones[0], pool.machine_type) if pool.zones else None
    lacks = too_much(needs, machine) if machine is not None else []
    return f"is of {pool.machine_type}: {' and '.join(lacks)}" if lacks else ""
