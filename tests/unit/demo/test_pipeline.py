"""What the demo makes of Airflow's answers: phases, their seconds, what chips did meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from raytpu_ops.demo.accounting import costs
from raytpu_ops.demo.pipeline import PHASES, Finished, Snapshot, look, run_pipeline
from raytpu_ops.demo.report import PlainProgress, print_report
from raytpu_ops.tpu.errors import DeadlineExceeded
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.spec import SliceSpec

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
#: Phase -> seconds after the start of the run at which its task began and ended.
TIMES = {
    "plan": (0.5, 1),
    "provision": (1, 4),
    "labelled": (5, 30),
    "train": (31, 60),
    "serve": (61, 80),
    "evaluate": (81, 90),
    "release": (91, 95),
}


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def lease() -> dict[str, Any]:
    return SliceLease(
        id="a-lease",
        owner=Owner(dag_id="d", run_id="r", task_id="provision"),
        backend="local",
        spec=SliceSpec.of("v4", "2x2x2", num_slices=2),
        ray=RayEndpoint(address="http://127.0.0.1:1"),
        granted_at=at(3),
        expires_at=at(3600),
    ).to_xcom()


OUTPUTS: dict[str, Any] = {
    "plan": {"spec": "two slices", "creates": [], "notes": []},
    "labelled": lease(),
    "provision": lease(),
    "train": {
        "started_at": at(35).isoformat(),
        "finished_at": at(55).isoformat(),
        "workers": [
            {
                "slice": f"s{n // 2}",
                "worker_id": n % 2,
                "rank": n,
                "megascale": {"MEGASCALE_SLICE_ID": str(n // 2), "MEGASCALE_NUM_SLICES": "2"},
            }
            for n in range(4)
        ],
    },
    "serve": {"url": "http://127.0.0.1:2/digits", "application": "digits"},
    "evaluate": {"accuracy": 0.9722, "asked": 360},
    "release": {"removed": ["everything"], "left": []},
}


class Api:
    """Airflow's answers at a moment after the start of the run, with chosen states."""

    def __init__(self, now: float = 1000, states: dict[str, str] | None = None) -> None:
        self.now = now
        self.states = states or {}
        self.asked: list[str] = []

    def wait_for_dag(self, dag_id: str) -> None:
        self.asked.append(f"wait {dag_id}")

    def unpause(self, dag_id: str) -> None:
        self.asked.append(f"unpause {dag_id}")

    def trigger(self, dag_id: str, conf: dict[str, Any]) -> str:
        self.asked.append(f"trigger {dag_id} {conf}")
        return "r"

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        state = "running" if self.now < 95 else ("failed" if "failed" in self.states.values() else "success")
        return {"state": state, "start_date": at(0).isoformat(), "queued_at": at(0).isoformat()}

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        return [self._task(phase, *times) for phase, times in TIMES.items()]

    def _task(self, phase: str, begin: float, end: float) -> dict[str, Any]:
        begun, ended = self.now >= begin, self.now >= end
        state = self.states.get(phase, "success") if ended else ("deferred" if begun else None)
        return {
            "task_id": PHASES[phase],
            "state": state,
            "try_number": int(begun),
            "start_date": at(begin).isoformat() if begun else None,
            "end_date": at(end).isoformat() if ended else None,
        }

    def xcom(self, dag_id: str, run_id: str, task_id: str) -> Any:
        return OUTPUTS[next(phase for phase, task in PHASES.items() if task == task_id)]

    def last_log(self, dag_id: str, run_id: str, task_id: str) -> list[str]:
        return [f"{task_id} went wrong", "ValueError: [brackets] stay"]


def run_to_end(**kwargs: Any) -> Finished:
    return run_pipeline(Api(**kwargs), {"epochs": 1}, deadline_s=5, poll_s=0)  # type: ignore[arg-type]


def test_phases_are_in_the_order_in_which_they_run():
    assert list(PHASES) == list(TIMES)


def test_seconds_of_the_phases_add_up_to_the_run():
    seconds = run_to_end().last.seconds()
    assert list(seconds) == list(PHASES)
    assert list(seconds.values()) == [1, 3, 26, 30, 20, 10, 5]
    assert sum(seconds.values()) == TIMES["release"][1]


@pytest.mark.parametrize(
    ("now", "states"),
    [
        (0, ["waiting"] * 7),
        (2, ["done", "running", *["waiting"] * 5]),
        (40, ["done", "done", "done", "running", "waiting", "waiting", "waiting"]),
        (95, ["done"] * 7),
    ],
)
def test_states_in_words(now: float, states: list[str]):
    assert [phase.state for phase in look(Api(now), "r").phases] == states  # type: ignore[arg-type]


def test_a_running_phase_counts_up_to_now():
    snapshot = look(Api(40), "r")  # type: ignore[arg-type]
    assert snapshot.seconds(at(40)) == {"plan": 1, "provision": 3, "labelled": 26, "train": 10}


def test_the_dag_is_unpaused_before_it_is_triggered():
    api = Api()
    run_pipeline(api, {"epochs": 1}, deadline_s=5, poll_s=0)  # type: ignore[arg-type]
    assert [line.split()[0] for line in api.asked] == ["wait", "unpause", "trigger"]
    assert "{'epochs': 1}" in api.asked[-1]


def test_a_run_that_does_not_end_is_named_with_its_phases():
    with pytest.raises(DeadlineExceeded, match="after 0 s: plan done, provision done, labelled running, train waiting"):
        run_pipeline(Api(10), {}, deadline_s=0, poll_s=0)  # type: ignore[arg-type]


def test_chip_seconds_are_held_from_the_grant_and_used_by_training_and_answering():
    lines = {line.phase: line for line in costs(run_to_end())}
    assert {line.chips for phase, line in lines.items() if phase != "plan"} == {16}
    assert (lines["plan"].chips, lines["plan"].used, lines["plan"].idle) == (0, 0, 0)
    assert (lines["provision"].used, lines["provision"].idle) == (0, 16)  # granted a second before it ended
    assert (lines["labelled"].used, lines["labelled"].idle) == (0, 26 * 16)
    assert (lines["train"].used, lines["train"].idle) == (20 * 16, 10 * 16)
    assert (lines["serve"].used, lines["serve"].idle) == (0, 20 * 16)
    assert (lines["evaluate"].used, lines["evaluate"].idle) == (10 * 8, 10 * 8)  # one slice of two answers
    assert sum(line.seconds for line in lines.values()) == 95


def test_a_run_without_a_lease_costs_no_chips():
    run = Finished("r", look(Api(), "r"))  # type: ignore[arg-type]
    assert all(line.chips == line.used == line.idle == 0 for line in costs(run))


def report_of(run: Finished) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    print_report(console, run)
    console.file.close()
    return console.export_text()


def test_the_report_has_everything_that_was_asked_for():
    text = report_of(run_to_end())
    for wanted in ("chip-seconds used", "s0", "s1", "0 of 2", "1 of 2", "0.9722", "360", "http://127.0.0.1:2/digits"):
        assert wanted in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("│")][: len(PHASES)] == list(PHASES)


def test_a_failed_phase_brings_the_end_of_its_log():
    run = run_to_end(states={"serve": "failed", "evaluate": "upstream_failed"})
    assert not run.succeeded
    assert list(run.failures) == ["serve"]
    text = report_of(run)
    assert "serve went wrong" in text
    assert "ValueError: [brackets] stay" in text
    assert run.last.phases[5].state == "not run"


def test_plain_progress_says_each_change_once(capsys: pytest.CaptureFixture[str]):
    shown = PlainProgress(Console(width=100, force_terminal=False))
    for now in (0, 2, 3, 6, 40, 41, 1000):
        shown.show(look(Api(now), "r"))  # type: ignore[arg-type]
    said = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert said[:6] == [
        "plan: done in 1.0 s",
        "provision: running",
        "provision: done in 3.0 s",
        "labelled: running",
        "labelled: done in 26.0 s",
        "train: running",
    ]
    assert said[-1] == "release: done in 5.0 s"
    assert len(said) == len(set(said))


def test_a_snapshot_of_nothing_has_no_seconds():
    assert Snapshot("queued", BEGAN, ()).seconds() == {}
