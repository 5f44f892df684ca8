"""The gke backend: KubeRay on GKE, or on any Kubernetes whose nodes offer ``google.com/tpu``.

Light to import; the Kubernetes client comes with the first call (extra ``gke``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytpu_ops.backends.gke.backend import GkeBackend

__all__ = ["GkeBackend"]


def __getattr__(name: str) -> Any:
    if name == "GkeBackend":
        return import_module("raytpu_ops.backends.gke.backend").GkeBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
