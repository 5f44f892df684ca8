"""Where user code meets ours: every way not to find it has words of its own, answers become plain JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytpu_ops.runtime.targets import failure_record, import_target, last_line, plain
from raytpu_ops.tpu.errors import DeadlineExceeded, UserCodeFailed


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("users_")]:
        del sys.modules[name]


def test_a_method_of_a_class_is_a_target_too(user_code: Path) -> None:
    (user_code / "users_a.py").write_text("class Job:\n    @staticmethod\n    def run(): return 7\n")
    assert import_target("users_a:Job.run", "function")() == 7


@pytest.mark.parametrize(
    ("code", "target", "words"),
    [
        (None, "users_none:f", "there is no module 'users_none' on the host"),
        ("import users_missing", "users_b:f", "there is no module 'users_missing' on the host"),
        ("", "users_b:f", "'users_b:f' does not exist"),
        ("f = 3", "users_b:f", "is a int, it must be callable"),
        ("raise ValueError('at import')", "users_b:f", "importing it raised ValueError: at import"),
        ("def f(:", "users_b:f", "importing it raised SyntaxError"),
    ],
)
def test_what_is_wrong_with_a_target(user_code: Path, code: str | None, target: str, words: str) -> None:
    if code is not None:
        (user_code / "users_b.py").write_text(code)
    with pytest.raises(UserCodeFailed) as caught:
        import_target(target, "train_loop")
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"train_loop '{target}'")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.array(3), 3),
        ({"a": (1, np.int64(2)), 3: None}, {"a": [1, 2], "3": None}),
        (float("nan"), None),
        (float("inf"), None),
        (True, True),
        ("text", "text"),
    ],
)
def test_answers_become_plain_json(value: Any, expected: Any) -> None:
    found = plain(value, "it")
    assert found == expected
    assert type(found) is type(expected)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(3), b"bytes", {"deep": [object()]}])
def test_what_json_has_no_word_for_is_refused(value: Any) -> None:
    with pytest.raises(UserCodeFailed, match="what f returned holds a .* which is no plain JSON"):
        plain(value, "what f returned")


def test_the_last_line_of_a_traceback_is_one_line() -> None:
    assert last_line(ValueError("one\n  two")) == "ValueError: one two"
    assert last_line(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_a_record_says_whether_the_error_is_ours() -> None:
    assert failure_record(DeadlineExceeded("late"))["ours"] == "DeadlineExceeded"
    assert failure_record(LookupError("x")) | {"at": 0} == {
        "at": 0,
        "error": "LookupError: x",
        "kind": "builtins.LookupError",
        "ours": "",
    }


def test_numbers_that_json_has_no_word_for_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert plain({"a": [math.nan, 1.5], "b": math.inf}, "metrics") == {"a": [None, 1.5], "b": None}
    assert capsys.readouterr().out == (
        "[raytpu] warning: metrics holds inf, nan, for which JSON has no word: it is null in the result\n"
    )


def test_an_exception_whose_text_fails_is_named_all_the_same() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert last_line(Silent()) == "Silent: its text can't be had, RuntimeError in its __str__"
