"""What a DAG says for all its tasks, with work in mind: where it reaches ours, and where it would do harm."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import DAG, TaskGroup

from raytpu_ops import (
    PlanTpuSlicesOperator,
    ProvisionTpuSlicesOperator,
    RayServeOperator,
    RayTpuJobOperator,
    ReapTpuSlicesOperator,
    ReleaseTpuSlicesOperator,
    TpuSlicesReadySensor,
    tpu_slices,
)
from raytpu_ops.tpu.deadlines import Deadlines, Phase
from raytpu_ops.tpu.errors import InvalidSpec

ALL = timedelta(minutes=5)
OWN = timedelta(hours=1)


@pytest.mark.parametrize(
    ("operator", "arguments", "mapped"),
    [
        (ReleaseTpuSlicesOperator, {"lease": "{{ params.x }}"}, {"ray_tpu_conn_id": ["a", "b"]}),
        (ReleaseTpuSlicesOperator, {}, {"lease": [{}, {}]}),
        (ReapTpuSlicesOperator, {}, {"backend": ["gke", "tpu_vm"]}),
    ],
)
def test_no_task_that_releases_is_cut_off_by_the_execution_timeout_of_all_tasks(
    operator: Any, arguments: dict[str, Any], mapped: dict[str, Any]
) -> None:
    """One that ends half way leaves chips that bill."""
    with DAG("d", schedule=None, default_args={"execution_timeout": ALL}) as dag:
        operator(task_id="one", **{name: values[0] for name, values in mapped.items()}, **arguments)
        operator.partial(task_id="each", **arguments).expand(**mapped)
        operator.partial(task_id="said", execution_timeout=OWN, **arguments).expand(**mapped)

    tasks: Any = dag.task_dict
    instances = {
        name: tasks[name].unmap({name: values[0] for name, values in mapped.items()}) for name in ("each", "said")
    }
    assert {name: task.execution_timeout for name, task in tasks.items()} == {"one": None, "each": None, "said": OWN}
    assert {name: task.execution_timeout for name, task in instances.items()} == {"each": None, "said": OWN}


def made() -> dict[str, Any]:
    """A task of every kind, in a block and beside it, mapped too: as they run."""
    with TaskGroup("g") as group, tpu_slices("v4", topology="2x2x1", prefix="block_") as lease:
        job = {"task_id": "job", "lease": lease, "function": "m:f"}
        RayTpuJobOperator(**job)
        RayTpuJobOperator.partial(**{**job, "task_id": "each"}).expand(op_args=[[1], [2]])
    wanted = {"generation": "v4", "topology": "2x2x1"}
    tasks: dict[str, Any] = {
        "plan": PlanTpuSlicesOperator(task_id="plan", **wanted),
        "provision": (provision := ProvisionTpuSlicesOperator(task_id="provision", **wanted)),
        "ready": TpuSlicesReadySensor(task_id="ready", lease=provision.output),
        "serve": RayServeOperator(task_id="serve", lease=provision.output, app="m:f"),
        "release": ReleaseTpuSlicesOperator(task_id="release", lease=provision.output),
        "reap": ReapTpuSlicesOperator(task_id="reap"),
        **group.children,
    }
    each: Any = tasks["g.each"]
    return {**tasks, "g.each": each.unmap({"op_args": [1]})}


@pytest.mark.parametrize("all_phases", [Deadlines, dict])
def test_deadlines_of_all_tasks_reach_each_task_for_the_phases_that_it_has(all_phases: Any) -> None:
    """A file that cannot be imported any more cannot run its release either."""
    said = all_phases(**{phase.value: 60 * number for number, phase in enumerate(Phase, 1)})
    with DAG("d", schedule=None, default_args={"deadlines": said}):
        tasks = made()

    have = {
        name: Deadlines.of(task.deadlines).model_dump(exclude_unset=True)
        for name, task in tasks.items()
        if hasattr(task, "phases") and "block" not in name
    }
    every = Deadlines.of(said).model_dump()
    assert have == {name: {phase: every[phase] for phase in tasks[name].phases} for name in have}
    assert {"plan", "provision", "ready", "serve", "release", "reap", "g.job", "g.each"} == set(have)


def test_a_deadline_that_no_task_has_and_one_that_the_task_itself_is_given_are_still_refused() -> None:
    with (
        DAG("d", schedule=None, default_args={"deadlines": {"runing": 60}}),
        pytest.raises(InvalidSpec, match="runing"),
    ):
        ReapTpuSlicesOperator(task_id="reap")
    with (
        DAG("d", schedule=None, default_args={"deadlines": {"running": 60}}),
        pytest.raises(InvalidSpec, match="reap: deadlines: running would have no effect"),
    ):
        ReapTpuSlicesOperator(task_id="reap", deadlines={"running": 60})


def test_results_that_are_needed_are_kept_where_all_tasks_have_them_switched_off() -> None:
    with DAG("d", schedule=None, default_args={"do_xcom_push": False}):
        tasks = made()

    kept = {name for name, task in tasks.items() if task.do_xcom_push}
    assert kept == {"provision", "ready", "serve", "g.job", "g.each", "g.block_provision", "g.block_labelled"}
