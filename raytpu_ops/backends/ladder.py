"""Where on a ladder of capacity a lease stands: what was tried in which zone, why it failed, what is next.

Each rung is tried in every zone before the next rung is. The state is small and plain, so that a
backend writes it on the objects that it makes and a retry goes on where a killed task stopped.
Pure. Not here: how a rung becomes a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple, Self

from pydantic import Field

from raytpu_ops.backends.base import Plan
from raytpu_ops.tpu.capacity import AnyCapacity
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.errors import (
    CapacityUnavailable,
    DeadlineExceeded,
    InvalidSpec,
    Misconfigured,
    NotOffered,
    RayTpuError,
)
from raytpu_ops.tpu.fields import Count, Instant, Text
from raytpu_ops.tpu.problems import Checked


class Step(NamedTuple):
    """One rung in one zone.

    :param number: its place among all steps, from 0.
    :param rung: the kind of capacity.
    :param zone: where; None where the backend leaves it open.
    """

    number: int
    rung: AnyCapacity
    zone: str | None

    def __str__(self) -> str:
        where = f" in {self.zone}" if self.zone else ""
        named = f" {self.rung.name}" if self.rung.kind == "reservation" else ""
        return f"{self.rung.kind}{named}{where}"


class Climb(Checked):
    """The state of a ladder.

    :param step: number of the step that is being tried.
    :param begun: when it began, UTC.
    :param tried: what was tried before and why it failed, one line each, in order.
    :param not_offered: how many of them could never work, as their zone does not have what was asked for.
    """

    step: Count
    begun: Instant
    tried: list[Text] = Field(default_factory=list)
    not_offered: Count = 0

    @classmethod
    def start(cls, now: datetime) -> Self:
        """At the foot of the ladder."""
        return cls(step=0, begun=now)

    def failed(self, step: Step, error: RayTpuError, now: datetime) -> Self:
        """The next step, with this one's failure in the list."""
        return type(self)(
            step=step.number + 1,
            begun=now,
            tried=[*self.tried, f"{step}: {error}"],
            not_offered=self.not_offered + isinstance(error, NotOffered),
        )


def steps(plan: Plan, zones: Sequence[str] = ()) -> list[Step]:
    """All steps of a plan, in the order in which they are tried.

    :param zones: where each rung may be; none where the backend leaves it open.
    """
    places: Sequence[str | None] = zones or [None]
    both = [(rung, zone) for rung in plan.ladder for zone in places]
    return [Step(number, rung, zone) for number, (rung, zone) in enumerate(both)]


def deadline(step: Step, climb: Climb, plan: Plan) -> datetime:
    """The instant, UTC, at which the step's time is over.

    :return: counted from when the step began.
    """
    if step.rung.within is not None:
        return climb.begun + step.rung.within
    return plan.deadlines.at(Phase.QUEUED if step.rung.waits_in_queue else Phase.PROVISIONING, climb.begun)


def check_queue(rung: AnyCapacity, where: str) -> None:
    """Refuse to wait longer than the place in a queue is good for.

    :param where: the rung, as the message names it.
    :raises InvalidSpec: it would be waited for what is withdrawn meanwhile.
    """
    if rung.kind == "queued" and rung.within is not None and rung.within > rung.valid_for:
        raise InvalidSpec(
            f"{where}: within ({rung.within}) is longer than valid_for ({rung.valid_for}), after which the request is "
            "withdrawn: make valid_for as long, or leave within out"
        )


def is_refusal(error: RayTpuError) -> bool:
    """Whether another rung or zone may help; all else ends the climb."""
    return isinstance(error, CapacityUnavailable | DeadlineExceeded | NotOffered)


def exhausted(what: str, climb: Climb) -> CapacityUnavailable | Misconfigured:
    """The error at the end of the ladder: everything that was tried, and why it failed.

    :param what: the lease, as the message names it.
    :return: of the class that says whether trying later can help.
    """
    tried = f"{len(climb.tried)} of {len(climb.tried)} tries failed: {'; '.join(climb.tried)}"
    if climb.not_offered == len(climb.tried):
        return Misconfigured(f"{what}: no zone that is named has what is asked for, {tried}. Name other zones")
    return CapacityUnavailable(
        f"{what}: no capacity, {tried}. Try later, add a rung or a zone, or ask for a smaller topology"
    )
