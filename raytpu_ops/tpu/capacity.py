"""How slices are paid for. A list of these is a ladder: tried in order until one is granted.

Not here: how a rung becomes a cloud's request; each backend translates the rungs that it knows.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.fields import Duration, Word
from raytpu_ops.tpu.problems import Checked, refused
from raytpu_ops.tpu.words import near, shown

#: Compute Engine's rule for the name, with the longer form for a reservation that another project shares.
_RESERVATION = re.compile(r"(projects/[a-z][a-z0-9-]{4,28}[a-z0-9]/reservations/)?[a-z]([-a-z0-9]{0,61}[a-z0-9])?\Z")

#: The longest that Google lets flex-start capacity run.
FLEX_START_LIMIT = timedelta(days=7)


class Rung(Checked):
    """What every kind of capacity has.

    :param within: how long to wait for it, in each zone, before the next rung is tried; a ``timedelta`` or
        seconds. Default: the deadline of the phase ``provisioning``, and of ``queued`` where capacity is
        granted when it comes free.
    """

    within: Duration | None = None

    #: Granted when it comes free, so the time in a queue is part of it.
    waits_in_queue: ClassVar[bool] = False


class OnDemand(Rung):
    """Ordinary capacity at list price."""

    kind: Literal["on_demand"] = "on_demand"


class Spot(Rung):
    """Cheap capacity that may be taken back at any moment."""

    kind: Literal["spot"] = "spot"


class Reservation(Rung):
    """Capacity that was bought ahead.

    :param name: the reservation's name, or ``projects/P/reservations/NAME`` where another project shares it.
    :raises InvalidSpec: for a name that no reservation can have.
    """

    kind: Literal["reservation"] = "reservation"
    name: Word

    def __init__(self, name: str | None = None, **data: Any) -> None:
        super().__init__(**(data if name is None else {"name": name, **data}))

    @field_validator("name")
    @classmethod
    def _is_reservation(cls, value: str) -> str:
        if not _RESERVATION.match(value):
            raise ValueError(
                "must be the name of a reservation (lower-case letters, digits and dashes, at most 63, starting "
                "with a letter), or 'projects/PROJECT/reservations/NAME'"
            )
        return value


class FlexStart(Rung):
    """Capacity that is granted when it comes free and taken back after a while.

    :param max_run_duration: how long it may run, at most seven days; a ``timedelta`` or seconds.
    :raises InvalidSpec: for something that is no such duration.
    """

    kind: Literal["flex_start"] = "flex_start"
    waits_in_queue: ClassVar[bool] = True
    max_run_duration: Duration

    def __init__(self, max_run_duration: timedelta | float | None = None, **data: Any) -> None:
        super().__init__(**(data if max_run_duration is None else {"max_run_duration": max_run_duration, **data}))

    @field_validator("max_run_duration")
    @classmethod
    def _within_a_week(cls, value: timedelta) -> timedelta:
        if value > FLEX_START_LIMIT:
            raise ValueError(f"must be at most {FLEX_START_LIMIT.days} days")
        return value


class Queued(Rung):
    """A request that waits in the cloud's queue.

    :param valid_for: how long the request may wait before it is withdrawn; a ``timedelta`` or seconds.
    :raises InvalidSpec: for something that is no such duration.
    """

    kind: Literal["queued"] = "queued"
    waits_in_queue: ClassVar[bool] = True
    valid_for: Duration

    def __init__(self, valid_for: timedelta | float | None = None, **data: Any) -> None:
        super().__init__(**(data if valid_for is None else {"valid_for": valid_for, **data}))


AnyCapacity = Annotated[OnDemand | Spot | Reservation | FlexStart | Queued, Field(discriminator="kind")]
_RUNG: TypeAdapter[Any] = TypeAdapter(AnyCapacity, config=ConfigDict(defer_build=True))
_RUNGS = (OnDemand, Spot, Reservation, FlexStart, Queued)
#: What a rung may be.
KINDS: tuple[str, ...] = tuple(one.model_fields["kind"].default for one in _RUNGS)

#: What a person may type into a form for a rung that needs nothing else.
_WORDS: dict[str, type[OnDemand | Spot]] = {
    "on_demand": OnDemand,
    "on-demand": OnDemand,
    "ondemand": OnDemand,
    "spot": Spot,
}
_THERE_ARE = (
    "write 'on_demand' or 'spot', or one of "
    "OnDemand(), Spot(), Reservation(name), FlexStart(max_run_duration), Queued(valid_for)"
)


def _rung(value: object, what: str) -> AnyCapacity:
    if isinstance(value, _RUNGS):
        return value
    if isinstance(value, str):
        word = value.strip().lower()
        if word not in _WORDS:
            raise InvalidSpec(f"{what}: {shown(value)} is no kind of capacity{near(word, _WORDS)}; {_THERE_ARE}")
        return _WORDS[word]()
    if not isinstance(value, dict):
        raise InvalidSpec(f"{what}: {shown(value)} ({type(value).__name__}) is no kind of capacity; {_THERE_ARE}")
    try:
        step: AnyCapacity = _RUNG.validate_python(value)
    except ValidationError as error:
        raise refused(error, what) from None
    return step


def ladder(capacity: object = None) -> list[AnyCapacity]:
    """Read what a DAG author wrote as a ladder.

    :param capacity: nothing (``OnDemand()``), one rung, or a list or tuple of rungs; a rung is one of
        this module's objects, its JSON, or the words ``on_demand`` and ``spot``.
    :return: the rungs in the order in which they are tried, at least one.
    :raises InvalidSpec: for anything else, and for a rung that stands there twice.
    """
    if capacity is None:
        return [OnDemand()]
    if not isinstance(capacity, list | tuple):
        return [_rung(capacity, "capacity")]
    if not capacity:
        raise InvalidSpec("capacity: is an empty list; name at least one rung, such as OnDemand()")
    steps = [_rung(rung, f"capacity[{index}]") for index, rung in enumerate(capacity)]
    for index, step in enumerate(steps):
        if any(step.model_copy(update={"within": other.within}) == other for other in steps[:index]):
            raise InvalidSpec(f"capacity[{index}]: {step.kind} stands there twice; each rung is tried once")
    return steps
