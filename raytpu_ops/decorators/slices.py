"""``with tpu_slices(…) as lease:``, the whole life of a lease around the tasks that use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.sdk import BaseOperator, TriggerRule
from airflow.sdk.definitions._internal.mixins import DependencyMixin
from airflow.sdk.exceptions import DuplicateTaskIdFound

from raytpu_ops.decorators.mapped import check_mapped
from raytpu_ops.operators.outcome import TpuSlicesOutcomeOperator
from raytpu_ops.operators.tpu_slices import (
    PlanTpuSlicesOperator,
    ProvisionTpuSlicesOperator,
    ReleaseTpuSlicesOperator,
)
from raytpu_ops.sensors.tpu_slices import TpuSlicesReadySensor
from raytpu_ops.tpu.deadlines import Deadlines
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.words import shown

if TYPE_CHECKING:
    from airflow.sdk import XComArg
    from airflow.sdk.definitions._internal.abstractoperator import AbstractOperator


Task = TypeVar("Task", bound=BaseOperator)

#: Rules by which a task may follow a branch, and no failure.
_AFTER_SKIPPED = frozenset({TriggerRule.NONE_FAILED, TriggerRule.NONE_FAILED_MIN_ONE_SUCCESS})


@contextmanager
def tpu_slices(
    generation: str,
    *,
    topology: str | None = None,
    num_slices: int | str = 1,
    machine_type: str | None = None,
    capacity: Any = None,
    backend: str | None = None,
    backend_options: dict[str, Any] | None = None,
    ray_tpu_conn_id: str | None = None,
    lease_for: timedelta | float = timedelta(hours=24),
    deadlines: Deadlines | dict[str, Any] | None = None,
    deferrable: bool = True,
    prefix: str = "",
    after: Any = (),
    **task_args: Any,
) -> Iterator[XComArg]:
    """Slices for the tasks of the ``with`` body, acquired before them and released after them.

    Expands to the tasks ``plan`` and ``provision`` (setups), ``labelled``, ``release`` (teardown) and
    ``released``. Every task of the body starts behind ``labelled`` and ends before ``release``, which
    runs whatever became of them, and also where ``provision`` failed or was ended half way.
    ``released`` looks at what happened: it is red, and the run with it, where the release left
    something behind or where work failed and nothing in the DAG made it good, be it that a person
    marked the run failed.

    Slices are acquired as soon as the run begins, also while tasks before the block still compute what the
    body takes from them. ``after`` names those that come first.

    The lease is good for tasks that are made in the body. An operator of this package that is made behind
    it and takes the lease is refused; a ``@task`` or a mapped operator there is not noticed, and runs while
    the slices are given back or after that.

    :param generation: ``v6e``, ``v4`` … ; see :class:`ProvisionTpuSlicesOperator` for this and the
        parameters up to ``lease_for``.
    :param deadlines: for the phases of the lease: ``queued``, ``provisioning``, ``labelled``, ``releasing``.
    :param deferrable: wait in the triggerer.
    :param prefix: put before these task ids; a second lease in one DAG needs one.
    :param after: tasks, outputs of tasks or task groups, one or a list, that are over before anything is made.
    :param task_args: arguments of all these tasks, such as ``retries``; a ``retry_policy`` that
        ``tpu_retry_policy`` made brings its own number of them. Of ``default_args`` an ``execution_timeout`` does
        not reach ``release`` and ``released``, and a ``trigger_rule`` none of these tasks; but ``plan``, where it
        only says that tasks before may be skipped.
    :return: the lease, for the ``lease`` parameter of the tasks in the body.
    :raises InvalidSpec: one line: what is wrong as written, and what would be right.
    """
    if not isinstance(prefix, str):
        raise InvalidSpec(f"tpu_slices: prefix must be text, such as 'second_', got {shown(prefix)}")
    phases = {*ProvisionTpuSlicesOperator.phases, *TpuSlicesReadySensor.phases, *ReleaseTpuSlicesOperator.phases}
    said = Deadlines.of(deadlines, phases)
    wanted: dict[str, Any] = {
        "generation": generation,
        "topology": topology,
        "num_slices": num_slices,
        "machine_type": machine_type,
        "capacity": capacity,
        "backend": backend,
        "backend_options": backend_options,
        "ray_tpu_conn_id": ray_tpu_conn_id,
        "lease_for": lease_for,
        "deadlines": said.only(ProvisionTpuSlicesOperator.phases),
        "deferrable": deferrable,
        **task_args,
    }
    plan = _made(PlanTpuSlicesOperator, task_id=f"{prefix}plan", **wanted)
    provision = _made(ProvisionTpuSlicesOperator, task_id=f"{prefix}provision", **wanted)
    plan.provision_task_id = provision.task_id
    _begin_after(plan, after)
    plan >> provision
    release = _made(
        ReleaseTpuSlicesOperator,
        task_id=f"{prefix}release",
        lease=provision.output,
        provision_task_id=provision.task_id,
        backend=backend,
        backend_options=backend_options,
        ray_tpu_conn_id=ray_tpu_conn_id,
        deadlines=said.only(ReleaseTpuSlicesOperator.phases),
        deferrable=deferrable,
        **task_args,
    )
    # Not on_failure_fail_dagrun: with it Airflow takes no task before it for a leaf, and a release that
    # succeeds would hide work that failed (airflow/models/dagrun.py, is_effective_leaf).
    # One setup that succeeded is enough for a teardown: where only provisioning failed, it runs all the same.
    with release.as_teardown(setups=[plan, provision]):
        labelled = _made(
            TpuSlicesReadySensor,
            task_id=f"{prefix}labelled",
            lease=provision.output,
            deadlines=said.only(TpuSlicesReadySensor.phases),
            deferrable=deferrable,
            **task_args,
        )
        before = set(provision.dag.task_dict)
        yield labelled.output
        body = [task for task_id, task in provision.dag.task_dict.items() if task_id not in before]
        _check_past(body)
        _begin_behind(labelled, body)
    # Behind the scope: in it Airflow would wire what is only made to be judged.
    check_mapped(body)
    # Airflow wires by itself neither mapped tasks nor what comes after a scope inside this one.
    _end_before(release, body)
    outcome = _made(
        TpuSlicesOutcomeOperator,
        task_id=f"{prefix}released",
        opening_task_id=plan.task_id,
        release_task_id=release.task_id,
        provision_task_id=provision.task_id,
        ray_tpu_conn_id=ray_tpu_conn_id,
        **{**task_args, "retries": 0},
    )
    release >> outcome.as_teardown(setups=[plan, provision], on_failure_fail_dagrun=True)
    labelled.tasks_at_release = frozenset(provision.dag.task_dict)


def _made(operator: type[Task], *, task_id: str, **arguments: Any) -> Task:
    """One of the tasks around the body."""
    said = "trigger_rule" in arguments
    if operator is not PlanTpuSlicesOperator:
        # Once slices are asked for, no task waits for another run: they would be paid for all the while.
        arguments |= {"depends_on_past": False, "wait_for_downstream": False}
    try:
        made = operator(task_id=task_id, **arguments)
    except DuplicateTaskIdFound as error:
        raise InvalidSpec(
            f"tpu_slices: the DAG has a task {task_id!r} already; give each lease of a DAG a prefix of its own, such "
            "as tpu_slices(…, prefix='second_')"
        ) from error
    # What a DAG says for all of its tasks shall not provision after a failure; that the block may come after a branch
    # is the business of its first task. A teardown gets its rule afterwards.
    if not said and not (operator is PlanTpuSlicesOperator and made.trigger_rule in _AFTER_SKIPPED):
        made.trigger_rule = TriggerRule.ALL_SUCCESS
    return made


def _begin_after(plan: PlanTpuSlicesOperator, after: Any) -> None:
    first = list(after) if isinstance(after, list | tuple | set) else [after]
    for one in first:
        if not isinstance(one, DependencyMixin):
            raise InvalidSpec(f"after: must be tasks, outputs of tasks or task groups, one or a list, got {shown(one)}")
    plan.set_upstream(first)


def _check_past(body: Sequence[AbstractOperator]) -> None:
    """After a run that failed, such a task would never begin and never end, with slices that nobody gives back.

    :raises InvalidSpec: a task of the body waits for the run before.
    """
    for task in body:
        if getattr(task, "depends_on_past", False) or getattr(task, "wait_for_downstream", False):
            raise InvalidSpec(
                f"tpu_slices: task {task.task_id!r} has depends_on_past, of its own or by default_args: after a run "
                "that failed it would wait for ever, with slices that are paid for. Set depends_on_past=False and "
                "wait_for_downstream=False on the tasks inside the block; its task `plan` may wait for the run before"
            )


def _begin_behind(labelled: TpuSlicesReadySensor, body: Sequence[AbstractOperator]) -> None:
    """No task of the body starts before the slices are whole, whether or not it takes the lease."""
    inside = {labelled.task_id, *(task.task_id for task in body)}
    above = labelled.get_flat_relative_ids(upstream=True)
    for task in body:
        if not task.upstream_task_ids & inside and task.task_id not in above:
            labelled >> task


def _end_before(release: ReleaseTpuSlicesOperator, body: Sequence[AbstractOperator]) -> None:
    """The slices stay until the last task of the body is over."""
    inside = {task.task_id for task in body}
    for task in body:
        if not task.downstream_task_ids & (inside | {release.task_id}):
            task >> release
