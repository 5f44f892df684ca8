"""User code of the test DAGs: runs on the hosts of a slice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

#: Longer than any test waits: what hangs here fails there by its own deadline.
PATIENCE_S = 600


def hello() -> str:
    """Say something on each host."""
    print("hello from a host")
    return "hello"


def fail() -> None:
    """Raise."""
    raise ValueError("broken on purpose")


def wait_for(gate: str, lines: int = 0) -> str:
    """Print numbered lines, then wait until a file is there."""
    for number in range(lines):
        print(f"line {number} of {lines}")
    print("waiting at the gate")
    give_up = time.monotonic() + PATIENCE_S
    while not Path(gate).exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{gate} never came")
        time.sleep(0.1)
    print("through the gate")
    return "through"


def train(config: dict[str, Any]) -> None:
    """Count to four with a checkpoint each; a run that was not resumed waits at the gate after the second."""
    import numpy as np

    from raytpu_ops.runtime import current_run

    run = current_run()
    restored = run.restore({"count": np.zeros(())})
    first, state = (1, {"count": np.zeros(())}) if restored is None else (restored[0] + 1, restored[1])
    for step in range(first, 5):
        state = {"count": state["count"] + 1}
        run.report({"count": float(state["count"])}, step=step, state=state)
        if step == 2 and restored is None:
            wait_for(config["gate"])


def wait_for_ever() -> None:
    """Wait for a gate that nobody opens."""
    wait_for("/nonexistent/gate")
