"""What is left is found on the machine: a process, a folder, a port, a lease."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

from raytpu_ops.demo.leftovers import left_behind

MARK = "RAYTPU_TEST_MARK"


def left(short_dir: Path, **changes: object) -> list[str]:
    arguments: dict = {"local_root": short_dir / "r", "marks": [], "folders": [], "ports": []} | changes
    return left_behind(**arguments)


def test_nothing_is_left(short_dir: Path):
    assert left(short_dir, marks=[(MARK, uuid4().hex)], folders=[short_dir / "gone"], ports=[1]) == []


def test_a_marked_process_is_named(short_dir: Path):
    mark = uuid4().hex
    process = subprocess.Popen([sys.executable, "-c", "input()"], env={**os.environ, MARK: mark}, stdin=subprocess.PIPE)
    try:
        assert left(short_dir, marks=[(MARK, mark)]) == [f"process {process.pid} (python)"]
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_names_the_folder_is_found_without_a_mark(short_dir: Path):
    argv = [sys.executable, "-c", "input()", f"--session={short_dir}/x"]
    process = subprocess.Popen([*argv[:3], f"{short_dir}/r/session"], stdin=subprocess.PIPE)
    try:
        assert left(short_dir) == [f"process {process.pid} (python)"]
    finally:
        process.kill()
        process.communicate()


def test_a_folder_and_a_listener_are_named(short_dir: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert left(short_dir, folders=[tmp_path], ports=[port]) == [
            f"folder {tmp_path}",
            f"somebody who listens on port {port}",
        ]
