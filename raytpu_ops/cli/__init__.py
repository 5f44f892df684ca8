"""The ``raytpu`` command. Commands import what they need when they run, so ``--help`` is quick."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the ``raytpu`` command; an error of ours is one line, not a traceback."""
    try:
        from raytpu_ops.cli.app import app
        from raytpu_ops.tpu.errors import RayTpuError

        try:
            app(prog_name="raytpu")
        except RayTpuError as error:
            print(f"raytpu: {error}", file=sys.stderr)
            sys.exit(1)
    except KeyboardInterrupt:  # so early that nothing was begun: the imports take a moment
        sys.exit(130)
