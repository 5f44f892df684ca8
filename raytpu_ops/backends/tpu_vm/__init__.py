"""The tpu_vm backend: Cloud TPU VMs by queued resources, without Kubernetes.

Light to import; Google's clients come with the first call (extra ``google``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytpu_ops.backends.tpu_vm.backend import TpuVmBackend

__all__ = ["TpuVmBackend"]


def __getattr__(name: str) -> Any:
    if name == "TpuVmBackend":
        return import_module("raytpu_ops.backends.tpu_vm.backend").TpuVmBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
