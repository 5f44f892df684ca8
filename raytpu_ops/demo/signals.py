"""How a command that has started things ends early: cleanly, and once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: Exit code of a command that a signal ended, as shells have it for Ctrl-C.
INTERRUPTED = 130

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ends_like_ctrl_c() -> Iterator[None]:
    """Inside, SIGTERM and the end of the terminal raise KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Inside, another signal does not cut the cleaning short, which takes seconds."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *_ENDING)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
