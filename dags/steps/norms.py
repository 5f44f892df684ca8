"""User code for ``tpu_inside_your_dag``: runs once on each host of the slice."""

from __future__ import annotations


def of_products(sizes: list[int]) -> dict[str, float]:
    """The Frobenius norm of a product of two random matrices, for each size, computed with JAX."""
    import jax
    import jax.numpy as jnp

    norms = {}
    for size in sizes:
        left, right = (jax.random.normal(key, (size, size)) for key in jax.random.split(jax.random.key(size)))
        norms[str(size)] = float(jnp.linalg.norm(left @ right))
    print(f"norms on {jax.default_backend()}: {norms}")
    return norms
