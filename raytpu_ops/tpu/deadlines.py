"""A deadline for each phase, so that hours in a queue never eat into the minutes of a start-up.

Durations here; a wait makes them absolute UTC instants the moment its phase begins, and those
travel. Not here: the waiting itself (``waits.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.fields import Duration, Instant
from raytpu_ops.tpu.problems import Checked, read, refused

#: The longest time between two looks: chips of what ended, or broke, just after a look are paid for until the next.
MAX_POLL = timedelta(minutes=10)

_DURATION: TypeAdapter[timedelta] = TypeAdapter(Duration, config=ConfigDict(defer_build=True))


class Phase(StrEnum):
    """The phases of a lease and of the work on it, in the order in which they come."""

    QUEUED = "queued"
    PROVISIONING = "provisioning"
    LABELLED = "labelled"
    STARTING = "starting"
    RUNNING = "running"
    RELEASING = "releasing"


class Deadlines(Checked):
    """How long each phase may last.

    Every field takes a ``timedelta`` or seconds, longer than zero and at most a year.

    :param queued: waiting for somebody to grant capacity.
    :param provisioning: granted, hosts being made.
    :param labelled: hosts are up, until Ray has labelled every one of them.
    :param starting: submitted, until the work runs on every host that it reserved.
    :param running: the work itself.
    :param releasing: teardown, until nothing is left; longer while Google does not let go of what it is still making,
        by an hour for node pools and two for queued resources at most.
    :raises InvalidSpec: for an unknown phase or something that is no such duration.
    """

    queued: Duration = timedelta(hours=4)
    provisioning: Duration = timedelta(minutes=30)
    labelled: Duration = timedelta(minutes=15)
    starting: Duration = timedelta(minutes=10)
    running: Duration = timedelta(hours=24)
    releasing: Duration = timedelta(minutes=15)

    @classmethod
    def of(cls, value: object = None, phases: Collection[Phase] = tuple(Phase)) -> Self:
        """Read what a DAG author wrote: an object, a dict with some of the fields, or nothing.

        :param phases: those that whoever it is written for has; a deadline for another would be without effect.
        :raises InvalidSpec: for an unknown phase, another one, or something that is no such duration.
        """
        said = cls() if value is None else read(cls, value, "deadlines")
        without = [phase for phase in Phase if phase in said.model_fields_set and phase not in phases]
        if without:
            there = ", ".join(phase for phase in Phase if phase in phases) or "none"
            raise InvalidSpec(
                f"deadlines: {', '.join(without)} would have no effect here, where the phases are {there}; give it to "
                "the task that has that phase, or leave it out"
            )
        return said

    def only(self, phases: Collection[Phase]) -> Self:
        """What was said of these phases.

        :param phases: those that a task has.
        """
        return type(self)(**{phase.value: getattr(self, phase) for phase in phases if phase in self.model_fields_set})

    def over(self, others: Self) -> Self:
        """Those that were said, and of the others those that somebody else thinks right.

        :param others: the defaults of whoever knows how long things take.
        """
        return others.model_copy(update={phase: getattr(self, phase) for phase in self.model_fields_set})

    def at(self, phase: Phase, start: datetime | None = None) -> datetime:
        """The instant, UTC, at which a phase that began at ``start`` (default: now) is over.

        :raises InvalidSpec: for a start without a time zone: it would mean another instant elsewhere.
        """
        begin = datetime.now(UTC) if start is None else start
        if begin.tzinfo is None:
            raise InvalidSpec(f"start of {phase}: {begin.isoformat()} has no time zone; use datetime.now(UTC)")
        duration: timedelta = getattr(self, Phase(phase).value)
        return begin.astimezone(UTC) + duration


class Schedule(Checked):
    """Deadlines that travel: how long each phase may last, and when the waiting began.

    The same in the triggerer that takes over; a retry begins a new one.

    :param begun: when the waiting began, UTC.
    :param deadlines: how long each phase may last.
    """

    begun: Instant
    deadlines: Deadlines

    @classmethod
    def start(cls, deadlines: object = None) -> Self:
        """A schedule that begins now.

        :param deadlines: what :meth:`Deadlines.of` reads.
        :raises InvalidSpec: as there.
        """
        return cls(begun=datetime.now(UTC), deadlines=Deadlines.of(deadlines))

    def until(self, phase: Phase, since: datetime | None = None) -> datetime:
        """The instant, UTC, at which a phase is over.

        :param since: when the phase began, as the far side says; a phase that is older than the waiting
            counts from the waiting.
        """
        return self.deadlines.at(phase, self.begun if since is None else max(since, self.begun))


def as_duration(value: object, what: str) -> timedelta:
    """A single duration that a DAG author wrote.

    :param value: a ``timedelta`` or seconds.
    :param what: what it is, as the message names it.
    :raises InvalidSpec: when it is none, not longer than zero, or longer than a year.
    """
    try:
        return _DURATION.validate_python(value)
    except ValidationError as error:
        raise refused(error, what) from None


def as_poll(value: object, what: str) -> float:
    """How often a DAG author wants a wait to look.

    :param value: a ``timedelta`` or seconds, at most :data:`MAX_POLL`.
    :param what: what it is, as the message names it.
    :return: seconds.
    :raises InvalidSpec: when it is none, not longer than zero, or longer.
    """
    seconds, most = as_duration(value, what).total_seconds(), MAX_POLL.total_seconds()
    if seconds > most:
        raise InvalidSpec(
            f"{what}: must be at most {most:.0f} seconds: what ended meanwhile is paid for, got {seconds:g}"
        )
    return seconds
