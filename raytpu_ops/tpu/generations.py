"""The TPU generations: their names everywhere, their machine types, how large their slices get.

Facts only; shapes and everything that follows from one are in ``shapes.py``. Sources, read in
2026: "Plan TPUs in GKE" and "TPU7x (Ironwood)" in Google Cloud's documentation for machine types,
topologies and pod sizes (v4 4,096 chips, v5p 16x16x24, TPU7x 9,216 chips), and Ray's
``_private/accelerators/tpu.py`` (2.60) for its names and cores per chip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.words import near, shown

Placement = Literal["compact", "workload"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of TPUs.

    :param name: our name, and the one that people use: ``v4``, ``v5e``, ``v5p``, ``v6e``, ``7x``.
    :param ray_name: Ray's name; it begins pod types.
    :param gke_accelerator: value of the node label ``cloud.google.com/gke-tpu-accelerator``.
    :param cores_per_chip: cores that a pod type's number counts for each chip.
    :param machine_types: the machine types, by the number of chips that one host has.
    :param dimensions: of its topologies, two or three.
    :param max_chips: chips of its largest slice.
    :param placement: the policy that a node pool of several hosts takes; TPU7x refuses the compact
        one that all others need.
    :param aliases: other spellings, in lower case.
    """

    name: str
    ray_name: str
    gke_accelerator: str
    cores_per_chip: int
    machine_types: tuple[tuple[int, str], ...]
    dimensions: Literal[2, 3]
    max_chips: int
    placement: Placement
    aliases: tuple[str, ...]

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling that :func:`generation_of` understands, the canonical one first."""
        return (self.name, self.ray_name, self.gke_accelerator, *self.aliases)


GENERATIONS: tuple[Generation, ...] = (
    Generation(
        name="v4",
        ray_name="v4",
        gke_accelerator="tpu-v4-podslice",
        cores_per_chip=2,
        machine_types=((4, "ct4p-hightpu-4t"),),
        dimensions=3,
        max_chips=4096,
        placement="compact",
        aliases=("tpuv4", "tpu4"),
    ),
    Generation(
        name="v5e",
        ray_name="v5litepod",
        gke_accelerator="tpu-v5-lite-podslice",
        cores_per_chip=1,
        machine_types=((1, "ct5lp-hightpu-1t"), (4, "ct5lp-hightpu-4t"), (8, "ct5lp-hightpu-8t")),
        dimensions=2,
        max_chips=256,
        placement="compact",
        aliases=("v5lite", "v5-lite", "v5-lite-pod", "v5-litepod", "tpuv5e", "tpu5e"),
    ),
    Generation(
        name="v5p",
        ray_name="v5p",
        gke_accelerator="tpu-v5p-slice",
        cores_per_chip=2,
        machine_types=((4, "ct5p-hightpu-4t"),),
        dimensions=3,
        max_chips=6144,
        placement="compact",
        aliases=("tpuv5p", "tpu5p"),
    ),
    Generation(
        name="v6e",
        ray_name="v6e",
        gke_accelerator="tpu-v6e-slice",
        cores_per_chip=1,
        machine_types=((1, "ct6e-standard-1t"), (4, "ct6e-standard-4t"), (8, "ct6e-standard-8t")),
        dimensions=2,
        max_chips=256,
        placement="compact",
        aliases=("trillium", "tpuv6e", "tpu6e"),
    ),
    Generation(
        name="7x",
        ray_name="v7x",
        gke_accelerator="tpu7x",
        cores_per_chip=2,
        machine_types=((4, "tpu7x-standard-4t"),),
        dimensions=3,
        max_chips=9216,
        placement="workload",
        aliases=("ironwood", "tpuv7x", "v7", "tpu7", "tpuv7"),
    ),
)

#: The generations that there are, for messages.
NAMES = ", ".join(generation.name for generation in GENERATIONS)

_BY_SPELLING = {spelling: generation for generation in GENERATIONS for spelling in generation.spellings}
#: No spelling is longer.
_LONGEST = 64
#: A pod type: a generation, a dash and a number of cores.
_POD_TYPE = re.compile(r"(?P<generation>.+)-(?P<cores>[1-9][0-9]{0,5})\Z")
#: "v6e-4x4", as some tools write a shape.
_WITH_TOPOLOGY = re.compile(r"(?P<generation>.+)-(?P<topology>[0-9]+(?:x[0-9]+)+)\Z")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a person's word for a generation says.

    :param generation: the generation.
    :param cores: the number of a pod type such as ``v6e-16``, None where the word was none.
    :param topology: the topology of a word such as ``v6e-4x4``, None where it had none.
    """

    generation: Generation
    cores: int | None = None
    topology: str | None = None


def _lookup(word: str) -> Generation | None:
    if word in _BY_SPELLING:
        return _BY_SPELLING[word]
    return _BY_SPELLING.get(word.removeprefix("tpu-")) if word.startswith("tpu-") else None


def generation_of(value: object) -> Wanted:
    """Read a generation in any spelling, or a pod type.

    :param value: ``v6e``, ``TPU-V6E``, ``trillium``, ``tpu-v6e-slice``, ``v6e-16``, ``v6e-4x4``.
    :raises InvalidSpec: when it is none of these.
    """
    if not isinstance(value, str):
        arrived = "nothing" if value is None else f"{shown(value)} ({type(value).__name__})"
        raise InvalidSpec(f"generation: must be one of {NAMES} or a pod type such as 'v6e-16', got {arrived}")
    word = value.strip().lower().replace("_", "-")[:_LONGEST]
    found = _lookup(word)
    if found:
        return Wanted(found)
    if (match := _POD_TYPE.match(word)) and (found := _lookup(match["generation"])):
        return Wanted(found, cores=int(match["cores"]))
    if (match := _WITH_TOPOLOGY.match(word)) and (found := _lookup(match["generation"])):
        return Wanted(found, topology=match["topology"])
    for generation in GENERATIONS:
        for _, machine_type in generation.machine_types:
            if word == machine_type:
                raise InvalidSpec(
                    f"generation: {shown(value)} is a machine type: write generation={generation.name!r}, "
                    f"machine_type={machine_type!r}"
                )
    raise InvalidSpec(
        f"generation: {shown(value)} is none that this package knows{near(word, _BY_SPELLING)}; "
        f"write one of {NAMES} or a pod type such as 'v6e-16'"
    )
