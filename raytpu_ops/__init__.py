"""Ray on Cloud TPUs from Airflow: a lease on slices is acquired, proven ready, used and released.

Everything that a DAG needs can be imported from here; names load when they are asked for, so that
this import costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytpu_ops.decorators.slices import tpu_slices
    from raytpu_ops.hooks.ray_tpu import RayTpuHook
    from raytpu_ops.operators.ray_jobs import RayTpuJobOperator, RayTrainOperator
    from raytpu_ops.operators.ray_serve import RayServeOperator
    from raytpu_ops.operators.reaping import ReapTpuSlicesOperator
    from raytpu_ops.operators.retries import RetryBudget, tpu_retry_policy
    from raytpu_ops.operators.tpu_slices import (
        PlanTpuSlicesOperator,
        ProvisionTpuSlicesOperator,
        ReleaseTpuSlicesOperator,
    )
    from raytpu_ops.sensors.tpu_slices import TpuSlicesReadySensor
    from raytpu_ops.tpu.capacity import FlexStart, OnDemand, Queued, Reservation, Spot

__version__ = "0.1.0"

_HOMES = {
    "FlexStart": "raytpu_ops.tpu.capacity",
    "OnDemand": "raytpu_ops.tpu.capacity",
    "PlanTpuSlicesOperator": "raytpu_ops.operators.tpu_slices",
    "ProvisionTpuSlicesOperator": "raytpu_ops.operators.tpu_slices",
    "Queued": "raytpu_ops.tpu.capacity",
    "RayServeOperator": "raytpu_ops.operators.ray_serve",
    "RayTpuHook": "raytpu_ops.hooks.ray_tpu",
    "RayTpuJobOperator": "raytpu_ops.operators.ray_jobs",
    "RayTrainOperator": "raytpu_ops.operators.ray_jobs",
    "ReapTpuSlicesOperator": "raytpu_ops.operators.reaping",
    "ReleaseTpuSlicesOperator": "raytpu_ops.operators.tpu_slices",
    "Reservation": "raytpu_ops.tpu.capacity",
    "RetryBudget": "raytpu_ops.operators.retries",
    "Spot": "raytpu_ops.tpu.capacity",
    "TpuSlicesReadySensor": "raytpu_ops.sensors.tpu_slices",
    "tpu_retry_policy": "raytpu_ops.operators.retries",
    "tpu_slices": "raytpu_ops.decorators.slices",
}

__all__ = [
    "FlexStart",
    "OnDemand",
    "PlanTpuSlicesOperator",
    "ProvisionTpuSlicesOperator",
    "Queued",
    "RayServeOperator",
    "RayTpuHook",
    "RayTpuJobOperator",
    "RayTrainOperator",
    "ReapTpuSlicesOperator",
    "ReleaseTpuSlicesOperator",
    "Reservation",
    "RetryBudget",
    "Spot",
    "TpuSlicesReadySensor",
    "tpu_retry_policy",
    "tpu_slices",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
