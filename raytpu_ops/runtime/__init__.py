"""What runs ON the Ray cluster: training loops, functions on every host, served models.

``python -m raytpu_ops.runtime`` is the driver of each job that the operators submit. User code that
runs there finds its place in the world here:

    from raytpu_ops.runtime import current_run      in a training loop
    from raytpu_ops.runtime import current_host     in a function on a host, and in a served model
    from raytpu_ops.runtime import slice_app        to serve a model that is spread over a slice
    from raytpu_ops.runtime import load_checkpoint  to read what a training run has saved

Nothing of Airflow is here, and of this package only ``raytpu_ops.tpu``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytpu_ops.runtime.checkpoints import load_checkpoint
    from raytpu_ops.runtime.place import CurrentHost, current_host
    from raytpu_ops.runtime.run import CurrentRun, current_run
    from raytpu_ops.runtime.serve import slice_app

__all__ = ["CurrentHost", "CurrentRun", "current_host", "current_run", "load_checkpoint", "slice_app"]

# Lazy: a served model needs no orbax, a function on a host no Serve, and each import is paid for on every host.
_HOMES = {
    "CurrentHost": "place",
    "CurrentRun": "run",
    "current_host": "place",
    "current_run": "run",
    "load_checkpoint": "checkpoints",
    "slice_app": "serve",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
