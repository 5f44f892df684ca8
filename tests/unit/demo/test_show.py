"""The demo's exit code and last line: green only for a green run that left nothing, clean-up always."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raytpu_ops.backends.base import Released
from raytpu_ops.demo import show
from raytpu_ops.demo.pipeline import Finished, Snapshot
from raytpu_ops.demo.report import LiveProgress
from raytpu_ops.tpu.errors import DeadlineExceeded, RemoteUnavailable
from tests.unit.demo.test_pipeline import BEGAN, Api, run_to_end


class Instance:
    """An Airflow that does nothing, and remembers whether it was stopped."""

    def __init__(self, home: Path, dags: Path, **options: Any) -> None:
        self.options = options
        self.url, self.port, self.mark, self.api = "http://127.0.0.1:1", 1, "m", None
        self.temp = home.parent / "no-such-folder"
        self.stopped = 0

    def start(self, say: Any) -> None:
        say("up")

    def stop(self) -> list[str]:
        self.stopped += 1
        return []


class Stage:
    """Everything around the demo, replaced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.instances: list[Instance] = []
        self.run: Any = run_to_end
        self.left: list[str] = []
        self.released = Released()
        self._capsys = capsys
        monkeypatch.setattr(show, "AirflowInstance", self._instance)
        monkeypatch.setattr(show, "run_pipeline", lambda *_, **__: self.run())
        monkeypatch.setattr(show, "release_all", lambda root: self.released)
        monkeypatch.setattr(show, "left_behind", lambda **_: list(self.left))

    def _instance(self, *args: Any, **options: Any) -> Instance:
        self.instances.append(Instance(*args, **options))
        return self.instances[-1]

    def play(self) -> tuple[int, str]:
        """The exit code and what was printed."""
        code = show.run_demo(Console(width=200), {}, home=None, plain=True, deadline_s=1)
        [instance] = self.instances
        assert instance.stopped == 1
        [place] = instance.options["temporary"]
        assert not place.exists()
        return code, self._capsys.readouterr().out


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Stage:
    return Stage(monkeypatch, capsys)


def raising(error: BaseException) -> Any:
    def run() -> Finished:
        raise error

    return run


def last(text: str) -> str:
    return re.sub(r"\d+ s", "N s", text.splitlines()[-1])


def test_a_green_run_that_left_nothing_passes(stage: Stage):
    code, out = stage.play()
    assert code == 0
    assert last(out) == "demo: passed in N s; accuracy 0.97; nothing left"


def test_a_green_run_that_left_something_fails_and_names_it(stage: Stage):
    stage.left = ["process 7 (raylet)"]
    code, out = stage.play()
    assert code == 1
    assert "left behind: process 7 (raylet)" in out
    assert last(out) == "demo: failed because something was left after N s"


def test_a_lease_that_cannot_be_released_fails_the_demo(stage: Stage):
    stage.released = Released(left=["process 8 of lease a"])
    code, out = stage.play()
    assert code == 1
    assert "process 8 of lease a" in out


def test_a_red_run_fails_and_names_the_phase(stage: Stage):
    stage.run = lambda: run_to_end(states={"train": "failed"})
    code, out = stage.play()
    assert code == 1
    assert last(out) == "demo: failed in train after N s"
    assert "train went wrong" in out


@pytest.mark.parametrize("error", [DeadlineExceeded("not over after 1 s"), RemoteUnavailable("does not answer")])
def test_an_error_of_ours_is_told_and_cleaned_up_after(stage: Stage, error: Exception):
    stage.run = raising(error)
    code, out = stage.play()
    assert code == 1
    assert str(error) in out
    assert last(out) == "demo: failed after N s"


def test_ctrl_c_cleans_up_and_says_so(stage: Stage):
    stage.run = raising(KeyboardInterrupt())
    code, out = stage.play()
    assert code == 130
    assert last(out) == "demo: interrupted after N s; nothing left"


def test_another_error_cleans_up_too(stage: Stage):
    stage.run = raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        stage.play()
    assert stage.instances[0].stopped == 1


def test_the_live_table_shows_phases_and_the_latest_log_line(capsys: pytest.CaptureFixture[str]):
    from raytpu_ops.demo.pipeline import look

    with LiveProgress(Console(width=100, force_terminal=True)) as shown:
        shown.step("starting")
        shown._live.refresh()
        shown.show(look(Api(40), "r"), "epoch 3: loss 0.1 [red]")  # type: ignore[arg-type]
        shown._live.refresh()
        shown.show(Snapshot("queued", BEGAN, ()))
    out = capsys.readouterr().out
    for wanted in ("starting", "provision", "running", "epoch 3: loss 0.1 [red]"):
        assert wanted in out
