"""Marked processes are found and ended to the last child, and nobody else is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from raytpu_ops.demo.processes import end, end_marked, free_port, marked, tail, with_children

MARK = "RAYTPU_TEST_MARK"
SLEEP = "import time; time.sleep(600)"
#: Starts a child in a session of its own and then sleeps; says so when the child is there.
PARENT = (
    "import subprocess, sys, time\n"
    f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(600)\n"
)
POLITE = (
    "import signal, sys, time\n"
    "def asked(*_):\n"
    "    print('asked', flush=True)\n"
    "    sys.exit()\n"
    "signal.signal(signal.SIGTERM, asked)\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def mark() -> Iterator[str]:
    value = uuid4().hex
    yield value
    for process in marked(MARK, value):
        process.kill()


@pytest.fixture
def start(mark: str) -> Iterator[Start]:
    started = []

    def run(code: str, *, ready: bool = False) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE)
        started.append(process)
        if ready:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_marked_finds_children_of_a_parent_that_is_dead(start: Start, mark: str):
    parent = start(PARENT, ready=True)
    assert len(marked(MARK, mark)) == 2
    parent.kill()
    parent.wait()
    assert len(marked(MARK, mark)) == 1


def test_marked_leaves_out_the_caller_and_other_values(mark: str, monkeypatch: pytest.MonkeyPatch, start: Start):
    monkeypatch.setenv(MARK, mark)
    start(SLEEP)
    assert marked(MARK, mark + "x") == []
    assert os.getpid() not in {process.pid for process in marked(MARK, mark)}


def test_end_asks_first(start: Start):
    process = start(POLITE, ready=True)
    assert end([psutil.Process(process.pid)], grace_s=30) == []
    assert process.stdout is not None
    assert process.stdout.read() == b"asked\n"


def test_end_kills_who_does_not_listen_and_the_children_too(start: Start, mark: str):
    stubborn, parent = start(STUBBORN, ready=True), start(PARENT, ready=True)
    family = with_children(psutil.Process(p.pid) for p in (stubborn, parent))
    assert len(family) == 3
    assert end([psutil.Process(p.pid) for p in (stubborn, parent)], grace_s=0.5) == []
    assert not any(process.is_running() for process in family)
    assert marked(MARK, mark) == []


def test_end_spares_a_stranger_who_got_the_pid(start: Start):
    process = start(SLEEP)
    other = psutil.Process(process.pid)
    other._ident = (other.pid, 1.0)  # as if the number had belonged to a process that began in 1970
    other._create_time = 1.0
    other._exitcode = None
    end([other], grace_s=0)
    assert process.poll() is None


def test_end_marked_ends_all_of_them(start: Start, mark: str):
    start(PARENT, ready=True)
    start(STUBBORN, ready=True)
    assert end_marked(MARK, mark) == []
    assert marked(MARK, mark) == []


def test_free_port_is_free_and_outside_the_ephemeral_range():
    port = free_port()
    assert 20_000 < port < 32_000
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_tail_of_a_log(tmp_path: Path):
    path = tmp_path / "log"
    assert tail(path) == f"({path} was never written)"
    path.touch()
    assert tail(path) == f"({path} is empty)"
    path.write_bytes(b"".join(b"line %d \xff\n" % n for n in range(100)))
    assert tail(path, 2).splitlines() == ["line 98 �", "line 99 �"]
