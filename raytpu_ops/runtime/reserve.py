"""Whole slices for one piece of work, reserved before a deadline and given back in any case.

Ray's ``slice_placement_group`` takes the first slice whose worker 0 is free, and then waits without
a word for the other hosts: for ever, where one of them is busy or dead. So a slice is chosen here,
among those that are whole and free, and claimed in the way that Ray claims one, by the resource on
its worker 0; then Ray reserves that slice by its name. At the deadline the error names the busy
hosts and who holds them.
Several slices are had all at once or not at all: two that wait with a part each would wait for each
other. So one that needs many comes after those that need few, and its deadline counts on. That holds
for Ray Train too, which by itself claims slice after slice and keeps what it has.
Not here: what runs on the hosts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from raytpu_ops.runtime.cluster import SLICE_NAME, Holding, Host, free_chips, holdings, tpu_hosts, whole_slices
from raytpu_ops.runtime.console import say
from raytpu_ops.tpu.errors import DeadlineExceeded, Preempted, RayTpuError
from raytpu_ops.tpu.shapes import SliceShape
from raytpu_ops.tpu.spec import SliceSpec

#: Pause between two looks at what is free, and how long Ray may take to hand over what is.
_LOOK_S, _CLAIM_S = 0.5, 10.0


@dataclass(frozen=True)
class ReservedHost:
    """A host that is reserved, and how to get onto it.

    :param host: the host.
    :param slice_index: number of its slice among the reserved ones.
    :param group: the placement group of its slice.
    :param bundle: the group's bundle that is on this host.
    """

    host: Host
    slice_index: int
    group: Any
    bundle: int

    def options(self) -> dict[str, Any]:
        """Options of a Ray task or actor that takes the whole host."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": 0,
            "resources": {"TPU": self.host.chips},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.bundle
            ),
        }


@dataclass
class Claim:
    """Slices that are ours; Ray Train takes it for its own ``SlicePlacementGroup``.

    :param heads: the group on their workers 0, None for single hosts.
    :param handle: Ray's, of the whole.
    """

    heads: Any = None
    handle: Any = None

    @property
    def placement_group(self) -> Any:
        """The placement group with a bundle on each host."""
        return self.handle.placement_group

    def shutdown(self) -> None:
        """Give them back; safe to call twice."""
        from ray.util.placement_group import remove_placement_group

        if self.handle is not None:
            self.handle.shutdown()
        if self.heads is not None:
            remove_placement_group(self.heads)
        self.heads = self.handle = None


@dataclass
class Reservation:
    """Reserved slices. :meth:`release` gives them back; nothing else does while their creator lives.

    :param claims: what is held of each slice.
    :param places: every host, by slice and worker id.
    """

    claims: list[Claim] = field(default_factory=list)
    places: list[ReservedHost] = field(default_factory=list)

    @property
    def hosts(self) -> list[Host]:
        """Every host, by slice and worker id."""
        return [place.host for place in self.places]

    def release(self) -> None:
        """Give the slices back; safe to call twice."""
        while self.claims:
            self.claims[-1].shutdown()
            self.claims.pop()


@contextmanager
def reserved(spec: SliceSpec, until: float, name: str, address: str) -> Iterator[Reservation]:
    """Slices for the body of a ``with``; see :func:`reserve`."""
    reservation = reserve(spec, until, name, address)
    try:
        yield reservation
    finally:
        reservation.release()


def reserve(spec: SliceSpec, until: float, name: str, address: str) -> Reservation:
    """Reserve whole slices.

    :param spec: which, and how many.
    :param until: when to give up, by :func:`time.monotonic`.
    :param name: what other people read when they wonder who holds the hosts; unique on the cluster.
    :param address: of Ray's head.
    :raises DeadlineExceeded: naming the hosts that were busy and who holds them.
    :raises Preempted: when slices of this shape have lost hosts, so that too few are whole.
    :raises InvalidSpec: when Ray cannot reserve this shape at all.
    """
    reservation = Reservation()
    began = time.monotonic()
    spec.shape.check_reserved()
    try:
        while not _claim_all(reservation.claims, spec, name):
            if (left := until - time.monotonic()) < 0:
                raise TimeoutError
            # Ray announces neither hosts that come nor chips that are given back; and whoever claimed at
            # the same time must not come back at the same time.
            pause = random.uniform(_LOOK_S, _CLAIM_S) if reservation.claims else _LOOK_S  # noqa: S311
            reservation.release()
            time.sleep(min(pause, max(left, _LOOK_S)))
        reservation.places.extend(_places([claim.placement_group for claim in reservation.claims]))
    except TimeoutError as error:
        # Looked at before the release below, which would free what we hold ourselves.
        own = {claim.placement_group.id.hex() for claim in reservation.claims}
        late = not_reserved(spec, time.monotonic() - began, address, lambda holding: holding.group_id in own)
        reservation.release()
        raise late from error
    except BaseException:
        reservation.release()
        raise
    say(f"reserved {', '.join(str(host) for host in reservation.hosts)}")
    return reservation


def reserve_together(spec: SliceSpec, within_s: float, name: str, resources: Mapping[str, float]) -> Claim:
    """Reserve whole slices as Ray Train wants them: in one placement group, slice by slice.

    :param within_s: when to give up, in seconds.
    :param name: see :func:`reserve`.
    :param resources: what Ray Train will ask of each host; a bundle with less takes no worker.
    :raises TimeoutError: they were not to be had, as Ray's own class says it; :func:`not_reserved` knows why.
    """
    until = time.monotonic() + within_s
    while True:
        free = _free_slices(spec.shape)[: spec.num_slices]
        claim = _claim(spec.shape, free, name, resources) if len(free) == spec.num_slices else None
        if claim is not None:
            return claim
        if time.monotonic() > until:
            raise TimeoutError(f"{spec}: not reserved after {within_s:.0f} s")
        time.sleep(_LOOK_S)  # Ray announces neither hosts that come nor chips that are given back


def _claim_all(claims: list[Claim], spec: SliceSpec, name: str) -> bool:
    """Claim slices while there are as many free ones as are wanted; whether all are ours now."""
    tried: set[str] = set()
    while (wanted := spec.num_slices - len(claims)) > 0:
        free = [slice_name for slice_name in _free_slices(spec.shape) if slice_name not in tried]
        if len(free) < wanted:
            return False
        tried.add(free[0])
        claim = _claim(spec.shape, free[:1], f"{name}-{len(claims)}")
        if claim is not None:
            claims.append(claim)
    return True


def _free_slices(shape: SliceShape) -> list[str]:
    """Names of slices that are whole and that nobody holds a chip of."""
    free = free_chips()
    return [
        name
        for name, hosts in sorted(whole_slices(shape).items())
        if all(free.get(host.node_id, 0.0) >= host.chips for host in hosts)
    ]


def _claim(
    shape: SliceShape, slice_names: list[str], name: str, resources: Mapping[str, float] | None = None
) -> Claim | None:
    """These slices, all of them, or None where somebody else was faster."""
    from ray.util.placement_group import placement_group
    from ray.util.tpu import slice_placement_group

    claim = Claim()
    try:
        if not shape.single_host:
            claim.heads = placement_group(
                [{shape.head_resource: 1} for _ in slice_names],
                name=f"{name}-head",
                bundle_label_selector=[{SLICE_NAME: slice_name} for slice_name in slice_names],
            )
            if not claim.heads.wait(_CLAIM_S):
                claim.shutdown()
                return None
        claim.handle = slice_placement_group(
            topology=shape.topology,
            accelerator_version=shape.ray_generation,
            num_slices=len(slice_names),
            chips_per_vm=shape.ray_chips_per_vm,
            # A CPU of the host is not asked for: the chips are what must be ours alone, and an actor of
            # somebody else on the only CPU would keep the slice from ever being ready.
            resources_per_bundle=dict(resources or {"TPU": shape.chips_per_host, "CPU": 0}),
            bundle_label_selector=[
                {**shape.ray_labels, SLICE_NAME: slice_name} for slice_name in slice_names for _ in range(shape.hosts)
            ],
            strategy="STRICT_SPREAD",
            name=name,
        )
        if not claim.placement_group.wait(_CLAIM_S):
            claim.shutdown()
            return None
    except BaseException:
        claim.shutdown()
        raise
    return claim


def _places(groups: list[Any]) -> list[ReservedHost]:
    from ray.util.placement_group import placement_group_table

    by_node = {host.node_id: host for host in tpu_hosts() if host.alive}
    slices = []
    for group in groups:
        nodes = placement_group_table(group)["bundles_to_node_id"]
        if not set(nodes.values()) <= set(by_node):
            raise TimeoutError  # a host died since its reservation; the one who catches this says which
        slices.append([(by_node[node_id], group, bundle) for bundle, node_id in nodes.items()])
    # Numbered by name, as Ray Train does, so that a retry numbers them alike.
    slices.sort(key=lambda bundles: bundles[0][0].slice_name)
    places = [
        ReservedHost(host, index, group, bundle)
        for index, bundles in enumerate(slices)
        for host, group, bundle in bundles
    ]
    return sorted(places, key=lambda place: (place.slice_index, place.host.worker_id))


def not_reserved(spec: SliceSpec, waited_s: float, address: str, is_own: Callable[[Holding], bool]) -> RayTpuError:
    """Why these slices could not be had, as the error to raise.

    :param waited_s: how long they were waited for, in seconds.
    :param address: of Ray's head.
    :param is_own: whether it is the one who waited that holds these chips.
    """
    shape = spec.shape
    whole = whole_slices(shape)
    what = f"{spec}: not reserved after {waited_s:.0f} s"
    if len(whole) < spec.num_slices:
        hosts = tpu_hosts(shape.pod_type)
        alive = {(host.slice_name, host.worker_id) for host in hosts if host.alive}
        dead = {host for host in hosts if not host.alive and (host.slice_name, host.worker_id) not in alive}
        # A slice that is gone whole has been replaced or given back; one with survivors is broken.
        standing = {host.slice_name for host in hosts if host.alive}
        lost = sorted(str(host) for host in dead if host.slice_name in standing)
        there = f"only {len(whole)} of {spec.num_slices} slices are whole"
        if lost:
            return Preempted(f"{what}, {there}: {', '.join(lost)} died. The slice must be replaced whole.")
        return DeadlineExceeded(f"{what}, {there}, {len(alive)} of {spec.hosts} hosts are there")
    busy = _busy([host for hosts in whole.values() for host in hosts], address, is_own)
    if not busy:
        return DeadlineExceeded(f"{what}, although every host is free now; a retry may find it")
    return DeadlineExceeded(f"{what}: {'; '.join(busy)}. Stop who holds it, or wait for it.")


def _busy(hosts: list[Host], address: str, is_own: Callable[[Holding], bool]) -> list[str]:
    """Hosts whose chips are not all free, each with who holds them."""
    free = free_chips()
    held = holdings(address)
    busy = []
    for host in hosts:
        here = [holding for holding in held if holding.node_id == host.node_id]
        if free.get(host.node_id, 0.0) >= host.chips or (here and all(is_own(holding) for holding in here)):
            continue
        who = ", ".join(holding.by for holding in here if not is_own(holding))
        busy.append(f"{host} is busy: {who or 'nobody knows who holds its chips'}")
    return busy
