"""``raytpu shapes``: the catalogue, for people and for programs."""

from __future__ import annotations

import json
from typing import Any

from raytpu_ops.tpu.shapes import RAY, SliceShape, catalogue

#: The families of v4, v5p and 7x run into hundreds; a table shows these many of a generation.
_SHOWN = 24


def show(generation: str | None, *, as_json: bool) -> None:
    """Print the shapes.

    :param generation: only this one, in any spelling; then all of its shapes.
    :raises InvalidSpec: for a generation that is none.
    """
    found = catalogue(generation)
    if as_json:
        print(json.dumps([as_dict(shape) for shape in found], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("TPU", "topology", "machine type"):
        table.add_column(name, overflow="fold")
    for name in ("hosts", "chips", "on a host"):
        table.add_column(name, justify="right", overflow="fold")
    for name in ("pod type", "Ray"):
        table.add_column(name, overflow="fold")
    hidden: dict[str, int] = {}
    seen: dict[str, int] = {}
    for shape in found:
        name = shape.generation.name
        seen[name] = seen.get(name, 0) + 1
        if generation is None and seen[name] > _SHOWN:
            hidden[name] = hidden.get(name, 0) + 1
            continue
        row = as_dict(shape)
        keys = ("generation", "topology", "machine_type", "hosts", "chips", "chips_per_host", "pod_type")
        table.add_row(*(str(row[key]) for key in keys), "" if shape.ray_reserves else "no")
    console = Console()
    console.print(table)
    for name, count in hidden.items():
        console.print(f"{count} larger shapes of {name}: raytpu shapes {name}", highlight=False)
    if not all(shape.ray_reserves for shape in found):
        words = f"no: {RAY} can't reserve it, so no task could use it; a plan refuses it"
        console.print(words, highlight=False, soft_wrap=True)


def as_dict(shape: SliceShape) -> dict[str, Any]:
    """A shape as plain JSON."""
    return {
        "generation": shape.generation.name,
        "topology": shape.topology,
        "machine_type": shape.machine_type,
        "hosts": shape.hosts,
        "chips": shape.chips,
        "chips_per_host": shape.chips_per_host,
        "pod_type": shape.pod_type,
        "ray_accelerator": shape.ray_accelerator,
        "ray_reserves": shape.ray_reserves,
        "gke_accelerator": shape.gke_accelerator,
        "node_selector": shape.node_selector,
    }
