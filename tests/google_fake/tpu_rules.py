"""What the Cloud TPU API refuses about a queued resource, and the accelerators and runtimes that a zone has.

Sources: `tpu_v2`'s own field descriptions, "Manage queued resources" and "TPU regions and zones" in Google
Cloud's documentation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from google.cloud import tpu_v2

from tests.google_fake import refusals
from tests.google_fake.pool_rules import check_labels

Type = tpu_v2.AcceleratorConfig.Type
_ID = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?\Z")
_TOPOLOGY = re.compile(r"[0-9]+(x[0-9]+){1,2}\Z")
_METADATA_LIMIT = 256 * 1024


@dataclass(frozen=True)
class Family:
    """One generation as this API knows it.

    :param type_: in `AcceleratorConfig`.
    :param word: begins accelerator types.
    :param cores: that the number of an accelerator type counts for each chip.
    :param dimensions: of topologies.
    :param topologies: that are listed; larger ones follow from cubes of 4.
    :param runtimes: versions that run on it.
    """

    type_: Type
    word: str
    cores: int
    dimensions: int
    topologies: tuple[str, ...]
    runtimes: tuple[str, ...]


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
FAMILIES = (
    Family(Type.V4, "v4", 2, 3, _CUBES, ("tpu-ubuntu2204-base", "tpu-vm-v4-base")),
    Family(Type.V5LITE_POD, "v5litepod", 1, 2, _FLAT, ("v2-alpha-tpuv5-lite", "tpu-ubuntu2204-base")),
    Family(Type.V5P, "v5p", 2, 3, _CUBES, ("v2-alpha-tpuv5", "tpu-ubuntu2204-base")),
    Family(Type.V6E, "v6e", 1, 2, _FLAT, ("v2-alpha-tpuv6e",)),
)
#: Every runtime version that there is.
RUNTIMES = tuple(dict.fromkeys(runtime for family in FAMILIES for runtime in family.runtimes))


@dataclass(frozen=True)
class Shape:
    """What a node is made of.

    :param family: its generation.
    :param topology: of its chips.
    :param hosts: virtual machines of it.
    :param chips: all of them.
    """

    family: Family
    topology: str
    hosts: int
    chips: int

    @property
    def accelerator_type(self) -> str:
        """`v4-16`."""
        return f"{self.family.word}-{self.chips * self.family.cores}"


def _chips(topology: str) -> int:
    found = 1
    for part in topology.split("x"):
        found *= int(part)
    return found


def _shape(family: Family, topology: str) -> Shape:
    chips = _chips(topology)
    # Two-dimensional slices of up to eight chips are one machine.
    hosts = 1 if family.dimensions == 2 and chips <= 8 else max(1, chips // 4)
    return Shape(family, topology, hosts, chips)


def catalogue() -> list[Shape]:
    """What can be asked for."""
    return [_shape(family, topology) for family in FAMILIES for topology in family.topologies]


def shape_of(node: tpu_v2.Node) -> Shape:
    """The shape that a node asks for.

    :raises Refusal: there is no such one, or it is said twice.
    """
    config = node.accelerator_config
    if bool(node.accelerator_type) == bool(config.type_):
        raise refusals.invalid("Exactly one of accelerator_type and accelerator_config must be set.")
    if config.type_:
        family = next((one for one in FAMILIES if one.type_ == config.type_), None)
        known = family is not None and _TOPOLOGY.match(config.topology)
        if not known or config.topology not in family.topologies:
            raise refusals.invalid(
                f'Invalid accelerator config: type {Type(config.type_).name} has no topology "{config.topology}".'
            )
        return _shape(family, config.topology)
    found = [shape for shape in catalogue() if shape.accelerator_type == node.accelerator_type]
    if not found:
        raise refusals.invalid(
            f'Invalid accelerator type "{node.accelerator_type}" was specified; use '
            "`gcloud compute tpus accelerator-types list` to see what the zone has."
        )
    return found[0]


def check_id(value: str, what: str) -> None:
    """Refuse an id that no node and no queued resource may have."""
    if not _ID.match(value):
        raise refusals.invalid(
            f'Invalid {what} "{value}": must start with a lowercase letter, be followed by up to 62 lowercase letters, '
            "numbers, or hyphens, and cannot end with a hyphen."
        )


def check_node(node: tpu_v2.Node) -> Shape:
    """Refuse a node that makes no sense.

    :raises Refusal: with what is wrong.
    """
    shape = shape_of(node)
    if node.runtime_version not in RUNTIMES:
        raise refusals.invalid(f'Runtime version "{node.runtime_version}" does not exist or is not supported.')
    if node.runtime_version not in shape.family.runtimes:
        raise refusals.invalid(
            f'Runtime version "{node.runtime_version}" is not compatible with accelerator type '
            f'"{shape.accelerator_type}".'
        )
    check_labels(node.labels, "node.labels")
    for key, value in node.metadata.items():
        if not re.match(r"[a-zA-Z0-9-_]{1,127}\Z", key):
            raise refusals.invalid(f'Metadata key "{key}" must match [a-zA-Z0-9-_]+ and be less than 128 bytes.')
        if len(value.encode()) > _METADATA_LIMIT:
            raise refusals.invalid(f'Metadata value of "{key}" is longer than 256 KiB.')
    if len(node.description) > 512:
        raise refusals.invalid("Description is longer than 512 characters.")
    if node.network_config.network and node.network_configs:
        raise refusals.invalid("network_config and network_configs are mutually exclusive.")
    return shape


def check_queued(resource: tpu_v2.QueuedResource, parent: str) -> None:
    """Refuse a queued resource that makes no sense.

    :param parent: `projects/P/locations/Z`.
    :raises Refusal: with what is wrong.
    """
    specs = resource.tpu.node_spec
    if len(specs) != 1:
        raise refusals.invalid(f"Exactly one node_spec must be set, got {len(specs)}.")
    (spec,) = specs
    if spec.parent != parent:
        raise refusals.invalid(
            f'node_spec.parent "{spec.parent}" must be the parent of the queued resource, "{parent}".'
        )
    if "multislice_params" in spec:
        if spec.multislice_params.node_count < 2:
            raise refusals.invalid("multislice_params.node_count must be greater than 1.")
    elif not spec.node_id:
        raise refusals.invalid("One of node_id and multislice_params must be set.")
    scheduling = spec.node.scheduling_config
    spot = "spot" in resource or scheduling.spot or scheduling.preemptible
    if spot and (resource.reservation_name or "guaranteed" in resource or scheduling.reserved):
        raise refusals.invalid("Spot and guaranteed or reserved capacity are mutually exclusive.")
    check_node(spec.node)


def node_ids(resource: tpu_v2.QueuedResource, queued_id: str) -> list[str]:
    """Ids of the nodes that a queued resource brings."""
    (spec,) = resource.tpu.node_spec
    if "multislice_params" not in spec:
        return [spec.node_id]
    prefix = spec.multislice_params.node_id_prefix or queued_id
    return [f"{prefix}-{number}" for number in range(spec.multislice_params.node_count)]
