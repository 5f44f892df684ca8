"""A demo that is ended half way, by Ctrl-C's like or by SIGKILL, leaves nothing on the machine.

That it passes when nobody ends it is what ``make demo`` shows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from raytpu_ops.demo.airflow import MARK
from raytpu_ops.demo.leftovers import left_behind

pytestmark = [pytest.mark.airflow, pytest.mark.ray, pytest.mark.timeout(420)]

COMMAND = [sys.executable, "-c", "from raytpu_ops.cli import main; main()", "demo", "--plain", "--slices", "1"]


class Demo:
    """A demo whose hosts are being started; what it has on the machine is known."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if "labelled: running" in line:
                break
        else:
            pytest.fail("the demo ended before its hosts were started:\n" + "\n".join(self.lines))
        environ = next(env for env in self._environments() if MARK in env)
        self.mark = environ[MARK]
        self.local_root = Path(environ["RAYTPU_LOCAL_ROOT"])
        self.folders = [self.local_root.parent, Path(environ["TMPDIR"])]

    def left(self) -> list[str]:
        marks = [(MARK, self.mark), ("RAYTPU_ROOT", str(self.local_root))]
        return left_behind(local_root=self.local_root, marks=marks, folders=self.folders, ports=[])

    def wait_until_nothing_is_left(self, deadline_s: float) -> list[str]:
        until = time.monotonic() + deadline_s
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(0.5)
        return left

    def _environments(self) -> Iterator[dict[str, str]]:
        for child in psutil.Process(self.process.pid).children():
            yield child.environ()


@pytest.fixture
def demo() -> Iterator[Demo]:
    one = Demo()
    yield one
    one.process.kill()
    one.process.communicate()


def test_sigterm_cleans_up_before_the_command_ends(demo: Demo):
    assert any(line.startswith("lease ") for line in demo.left())
    demo.process.send_signal(signal.SIGTERM)
    out, _ = demo.process.communicate(timeout=120)
    assert demo.process.returncode == 130
    assert out.splitlines()[-1].startswith("demo: interrupted after")
    assert out.splitlines()[-1].endswith("nothing left")
    assert demo.left() == []


def test_after_sigkill_the_guard_cleans_up(demo: Demo):
    assert any(line.startswith("lease ") for line in demo.left())
    os.kill(demo.process.pid, signal.SIGKILL)
    demo.process.communicate(timeout=120)
    assert demo.wait_until_nothing_is_left(deadline_s=120) == []
