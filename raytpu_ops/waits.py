"""Decide once, wait twice: one decider that makes every choice, a sleeping and an awaiting driver.

Callers bring a *look* (the I/O) and a *judge* (what an observation means to them); the decider
brings the clock's side: when to look again, when it is too late, what to say. So a blocking task
and a trigger cannot come to different verdicts (F40).

Not here: anything of Ray or Airflow, and what an observation means.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar

from raytpu_ops.tpu.errors import DeadlineExceeded, RemoteUnavailable

Seen = TypeVar("Seen")
Value = TypeVar("Value")
#: What a driver's look brings; plain functions need variables of their own.
S = TypeVar("S")
V = TypeVar("V")

#: A time-out is declared after a look that got an answer, or after so many that got none: the far
#: side may be restarting in the very moment in which a late trigger wakes up (F33).
LAST_LOOKS = 3
#: The first pause after an error, seconds; each further error in a row doubles it.
FIRST_BACKOFF_S = 0.5
#: The longest that a far side may ask us to stay away, seconds.
LONGEST_AWAY_S = 300.0


def utc_now() -> datetime:
    """The clock that waits use unless a test brings its own."""
    return datetime.now(UTC)


@dataclass(frozen=True)
class Pending:
    """The judge's word for "not yet".

    :param description: what is there and what is missing; progress is told when it changes.
    """

    description: str


@dataclass(frozen=True)
class Done(Generic[Value]):
    """The wait is over, with this value."""

    value: Value


@dataclass(frozen=True)
class Pause:
    """Look again after so many seconds."""

    seconds: float


class Wait(Generic[Seen, Value]):
    """The decider: fed one observation or error after the other, it answers with the next step.

    The deadline is looked at only after an observation, so the state is always known before a
    time-out is declared, however late the first look comes (F33).

    :param what: the object that is waited for, as messages name it.
    :param judge: what an observation means; it may raise, which ends the wait.
    :param deadline: the instant, UTC, after which there is no further pause; None waits for ever.
    :param phase: the phase whose deadline it is, as messages name it.
    :param poll_s: seconds between two looks while nothing is wrong.
    :param max_backoff_s: the longest pause after errors, seconds.
    :param on_progress: called with a line, only when it differs from the last one.
    :param clock: the time, UTC.
    :param rng: the source of jitter.
    """

    def __init__(
        self,
        what: str,
        judge: Callable[[Seen], Pending | Done[Value]],
        *,
        deadline: datetime | None,
        phase: str = "",
        poll_s: float = 5.0,
        max_backoff_s: float = 60.0,
        on_progress: Callable[[str], None] | None = None,
        clock: Callable[[], datetime] = utc_now,
        rng: random.Random | None = None,
    ) -> None:
        self.what = what
        self.description = ""
        self.last_error: Exception | None = None
        self._judge = judge
        self._poll_s = poll_s
        self._max_backoff_s = max_backoff_s
        self._on_progress = on_progress
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - jitter is no secret
        self._errors = 0
        self._told = ""
        self.enter(phase, deadline)

    def enter(self, phase: str, deadline: datetime | None) -> None:
        """Begin another phase with a deadline of its own; a judge calls this when it sees that one began.

        :param deadline: the instant, UTC; None waits for ever.
        :raises ValueError: for an instant without a time zone, which means something else elsewhere.
        """
        if deadline is not None and deadline.tzinfo is None:
            raise ValueError(f"{self.what}: the deadline {deadline.isoformat()} has no time zone; pass UTC")
        self.phase = str(phase)
        self.deadline = deadline

    def next(self, seen: Seen | Exception) -> Pause | Done[Value]:
        """The next step after one look.

        :param seen: what the look brought, or the error that it ended with.
        :raises DeadlineExceeded: the phase is over, and the state was looked at.
        :raises Exception: an error that is not transient, as it came.
        """
        if isinstance(seen, Exception):
            return self._after_error(seen)
        verdict = self._judge(seen)
        self._errors = 0
        self.last_error = None
        if isinstance(verdict, Done):
            return verdict
        self.description = verdict.description
        self._tell(verdict.description)
        if self._seconds_left() <= 0:
            raise self._too_late()
        return self._pause(self._poll_s)

    def _after_error(self, error: Exception) -> Pause:
        if not isinstance(error, RemoteUnavailable):
            raise error
        self._errors += 1
        self.last_error = error
        self._tell(f"{self.what} does not answer, trying again: {error}")
        ceiling = min(self._max_backoff_s, FIRST_BACKOFF_S * 2 ** min(self._errors - 1, 16))
        pause = max(ceiling * self._rng.uniform(0.5, 1.0), min(error.after_s, LONGEST_AWAY_S))
        if self._seconds_left() > 0:
            return self._pause(pause)
        if self._errors >= LAST_LOOKS:
            raise self._too_late() from error
        return Pause(min(pause, self._poll_s))

    def _pause(self, seconds: float) -> Pause:
        # Never past the deadline: the look that decides comes at it, not a pause later.
        return Pause(max(0.0, min(seconds, self._seconds_left())))

    def _seconds_left(self) -> float:
        if self.deadline is None:
            return float("inf")
        return (self.deadline - self._clock()).total_seconds()

    def _tell(self, line: str) -> None:
        if self._on_progress is not None and line != self._told:
            self._told = line
            self._on_progress(line)

    def _too_late(self) -> DeadlineExceeded:
        assert self.deadline is not None
        phase = f" {self.phase}" if self.phase else ""
        parts = [f"{self.what}: the{phase} deadline {self.deadline:%Y-%m-%d %H:%M:%S}Z has passed"]
        if self.description:
            parts.append(f"last seen: {self.description}")
        if self.last_error is not None:
            parts.append(f"last error: {self.last_error}")
        return DeadlineExceeded("; ".join(parts))


def wait(look: Callable[[], S], decider: Wait[S, V], *, sleep: Callable[[float], None] = time.sleep) -> V:
    """The sleeping driver, for a task that blocks.

    :param look: one observation; an error that is not RemoteUnavailable ends the wait as it came.
    :param decider: makes every choice.
    :param sleep: takes seconds.
    :raises DeadlineExceeded: the deadline passed.
    """
    while True:
        seen: S | Exception
        try:
            seen = look()
        except RemoteUnavailable as error:  # all else is permanent and passes through
            seen = error
        step = decider.next(seen)
        if isinstance(step, Done):
            return step.value
        sleep(step.seconds)


async def wait_async(
    look: Callable[[], Awaitable[S]],
    decider: Wait[S, V],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> V:
    """The awaiting driver, for a trigger; the same choices as :func:`wait`."""
    while True:
        seen: S | Exception
        try:
            seen = await look()
        except RemoteUnavailable as error:  # all else is permanent and passes through
            seen = error
        step = decider.next(seen)
        if isinstance(step, Done):
            return step.value
        await sleep(step.seconds)
