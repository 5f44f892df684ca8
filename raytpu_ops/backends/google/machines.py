"""Whether what a pod asks for fits on a machine of Compute Engine.

By what the machine type has. Not here: what of a machine is free now, which no API of Google's tells, and how a pod's
template becomes numbers (``gke/room.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from raytpu_ops.backends.google.clients import GoogleApis

#: GKE keeps up to a tenth of a TPU machine's memory for itself and lets its own pods run there:
#: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes
_TIGHT = 0.9


class Needs(NamedTuple):
    """What a pod asks for.

    :param cpus: CPUs.
    :param memory: bytes.
    """

    cpus: float
    memory: float


async def machine_type(apis: GoogleApis, project: str, zone: str, name: str) -> Mapping[str, Any] | None:
    """A machine type, as the Compute API has it; None where the zone has none of that name."""
    return await apis.compute_or_none(
        f"projects/{project}/zones/{zone}/machineTypes/{name}", f"get machine type {name} in {zone}"
    )


def too_much(needs: Needs, machine: Mapping[str, Any]) -> list[str]:
    """What a pod asks for and such a machine can't give: it has no more than that, and GKE takes some of it.

    :param machine: of the Compute API.
    :return: one phrase for each resource.
    """
    return [f"{asked}, it has {there}" for asked, there, share in _shares(needs, machine) if share >= 1]


def tight(needs: Needs, machine: Mapping[str, Any]) -> list[str]:
    """What a pod asks for of which GKE may leave too little, as :func:`too_much`."""
    return [f"{asked}, it has {there}" for asked, there, share in _shares(needs, machine) if _TIGHT < share < 1]


def _shares(needs: Needs, machine: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """What is asked for, what is there, both in words, and the quotient; what Google does not tell is left out."""
    cpus, memory = int(machine.get("guestCpus", 0)), int(machine.get("memoryMb", 0)) * 2**20
    found = [(f"{needs.cpus:g} CPUs", f"{cpus}", needs.cpus, cpus)]
    found += [(f"{needs.memory / 2**30:g} GiB", f"{memory / 2**30:g} GiB", needs.memory, memory)]
    return [(asked, there, of / whole) for asked, there, of, whole in found if whole]
