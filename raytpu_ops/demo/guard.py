"""Cleans up after a parent that cannot do it any more: killed, crashed, out of memory.

A small process of its own session holds the reading end of a pipe. When the pipe closes and
nobody said "done" before, the parent is dead: the guard ends what it left, releases its leases on
the local backend and removes its folders. Not for the ordinary way out: that is the parent's work,
and it can say what is left.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from raytpu_ops.demo.processes import end_marked

_DONE = b"done\n"


class Guard:
    """The parent's end of the pipe.

    :param marks: variables and values by which left processes are found.
    :param local_root: root of a local backend whose leases are released.
    :param folders: what is removed at the end.
    :param log: where the guard writes what it did.
    """

    def __init__(
        self,
        *,
        marks: Sequence[tuple[str, str]] = (),
        local_root: Path | None = None,
        folders: Sequence[Path] = (),
        log: Path | None = None,
    ) -> None:
        orders = {
            "marks": [list(mark) for mark in marks],
            "local_root": str(local_root) if local_root else None,
            "folders": [str(folder) for folder in folders],
        }
        with (log or Path(os.devnull)).open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(orders).encode() + b"\n")
        self._process.stdin.flush()

    def dismiss(self) -> None:
        """Say that all is cleaned up; the guard ends without touching anything."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        try:
            self._process.stdin.write(_DONE)
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # the guard is gone already; there is nobody to dismiss
        self._process.wait(timeout=30)


def clean_up(orders: dict[str, object]) -> None:
    """Do what a dead parent would have done, as far as ``orders`` say."""
    marks = orders["marks"]
    folders = orders["folders"]
    assert isinstance(marks, list)
    assert isinstance(folders, list)
    for variable, value in marks:
        end_marked(variable, value)
    if orders["local_root"]:
        from raytpu_ops.demo.leases import release_all

        release_all(Path(str(orders["local_root"])))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Read the orders, wait for the parent's end, act unless it said that it had cleaned up."""
    orders = json.loads(sys.stdin.buffer.readline())
    if sys.stdin.buffer.read() != _DONE:
        clean_up(orders)


if __name__ == "__main__":
    main()
