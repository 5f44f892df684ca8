"""The time of the fake: hours pass when the test says so, or by themselves at a chosen speed."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta


class Clock:
    """A clock with a diary: what is due is done in order, each thing at its own instant.

    :param speed: seconds that pass in each real second; 0 means that only `advance` moves the time.
    :param per_call: seconds that each request to the fake takes, so that whoever polls sees progress.
    :param start: the first instant, UTC; default: now.
    """

    def __init__(self, *, speed: float = 0.0, per_call: float = 0.0, start: datetime | None = None) -> None:
        self.speed = speed
        self.per_call = per_call
        #: Guards the diary and all state of the fake: one request or step of a state machine at a time.
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._now = start or datetime.now(UTC)
        self._begun = time.monotonic()
        self._diary: list[tuple[datetime, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._closed = False

    def now(self) -> datetime:
        """The instant, UTC."""
        with self.lock:
            return self._now + timedelta(seconds=(time.monotonic() - self._begun) * self.speed)

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something so many seconds from now."""
        with self._changed:
            due = self.now() + timedelta(seconds=seconds)
            heapq.heappush(self._diary, (due, next(self._numbers), do))
            self._changed.notify_all()

    def advance(self, seconds: float) -> None:
        """Let time pass, and do what falls due meanwhile."""
        with self.lock:
            end = self.now() + timedelta(seconds=seconds)
            while self._diary and self._diary[0][0] <= end:
                due, _, do = heapq.heappop(self._diary)
                self._set(max(due, self._now))
                do()
            self._set(max(end, self._now))

    async def sleep(self, seconds: float) -> None:
        """What code under test may use for `asyncio.sleep`: the time passes at once."""
        self.advance(seconds)

    def settle(self) -> None:
        """Do what is due by now."""
        self.advance(0)

    def run(self) -> None:
        """Do things when they fall due, in real time, until `close`; for a thread of its own."""
        with self._changed:
            while not self._closed:
                self.settle()
                wait = None
                if self._diary:
                    wait = max(0.0, (self._diary[0][0] - self.now()).total_seconds() / self.speed)
                self._changed.wait(wait)

    def close(self) -> None:
        """Nothing in the diary is done any more."""
        with self._changed:
            self._closed = True
            self._diary.clear()
            self._changed.notify_all()

    def _set(self, now: datetime) -> None:
        self._now = now
        self._begun = time.monotonic()
