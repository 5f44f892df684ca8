"""User code that the tests of the runtime run on hosts; it is found there by PYTHONPATH."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from raytpu_ops.runtime import current_host, current_run

LINES = 500


def print_lines() -> None:
    """Numbered lines on stdout, some on stderr, and a last one without an end."""
    host = current_host()
    for number in range(LINES):
        print(f"line {number:04d} of {host.rank}")
        if number % 100 == 0:
            print(f"error line {number:04d} of {host.rank}", file=sys.stderr)
    sys.stdout.write(f"last words of {host.rank}")


def look_around(argument: str) -> dict[str, Any]:
    """Prints, connects JAX over all hosts, and says what it sees."""
    host = current_host()
    print_lines()
    host.initialize_jax()
    import jax
    from jax.experimental import multihost_utils

    ranks = multihost_utils.process_allgather(jax.numpy.array([host.rank]))
    return {
        "name": host.name,
        "slice_index": host.slice_index,
        "megascale": {name: value for name, value in os.environ.items() if name.startswith("MEGASCALE_")},
        "ranks": [int(rank) for rank in ranks.ravel()],
        "argument": argument,
        "greeting": os.environ["GREETING"],
    }


def raise_on_one(rank: int) -> None:
    """Raises on one host while the others wait."""
    if current_host().rank == rank:
        raise LookupError("nothing\nto be found")
    time.sleep(600)


def exit_on_one(rank: int) -> None:
    """Ends its process on one host, without a word."""
    if current_host().rank == rank:
        os._exit(7)
    time.sleep(600)


def wait() -> None:
    """Stays until it is ended."""
    time.sleep(600)


def lines_then_raise(config: dict[str, Any]) -> None:
    """A training loop that prints much on every host, then raises on one while the others wait for it."""
    import jax
    from jax.experimental import multihost_utils

    print_lines()
    print()
    if current_run().host.rank == config["raises"]:
        raise ArithmeticError("a bug in the loop")
    multihost_utils.process_allgather(jax.numpy.zeros(1))


def count(config: dict[str, Any]) -> None:
    """A training loop that counts up to ``steps``, in an array that every host holds, with a checkpoint of each."""
    import jax

    run = current_run()
    one_more = jax.jit(lambda state: {"count": state["count"] + 1}, out_shardings=run.replicated)
    state = jax.jit(lambda: {"count": jax.numpy.zeros(())}, out_shardings=run.replicated)()
    done = 0
    if (found := run.restore(state)) is not None:
        done, state = found
    for step in range(done + 1, config["steps"] + 1):
        state = one_more(state)
        run.report({"count": float(state["count"])}, step=step, state=state)
        print(f"step {step}")
        time.sleep(0.2)


def plain_loop(_config: dict[str, Any]) -> dict[str, Any]:
    """A training loop that needs nothing of ours and returns something."""
    import jax

    return {"devices": jax.device_count()}
