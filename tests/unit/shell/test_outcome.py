"""The rule by which ``released`` is red, as a function over states, and the scope that it looks at."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG, BaseOperator, Context
from airflow.sdk.exceptions import AirflowFailException

from raytpu_ops import tpu_slices
from raytpu_ops.operators.outcome import TpuSlicesOutcomeOperator, by_instance, unhandled

#: labelled, then a, then b and a fallback, then c behind both.
BELOW = {"labelled": {"a", "b", "f", "c"}, "a": {"b", "f", "c"}, "b": {"c"}, "f": {"c"}, "c": set()}


@pytest.mark.parametrize(
    ("states", "failed"),
    [
        (["success", "success", "success", "skipped", "success"], []),
        # The work failed, and Airflow kept the rest from running.
        (["success", "failed", "upstream_failed", "upstream_failed", "upstream_failed"], ["a"]),
        (["success", "success", "success", "skipped", "failed"], ["c"]),
        # Something before the scope failed.
        (["upstream_failed"] * 5, ["a", "b", "c", "f", "labelled"]),
        # A person marked the run failed: in labelled, in the first task, in one of the middle.
        (["failed", "skipped", "skipped", "skipped", "skipped"], ["labelled"]),
        (["success", "failed", "skipped", "skipped", "skipped"], ["a"]),
        (["success", "success", "failed", "skipped", "skipped"], ["b"]),
        # Marked success by a person: what ran counts as well done.
        (["success", "success", "skipped", "skipped", "skipped"], []),
        # The fallback made it good; the leaf ran, or was skipped by a branch, or is still to come.
        (["success", "failed", "upstream_failed", "success", "success"], []),
        (["success", "failed", "upstream_failed", "success", "skipped"], ["b"]),
        (["success", "failed", "skipped", "success", "skipped"], []),
        (["success", "failed", "skipped", "skipped", None], []),
        # A branch that skips everything.
        (["success", "skipped", "skipped", "skipped", "skipped"], []),
    ],
)
def test_a_failure_counts_unless_something_below_it_made_it_good(states: list[str | None], failed: list[str]) -> None:
    assert unhandled({task: {-1: state} for task, state in zip(BELOW, states, strict=True)}, BELOW) == failed


def test_a_mapped_instance_is_judged_by_those_that_follow_it() -> None:
    below = {"a": {"b"}, "b": set()}

    assert unhandled({"a": {0: "success", 1: "failed"}, "b": {0: "success", 1: "skipped"}}, below) == ["a[1]"]
    assert unhandled({"a": {0: "success", 1: "failed"}, "b": {-1: "success"}}, below) == []


def test_airflows_answer_is_taken_apart_where_names_look_like_instances() -> None:
    answer = {"a_0": "success", "a_1": None, "step_2": "failed", "b": "skipped"}

    assert by_instance(answer, {"a", "step", "step_2", "b"}) == {
        "a": {0: "success", 1: None},
        "step_2": {-1: "failed"},
        "b": {-1: "skipped"},
    }


class Instance:
    """A running task instance that answers with given states."""

    dag_id, run_id, task_id, map_index = "d", "r", "released", -1

    def __init__(self, states: dict[str, str | None]) -> None:
        self.states = states

    def get_task_states(self, *, dag_id: str, task_ids: list[str], run_ids: list[str]) -> dict[str, Any]:
        assert (dag_id, run_ids) == ("d", ["r"])
        return {"r": {task_id: state for task_id, state in self.states.items() if task_id in task_ids}}


@pytest.fixture
def outcome() -> TpuSlicesOutcomeOperator:
    with DAG("d", schedule=None) as dag:
        before = BaseOperator(task_id="before")
        with tpu_slices("v4", topology="2x2x1", backend="local") as lease:
            first, second = BaseOperator(task_id="first"), BaseOperator(task_id="second")
            before >> first >> second
            lease >> second
        second >> BaseOperator(task_id="after")
    made = dag.get_task("released")
    assert isinstance(made, TpuSlicesOutcomeOperator)
    return made


def test_the_scope_is_what_lies_between_provision_and_release(outcome: TpuSlicesOutcomeOperator) -> None:
    everything = {"labelled", "first", "second", "after"}
    assert outcome.scope() == {
        "provision": everything,
        "labelled": {"first", "second", "after"},
        "first": {"second", "after"},
        "second": {"after"},
    }


def run(outcome: TpuSlicesOutcomeOperator, **states: str | None) -> None:
    good = dict.fromkeys(["provision", "labelled", "first", "second", "after", "release"], "success")
    context: Any = {"ti": Instance({**good, **states})}
    # The guard of Airflow against calls outside a task looks at the wrapped method.
    type(outcome).execute.__wrapped__(outcome, _context(context))  # type: ignore[attr-defined]


def _context(context: Any) -> Context:
    made: Context = context
    return made


def test_it_is_green_after_a_good_run(outcome: TpuSlicesOutcomeOperator) -> None:
    run(outcome)


def test_it_is_red_where_the_release_failed_and_says_that_slices_may_bill(outcome: TpuSlicesOutcomeOperator) -> None:
    words = r"release failed: TPU slices may be left and bill.* run `raytpu release d-provision-[0-9a-f]+"
    # Without a connection the command looks by `ray_tpu_default` or on this machine: "no such lease" for all others.
    with pytest.raises(AirflowFailException, match=rf"{words}`, with --backend or --conn-id for what the task has$"):
        run(outcome, release="failed")
    outcome.ray_tpu_conn_id = "pools"
    with pytest.raises(AirflowFailException, match=rf"{words} --conn-id pools`$"):
        run(outcome, release="failed")


def test_it_is_red_where_the_work_failed_and_names_it(outcome: TpuSlicesOutcomeOperator) -> None:
    with pytest.raises(AirflowFailException, match=r"the work failed: first$"):
        run(outcome, first="failed", second="skipped", after="skipped")


def test_a_failure_that_is_handled_behind_the_release_is_left_to_airflow(outcome: TpuSlicesOutcomeOperator) -> None:
    run(outcome, second="failed", after=None)
