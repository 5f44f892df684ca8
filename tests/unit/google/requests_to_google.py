"""Requests that make sense, for tests that then change one thing."""

from __future__ import annotations

from typing import Any

from google.cloud import container_v1, tpu_v2

from tests.google_fake.fake import CLUSTER, PROJECT, ZONE

PARENT = f"projects/{PROJECT}/locations/{ZONE}"
POOL = f"{CLUSTER}/nodePools/pool-s0"
QUEUED = f"{PARENT}/queuedResources/qr"


def pool(config: dict[str, Any] | None = None, **more: Any) -> container_v1.NodePool:
    """A slice of four v6e hosts as a node pool."""
    return container_v1.NodePool(
        {
            "name": "pool-s0",
            "initial_node_count": 4,
            "config": {"machine_type": "ct6e-standard-4t", **(config or {})},
            "placement_policy": {"type_": "COMPACT", "tpu_topology": "4x4"},
            **more,
        }
    )


def single(config: dict[str, Any] | None = None, **more: Any) -> container_v1.NodePool:
    """A slice of one host."""
    return container_v1.NodePool(
        {
            "name": "pool-s0",
            "initial_node_count": 1,
            "config": {"machine_type": "ct6e-standard-4t", **(config or {})},
            **more,
        }
    )


def flex(config: dict[str, Any] | None = None, **more: Any) -> container_v1.NodePool:
    """The four hosts as flex-start capacity."""
    fields = {
        "initial_node_count": 0,
        "autoscaling": {"enabled": True, "max_node_count": 4, "location_policy": "ANY"},
        "management": {"auto_repair": False},
        **more,
    }
    kind = {"flex_start": True, "reservation_affinity": {"consume_reservation_type": "NO_RESERVATION"}}
    return pool({**kind, **(config or {})}, **fields)


def queued(node: dict[str, Any] | None = None, *, slices: int = 1, **more: Any) -> tpu_v2.QueuedResource:
    """Slices of two v4 hosts on Spot."""
    name = {"node_id": "qr"} if slices == 1 else {"multislice_params": {"node_count": slices, "node_id_prefix": "qr"}}
    asked = {
        "accelerator_config": {"type_": "V4", "topology": "2x2x2"},
        "runtime_version": "tpu-ubuntu2204-base",
        **(node or {}),
    }
    spec = {"parent": PARENT, **name, "node": asked}
    return tpu_v2.QueuedResource({"tpu": {"node_spec": [spec]}, **(more or {"spot": {}})})
