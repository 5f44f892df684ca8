"""The example DAGs parse, and their tasks hang together as a lease wants it."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, BaseOperator

from raytpu_ops import (
    ProvisionTpuSlicesOperator,
    RayServeOperator,
    RayTpuJobOperator,
    RayTrainOperator,
    ReleaseTpuSlicesOperator,
    TpuSlicesReadySensor,
    tpu_slices,
)
from raytpu_ops.tpu.errors import InvalidSpec

DAGS = Path(__file__).parents[3] / "dags"


def load(name: str) -> DAG:
    spec = importlib.util.spec_from_file_location(name, DAGS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: DAG = getattr(module, name)()
    return made


def test_pipeline_acquires_first_and_releases_last() -> None:
    dag = load("tpu_train_and_serve")

    assert dag.get_task("plan").is_setup
    assert dag.get_task("provision").is_setup
    assert dag.get_task("provision").upstream_task_ids == {"plan"}
    assert dag.get_task("release").is_teardown
    assert not dag.get_task("release").on_failure_fail_dagrun
    assert dag.get_task("released").is_teardown
    assert dag.get_task("released").on_failure_fail_dagrun
    assert dag.get_task("released").upstream_task_ids == {"plan", "provision", "release"}
    assert dag.get_task("labelled").upstream_task_ids == {"plan", "provision"}
    assert dag.get_task("train").upstream_task_ids == {"labelled"}
    assert dag.get_task("serve").upstream_task_ids == {"labelled", "train"}
    assert dag.get_task("evaluate").upstream_task_ids == {"labelled", "serve"}
    assert dag.get_task("release").upstream_task_ids == {"plan", "provision", "evaluate"}


def test_pipeline_is_not_scheduled_and_has_a_form() -> None:
    dag = load("tpu_train_and_serve")

    assert not dag.timetable.can_be_scheduled
    assert list(dag.params) == ["backend", "generation", "topology", "slices", "epochs", "storage"]
    with pytest.raises(Exception, match="slices"):
        dag.params["slices"] = 0


def test_step_inside_another_dag_sits_between_its_tasks() -> None:
    dag = load("tpu_inside_your_dag")

    assert dag.get_task("plan").upstream_task_ids == {"matrices"}
    assert dag.get_task("norms").upstream_task_ids == {"matrices", "labelled"}
    assert dag.get_task("summarise").upstream_task_ids == {"norms"}
    assert dag.get_task("release").upstream_task_ids == {"plan", "provision", "norms"}


def test_two_leases_in_one_dag() -> None:
    with DAG("two", schedule=None) as dag:
        with tpu_slices("v4", topology="2x2x2", backend="local", prefix="a_") as lease:
            RayTrainOperator(task_id="train_a", lease=lease, train_loop="m:f", storage="/s")
        with tpu_slices("v4", topology="2x2x1", backend="local", prefix="b_") as lease:
            RayTrainOperator(task_id="train_b", lease=lease, train_loop="m:f", storage="/s")

    assert dag.get_task("a_release").upstream_task_ids == {"a_plan", "a_provision", "train_a"}
    assert dag.get_task("b_release").upstream_task_ids == {"b_plan", "b_provision", "train_b"}


def test_a_second_lease_of_a_dag_is_told_to_take_a_prefix() -> None:
    def lease() -> None:
        with tpu_slices("v4", topology="2x2x1", backend="local"):
            pass

    with DAG("two", schedule=None):
        lease()
        with pytest.raises(InvalidSpec, match="has a task 'plan' already; give each lease .* prefix="):
            lease()


def test_no_task_waits_for_another_run_once_slices_are_asked_for() -> None:
    """After a run that failed it would wait for ever, and they would be paid for."""
    past = {"depends_on_past": True, "wait_for_downstream": True}
    with DAG("d", schedule=None, default_args=past) as dag, tpu_slices("v4", topology="2x2x1", backend="local"):
        BaseOperator(task_id="mine", depends_on_past=False, wait_for_downstream=False)
    assert [name for name, task in dag.task_dict.items() if task.depends_on_past] == ["plan"]
    with (
        DAG("d", schedule=None, default_args=past),
        pytest.raises(InvalidSpec, match="task 'mine' has depends_on_past, of its own or by default_args"),
        tpu_slices("v4", topology="2x2x1", backend="local"),
    ):
        BaseOperator(task_id="mine")


def test_a_task_of_the_authors_own_that_is_called_like_one_of_the_leases_names_a_way_out() -> None:
    with DAG("d", schedule=None):
        RayTrainOperator(task_id="release", lease={}, train_loop="m:f", storage="/s")
        with (
            pytest.raises(InvalidSpec, match="has a task 'release' already"),
            tpu_slices("v4", topology="2x2x1", backend="local"),
        ):
            pass


@pytest.mark.parametrize("operator", [RayTpuJobOperator, RayServeOperator, TpuSlicesReadySensor])
def test_a_lease_is_not_taken_behind_its_block(operator: type[BaseOperator]) -> None:
    code = {RayTpuJobOperator: {"function": "m:f"}, RayServeOperator: {"app": "m:f"}}.get(operator, {})
    with DAG("d", schedule=None):
        with tpu_slices("v4", topology="2x2x1", backend="local") as lease:
            operator(task_id="inside", lease=lease, **code)
        with pytest.raises(
            InvalidSpec, match=r"late: takes the lease of labelled behind its `with tpu_slices\(…\)` block"
        ):
            operator(task_id="late", lease=lease, **code)


def test_a_mapped_task_of_the_block_is_made_again_when_it_runs() -> None:
    with DAG("d", schedule=None) as dag, tpu_slices("v4", topology="2x2x1", backend="local") as lease:
        RayTpuJobOperator.partial(task_id="each", lease=lease).expand(function=["m:f", "m:g"])

    made: Any = dag.get_task("each").unmap({"function": "m:g"})  # type: ignore[union-attr]
    assert made.function == "m:g"


def test_results_of_the_body_and_an_outer_lease_are_good_behind_an_inner_block() -> None:
    with DAG("d", schedule=None) as dag, tpu_slices("v4", topology="2x2x1", backend="local") as outer:
        with tpu_slices("v4", topology="2x2x1", backend="local", prefix="in_") as inner:
            first = RayTpuJobOperator(task_id="first", lease=inner, function="m:f")
        RayTpuJobOperator(task_id="second", lease=outer, function="m:f", op_args=[first.output])

    assert dag.get_task("second").upstream_task_ids == {"first", "labelled"}


def test_task_arguments_reach_every_task_of_the_lease() -> None:
    with DAG("d", schedule=None) as dag, tpu_slices("v4", topology="2x2x1", backend="local", retries=7):
        pass

    assert {task.task_id: task.retries for task in dag.tasks} == {
        "plan": 7,
        "provision": 7,
        "labelled": 7,
        "release": 7,
        "released": 0,
    }


#: What people write for all tasks of a DAG, with work in mind and not slices.
FOR_ALL = {"execution_timeout": timedelta(minutes=5), "trigger_rule": "all_done"}


def test_no_release_is_cut_off_by_the_execution_timeout_of_all_tasks() -> None:
    """One that ends half way leaves chips that bill."""
    with DAG("d", schedule=None, default_args=FOR_ALL) as dag:
        with tpu_slices("v4", topology="2x2x1", backend="local"):
            pass
        ReleaseTpuSlicesOperator(task_id="own", provision_task_id="provision")
        ReleaseTpuSlicesOperator(task_id="said", lease={}, execution_timeout=timedelta(hours=1))

    limits = {task.task_id: task.execution_timeout for task in dag.tasks}
    assert [limits.pop(name) for name in ("release", "released", "own", "said")] == [*3 * [None], timedelta(hours=1)]
    assert set(limits.values()) == {FOR_ALL["execution_timeout"]}


def test_nothing_is_provisioned_after_a_failure_whatever_the_trigger_rule_of_all_tasks() -> None:
    with DAG("d", schedule=None, default_args=FOR_ALL) as dag, tpu_slices("v4", topology="2x2x1", backend="local"):
        pass

    rules = {task.task_id: str(task.trigger_rule.value) for task in dag.tasks}
    assert rules == {
        **dict.fromkeys(("plan", "provision", "labelled"), "all_success"),
        **dict.fromkeys(("release", "released"), "all_done_setup_success"),
    }


@pytest.mark.parametrize("rule", ["none_failed", "none_failed_min_one_success"])
def test_a_block_may_come_after_a_branch_by_the_trigger_rule_of_all_tasks(rule: str) -> None:
    """With all_success the path that was not taken would skip it, and the run would be green without any work."""
    every = {"trigger_rule": rule}
    with DAG("d", schedule=None, default_args=every) as dag, tpu_slices("v4", topology="2x2x1", backend="local"):
        pass

    rules = {task.task_id: str(task.trigger_rule.value) for task in dag.tasks}
    assert rules["plan"] == rule
    assert {rules["provision"], rules["labelled"]} == {"all_success"}


def test_what_tpu_slices_is_told_goes_over_that() -> None:
    with (
        DAG("d", schedule=None, default_args=FOR_ALL) as dag,
        tpu_slices(
            "v4", topology="2x2x1", backend="local", trigger_rule="none_failed", execution_timeout=timedelta(hours=1)
        ),
    ):
        pass

    assert {str(dag.get_task(name).trigger_rule.value) for name in ("plan", "provision", "labelled")} == {"none_failed"}
    assert {task.execution_timeout for task in dag.tasks} == {timedelta(hours=1)}
    assert dag.get_task("release").trigger_rule.value == "all_done_setup_success"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"generation": "v4", "topology": "4x4"}, "topology"),
        ({"generation": "v99", "topology": "4x4"}, "generation"),
        ({"generation": "v4", "topology": "2x2x2", "num_slices": 0}, "num_slices"),
        ({"generation": "v4", "topology": "2x2x2", "num_slices": -1}, "num_slices"),
        ({"generation": "v4", "topology": "2x2x2", "capacity": "cheap"}, "capacity"),
        ({"generation": "v4", "topology": "2x2x2", "lease_for": -5}, "lease_for"),
    ],
)
def test_a_literal_mistake_is_an_import_error_of_the_dag(arguments: dict[str, object], message: str) -> None:
    with DAG("d", schedule=None), pytest.raises(InvalidSpec, match=message):
        ProvisionTpuSlicesOperator(task_id="provision", backend="local", **arguments)  # type: ignore[arg-type]


def test_a_templated_value_waits_until_it_is_rendered() -> None:
    with DAG("d", schedule=None):
        task = ProvisionTpuSlicesOperator(
            task_id="provision", generation="{{ params.g }}", topology="nonsense", num_slices="{{ params.n }}"
        )

    assert task.generation == "{{ params.g }}"


def test_the_reaper_is_scheduled_paused_at_first_and_takes_only_what_it_knows() -> None:
    dag = load("tpu_reaper")

    assert dag.is_paused_upon_creation
    assert dag.timetable.can_be_scheduled
    assert [task.task_id for task in dag.tasks] == ["reap"]
    assert dag.params["unknown_runs"] is False


def test_the_reaper_looks_after_each_connection_that_it_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTPU_REAPER_CONN_IDS", "team_a, prod/b,team_a")
    reapers: Any = load("tpu_reaper").tasks

    assert {one.task_id: (one.ray_tpu_conn_id, one.backend) for one in reapers} == {
        "reap_team_a": ("team_a", None),
        "reap_prod_b": ("prod/b", None),
    }
