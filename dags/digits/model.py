"""The model, and the state that training keeps of it."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Classifier(nn.Module):
    """64 pixels in, a score for each of the ten digits out."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Scores of a batch of images."""
        hidden = nn.relu(nn.Dense(256)(images))
        hidden = nn.relu(nn.Dense(128)(hidden))
        return nn.Dense(10)(hidden)


def optimizer(learning_rate: float = 2e-3) -> optax.GradientTransformation:
    """What training moves the parameters with."""
    return optax.adam(learning_rate)


def new_state(seed: int = 0) -> dict[str, Any]:
    """Fresh parameters, and the optimizer's memory of them."""
    params = Classifier().init(jax.random.key(seed), jnp.zeros((1, 64)))
    return {"params": params, "optimizer": optimizer().init(params)}
