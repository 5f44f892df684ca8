"""What our triggers share: one flow from start to end, one event, and who may stop what.

A trigger's ``on_kill`` also fires for a triggerer that lost its triggers to another one and then
wakes up, and for one whose event is already out. The remote work is stopped only when the task
instance says that a person ended it: a success that left a result is the other triggerer's, whose work is
in use. A person's clear is left to the next try, whose epoch is a new
one: it stops the older epoch's job itself, and nobody can stop the new one by mistake.
Beyond ``dagrun_timeout`` Airflow skips the teardown too: then the lease is given back here.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import tenacity
from airflow.sdk.bases.xcom import BaseXCom
from airflow.triggers.base import BaseTrigger, TriggerEvent

from raytpu_ops.backends.base import Backend
from raytpu_ops.tpu.errors import RayTpuError
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.triggers.log_channel import wait_until_read

if TYPE_CHECKING:
    from raytpu_ops.hooks.ray_tpu import RayTpuHook

#: States of a task instance in which somebody still works on it: this trigger elsewhere, or a newer try.
ALIVE = frozenset({"deferred", "running"})


#: An Airflow that does not answer once, as when it restarts, is no reason to leave a job, or slices, to themselves.
BEARS_SILENCE = tenacity.retry(
    stop=tenacity.stop_after_attempt(5), wait=tenacity.wait_random_exponential(1, max=15), reraise=True
)


class FlowTrigger(BaseTrigger):
    """Runs one flow and sends its result, or its failure, as one event.

    :param owner: the task instance that deferred, as plain JSON.
    """

    def __init__(self, *, owner: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # Airflow's own has no annotations
        self.owner = Owner.model_validate(owner)
        self._fired = False

    @abstractmethod
    async def flow(self, backend: Backend) -> dict[str, Any]:
        """The work; its result as plain JSON, which the task's resume method gets."""

    @abstractmethod
    def hook(self) -> RayTpuHook:
        """The hook whose backend the flow works with."""

    @abstractmethod
    async def ended(self, backend: Backend, state: str | None) -> None:
        """The task ended while the flow was under way, by a person or by its run's time.

        :param state: of the task instance now; None after a clear.
        """

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class's path and its arguments, as plain JSON."""
        path = f"{type(self).__module__}.{type(self).__qualname__}"
        return path, {"owner": self.owner.model_dump(mode="json")}

    async def backend(self) -> Backend:
        """The backend. The connection is read in a thread: that call blocks, and is refused in ``on_kill``."""
        return await asyncio.to_thread(lambda: self.hook().backend)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Run the flow; a failure of a class of ours travels as an event, for its class would be lost otherwise."""
        try:
            event = {"result": await self.flow(await self.backend())}
        except RayTpuError as error:
            event = error.as_event()
        if not await wait_until_read():
            self.log.warning("The end of this log may be in the triggerer's own log: it is behind with reading")
        self._fired = True
        yield TriggerEvent(event)

    async def on_kill(self) -> None:
        """Act where a person, or the run's time, ended the task; a hand-over to another triggerer changes nothing."""
        if self._fired:
            return
        state = await self.task_state()
        if state in ALIVE:
            self.log.info("%s is %s elsewhere: its remote work goes on", self.owner.key, state)
            return
        if state == "success" and await asyncio.to_thread(self._has_result):
            self.log.info("%s was brought to its end elsewhere: what it made is in use", self.owner.key)
            return
        await self.ended(await self.backend(), state)

    def task_key(self) -> dict[str, Any]:
        """The task instance, in Airflow's own four ids."""
        return self.owner.model_dump(mode="json", include={"dag_id", "run_id", "task_id", "map_index"})

    @BEARS_SILENCE
    def _has_result(self) -> bool:
        """Whether the task handed its result on; a person's mark leaves none."""
        from airflow.sdk.execution_time.xcom import XCom

        return XCom.get_one(key=BaseXCom.XCOM_RETURN_KEY, **self.task_key()) is not None

    @BEARS_SILENCE
    async def task_state(self) -> str | None:
        """The task instance's state in Airflow now."""
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        owner = self.owner
        states = await asyncio.to_thread(
            RuntimeTaskInstance.get_task_states,
            dag_id=owner.dag_id,
            task_ids=[owner.task_id],
            run_ids=[owner.run_id],
            map_index=owner.map_index,
        )
        of_run = states.get(owner.run_id, {})
        return next((str(getattr(state, "value", state)) for state in of_run.values() if state), None)

    async def run_is_over(self) -> bool:
        """Whether the DAG run that the owner belongs to has ended."""
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        owner = self.owner
        states = ["success", "failed"]
        count = await asyncio.to_thread(
            RuntimeTaskInstance.get_dr_count, dag_id=owner.dag_id, run_ids=[owner.run_id], states=states
        )
        return count > 0


class LeaseTrigger(FlowTrigger):
    """A flow on a lease.

    :param lease: the lease, as plain JSON.
    :param owner: the task instance that deferred, as plain JSON.
    """

    def __init__(self, *, lease: dict[str, Any], owner: dict[str, Any]) -> None:
        super().__init__(owner=owner)
        self.lease = SliceLease.from_xcom(lease)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class's path and its arguments, as plain JSON."""
        path, kwargs = super().serialize()
        return path, {"lease": self.lease.to_xcom(), **kwargs}

    def hook(self) -> RayTpuHook:
        """The hook by which the lease was granted."""
        from raytpu_ops.hooks.ray_tpu import RayTpuHook

        return RayTpuHook.for_lease(self.lease)

    async def stop(self, backend: Backend) -> None:
        """Stop what the flow runs remotely; nothing by default."""

    async def ended(self, backend: Backend, state: str | None) -> None:
        """Stop the remote work; beyond the run's end give the lease back too."""
        self.log.info("%s is %s: stopping its remote work", self.owner.key, state or "cleared")
        try:
            await self.stop(backend)
        finally:
            if state is not None and self._same_run() and await self.run_is_over():
                await self.give_back(backend)

    async def give_back(self, backend: Backend) -> None:
        """Release the lease of a run that is over while its teardown never ran: ``dagrun_timeout`` skips that too.

        A run that a person ends is not over before its teardown is, so nothing is taken from that.
        """
        self.log.info("The run %s is over: giving back lease %s", self.owner.run_id, self.lease.id)
        released = await backend.release(self.lease)
        for line in released.left:
            self.log.warning("Still there, until the reaper's next round: %s", line)

    def _same_run(self) -> bool:
        """The lease was granted in this very run; one that another run handed on is that one's."""
        granted = self.lease.owner
        ours = self.owner
        return (granted.deployment, granted.dag_id, granted.run_id) == (ours.deployment, ours.dag_id, ours.run_id)
