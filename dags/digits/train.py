"""Data-parallel training: each host works on its share of the images, all of them keep the same parameters."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from digits.data import training
from digits.model import Classifier, new_state, optimizer
from raytpu_ops.runtime import current_run


def loop(config: dict[str, Any]) -> None:
    """Train for ``config["epochs"]`` epochs, from the last checkpoint where there is one."""
    run = current_run()
    images, digits = training()
    mine = run.rows(len(images))
    images, digits = images[mine], digits[mine]
    batch = int(config.get("batch_per_host", 32))

    state = jax.jit(new_state, out_shardings=run.replicated)(config.get("seed", 0))
    done = 0
    if (found := run.restore(state)) is not None:
        done, state = found
        print(f"going on after epoch {done}")

    @jax.jit
    def step(
        state: dict[str, Any], images: jax.Array, digits: jax.Array
    ) -> tuple[dict[str, Any], jax.Array, jax.Array]:
        def loss_of(params: Any) -> tuple[jax.Array, jax.Array]:
            scores = Classifier().apply(params, images)
            losses = optax.softmax_cross_entropy_with_integer_labels(scores, digits)
            return losses.mean(), (scores.argmax(-1) == digits).mean()

        (loss, accuracy), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        updates, memory = optimizer().update(gradients, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "optimizer": memory}
        return jax.lax.with_sharding_constraint((new, loss, accuracy), run.replicated)

    for epoch in range(done + 1, int(config["epochs"]) + 1):
        seen = []
        order = np.random.default_rng([epoch, run.host.rank]).permutation(len(images))
        for rows in order[: len(order) // batch * batch].reshape(-1, batch):
            state, loss, accuracy = step(state, *run.shard((images[rows], digits[rows])))
            seen.append((float(loss), float(accuracy)))
        loss, accuracy = np.mean(seen, axis=0)
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}, {run.host.name} of {run.host.num_hosts} hosts")
        run.report({"loss": loss, "accuracy": accuracy}, step=epoch, state=state)
