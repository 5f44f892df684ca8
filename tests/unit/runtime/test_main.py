"""The driver's door: whatever happens, one event says how it ended, and the exit code agrees."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from raytpu_ops.runtime import __main__ as driver
from raytpu_ops.tpu.errors import FailureClass, Preempted
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.tpu.work import WORK_VARIABLE, Event, FunctionWork, dump_work, parse_event

WORK = dump_work(FunctionWork.of(spec=SliceSpec.of("v4", "2x2x2"), function="a.b:c"))


class _Session:
    closed = False

    @classmethod
    def open(cls, _start_timeout_s: float) -> _Session:
        return cls()

    def close(self) -> None:
        type(self).closed = True


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the work end in a way: a result, or an exception."""
    from raytpu_ops.runtime import hosts, session

    def set_end(end: Any) -> None:
        def run(_work: Any, _session: Any) -> Any:
            if isinstance(end, BaseException):
                raise end
            return end

        monkeypatch.setattr(hosts, "run_on_slices", run)

    _Session.closed = False
    monkeypatch.setattr(session, "Session", _Session)
    monkeypatch.setattr(driver.signal, "signal", lambda *_: None)
    return set_end


def events(text: str) -> list[Event]:
    return [event for line in text.splitlines() if (event := parse_event(line)) is not None]


def test_a_result_is_one_event_and_exit_code_0(ends: Any, capfd: pytest.CaptureFixture[str]) -> None:
    ends({"hosts": []})
    assert driver.main({WORK_VARIABLE: WORK}) == 0
    assert events(capfd.readouterr().out) == [Event(event="result", data={"hosts": []})]
    assert _Session.closed


@pytest.mark.parametrize(
    ("end", "failure_class", "words"),
    [
        (Preempted("s0 worker 1 died"), FailureClass.PREEMPTED, "s0 worker 1 died"),
        (driver._Stop(), FailureClass.JOB_STOPPED, "stopped from outside"),
        (RuntimeError("what\nnow"), FailureClass.MISCONFIGURED, "the driver failed: RuntimeError: what now"),
    ],
)
def test_every_other_end_is_one_event_too(
    ends: Any, capfd: pytest.CaptureFixture[str], end: BaseException, failure_class: FailureClass, words: str
) -> None:
    ends(end)
    assert driver.main({WORK_VARIABLE: WORK}) == 1
    (event,) = events(capfd.readouterr().out)
    assert (event.event, event.failure_class) == ("failed", failure_class)
    assert words in event.message
    assert _Session.closed


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "RAYTPU_WORK is not set"),
        ({WORK_VARIABLE: "nonsense"}, "work"),
        ({WORK_VARIABLE: '{"kind":"dance"}'}, "kind"),
    ],
)
def test_work_that_cannot_be_read_is_misconfigured(environ: dict[str, str], words: str) -> None:
    """As a process of its own, which must not need Ray for it."""
    bare = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-m", "raytpu_ops.runtime"],
        env={**bare, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    (event,) = events(done.stdout)
    assert event.failure_class is FailureClass.MISCONFIGURED
    assert words in event.message
