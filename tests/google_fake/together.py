"""What makes a test that plays with time the same each time: several tasks on one clock, and jitter from a seed.

Not here: the clock.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.google_fake.fake import GoogleFake


@contextmanager
def jitter(seed: int) -> Iterator[None]:
    """Pauses after errors follow from the seed: whoever waits looks at the same instants each time.

    Those of `raytpu_ops.waits`, and of tenacity, which takes them from the module's own dice.
    """
    before, dice = random.getstate(), random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raytpu_ops.waits.random", SimpleNamespace(Random=lambda: dice))
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before)


class Together:
    """Several tasks on one clock: when all of them sleep, it goes on to the moment in which the first one wakes.

    So one of them works at a time, in an order that follows from what each of them does.

    :param google: whose clock it is.
    :param passes: lets so many seconds pass; default: on the clock, and nothing else.
    """

    def __init__(self, google: GoogleFake, passes: Callable[[float], None] | None = None) -> None:
        self._clock = google.clock
        self._passes = passes or google.clock.advance
        self._tasks = 0
        self._asleep: list[tuple[datetime, int, asyncio.Event]] = []
        self._numbers = itertools.count(1)

    async def sleep(self, seconds: float) -> None:
        """What each of them sleeps with; no two wake at the same instant."""
        number, woken = next(self._numbers), asyncio.Event()
        due = self._clock.now() + timedelta(seconds=seconds, microseconds=number)
        heapq.heappush(self._asleep, (due, number, woken))
        self._go_on()
        await woken.wait()

    async def run(self, *tasks: tuple[float, Callable[[], Awaitable[object]]]) -> list[object]:
        """What they return or raise.

        :param tasks: each with the seconds after which it begins.
        """
        self._tasks = len(tasks)
        return await asyncio.gather(*(self._one(*task) for task in tasks), return_exceptions=True)

    async def _one(self, after: float, task: Callable[[], Awaitable[object]]) -> object:
        try:
            await self.sleep(after)
            return await task()
        finally:
            self._tasks -= 1
            self._go_on()

    def _go_on(self) -> None:
        if self._asleep and len(self._asleep) == self._tasks:
            due, _, woken = heapq.heappop(self._asleep)
            self._passes(max(0.0, (due - self._clock.now()).total_seconds()))
            woken.set()
