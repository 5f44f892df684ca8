"""The last task of a lease's scope: whether a run is red, where Airflow alone would lose sight of a failure.

Airflow judges a run by its leaves. Marked failed by hand while a teardown is pending, a run keeps
running until the teardown is over; what had not begun is skipped, the task that ran is failed but
no leaf, and all leaves being "skipped" makes the run green (``airflow/api/common/mark_tasks.py``,
``DagRun._tis_for_dagrun_state``). A failed teardown does not count either. Not here: the release.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from raytpu_ops.operators.base import by_hand, owner_of
from raytpu_ops.tpu.naming import lease_id

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.definitions._internal.abstractoperator import AbstractOperator

#: States of each task's instances, by map index; -1 where it is not mapped.
States = Mapping[str, Mapping[int, str | None]]

FAILED = frozenset({"failed", "upstream_failed"})
#: What becomes of tasks that wait for one that failed, or for a run that a person ended.
WITHOUT_EFFECT = FAILED | {"skipped", "removed"}


def unhandled(states: States, below: Mapping[str, Collection[str]]) -> list[str]:
    """Failures that nothing below them made good.

    A failure is handled where something below it succeeded, such as a fallback with the trigger
    rule ``one_failed``, or is still to come: then Airflow's own judgement of that task decides.

    :param states: of the tasks of the scope and of those below them.
    :param below: for each task of the scope, every task downstream of it that is no teardown.
    :return: the task instances, ``task`` or ``task[index]``, in order; those that failed themselves,
        or where there is none those that could not start.
    """
    found: dict[str, list[str]] = {"failed": [], "upstream_failed": []}
    for task_id, after in below.items():
        for index, state in states.get(task_id, {}).items():
            if state not in FAILED:
                continue
            ends = (end for one in after for end in _seen_from(states.get(one, {}), index))
            if all(end in WITHOUT_EFFECT for end in ends):
                found[str(state)].append(task_id if index < 0 else f"{task_id}[{index}]")
    return sorted(found["failed"] or found["upstream_failed"])


def _seen_from(instances: Mapping[int, str | None], index: int) -> Iterable[str | None]:
    """The instances of a task below that follow the mapped instance ``index``: its own, else all."""
    return [instances[index]] if index in instances else instances.values()


def by_instance(answer: Mapping[str, Any], task_ids: Collection[str]) -> States:
    """Airflow's answer, which names the third instance of ``a`` as ``a_3``, taken apart.

    :param answer: of ``RuntimeTaskInstance.get_task_states``, for one run.
    :param task_ids: of the tasks that were asked for.
    """
    states: dict[str, dict[int, str | None]] = {}
    for key, value in answer.items():
        state = None if value is None else str(getattr(value, "value", value))
        task_id, _, index = key.rpartition("_")
        if key not in task_ids and task_id in task_ids and index.isdecimal():
            states.setdefault(task_id, {})[int(index)] = state
        else:
            states.setdefault(key, {})[-1] = state
    return states


class TpuSlicesOutcomeOperator(BaseOperator):
    """Fails where the release failed, or where work of the lease's scope failed and nothing made it good.

    A teardown with ``on_failure_fail_dagrun``, behind the release: it runs whatever became of the
    work, and the run is red when it is. Failures that the DAG handles leave the run green.

    :param opening_task_id: the first setup, which opens the scope.
    :param release_task_id: the teardown that closes it.
    :param provision_task_id: whose lease it is.
    :param ray_tpu_conn_id: the connection that granted it. (templated)
    """

    template_fields: Sequence[str] = ("ray_tpu_conn_id",)
    ui_color = "#f3dcc4"

    def __init__(
        self,
        *,
        opening_task_id: str,
        release_task_id: str,
        provision_task_id: str,
        ray_tpu_conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        # As for the release: one that is ended by its time is a red run for nothing.
        super().__init__(**{"execution_timeout": None, **kwargs})
        self.opening_task_id = opening_task_id
        self.release_task_id = release_task_id
        self.provision_task_id = provision_task_id
        self.ray_tpu_conn_id = ray_tpu_conn_id

    def execute(self, context: Context) -> None:
        """Look at the states.

        :raises AirflowFailException: naming what failed.
        """
        below = self.scope()
        asked = {self.release_task_id, *below}.union(*below.values())
        states = self._states(context, asked)
        released = states.get(self.release_task_id, {})
        if any(state in FAILED for state in released.values()):
            lease = lease_id(owner_of(context, self.provision_task_id))
            raise AirflowFailException(
                f"{self.release_task_id} failed: TPU slices may be left and bill; its log names them, clear it or run "
                f"{by_hand(lease, self.ray_tpu_conn_id)}"
            )
        if failed := unhandled(states, below):
            raise AirflowFailException(f"the slices are released, the work failed: {', '.join(failed)}")
        self.log.info("The slices are released, and nothing failed that was not handled")

    def scope(self) -> dict[str, set[str]]:
        """The tasks between provisioning and release, with what is below each; teardowns are left out."""
        tasks = self.get_dag().task_dict  # type: ignore[union-attr] # a running task has a DAG
        inside = _reach([tasks[self.opening_task_id]], "downstream_task_ids", tasks, self.release_task_id)
        inside &= _reach([tasks[self.release_task_id]], "upstream_task_ids", tasks, self.opening_task_id)
        return {
            task_id: {
                one
                for one in _reach([tasks[task_id]], "downstream_task_ids", tasks, self.release_task_id)
                if not tasks[one].is_teardown
            }
            for task_id in inside
            if not tasks[task_id].is_teardown
        }

    def _states(self, context: Context, task_ids: Collection[str]) -> States:
        ti = context["ti"]
        answer = ti.get_task_states(dag_id=ti.dag_id, task_ids=sorted(task_ids), run_ids=[ti.run_id])
        states = by_instance(answer.get(ti.run_id, {}), task_ids)
        index = ti.map_index
        if index is None or index < 0:
            return states
        # In a mapped task group: only this instance's own siblings count.
        return {task_id: {index: one[index]} if index in one else one for task_id, one in states.items()}


def _reach(start: Iterable[AbstractOperator], way: str, tasks: Mapping[str, AbstractOperator], end: str) -> set[str]:
    """Ids of every task that is reached that way; what is at ``end`` or behind it does not count."""
    seen: set[str] = set()
    waiting = [one for task in start for one in getattr(task, way)]
    while waiting:
        task_id = waiting.pop()
        if task_id not in seen and task_id != end:
            seen.add(task_id)
            waiting.extend(getattr(tasks[task_id], way))
    return seen
