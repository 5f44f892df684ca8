"""The look for secrets that were told finds them in each place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.leaks import Argv, leaks
from tests.waiting import eventually

SECRET = "ya29.not-a-real-one"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "airflow.db").write_bytes(b"SQLite")
    (tmp_path / "airflow.db-wal").write_bytes(b"pages")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "attempt=1.log").write_text("begun")
    return tmp_path


def test_where_nothing_was_told_nothing_is_found(home: Path) -> None:
    assert leaks([SECRET], home, labels=[{"a": "b"}]) == []


@pytest.mark.parametrize("name", ["airflow.db", "airflow.db-wal", "logs/attempt=1.log"])
def test_a_secret_in_a_file_of_airflows(home: Path, name: str) -> None:
    (home / name).write_bytes(f"x{SECRET}y".encode())
    assert leaks([SECRET, "another one"], home) == [str(home / name)]


def test_a_secret_among_what_else_was_told(home: Path) -> None:
    assert leaks([SECRET], home, labels=[{"a": SECRET}], lines={"b"}) == ["labels"]


def test_a_secret_on_a_command_line(home: Path) -> None:
    with Argv() as argv:
        command = [sys.executable, "-c", "input()", SECRET]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ) as process:
            eventually(lambda: any(SECRET in line for line in argv.lines), "it is seen")
            process.communicate(b"\n")
    assert leaks([SECRET], home, argv=argv.lines) == ["argv"]


@pytest.mark.parametrize("told", [{}, {"labels": []}])
def test_a_look_that_could_find_nothing_fails(tmp_path: Path, home: Path, told: dict[str, object]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(AssertionError, match="no logs|nothing was told"):
        leaks([SECRET], home if told else empty, **told)
