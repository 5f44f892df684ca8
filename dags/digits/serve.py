"""The trained model behind HTTP: its weights are spread over all hosts of a slice, which answer together."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from digits.model import Classifier, new_state
from raytpu_ops.runtime import load_checkpoint, slice_app

#: Images that go through the model at a time: one shape, compiled once.
BATCH = 64


class Digits:
    """Lives on every host of the slice; each of them holds a part of the weights."""

    def __init__(self, checkpoint: str) -> None:
        mesh = Mesh(np.asarray(jax.devices()), ("model",))
        whole = NamedSharding(mesh, PartitionSpec())
        rows = NamedSharding(mesh, PartitionSpec("model"))

        def placed(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            fits = len(shape.shape) == 2 and shape.shape[0] % mesh.size == 0
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=rows if fits else whole)

        like = jax.tree.map(placed, jax.eval_shape(new_state))
        params = load_checkpoint(checkpoint, like)["params"]

        @jax.jit
        def digits_of(params: Any, images: jax.Array) -> jax.Array:
            digits = Classifier().apply(params, images).argmax(-1)
            return jax.lax.with_sharding_constraint(digits, whole)

        self._digits = lambda images: np.asarray(digits_of(params, jax.device_put(images, whole)))
        self._digits(np.zeros((BATCH, 64), np.float32))  # compiled before the first question comes

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """``{"images": [[64 numbers between 0 and 1], ...]}`` in, ``{"digits": [...]}`` out."""
        images = np.asarray(request["images"], np.float32)
        if images.ndim != 2 or images.shape[1] != 64:
            raise ValueError(f"images must be rows of 64 numbers, got an array of shape {images.shape}")
        found: list[int] = []
        for start in range(0, len(images), BATCH):
            batch = images[start : start + BATCH]
            filled = np.pad(batch, ((0, BATCH - len(batch)), (0, 0)))
            found += self._digits(filled)[: len(batch)].tolist()
        return {"digits": found}


def app(args: dict[str, Any]) -> Any:
    """The application that RayServeOperator deploys.

    :param args: ``checkpoint``, as the training task's result names it.
    """
    return slice_app(Digits, args["checkpoint"], num_replicas=int(args.get("replicas", 1)))
