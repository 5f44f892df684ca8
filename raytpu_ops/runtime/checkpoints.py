"""Checkpoints of a run, written and read by orbax, on a local folder or a bucket.

Orbax writes a step into a folder with another name and renames it when it is whole, so a try that
was killed in the middle leaves nothing that a later one would take for a checkpoint.
"""

from __future__ import annotations

from typing import Any

#: Folder of the checkpoints below a run's own.
FOLDER = "checkpoints"


def make_manager(directory: str, keep: int, *, fresh: bool = False) -> Any:
    """Orbax's manager of the checkpoints in a folder. Every host of the run must call it.

    :param directory: absolute path or URL.
    :param keep: how many checkpoints stay.
    :param fresh: remove those that are there.
    """
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            cleanup_tmp_directories=True,
            # A saved step is whole when `save` returns: what we report is there, and a retry finds it.
            enable_async_checkpointing=False,
        ),
    )
    if fresh:
        for step in manager.all_steps():
            manager.delete(step)
    return manager


def abstract(like: Any) -> Any:
    """Shapes, types and shardings of a tree of arrays, without their values."""
    import jax
    import orbax.checkpoint as ocp

    return jax.tree.map(ocp.utils.to_shape_dtype_struct, like)


def load_checkpoint(path: str, like: Any) -> Any:
    """Read one checkpoint, as ``result["checkpoint"]`` of a training run names it.

    Every host that JAX is connected with must call it; each reads the shards that it holds.

    :param path: folder or URL of the checkpoint.
    :param like: a tree of the same form: arrays, or ``jax.ShapeDtypeStruct``; their shardings say
        where the values go, whatever they were sharded like when they were saved.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    with ocp.StandardCheckpointer() as reader:
        return reader.restore(epath.Path(path) / "default", abstract(like))
