"""A mapped task of a block is made when it runs, with slices held: what is plain in it is judged when it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk import DAG, TaskGroup, task

from raytpu_ops import (
    ProvisionTpuSlicesOperator,
    RayTpuJobOperator,
    RayTrainOperator,
    ReleaseTpuSlicesOperator,
    TpuSlicesReadySensor,
    tpu_slices,
)
from raytpu_ops.tpu.errors import InvalidSpec


def block(*, each: dict[str, Any], expand: Any, prefix: str = "") -> None:
    """A block of two slices with a mapped training: by keyword arguments where ``expand`` is a dict."""
    with tpu_slices("v4", topology="2x2x1", num_slices=2, prefix=prefix) as lease:
        same = {"train_loop": "m:f", "storage": "/s", **each}
        partial = RayTrainOperator.partial(task_id=f"{prefix}each", lease=lease, **same)
        if isinstance(expand, dict):
            partial.expand(**expand)
        else:
            partial.expand_kwargs(expand)


@task
def step(value: Any = None) -> Any:
    """Another task."""
    return value


@pytest.mark.parametrize(
    ("each", "expand", "words"),
    [
        ({"train_loop": "mf"}, {"config": [{"lr": 1}]}, "train_loop: it must be 'package.module:function'"),
        ({"deadlines": {"releasing": 3}}, {"config": [{}]}, "each: deadlines: releasing would have no effect"),
        ({"poll_interval": 9999}, {"config": [{}]}, "poll_interval: must be at most"),
        ({"do_xcom_push": False}, {"config": [{}]}, "each: do_xcom_push is off"),
        ({"num_slices": 3}, {"config": [{}]}, "num_slices: 3 were asked for; the lease that each takes has 2"),
        ({}, {"config": [{}], "run_name": ["good", "Bad Name"]}, "run_name: must be lower-case letters"),
        ({}, {"num_slices": [1, 3]}, "num_slices: 3 were asked for; the lease that each takes has 2"),
        ({}, [{"config": {}}, {"keep_checkpoints": 0}], "keep_checkpoints: should be greater than or equal to 1"),
    ],
)
def test_a_mistake_is_refused_when_the_file_is_parsed(each: dict[str, Any], expand: Any, words: str) -> None:
    with DAG("d", schedule=None), pytest.raises(InvalidSpec, match=words):
        block(each=each, expand=expand)


def test_what_other_tasks_return_does_not_hide_a_mistake_beside_it() -> None:
    with DAG("d", schedule=None), pytest.raises(InvalidSpec, match="train_loop: it must be"):
        block(each={"train_loop": "mf"}, expand={"config": step(), "run_name": ["a", "b"]})


def test_what_other_tasks_return_waits_until_it_is_there() -> None:
    with DAG("d", schedule=None):
        out = step()
        block(each={"working_dir": "{{ params.x }}"}, expand={"config": out, "run_name": ["a", "b"]})
        block(each={}, expand=[{"config": {"x": out}}, {"run_name": "{{ params.x }}"}], prefix="second_")
        block(each={}, expand=out, prefix="third_")
        block(each={}, expand={"resume": out}, prefix="fourth_")


@pytest.mark.parametrize("operator", [ReleaseTpuSlicesOperator, TpuSlicesReadySensor])
def test_leases_of_mapped_tasks_are_taken_one_by_one(operator: Any) -> None:
    """As Airflow makes the instances: from what the mapped argument was, or from the output itself."""
    with DAG("d", schedule=None) as dag:
        granted = ProvisionTpuSlicesOperator.partial(task_id="provision", generation="v4").expand(
            topology=["2x2x1", "2x2x2"]
        )
        operator.partial(task_id="each").expand(lease=granted.output)
        operator.partial(task_id="all", lease=granted.output).expand(deferrable=[True, False])

    tasks: Any = dag.task_dict
    assert tasks["each"].unmap({"lease": {"id": "one"}}).lease == {"id": "one"}
    assert tasks["all"].unmap({"deferrable": True}).lease.operator is granted


def test_an_operator_in_the_place_of_its_output_is_refused_in_a_mapped_task_too() -> None:
    with (
        DAG("d", schedule=None),
        pytest.raises(InvalidSpec, match="^each: lease: must be .* got <Task"),
        tpu_slices("v4", topology="2x2x1") as lease,
    ):
        RayTpuJobOperator.partial(task_id="each", lease=lease.operator).expand(function=["m:f"])


def wired(each: Callable[[Any], object]) -> dict[str, set[str]]:
    """For each task of a lease inside a lease, with a mapped task in it, what is directly upstream of it."""
    with DAG("d", schedule=None) as dag, tpu_slices("v4", topology="2x2x1", prefix="out_") as outer:
        with TaskGroup("group"), tpu_slices("v4", topology="2x2x1") as lease:
            each(lease)
        RayTpuJobOperator(task_id="job", lease=outer, function="m:f")
    dag.validate()
    dag.check_cycle()
    assert dag.get_task("group.each").is_mapped
    return {name: set(one.upstream_task_ids) for name, one in dag.task_dict.items()}


def test_to_be_judged_makes_no_task_and_wires_none() -> None:
    def ours(lease: Any) -> None:
        RayTpuJobOperator.partial(task_id="each", lease=lease).expand(function=["m:f", "m:g"])

    def another(lease: Any) -> None:
        step.override(task_id="each").expand(value=lease)

    assert wired(ours) == wired(another)
