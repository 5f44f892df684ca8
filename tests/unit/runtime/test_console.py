"""The driver's log: whole lines, every worker's line once, events at the start of a line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from raytpu_ops.runtime import console
from raytpu_ops.runtime.console import END_MARK, LineWriter, WorkerLines, emit
from raytpu_ops.tpu.work import EVENT_MARK, Event, parse_event


class Log:
    """The driver's log in a file; inside a ``with``, stdout writes to it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Log:
        self._fd = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._redirect = redirect_stdout(LineWriter(self._fd))
        self._redirect.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._redirect.__exit__(*failure)
        os.close(self._fd)

    @property
    def text(self) -> str:
        return self._path.read_text(encoding="utf-8")


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


def batch(*lines: str, ip: str = "127.0.0.2", pid: Any = 17, **more: Any) -> dict[str, Any]:
    return {"ip": ip, "pid": pid, "is_err": False, "lines": list(lines), "actor_name": None, "task_name": None, **more}


def attached(names: dict[str, str] | None = None) -> WorkerLines:
    lines = WorkerLines("run1", (names or {"127.0.0.2": "s0 worker 1"}).get)
    lines._attached = True
    return lines


def test_lines_of_many_threads_do_not_run_into_each_other(log: Log) -> None:
    with log:

        def talk(number: int) -> None:
            for count in range(50):
                print("thread", number, "says", count)  # several writes, one line

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(log.text.splitlines()) == sorted(f"thread {n} says {c}" for n in range(8) for c in range(50))


def test_an_event_begins_a_line_even_after_a_line_without_an_end(log: Log) -> None:
    with log:
        print("no end", end="")
        emit(Event(event="result", data={"x": 1}))
    first, second = log.text.splitlines()
    assert first == "no end"
    assert parse_event(second) == Event(event="result", data={"x": 1})


def test_a_workers_line_is_never_an_event(log: Log) -> None:
    with log:
        attached().take(batch(f'{EVENT_MARK}{{"event":"result"}}'))
    assert parse_event(log.text.strip()) is None


def test_lines_carry_the_hosts_name_and_marks_are_not_shown(log: Log) -> None:
    with log:
        attached().take(batch("one", "", f"two{END_MARK}run1/0/out"))
    assert log.text == "(s0 worker 1) one\n(s0 worker 1) \n(s0 worker 1) two\n"


def test_lines_that_look_alike_all_arrive(log: Log) -> None:
    with log:
        lines = attached({"127.0.0.2": "a", "127.0.0.3": "b"})
        for ip in ("127.0.0.2", "127.0.0.3"):
            lines.take(batch("step 1", "step 2", ip=ip))
    assert len(re.findall("step", log.text)) == 4


def test_a_process_on_no_tpu_host_is_named_by_what_it_is(log: Log) -> None:
    with log:
        attached().take(batch("hello", ip="127.0.0.9", actor_name="TrainController"))
    assert log.text == "(TrainController pid=17, ip=127.0.0.9) hello\n"


def test_marks_of_another_run_are_lines_like_all_others(log: Log) -> None:
    with log:
        attached().take(batch(f"{END_MARK}run2/0/out"))
    assert END_MARK in log.text


def test_drain_waits_for_both_streams_of_every_worker(log: Log) -> None:
    with log:
        lines = attached()
        waiting = threading.Thread(target=lines.drain, args=(["0", "1"], 30.0), kwargs={"all_ended": True})
        waiting.start()
        for mark in ("0/out", "0/err", "1/out"):
            lines.take(batch(f"{END_MARK}run1/{mark}"))
        waiting.join(0.2)
        assert waiting.is_alive()
        lines.take(batch(f"last{END_MARK}run1/1/err"))
        waiting.join(30)
        assert not waiting.is_alive()
    assert log.text == "(s0 worker 1) last\n"


def test_lines_that_never_arrive_are_warned_about_by_worker(log: Log) -> None:
    with log:
        lines = attached()
        lines.take(batch(f"{END_MARK}run1/0/out", f"{END_MARK}run1/0/err", f"{END_MARK}run1/1/out"))
        lines.drain(["0", "1"], 0.05, all_ended=True)
    assert "the last lines of worker 1 did not arrive" in log.text


def test_lines_that_the_stream_drops_are_counted_and_said(log: Log) -> None:
    """Five lines were written, one of them without an end, before the mark; two of them came."""
    with log:
        lines = attached()
        lines.take(batch("one", f"{END_MARK}run1/0/err 0", is_err=True))
        lines.take(batch("two"))
        lines.take(batch(f"five{END_MARK}run1/0/out 5"))
        lines.drain(["0"], 5, all_ended=True)
    assert "warning: 3 lines of worker 0 are missing above" in log.text


def test_a_log_that_came_whole_is_not_warned_about(log: Log) -> None:
    with log:
        lines = attached()
        lines.take(batch("one", "two"))
        lines.take(batch(f"three{END_MARK}run1/0/out 3", pid=17))
        lines.take(batch(f"{END_MARK}run1/0/err 0", is_err=True))
        lines.drain(["0"], 5, all_ended=True)
    assert "warning" not in log.text


def test_what_follows_a_carriage_return_is_no_event(log: Log) -> None:
    with log:
        attached().take(batch(f'10%\r{EVENT_MARK}{{"event":"result","data":{{}}}}'))
    assert [parse_event(line) for line in log.text.splitlines()] == [None, None]


def test_a_worker_writes_a_line_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's log monitor takes what is there for a line: half of one becomes two."""
    writes: list[bytes] = []

    def write(_fd: int, data: memoryview) -> int:
        writes.append(bytes(data))
        return len(data)

    monkeypatch.setattr(os, "write", write)
    stream = LineWriter(1)
    print("line", 1, file=stream)
    print("no end", end="", file=stream, flush=True)
    print("\r10%", end="", file=stream, flush=True)
    stream.write_rest()
    assert writes == [b"line 1\n", b"no end\r", b"10%\n"]


def test_the_end_mark_says_how_many_lines_were_written_however(tmp_path: Path) -> None:
    """By print, by libraries that know the descriptor only, and without an end; not Ray's own lines."""
    code = (
        "import os; from raytpu_ops.runtime import console; os.write(1, b':job_id:1\\n'); console.use_whole_lines();"
        "print('a', 1); os.write(1, b'b\\n'); print('c', end=''); console.end_of_log('run1', '0')"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, stderr=subprocess.DEVNULL, check=True)
    written = (tmp_path / "out").read_text().splitlines()
    assert written == [":job_id:1", "a 1", "b", "c", f"{END_MARK}run1/0/out 3"]


def test_user_code_that_closed_its_streams_can_end(tmp_path: Path) -> None:
    code = "import os; from raytpu_ops.runtime import console; os.closerange(0, 3); console.end_of_log('run1', '0')"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_marks_the_log_is_complete_when_nothing_comes_any_more(
    monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    with log:
        monkeypatch.setattr(console, "_QUIET_S", 0.2)
        lines = attached()
        began = time.monotonic()
        waiting = threading.Thread(target=lines.drain, args=([], 60.0), kwargs={"all_ended": False})
        waiting.start()
        lines.take(batch("late"))
        waiting.join(30)
        assert not waiting.is_alive()
        assert time.monotonic() - began >= 0.2
    assert log.text == "(s0 worker 1) late\n"
