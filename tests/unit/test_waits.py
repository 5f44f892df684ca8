"""Claims of waits.py: both drivers take the same steps, and hours pass without a second."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from raytpu_ops.tpu.errors import DeadlineExceeded, Misconfigured, RemoteUnavailable
from raytpu_ops.waits import FIRST_BACKOFF_S, LAST_LOOKS, LONGEST_AWAY_S, Done, Pause, Pending, Wait, wait, wait_async

START = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = START
        self.naps: list[float] = []

    def __call__(self) -> datetime:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += timedelta(seconds=seconds)

    async def asleep(self, seconds: float) -> None:
        self.sleep(seconds)


def judge(seen: str) -> Pending | Done[str]:
    return Done(seen) if seen.startswith("done") else Pending(seen)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sleeping", "awaiting"])
def drive(request: pytest.FixtureRequest, clock: Clock) -> Callable[..., Any]:
    """Runs a wait over scripted looks with one of the two drivers; every claim holds for both."""

    async def run(decider: Wait[str, str], looks: Iterator[str | Exception]) -> str:
        def look() -> str:
            seen = next(looks)
            if isinstance(seen, Exception):
                raise seen
            return seen

        async def alook() -> str:
            return look()

        if request.param == "sleeping":
            return wait(look, decider, sleep=clock.sleep)
        return await wait_async(alook, decider, sleep=clock.asleep)

    return run


def decider(clock: Clock, deadline_s: float | None = 3600, **options: Any) -> Wait[str, str]:
    deadline = None if deadline_s is None else START + timedelta(seconds=deadline_s)
    return Wait("job x", judge, deadline=deadline, clock=clock, rng=random.Random(7), **options)


def endless(seen: str | Exception) -> Iterator[str | Exception]:
    while True:
        yield seen


async def test_a_far_side_that_says_when_to_come_back_is_not_asked_before(drive, clock):
    error = RemoteUnavailable("too many requests")
    error.after_s = 45
    too_long = RemoteUnavailable("too many requests")
    too_long.after_s = 1e9
    assert await drive(decider(clock), iter([error, error, too_long, "done"])) == "done"
    assert clock.naps == [45, 45, LONGEST_AWAY_S]


async def test_the_value_of_the_judge_comes_back(drive, clock):
    assert await drive(decider(clock, poll_s=5), iter(["waiting", "waiting", "done well"])) == "done well"
    assert clock.naps == [5, 5]


async def test_a_finished_state_counts_however_late_the_first_look_comes(drive, clock):
    clock.sleep(10 * 3600)
    assert await drive(decider(clock, deadline_s=60), iter(["done late"])) == "done late"


async def test_the_last_look_is_at_the_deadline_not_a_poll_after_it(drive, clock):
    with pytest.raises(DeadlineExceeded):
        await drive(decider(clock, deadline_s=12, poll_s=5), endless("waiting"))
    assert clock.naps == [5, 5, 2]


async def test_a_day_passes_in_no_time(drive, clock):
    with pytest.raises(DeadlineExceeded):
        await drive(decider(clock, deadline_s=24 * 3600, poll_s=30), endless("waiting"))
    assert clock.now == START + timedelta(hours=24)


async def test_a_timeout_names_object_phase_state_and_deadline(drive, clock):
    with pytest.raises(DeadlineExceeded) as caught:
        await drive(decider(clock, deadline_s=60, phase="labelled"), endless("worker 1 is missing"))
    message = str(caught.value)
    assert message == "job x: the labelled deadline 2026-11-30 12:01:00Z has passed; last seen: worker 1 is missing"


async def test_transient_errors_do_not_end_a_wait(drive, clock):
    looks = iter([RemoteUnavailable("refused")] * 50 + ["done"])
    assert await drive(decider(clock, deadline_s=None), looks) == "done"


async def test_the_deadline_ends_a_wait_of_errors_and_names_the_last_one(drive, clock):
    """F05."""
    looks = iter(["starting", *[RemoteUnavailable(f"refused {number}") for number in range(10_000)]])
    with pytest.raises(DeadlineExceeded, match=r"last seen: starting; last error: refused \d+") as caught:
        await drive(decider(clock, deadline_s=600), looks)
    assert isinstance(caught.value.__cause__, RemoteUnavailable)


async def test_a_late_wait_survives_errors_of_its_first_looks(drive, clock):
    """The far side restarts in the moment in which a late trigger wakes up."""
    clock.sleep(7200)
    looks = iter([*[RemoteUnavailable("reset")] * (LAST_LOOKS - 1), "done after all"])
    assert await drive(decider(clock, deadline_s=60), looks) == "done after all"


async def test_a_late_wait_that_never_gets_an_answer_ends(drive, clock):
    clock.sleep(7200)
    with pytest.raises(DeadlineExceeded, match="last error: gone"):
        await drive(decider(clock, deadline_s=60), endless(RemoteUnavailable("gone")))
    assert len(clock.naps) == 1 + LAST_LOOKS - 1


async def test_permanent_errors_pass_through_at_once(drive, clock):
    with pytest.raises(Misconfigured, match="the token"):
        await drive(decider(clock), iter(["waiting", Misconfigured("the token"), "done"]))
    with pytest.raises(ZeroDivisionError):
        await drive(decider(clock), iter([ZeroDivisionError()]))


async def test_an_error_of_the_judge_ends_the_wait(clock):
    def failing(seen: str) -> Pending | Done[str]:
        raise Misconfigured(f"no good: {seen}")

    with pytest.raises(Misconfigured, match="no good: x"):
        wait(lambda: "x", Wait("job x", failing, deadline=None, clock=clock), sleep=clock.sleep)


async def test_errors_back_off_exponentially_with_jitter_up_to_a_ceiling(drive, clock):
    """F05."""
    looks = iter([*[RemoteUnavailable("x")] * 12, "done"])
    await drive(decider(clock, deadline_s=None, max_backoff_s=20), looks)
    ceilings = [min(20, FIRST_BACKOFF_S * 2**n) for n in range(12)]
    assert all(top / 2 <= nap <= top for nap, top in zip(clock.naps, ceilings, strict=True))
    assert len(set(clock.naps[-4:])) == 4, "no two waits come back in the same moment"


async def test_an_answer_ends_the_back_off(drive, clock):
    looks = iter([*[RemoteUnavailable("x")] * 8, "waiting", RemoteUnavailable("x"), "done"])
    await drive(decider(clock, deadline_s=None, poll_s=5), looks)
    assert clock.naps[8] == 5
    assert clock.naps[9] <= FIRST_BACKOFF_S


async def test_progress_is_told_only_when_it_changes(drive, clock):
    told: list[str] = []
    looks = iter(["1 of 2", "1 of 2", RemoteUnavailable("x"), RemoteUnavailable("x"), "1 of 2", "2 of 2", "done"])
    await drive(decider(clock, on_progress=told.append), looks)
    assert told == ["1 of 2", "job x does not answer, trying again: x", "1 of 2", "2 of 2"]


async def test_a_judge_may_begin_the_next_phase_with_a_deadline_of_its_own(clock):
    """One clock for queueing and start-up kills what waited long in the queue (F10)."""
    waiting: Wait[str, str]

    def phases(seen: str) -> Pending | Done[str]:
        if seen == "running" and waiting.phase == "starting":
            waiting.enter("running", clock() + timedelta(hours=2))
        return judge(seen)

    waiting = Wait("job x", phases, deadline=START + timedelta(seconds=60), phase="starting", poll_s=30, clock=clock)
    looks = iter(["starting", "starting", *["running"] * 20, "done"])
    assert wait(lambda: next(looks), waiting, sleep=clock.sleep) == "done"
    assert clock.now > START + timedelta(seconds=60)


def test_next_is_pure_and_takes_errors_too(clock):
    waiting = decider(clock, poll_s=4)
    assert waiting.next("waiting") == Pause(4)
    assert isinstance(waiting.next(RemoteUnavailable("x")), Pause)
    assert waiting.next("done") == Done("done")
    with pytest.raises(ZeroDivisionError):
        waiting.next(ZeroDivisionError())
    assert clock.naps == []


def test_a_deadline_without_a_time_zone_is_refused(clock):
    with pytest.raises(ValueError, match="no time zone"):
        Wait("job x", judge, deadline=datetime(2026, 11, 30), clock=clock)  # noqa: DTZ001
