"""How ``tpu_slices`` wires the tasks of its body: none before the slices are whole, none after their release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, TaskGroup, task, task_group

from raytpu_ops import tpu_slices
from raytpu_ops.tpu.errors import InvalidSpec


@task
def step(value: Any = None) -> Any:
    """A task of a body."""
    return value


def named(name: str) -> Any:
    return step.override(task_id=name)


def upstream(body: Callable[[Any], object]) -> dict[str, set[str]]:
    """For each task of a DAG with that body, what is directly upstream of it."""
    with DAG("d", schedule=None) as dag, tpu_slices("v4", topology="2x2x1", backend="local") as lease:
        body(lease)
    dag.validate()
    dag.check_cycle()
    found = {one.task_id: set(one.upstream_task_ids) for one in dag.tasks}
    assert found["provision"] == {"plan"} | found["plan"]
    assert found["labelled"] == {"plan", "provision"}
    assert found["released"] == {"plan", "provision", "release"}
    assert {"plan", "provision"} <= found["release"]
    return found


def mapped_operator(lease: Any) -> None:
    BashOperator.partial(task_id="mapped").expand(bash_command=["a", "b"])


def mapped_task(lease: Any) -> None:
    named("mapped").expand(value=[1, 2])


def mapped_over_the_lease(lease: Any) -> None:
    named("mapped").expand(value=lease)


@pytest.mark.parametrize("body", [mapped_operator, mapped_task, mapped_over_the_lease])
def test_a_mapped_task_runs_between_labelled_and_release(body: Callable[[Any], object]) -> None:
    found = upstream(body)

    assert found["mapped"] == {"labelled"}
    assert "mapped" in found["release"]


@pytest.mark.parametrize("body", [mapped_operator, mapped_task])
def test_a_mapped_task_beside_an_ordinary_one(body: Callable[[Any], object]) -> None:
    def both(lease: Any) -> None:
        named("ordinary")(lease)
        body(lease)

    found = upstream(both)

    assert found["mapped"] == found["ordinary"] == {"labelled"}
    assert {"mapped", "ordinary"} <= found["release"]


def test_mapped_tasks_at_both_ends_of_a_chain() -> None:
    def chain(lease: Any) -> None:
        named("last").expand(value=named("middle")(named("first").expand(value=[1, 2])))

    found = upstream(chain)

    assert found["first"] == {"labelled"}
    assert "last" in found["release"]


def test_task_groups_in_groups_and_mapped_groups() -> None:
    def groups(lease: Any) -> None:
        with TaskGroup("outer"):
            named("mapped").expand(value=[1, 2])
            with TaskGroup("inner"):
                named("ordinary")(lease)

        @task_group
        def each(value: Any) -> None:
            named("one")(value) >> named("two")(value)

        each.expand(value=[1, 2])

    found = upstream(groups)

    assert found["outer.mapped"] == found["outer.inner.ordinary"] == found["each.one"] == {"labelled"}
    assert {"outer.mapped", "outer.inner.ordinary", "each.two"} <= found["release"]


def test_a_body_without_tasks() -> None:
    assert upstream(lambda lease: None)["release"] == {"plan", "provision", "labelled"}


def test_a_task_that_takes_something_from_before_waits_for_the_slices_too() -> None:
    with DAG("d", schedule=None) as dag:
        value = named("before")()
        with tpu_slices("v4", topology="2x2x1", backend="local"):
            named("inside")(value)

    assert dag.get_task("inside").upstream_task_ids == {"before", "labelled"}
    assert dag.get_task("before").upstream_task_ids == set()


@pytest.mark.parametrize("many", [False, True])
def test_nothing_is_made_before_the_tasks_that_the_author_wants_first(many: bool) -> None:
    with DAG("d", schedule=None) as dag:
        value = named("before")()
        other = BashOperator(task_id="other", bash_command="x")
        with TaskGroup("group") as group:
            named("last")(named("first")())
        after = [value, other, group] if many else value
        with tpu_slices("v4", topology="2x2x1", backend="local", after=after):
            named("inside")(value)

    dag.validate()
    dag.check_cycle()
    assert dag.get_task("plan").upstream_task_ids == ({"before", "other", "group.last"} if many else {"before"})
    assert dag.get_task("inside").upstream_task_ids == {"before", "labelled"}
    assert dag.get_task("release").upstream_task_ids == {"plan", "provision", "inside"}
    assert all(not dag.get_task(name).is_setup for name in ("before", "other", "group.first"))


@pytest.mark.parametrize("after", ["prepare", ["prepare"], None])
def test_what_is_no_task_is_refused_where_it_is_written(after: Any) -> None:
    with (
        DAG("first", schedule=None),
        pytest.raises(InvalidSpec, match="^after: must be tasks, outputs of tasks or task groups, .* got"),
        tpu_slices("v4", topology="2x2x1", backend="local", after=after),
    ):
        raise AssertionError("the body runs with a lease only")


def test_a_lease_inside_a_lease_may_wait_for_a_task_of_the_outer_one() -> None:
    def nested(lease: Any) -> None:
        first = named("first")(lease)
        with tpu_slices("v4", topology="2x2x1", backend="local", prefix="in_", after=first) as inner:
            named("work")(inner)

    found = upstream(nested)

    assert found["in_plan"] >= {"first"}
    assert "in_release" in found["release"]


def test_a_teardown_of_the_authors_own_in_the_body_comes_before_the_release() -> None:
    def own(lease: Any) -> None:
        opens, works, closes = (BashOperator(task_id=name, bash_command="x") for name in ("opens", "works", "closes"))
        opens >> works >> closes.as_teardown(setups=opens)

    found = upstream(own)

    assert found["opens"] == {"labelled"}
    assert "closes" in found["release"]


def test_a_lease_inside_a_lease_is_released_first() -> None:
    def nested(lease: Any) -> None:
        with tpu_slices("v4", topology="2x2x1", backend="local", prefix="in_") as inner:
            named("work").expand(value=inner)
        named("later").expand(value=lease)

    found = upstream(nested)

    assert "labelled" in found["in_plan"]
    assert found["work"] == {"in_labelled"}
    assert {"in_plan", "in_provision", "work"} <= found["in_release"]
    assert {"in_release", "later"} <= found["release"]
