"""The guard cleans up after a parent that was killed, and does nothing after one that said it had."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from raytpu_ops.demo.guard import Guard
from raytpu_ops.demo.processes import marked

MARK = "RAYTPU_TEST_MARK"
#: A parent with a guard, a folder and a marked child, that is killed or dismisses its guard.
PARENT = """
import os, subprocess, sys, time
from pathlib import Path
from raytpu_ops.demo.guard import Guard

mark, folder, way = sys.argv[1:]
guard = Guard(marks=[("RAYTPU_TEST_MARK", mark)], folders=[Path(folder)])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, "RAYTPU_TEST_MARK": mark})
print("ready", flush=True)
if way == "dismiss":
    sys.stdin.readline()
    guard.dismiss()
    print("dismissed", flush=True)
time.sleep(600)
"""


def parent(mark: str, folder: Path, way: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, mark, str(folder), way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def guards_of(pid: int) -> list[int]:
    import psutil

    return [p.pid for p in psutil.Process(pid).children() if "raytpu_ops.demo.guard" in p.cmdline()]


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def wait_until_gone(mark: str, folder: Path) -> None:
    until = time.monotonic() + 30
    while (folder.exists() or marked(MARK, mark)) and time.monotonic() < until:
        time.sleep(0.05)


def test_after_sigkill_of_the_parent_nothing_is_left(tmp_path: Path):
    mark, folder = uuid4().hex, tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    process = parent(mark, folder, "stay")
    assert marked(MARK, mark)
    end(process)
    wait_until_gone(mark, folder)
    assert marked(MARK, mark) == []
    assert not folder.exists()


def test_a_dismissed_guard_touches_nothing(tmp_path: Path):
    mark, folder = uuid4().hex, tmp_path / "folder"
    folder.mkdir()
    process = parent(mark, folder, "dismiss")
    try:
        assert len(guards_of(process.pid)) == 1
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "dismissed\n"
        assert guards_of(process.pid) == []
        assert folder.exists()
        assert marked(MARK, mark)
    finally:
        for left in marked(MARK, mark):
            left.kill()
        end(process)


def test_dismissing_twice_is_fine():
    guard = Guard()
    guard.dismiss()
    guard.dismiss()


def test_a_guard_survives_what_ends_the_parents_group(tmp_path: Path):
    guard = Guard()
    try:
        assert os.getsid(guard._process.pid) != os.getsid(0)
    finally:
        guard.dismiss()
    assert guard._process.returncode == 0


@pytest.mark.parametrize("folders", [[], ["never-made"]])
def test_folders_that_are_not_there_are_no_trouble(tmp_path: Path, folders: list[str]):
    from raytpu_ops.demo.guard import clean_up

    clean_up({"marks": [], "local_root": None, "folders": [str(tmp_path / name) for name in folders]})
    assert not (tmp_path / "never-made").exists()
