"""Triggers that wait for a lease: until it is granted, until it is whole, until it is gone."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING, Any

from raytpu_ops.backends.base import Backend, Plan
from raytpu_ops.flows.leases import take_back
from raytpu_ops.tpu.deadlines import Schedule
from raytpu_ops.triggers.base import FlowTrigger, LeaseTrigger

if TYPE_CHECKING:
    from raytpu_ops.hooks.ray_tpu import RayTpuHook

#: Seconds until a request that nobody waits for any more has been carried out or never will be.
IN_FLIGHT_S = 5.0
#: States of a task instance that nobody will try again by itself.
OVER = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})


class ProvisionSlicesTrigger(FlowTrigger):
    """Climbs the ladder of capacity until a lease is granted.

    A triggerer that takes over goes on: everything that was made is found again from the owner.

    :param plan: the :class:`~raytpu_ops.backends.base.Plan`, as plain JSON.
    :param owner: the provisioning task instance, as plain JSON.
    :param ray_tpu_conn_id: the connection to the backend.
    :param options: options of the backend that go over the connection's.
    """

    def __init__(
        self,
        *,
        plan: dict[str, Any],
        owner: dict[str, Any],
        ray_tpu_conn_id: str | None,
        options: dict[str, Any] | None,
    ) -> None:
        super().__init__(owner=owner)
        self.plan = Plan.model_validate(plan)
        self.ray_tpu_conn_id = ray_tpu_conn_id
        self.options = options

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class's path and its arguments, as plain JSON."""
        path, kwargs = super().serialize()
        return path, {
            **kwargs,
            "plan": self.plan.model_dump(mode="json"),
            "ray_tpu_conn_id": self.ray_tpu_conn_id,
            "options": self.options,
        }

    def hook(self) -> RayTpuHook:
        """The hook of the task's connection and options."""
        from raytpu_ops.hooks.ray_tpu import RayTpuHook

        return RayTpuHook(self.ray_tpu_conn_id, self.plan.backend, options=self.options)

    async def flow(self, backend: Backend) -> dict[str, Any]:
        """The lease."""
        return (await backend.acquire(self.plan, self.owner, say=self.log.info)).to_xcom()

    async def ended(self, backend: Backend, state: str | None) -> None:
        """Give back what was made so far; after a clear the next try adopts it."""
        if state not in OVER:
            self.log.info("%s was cleared: its next try goes on with what there is", self.owner.key)
            return
        self.log.info("%s is %s: giving back what was made", self.owner.key, state)
        await take_back(backend, self.owner)
        # A request that was on its way when the flow was ended may have arrived after that look.
        await asyncio.sleep(IN_FLIGHT_S)
        for line in await take_back(backend, self.owner):
            self.log.warning("Still there, until the release task or the reaper takes it: %s", line)


class SlicesReadyTrigger(LeaseTrigger):
    """Waits until every slice of the lease is whole.

    :param schedule: the :class:`~raytpu_ops.tpu.deadlines.Schedule`, as plain JSON.
    :param poll_s: seconds between two looks.
    """

    def __init__(
        self, *, lease: dict[str, Any], owner: dict[str, Any], schedule: dict[str, Any], poll_s: float
    ) -> None:
        super().__init__(lease=lease, owner=owner)
        self.schedule = schedule
        self.poll_s = poll_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class's path and its arguments, as plain JSON."""
        path, kwargs = super().serialize()
        return path, {**kwargs, "schedule": self.schedule, "poll_s": self.poll_s}

    async def flow(self, backend: Backend) -> dict[str, Any]:
        """The lease and the report."""
        from raytpu_ops.flows.leases import wait_whole

        lease, report = await wait_whole(
            backend,
            self.lease,
            schedule=Schedule.model_validate(self.schedule),
            say=self.log.info,
            poll_s=self.poll_s,
        )
        return {"lease": lease.to_xcom(), "readiness": report.model_dump(mode="json")}


class ReleaseSlicesTrigger(LeaseTrigger):
    """Releases the lease until nothing of it is left. A kill stops nothing: giving back is what is wanted.

    :param by: the instant, UTC and ISO 8601, after which what is left is an error.
    """

    def __init__(self, *, lease: dict[str, Any], owner: dict[str, Any], by: str) -> None:
        super().__init__(lease=lease, owner=owner)
        self.by = by

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class's path and its arguments, as plain JSON."""
        path, kwargs = super().serialize()
        return path, {**kwargs, "by": self.by}

    async def flow(self, backend: Backend) -> dict[str, Any]:
        """What was removed."""
        from raytpu_ops.flows.leases import give_back

        released = await give_back(backend, self.lease, by=datetime.fromisoformat(self.by), say=self.log.info)
        return released.model_dump(mode="json")
