"""What is wanted: generation, topology, machine type, number of slices. All else follows from it.

Not here: the facts about shapes (``shapes.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from raytpu_ops.tpu import shapes
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.fields import Count
from raytpu_ops.tpu.problems import Checked, read
from raytpu_ops.tpu.shapes import SliceShape

#: More slices than anybody has; a number beyond it is a slip of the keyboard.
MAX_SLICES = 256


class SliceSpec(Checked):
    """One or more slices of one shape.

    :param generation: ``v4``, ``v5e``, ``v5p``, ``v6e``, ``7x`` in any spelling that people use, or a
        pod type such as ``v6e-16`` that names the topology too.
    :param topology: ``4x4``, ``2x2x2``; may be left out where the generation was a pod type that has
        one topology only.
    :param machine_type: needed only where the topology leaves a choice (``2x4`` of v5e and v6e).
    :param num_slices: how many slices, each whole.
    :raises InvalidSpec: with one line that says what is wrong and what would be right.
    """

    generation: str
    topology: str
    machine_type: str
    num_slices: Count = Field(default=1, ge=1, le=MAX_SLICES)

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any) -> Any:
        # Unknown fields first: a misspelt "topologie" explains a missing topology.
        if not isinstance(data, dict) or not data.keys() <= cls.model_fields.keys():
            return data
        shape = shapes.resolve(data.get("generation"), data.get("topology"), data.get("machine_type"))
        return {
            **data,
            "generation": shape.generation.name,
            "topology": shape.topology,
            "machine_type": shape.machine_type,
        }

    @classmethod
    def of(
        cls,
        generation: object,
        topology: object = None,
        *,
        num_slices: object = 1,
        machine_type: object = None,
    ) -> Self:
        """Read what a person wrote.

        :param generation: as the class has it; or, alone, a :class:`SliceSpec` or a dict of its fields.
        :raises InvalidSpec: with one line that says what is wrong and what would be right.
        """
        if isinstance(generation, SliceSpec | Mapping):
            if topology is not None or machine_type is not None or num_slices != 1:
                raise InvalidSpec("spec: give either a whole spec or generation, topology and so on, not both")
            return read(cls, generation, "spec")
        fields = {
            "generation": generation,
            "topology": topology,
            "machine_type": machine_type,
            "num_slices": num_slices,
        }
        return read(cls, fields, "spec")

    @property
    def shape(self) -> SliceShape:
        """The shape of each slice, with everything that follows from it."""
        return shapes.resolve(self.generation, self.topology, self.machine_type)

    @property
    def hosts(self) -> int:
        """Hosts of all slices together."""
        return self.shape.hosts * self.num_slices

    @property
    def chips(self) -> int:
        """Chips of all slices together."""
        return self.shape.chips * self.num_slices

    def __str__(self) -> str:
        shape = self.shape
        hosts = f"{shape.hosts} host{'s' if shape.hosts > 1 else ''}"
        chips = f"{shape.chips} chip{'s' if shape.chips > 1 else ''}"
        return f"{self.num_slices} x {shape.generation.name} {shape.topology} ({hosts}, {chips} each)"
