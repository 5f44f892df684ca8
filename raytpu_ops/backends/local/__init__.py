"""The local backend: this machine plays the TPU hosts, one ``ray start`` for each.

Light to import: a DAG file or the ``raytpu`` command may name the package without paying for psutil.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytpu_ops.backends.local.backend import LocalBackend

__all__ = ["LocalBackend"]


def __getattr__(name: str) -> Any:
    if name == "LocalBackend":
        return import_module("raytpu_ops.backends.local.backend").LocalBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
