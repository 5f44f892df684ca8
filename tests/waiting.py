"""Waiting for a condition in tests: the only place that sleeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Seen = TypeVar("Seen")


def eventually(look: Callable[[], Seen], what: str, *, limit_s: float = 120.0, every_s: float = 0.2) -> Seen:
    """What ``look`` answers once that is true.

    :param what: what is waited for; fails with it after ``limit_s`` seconds, which only a hang takes.
    """
    give_up = time.monotonic() + limit_s
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < give_up, f"this never came true: {what}"
        time.sleep(every_s)


async def eventually_async(
    look: Callable[[], Awaitable[Seen]], what: str, *, limit_s: float = 120.0, every_s: float = 0.2
) -> Seen:
    """The same where ``look`` is a coroutine function."""
    give_up = time.monotonic() + limit_s
    while True:
        seen = await look()
        if seen:
            return seen
        assert time.monotonic() < give_up, f"this never came true: {what}"
        await asyncio.sleep(every_s)
