"""Triggers that wait for a lease: until it is whole, until it is gone."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from raytpu_ops.backends.base import Backend
from raytpu_ops.tpu.deadlines import Schedule
from raytpu_ops.triggers.base import FlowTrigger


class SlicesReadyTrigger(FlowTrigger):
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


class ReleaseSlicesTrigger(FlowTrigger):
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
