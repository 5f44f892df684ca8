"""What our operators share: who owns, which epoch, and running a flow so that a kill ends it.

Not here: any decision about remote state; those are the flows'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from airflow.sdk import BaseOperator, XComArg
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowFailException

from raytpu_ops.operators.retries import TpuRetryPolicy
from raytpu_ops.tpu.deadlines import Deadlines, Phase, Schedule
from raytpu_ops.tpu.errors import InvalidSpec, from_event
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.words import shown

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial
    from airflow.triggers.base import BaseTrigger

    from raytpu_ops.backends.base import Backend

Result = TypeVar("Result")

#: After SIGTERM Airflow waits five seconds before SIGKILL; a stop that is asked for must fit.
KILL_WITHIN_S = 4.0


def owner_of(context: Context, task_id: str | None = None) -> Owner:
    """Whose the work is: the same over retries and over clears.

    :param task_id: another task of the same run, where that one is the owner.
    """
    ti = context["ti"]
    return Owner(
        dag_id=ti.dag_id,
        run_id=ti.run_id,
        task_id=task_id or ti.task_id,
        map_index=-1 if ti.map_index is None else ti.map_index,
        deployment=deployment(),
    )


def deployment() -> str | None:
    """The name by which this Airflow knows itself, ``[raytpu] deployment``; None where it has none.

    Two that run one DAG on one cluster would otherwise hold the same leases.
    """
    return conf.get("raytpu", "deployment", fallback="").strip() or None


def by_hand(lease_id: str, conn_id: str | None) -> str:
    """What a person types to give a lease back.

    :param conn_id: the connection that granted it; None where the task named none: then only its author knows where
        it is, for the command looks at ``ray_tpu_default`` or at this machine.
    """
    if conn_id:
        return f"`raytpu release {lease_id} --conn-id {conn_id}`"
    return f"`raytpu release {lease_id}`, with --backend or --conn-id for what the task has"


def epoch_of(context: Context) -> int:
    """A number that stays over retries and rises when a person clears the task.

    Airflow sets ``max_tries`` to the tries so far plus ``retries`` at each clear, and at no other
    time (airflow/models/taskinstance.py, ``clear_task_instances``).
    """
    return max(0, int(context["ti"].max_tries or 0))


def whole_number(value: object) -> object:
    """A number that a template rendered as text, as a number; anything else as it is, to be judged later."""
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdecimal():
        return int(value)
    return value


def has_template(value: object) -> bool:
    """Whether a value, or something inside it, is only known when the task runs."""
    if isinstance(value, str):
        return "{{" in value or "{%" in value
    if isinstance(value, dict):
        return any(has_template(part) for part in value.values())
    if isinstance(value, list | tuple):
        return any(has_template(part) for part in value)
    return hasattr(value, "resolve") and not isinstance(value, PurePath)


def settled(value: object, stand_in: object) -> Any:
    """What can be judged before the task runs: a value with a stand-in for what a template decides.

    :param stand_in: a value that is right, in the place of one that is a template as a whole; a template
        inside a dict or a list becomes a word.
    """
    if isinstance(value, dict):
        return {name: settled(part, "template") for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [settled(part, "template") for part in value]
    return stand_in if has_template(value) else value


@contextmanager
def _no_retry_of_what_cannot_work() -> Iterator[None]:
    """A value that was refused is refused again in every retry; the person who can change it learns of it now."""
    try:
        yield
    except InvalidSpec as error:
        raise AirflowFailException(str(error)) from error


def _retries_of_policy(arguments: Mapping[str, Any]) -> dict[str, int]:
    """The retries that a policy of ours needs: without any Airflow never asks it.

    Those that stand beside the policy count, in the task or in ``default_args``; a DAG's own default was meant
    for tasks without one.
    """
    defaults = arguments.get("default_args") or {}
    beside = arguments if "retry_policy" in arguments else {**defaults, **arguments}
    policy = beside.get("retry_policy")
    return {"retries": policy.retries} if isinstance(policy, TpuRetryPolicy) and "retries" not in beside else {}


def as_written(task_id: str, lease: Any) -> Any:
    """The lease as it is, where it can be one when the task runs.

    :param lease: the output of a task, another template, a lease, or the dict of one; a mapped task has it from XCom.
    :raises InvalidSpec: it is nothing of that.
    """
    if isinstance(lease, SliceLease | dict) or (has_template(lease) and not isinstance(lease, list | tuple)):
        return lease
    raise InvalidSpec(
        f"{task_id}: lease: must be what a task that provisions returns, got {shown(lease)}: pass "
        "lease=provision.output, or what `with tpu_slices(…) as lease:` gives"
    )


def in_scope(task_id: str, lease: Any) -> Any:
    """The lease as it is, where the task may take it.

    :param lease: what :func:`as_written` takes.
    :raises InvalidSpec: it can be no lease, or it is of a ``with tpu_slices(…)`` block that was over before the task
        was made.
    """
    for source, _ in XComArg.iter_xcom_references(as_written(task_id, lease)):
        tasks = getattr(source, "tasks_at_release", None)
        # Not whether the block is over: a mapped task of it is made again when it runs.
        if tasks is not None and task_id not in tasks:
            raise InvalidSpec(
                f"{task_id}: takes the lease of {source.task_id} behind its `with tpu_slices(…)` block, when the "
                "slices are given back; make the task inside the block"
            )
    return lease


def slices_of(lease: Any) -> int | None:
    """How many slices a lease has, where it is plain in the DAG; None where only the run tells.

    :param lease: an XComArg, or anything else.
    """
    return next((getattr(source, "slices_handed_on", None) for source, _ in XComArg.iter_xcom_references(lease)), None)


class RayTpuOperator(BaseOperator):
    """Base of the operators: runs a flow to its end in this process, and ends it when killed.

    Subclasses implement :meth:`begin`. A value that can never work fails the task without retries. A
    ``retry_policy`` made by ``tpu_retry_policy`` brings its number of ``retries``, where none is given with it.

    :param deferrable: wait in the triggerer, without a worker slot. On by default.
    :param deadlines: for some of the :attr:`phases`, each a ``timedelta`` or seconds; in ``default_args`` also for
        phases of other tasks.
    :raises InvalidSpec: ``deferrable`` is no switch, ``do_xcom_push`` is off on a task whose result is needed (of
        ``default_args`` it does not count there), or a deadline is none or without effect.
    """

    ui_color = "#d7ecff"
    #: Arguments of Airflow's that the task alone decides: what ``default_args`` and Airflow's configuration say of them
    #: does not count. The result is needed by those that take it, and by a triggerer that was cut off from Airflow and
    #: has to tell work that is in use from work that a person ended; a task whose result nobody needs takes this out.
    not_by_default: ClassVar[Mapping[str, Any]] = {"do_xcom_push": True}
    #: What the task may spend its time with, each with a deadline of its own.
    phases: ClassVar[tuple[Phase, ...]] = ()

    def __init__(
        self, *, deferrable: bool = True, deadlines: Deadlines | dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**{**self.not_by_default, **kwargs, **_retries_of_policy(kwargs)})
        if not isinstance(deferrable, bool):
            raise InvalidSpec(f"{self.task_id}: deferrable must be True or False, got {shown(deferrable)}")
        if self.not_by_default.get("do_xcom_push") and not self.do_xcom_push:
            raise InvalidSpec(
                f"{self.task_id}: do_xcom_push is off, but what a {type(self).__name__} returns is needed; leave it out"
            )
        self.deadlines = self._deadlines_of(deadlines, kwargs.get("default_args") or {})
        self.deferrable = deferrable
        self._flow: asyncio.Task[Any] | None = None
        #: For the task whose output is the lease of a ``with tpu_slices(…)`` block: those made before its end.
        self.tasks_at_release: frozenset[str] | None = None
        #: For a task whose output is a lease: of how many slices, where that is plain in the DAG.
        self.slices_handed_on: int | None = None

    def _deadlines_of(self, said: Any, defaults: Mapping[str, Any]) -> Any:
        """Those of the task; of ``default_args``, which are for tasks of many kinds, what is for its phases."""
        try:
            if said is not None and said is defaults.get("deadlines"):
                return Deadlines.of(said).only(self.phases)
            Deadlines.of(said, self.phases)
        except InvalidSpec as error:
            raise InvalidSpec(f"{self.task_id}: {error}") from None
        return said

    @classmethod
    def partial(cls, **kwargs: Any) -> OperatorPartial:
        """Airflow's own, for ``.expand(…)``; what the constructor puts in stands in a mapped task too.

        The scheduler counts tries by the mapped task, and makes no instance of it. For an instance all that stands
        here is as good as written on the task.
        """
        made: OperatorPartial = super().partial(**{**cls.not_by_default, **kwargs})
        defaults: dict[str, Any] = {}
        for whose in (made.kwargs["dag"], made.kwargs["task_group"]):
            defaults |= getattr(whose, "default_args", None) or {}
        defaults |= kwargs.get("default_args") or {}
        made.kwargs.update(_retries_of_policy({**kwargs, "default_args": defaults}))
        return made

    def execute(self, context: Context) -> Any:
        """Do what the operator is for, see :meth:`begin`.

        :raises AirflowFailException: for a value that was refused (:class:`InvalidSpec`).
        """
        with _no_retry_of_what_cannot_work():
            return self.begin(context)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Go on after a deferral; what holds for :meth:`execute` holds here."""
        with _no_retry_of_what_cannot_work():
            return super().resume_execution(next_method, next_kwargs, context)

    def begin(self, context: Context) -> Any:
        """What the task does first; its result is the task's, unless it defers."""
        raise NotImplementedError

    def run_flow(self, flow: Coroutine[Any, Any, Result]) -> Result:
        """Run a flow to its end; :meth:`on_kill` cancels it.

        :raises asyncio.CancelledError: when it was killed.
        """

        async def main() -> Result:
            self._flow = asyncio.current_task()
            try:
                return await flow
            finally:
                self._flow = None

        return asyncio.run(main())

    def carry(
        self,
        context: Context,
        *,
        flow: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
        trigger: Callable[[], BaseTrigger],
        deferred: bool,
    ) -> dict[str, Any]:
        """Carry a flow to its end, here or in the triggerer; either way it ends in :meth:`finish`."""
        if deferred:
            # Without a `timeout`, by which Airflow would end the wait and leave the remote work running: it calls no
            # `on_kill` then (airflow/jobs/triggerer_job_runner.py, F33, F35). The flow's own deadlines bound it.
            self.defer(trigger=trigger(), method_name="resume")
        return self.finish(context, self.run_flow(flow()))

    def until_whole(self, context: Context, backend: Backend, lease: SliceLease, deadlines: object) -> SliceLease:
        """Wait, where the lease is in a queue again, its hosts are still to come, or nothing of it is left.

        A slice that only broke is replaced on the way, by the flow itself: that takes no hop of its own.

        :return: the lease as it is then; deferred, it comes to :meth:`resume_whole`.
        """
        report = self.run_flow(backend.observe(lease))
        if report.ready or report.stands or report.fatal or (report.broken and not report.lost):
            return lease
        self.log.info("Lease %s is not whole: %s", lease.id, report.describe())
        schedule = Schedule.start(deadlines)
        if self.deferrable:
            from raytpu_ops.triggers.leases import SlicesReadyTrigger

            trigger = SlicesReadyTrigger(
                lease=lease.to_xcom(),
                owner=owner_of(context).model_dump(mode="json"),
                schedule=schedule.model_dump(mode="json"),
                poll_s=2.0,
            )
            self.defer(trigger=trigger, method_name="resume_whole")
        from raytpu_ops.flows.leases import wait_whole

        return self.run_flow(wait_whole(backend, lease, schedule=schedule, say=self.log.info))[0]

    def resume_whole(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """The lease is whole now; what is there already is not waited for a second time.

        :raises RayTpuError: it did not become whole.
        """
        if "failure_class" in event:
            raise from_event(event)
        return self.proceed(context, SliceLease.from_xcom(event["result"]["lease"]))

    def proceed(self, context: Context, lease: SliceLease) -> dict[str, Any]:
        """What is left to do once the lease is whole.

        :param lease: as it is now: its slices may have been replaced since the task that provisioned it.
        """
        raise NotImplementedError

    def resume(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Take what the trigger sent: the flow's result, or its failure as the typed error.

        :raises RayTpuError: the failure.
        """
        if "failure_class" in event:
            raise from_event(event)
        return self.finish(context, event["result"])

    def finish(self, context: Context, result: dict[str, Any]) -> dict[str, Any]:
        """What the task returns for the flow's result, in both modes; the result itself by default."""
        return result

    def on_kill(self) -> None:
        """Stop what runs remotely, then end the flow that waits for it.

        Airflow calls this inside its SIGTERM handler, in the thread whose event loop runs the flow:
        hence a thread of its own for the stop. The handler returns into the flow, so that is cancelled.
        """
        with ThreadPoolExecutor(max_workers=1) as pool:
            pool.submit(asyncio.run, self._stop_within()).result()
        if self._flow is not None:
            self._flow.get_loop().call_soon_threadsafe(self._flow.cancel)

    async def _stop_within(self) -> None:
        try:
            async with asyncio.timeout(KILL_WITHIN_S):
                await self.stop_remote()
        except TimeoutError:
            self.log.warning("The remote side did not confirm the stop within %s s", KILL_WITHIN_S)

    async def stop_remote(self) -> None:
        """Stop what this task runs remotely; nothing by default."""
