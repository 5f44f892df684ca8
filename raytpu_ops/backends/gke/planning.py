"""What a lease would be made of, in words, and what is refused because it can't work.

Pure: nobody is asked. Not here: what Google says of it beforehand (``google/preflight.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.gke import manifest as manifests
from raytpu_ops.backends.gke.node_pools import own_nodes, own_policy
from raytpu_ops.backends.gke.pool_settings import NodePools
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.backends.ladder import check_queue
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.capacity import FLEX_START_LIMIT, AnyCapacity, FlexStart, Queued
from raytpu_ops.tpu.deadlines import Deadlines
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.spec import SliceSpec

#: What GKE takes as a rule to make a node pool, or to delete one, at least and at most. On many clusters it does one
#: thing at a time.
_A_QUICK_POOL, _A_POOL = timedelta(minutes=2), timedelta(minutes=4)
#: An image of Ray's that is for CPUs.
_RAYS_OWN = re.compile(r"(docker\.io/)?rayproject/ray:(?!.*tpu)")


def planned(
    spec: SliceSpec, ladder: Sequence[AnyCapacity], settings: Settings, lease_for: timedelta, owner: Owner | None = None
) -> Plan:
    """The plan.

    :param owner: whose names are told.
    :raises InvalidSpec: a kind of capacity that this backend does not have, a shape that Ray can't reserve, or a
        template that breaks it.
    """
    options, shape = settings.node_pools, spec.shape
    shape.check_reserved()
    made = options is not None and not options.reuse
    _check(spec, ladder, options)
    manifest_of(spec, ladder, settings)  # refuses what cannot work
    creates = [
        f"1 RayCluster in namespace {settings.namespace} with {settings.image}",
        "1 head pod",
        f"{_counted(spec.hosts, 'host pod')}: {spec.num_slices} x {shape}, "
        f"{_counted(shape.chips_per_host, 'chip')} on each host",
    ]
    if options is not None and made:
        creates += _pools(spec, ladder, options)
    return Plan(
        backend="gke",
        spec=spec,
        ladder=list(ladder),
        lease_for=lease_for,
        deadlines=_deadlines(spec) if made else Deadlines(),
        creates=creates,
        notes=[note for note in (*_notes(spec, ladder, settings, lease_for), _without_jax(settings.image)) if note],
        names=naming.with_room(owner, spec.num_slices if made else 0) if owner else [],
    )


def one_by_one(pools: int) -> timedelta:
    """How much longer several node pools take than one."""
    return max(pools - 1, 0) * _A_POOL


def _deadlines(spec: SliceSpec) -> Deadlines:
    """Those where no user says otherwise."""
    usual, more = Deadlines(), one_by_one(spec.num_slices)
    return Deadlines(provisioning=usual.provisioning + more, releasing=usual.releasing + more)


def manifest_of(spec: SliceSpec, ladder: Sequence[AnyCapacity], settings: Settings) -> Mapping[str, Any]:
    """The RayCluster, but for names that follow from an owner.

    :raises InvalidSpec: a template that breaks it.
    """
    nodes = own_nodes("plan", ladder) if settings.node_pools is not None else None
    return manifests.ray_cluster("plan", spec, ladder[0], settings, nodes)


def _check(spec: SliceSpec, ladder: Sequence[AnyCapacity], options: NodePools | None) -> None:
    if len(ladder) > 1 and (options is None or options.reuse):
        raise InvalidSpec(
            f"capacity: backend 'gke' takes one kind, {len(ladder)} were given: it takes a ladder where it makes "
            "the nodes itself, with its option node_pools; a ComputeClass can hold a ladder of its own, name it in "
            "compute_class"
        )
    for index, rung in enumerate(ladder):
        if rung.kind == "queued" and (options is None or options.reuse):
            raise InvalidSpec(
                f"capacity[{index}]: backend 'gke' queues at Google for node pools that it makes itself: set its "
                "option node_pools, without reuse; or leave Queued out and name a Kueue LocalQueue in its option queue"
            )
        check_queue(rung, f"capacity[{index}]")
    if options is not None and options.reuse and len(options.reuse) != spec.num_slices:
        raise InvalidSpec(
            f"node_pools.reuse: {len(options.reuse)} node pools are named, {spec} needs one for each slice"
        )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _pools(spec: SliceSpec, ladder: Sequence[AnyCapacity], options: NodePools) -> list[str]:
    shape = spec.shape
    where = f" in {' or '.join(options.zones)}" if options.zones else ""
    each = "each of" if spec.num_slices > 1 else "of"
    nodes = _counted(shape.hosts, f"{shape.machine_type} node")
    found = [f"{_counted(spec.num_slices, 'GKE node pool')}{where}, {each} {nodes}"]
    if any(rung.kind == "queued" for rung in ladder):
        found.append(f"{_counted(spec.num_slices, 'ProvisioningRequest')} with a PodTemplate, in the queued step")
    if own_policy("plan", shape, options):
        found.append(f"1 workload policy for topology {shape.topology}")
    return found


def _short(rung: FlexStart | Queued, lease_for: timedelta) -> str:
    """That the hosts go before the lease does."""
    runs = rung.max_run_duration if rung.kind == "flex_start" else FLEX_START_LIMIT
    if runs >= lease_for:
        return ""
    return f"{rung.kind} hosts are taken back after {runs}, the lease is for {lease_for}"


def _without_jax(image: str) -> str:
    """That no training with JAX runs in Ray's own image as it is."""
    if not _RAYS_OWN.match(image):
        return ""
    return f"{image} has no JAX: training needs an image with it, or runtime_env={{'pip': ['jax[tpu]', …]}} in the task"


def _takes_long(spec: SliceSpec, ladder: Sequence[AnyCapacity]) -> list[str]:
    """That node pools come, and go, one after the other."""
    pools, granted = spec.num_slices, _deadlines(spec)
    if pools == 1:
        return []
    time = (
        f"{pools} node pools may come and go one after the other, each in two to four minutes: provisioning has "
        f"{granted.provisioning}, releasing {granted.releasing}, where deadlines says nothing else"
    )
    short = [rung for rung in ladder if rung.within is not None and rung.within < pools * _A_QUICK_POOL]
    return [
        time,
        *(f"{rung.kind}: within {rung.within} is short for {pools} node pools one after the other" for rung in short),
    ]


def _notes(spec: SliceSpec, ladder: Sequence[AnyCapacity], settings: Settings, lease_for: timedelta) -> list[str]:
    options = settings.node_pools
    short = [_short(rung, lease_for) for rung in ladder if rung.kind in ("flex_start", "queued")]
    if options is not None and options.reuse:
        return [f"the hosts run in node pools {', '.join(options.reuse)}, which stay; capacity is theirs"]
    if options is not None:
        tried = ", then ".join(f"reservation {one.name}" if one.kind == "reservation" else one.kind for one in ladder)
        several = len(ladder) > 1 or len(options.zones) > 1
        notes = [f"tried in order: {tried}; each in every zone before the next"] if several else []
        notes += _takes_long(spec, ladder)
        if spec.num_slices > 1 and any(rung.kind == "queued" for rung in ladder):
            notes.append("queued: each slice is granted by itself, and paid for until the last one is there")
        return [*notes, *short]
    notes = [f"waits in Kueue's LocalQueue {settings.queue}"] if settings.queue else []
    if ladder[0].kind != "on_demand":
        notes.append(f"{ladder[0].kind} nodes are chosen by label: they exist, or the autoscaler brings them")
    return [*notes, *short]
