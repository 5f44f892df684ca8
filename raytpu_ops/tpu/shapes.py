"""Every slice that can be had, and everything that follows from its shape, in one place.

A shape is generation, topology *and* machine type: ``2x4`` of v5e and v6e is one host of eight
chips or two hosts of four, and those are different node pools, pod counts and reservations. There
is no silent default for them: whoever asks for ``2x4`` says which.
Facts and arithmetic only. Not here: how a shape is bought or found (``backends/``).
Sources: see ``generations.py``; labels and resources as Ray 2.60 makes them at ``ray start``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.generations import GENERATIONS, NAMES, Generation, Placement, Wanted, generation_of
from raytpu_ops.tpu.words import shown

__all__ = ["GENERATIONS", "NAMES", "Generation", "SliceShape", "catalogue", "generation_of", "resolve"]

#: v5e and v6e: topology -> chips on a host, one entry for each machine type that has it.
_FLAT: dict[str, tuple[int, ...]] = {
    "1x1": (1,),
    "2x2": (4,),
    "2x4": (8, 4),
    "4x4": (4,),
    "4x8": (4,),
    "8x8": (4,),
    "8x16": (4,),
    "16x16": (4,),
}
#: v4, v5p and 7x: the slices below one cube of 4x4x4; above it, dimensions are multiples of 4.
_SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
#: Chips on each host of the three-dimensional generations.
_CUBE_HOST = 4
#: Topologies of v5e and v6e that Ray takes for one host, whatever the hosts are.
_RAY_ONE_HOST = frozenset({"1x1", "2x2", "2x4"})
#: Labels of GKE's TPU nodes: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
ACCELERATOR_LABEL, TOPOLOGY_LABEL = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
#: Whose list of topologies is meant below.
RAY = "Ray 2.60"
#: The largest dimensions that it lists; beyond them its reservations answer ValueError.
_RAY_LARGEST = {"v4": (12, 12, 16), "v5p": (16, 16, 24)}
_RAY_7X_CUBES = frozenset({"4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"})

_TOPOLOGY = re.compile(r"[0-9]{1,4}(?:x[0-9]{1,4}){1,3}\Z")
#: Topologies that an error lists before it says how many more there are.
_LISTED = 16


@dataclass(frozen=True, slots=True)
class SliceShape:
    """One slice: hosts that are wired to each other and come and go as one.

    :param generation: the TPU generation.
    :param topology: chips in each dimension, ``4x4`` or ``2x2x2``.
    :param machine_type: the machine type of each host.
    :param hosts: hosts of the slice.
    :param chips: chips of the slice.
    :param chips_per_host: chips of each host.
    """

    generation: Generation
    topology: str
    machine_type: str
    hosts: int
    chips: int
    chips_per_host: int

    def __str__(self) -> str:
        return f"{self.generation.name} {self.topology} ({self.machine_type})"

    @property
    def single_host(self) -> bool:
        """All chips are on one host."""
        return self.hosts == 1

    @property
    def pod_type(self) -> str:
        """Ray's and Cloud TPU's name for the size, ``v4-16``; it counts cores, not chips."""
        return f"{self.generation.ray_name}-{self.chips * self.generation.cores_per_chip}"

    @property
    def ray_generation(self) -> str:
        """The ``accelerator_version`` of Ray's ``slice_placement_group``."""
        return self.generation.ray_name

    @property
    def ray_accelerator(self) -> str:
        """The ``accelerator_type`` of Ray's ``ScalingConfig``, and of its node label."""
        return f"TPU-{self.generation.ray_name.upper()}"

    @property
    def head_resource(self) -> str:
        """The resource that Ray puts on worker 0 of each slice of this pod type."""
        return f"TPU-{self.pod_type}-head"

    @property
    def ray_labels(self) -> dict[str, str]:
        """Labels that Ray gives to each host; slice name and worker id come on top of these."""
        return {
            "ray.io/tpu-topology": self.topology,
            "ray.io/tpu-pod-type": self.pod_type,
            "ray.io/accelerator-type": self.ray_accelerator,
        }

    @property
    def ray_chips_per_vm(self) -> int | None:
        """``chips_per_vm`` for ``slice_placement_group`` where Ray would guess otherwise, else None.

        Ray takes every ``2x4`` for one host of eight chips.
        """
        eight_chip_hosts = self.generation.dimensions == 2 and self.topology in _RAY_ONE_HOST
        guess = self.chips if eight_chip_hosts else _CUBE_HOST
        return None if guess == self.chips_per_host else self.chips_per_host

    @property
    def ray_reserves(self) -> bool:
        """Ray lists the topology; where it does not, ``slice_placement_group`` and ``JaxTrainer`` refuse it."""
        if self.generation.dimensions == 2 or self.topology in _SMALL_CUBES:
            return True
        if self.generation.name == "7x":
            return self.topology in _RAY_7X_CUBES
        largest = _RAY_LARGEST[self.generation.name]
        return all(mine <= most for mine, most in zip(_dimensions(self.topology), largest, strict=True))

    def check_reserved(self) -> None:
        """Refuse a slice whose chips would come and be paid for, and that no task could use.

        :raises InvalidSpec: Ray can't reserve it; the message names the nearest that it can.
        """
        if self.ray_reserves:
            return
        close = min(
            (shape for shape in _shapes(self.generation) if shape.ray_reserves),
            key=lambda shape: _distance(_dimensions(shape.topology), _dimensions(self.topology)),
        )
        raise InvalidSpec(
            f"topology: {RAY} has no {self.generation.name} {self.topology}, so no task could reserve such a slice; "
            f"the nearest that it has is {close.topology!r}"
        )

    @property
    def gke_accelerator(self) -> str:
        """Value of the node label ``cloud.google.com/gke-tpu-accelerator``."""
        return self.generation.gke_accelerator

    @property
    def node_selector(self) -> dict[str, str]:
        """Labels of the GKE nodes that a pod of this slice runs on."""
        return {
            ACCELERATOR_LABEL: self.gke_accelerator,
            TOPOLOGY_LABEL: self.topology,
        }

    @property
    def tolerations(self) -> list[dict[str, str]]:
        """For the taint ``google.com/tpu=present:NoSchedule`` of every GKE node with TPUs."""
        return [{"key": "google.com/tpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"}]

    @property
    def placement(self) -> Placement | None:
        """The policy that a node pool for it takes; None for one host, which takes none."""
        return None if self.single_host else self.generation.placement

    def host_env(self, slice_name: str, worker_id: int) -> dict[str, str]:
        """The variables from which ``ray start`` labels a host, as GKE and its TPU webhook inject them.

        The last one keeps Ray and libtpu from asking a metadata server that may not be there.

        :param slice_name: name of the slice, the same on each of its hosts.
        :param worker_id: number of the host in the slice, from 0.
        :raises InvalidSpec: when the slice has no such host.
        """
        if type(worker_id) is not int or worker_id not in range(self.hosts):
            raise InvalidSpec(f"worker_id: hosts of {self} are numbered 0 to {self.hosts - 1}, got {shown(worker_id)}")
        return {
            "TPU_NAME": slice_name,
            "TPU_WORKER_ID": str(worker_id),
            "TPU_ACCELERATOR_TYPE": self.pod_type,
            "TPU_TOPOLOGY": self.topology,
            "TPU_SKIP_MDS_QUERY": "1",
        }


def _dimensions(topology: str) -> tuple[int, ...]:
    return tuple(int(part) for part in topology.split("x"))


def _cubes(max_chips: int) -> Iterator[str]:
    """``AxBxC`` of multiples of 4, A <= B <= C as GKE wants them, up to ``max_chips``."""
    unit = 4
    limit = max_chips // unit**3
    for a in range(1, limit + 1):
        for b in range(a, limit // a + 1):
            for c in range(b, limit // (a * b) + 1):
                yield f"{a * unit}x{b * unit}x{c * unit}"


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


@lru_cache(maxsize=len(GENERATIONS))
def _shapes(generation: Generation) -> tuple[SliceShape, ...]:
    hosts_of: dict[str, tuple[int, ...]]
    if generation.dimensions == 2:
        hosts_of = _FLAT
    else:
        hosts_of = dict.fromkeys([*_SMALL_CUBES, *_cubes(generation.max_chips)], (_CUBE_HOST,))
    machine_type_of = dict(generation.machine_types)
    found = [
        SliceShape(
            generation=generation,
            topology=topology,
            machine_type=machine_type_of[per_host],
            hosts=prod(_dimensions(topology)) // per_host,
            chips=prod(_dimensions(topology)),
            chips_per_host=per_host,
        )
        for topology, choices in hosts_of.items()
        for per_host in choices
    ]
    return tuple(sorted(found, key=lambda shape: (shape.chips, _dimensions(shape.topology), shape.hosts)))


def catalogue(generation: object = None) -> list[SliceShape]:
    """Every shape there is, smallest first within a generation.

    :param generation: only this one, in any spelling.
    :raises InvalidSpec: for a generation that is none.
    """
    chosen = GENERATIONS if generation is None else (generation_of(generation).generation,)
    return [shape for one in chosen for shape in _shapes(one)]


def resolve(generation: object, topology: object = None, machine_type: object = None) -> SliceShape:
    """The one shape that these words mean.

    :param generation: in any spelling (``v5e``, ``TPU-V6E``, ``ironwood``), or a pod type such as
        ``v6e-16``.
    :param topology: ``4x4``, ``2x2x2``; may be left out where a pod type has one topology only.
    :param machine_type: needed only where the topology leaves a choice: ``2x4`` of v5e and v6e.
    :raises InvalidSpec: one line: what is wrong, and what would be right.
    """
    # Only text is hashable for certain, and 1 == True would share an entry of the cache.
    if all(value is None or type(value) is str for value in (generation, topology, machine_type)):
        return _resolve_text(generation, topology, machine_type)
    return _resolve(generation, topology, machine_type)


@lru_cache(maxsize=1024)
def _resolve_text(generation: str | None, topology: str | None, machine_type: str | None) -> SliceShape:
    return _resolve(generation, topology, machine_type)


def _resolve(generation: object, topology: object, machine_type: object) -> SliceShape:
    wanted = generation_of(generation)
    shapes = _shapes(wanted.generation)
    word = _topology_word(wanted, topology)
    fits = _of_topology(wanted, shapes, word) if word is not None else _of_cores(wanted, shapes)
    if wanted.cores is not None:
        _check_cores(wanted, fits)
    return _of_machine_type(wanted, fits, machine_type)


def _topology_word(wanted: Wanted, topology: object) -> str | None:
    """The topology in canonical spelling, from either argument; None where neither has one."""
    if topology is None:
        if wanted.topology is None and wanted.cores is None:
            raise InvalidSpec(f"topology: is missing; {_list(wanted.generation)}")
        return wanted.topology
    if not isinstance(topology, str):
        raise InvalidSpec(
            f"topology: must be text such as '{_example(wanted.generation)}', "
            f"got {shown(topology)} ({type(topology).__name__})"
        )
    word = topology.strip().lower().replace("\u00d7", "x")
    if wanted.topology not in (None, word):
        raise InvalidSpec(
            f"topology: {shown(topology)} contradicts the generation, which says {wanted.topology}; "
            "leave one of them out"
        )
    return word


def _of_topology(wanted: Wanted, shapes: tuple[SliceShape, ...], word: str) -> list[SliceShape]:
    fits = [shape for shape in shapes if shape.topology == word]
    if fits:
        return fits
    generation = wanted.generation
    if not _TOPOLOGY.match(word):
        raise InvalidSpec(f"topology: {shown(word)} is not of the form '{_example(generation)}'; {_list(generation)}")
    dimensions = _dimensions(word)
    if len(dimensions) != generation.dimensions:
        raise InvalidSpec(
            f"topology: {generation.name} slices have {generation.dimensions} dimensions, {shown(word)} has "
            f"{len(dimensions)}; {_list(generation)}"
        )
    turned = [shape.topology for shape in shapes if sorted(_dimensions(shape.topology)) == sorted(dimensions)]
    if turned:
        raise InvalidSpec(f"topology: {shown(word)} of {generation.name} is written {turned[0]!r}")
    close = min(shapes, key=lambda shape: _distance(_dimensions(shape.topology), dimensions))
    raise InvalidSpec(
        f"topology: {generation.name} has no {shown(word)}, the nearest is {close.topology!r}; {_list(generation)}"
    )


def _of_cores(wanted: Wanted, shapes: tuple[SliceShape, ...]) -> list[SliceShape]:
    per_chip = wanted.generation.cores_per_chip
    fits = [shape for shape in shapes if shape.chips * per_chip == wanted.cores]
    topologies = list(dict.fromkeys(shape.topology for shape in fits))
    if len(topologies) > 1:
        raise InvalidSpec(
            f"topology: {wanted.generation.ray_name}-{wanted.cores} is one of {_words(topologies)}; say which"
        )
    if not fits:
        _check_cores(wanted, fits)
    return fits


def _check_cores(wanted: Wanted, fits: list[SliceShape]) -> None:
    """The number of a pod type must be that of the topology."""
    generation, cores = wanted.generation, wanted.cores
    per_chip = generation.cores_per_chip
    name = f"{generation.ray_name}-{cores}"
    unit = "it counts chips" if per_chip == 1 else f"it counts cores, {per_chip} a chip"
    if not fits:
        sizes = list(dict.fromkeys(shape.chips * per_chip for shape in _shapes(generation)))
        close = sorted(sizes, key=lambda size: abs(size - (cores or 0)))[:3]
        near_by = _words([f"{generation.ray_name}-{size}" for size in sorted(close)])
        raise InvalidSpec(f"generation: no {generation.name} slice is a {name} ({unit}); the nearest are {near_by}")
    if fits[0].chips * per_chip != cores:
        raise InvalidSpec(
            f"topology: {name} ({unit}) is not {fits[0].topology}, which is a {fits[0].pod_type}; leave one of them out"
        )


def _of_machine_type(wanted: Wanted, fits: list[SliceShape], machine_type: object) -> SliceShape:
    generation, topology = wanted.generation, fits[0].topology
    choices = " or ".join(
        f"{shape.machine_type!r} ({shape.hosts} host{'s' if shape.hosts > 1 else ''} of {shape.chips_per_host} "
        f"chip{'s' if shape.chips_per_host > 1 else ''})"
        for shape in fits
    )
    if machine_type is None:
        if len(fits) > 1:
            raise InvalidSpec(f"machine_type: {generation.name} {topology} leaves a choice; say {choices}")
        return fits[0]
    if not isinstance(machine_type, str):
        raise InvalidSpec(f"machine_type: must be {choices}, got {shown(machine_type)} ({type(machine_type).__name__})")
    word = machine_type.strip().lower()
    for shape in fits:
        if shape.machine_type == word:
            return shape
    raise InvalidSpec(f"machine_type: {generation.name} {topology} has no {shown(machine_type)}; it is {choices}")


def _example(generation: Generation) -> str:
    return "4x4" if generation.dimensions == 2 else "2x2x2"


def _words(options: list[str]) -> str:
    if len(options) > _LISTED:
        return f"{', '.join(options[:_LISTED])} and {len(options) - _LISTED} more"
    return ", ".join(options)


def _list(generation: Generation) -> str:
    """The generation's topologies, in words."""
    if generation.dimensions == 2:
        return f"{generation.name} has {', '.join(_FLAT)}"
    return (
        f"{generation.name} has {', '.join(_SMALL_CUBES)} and AxBxC of multiples of 4 "
        f"with A <= B <= C, up to {generation.max_chips} chips"
    )
