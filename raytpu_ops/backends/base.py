"""The protocol that a backend speaks: plan, acquire, observe, repair, release, list.

All of it is async, idempotent and safe to be killed in: a backend finds what it made by the
owner's labels on the real objects, so calling again is always right. Errors of the libraries
below stop here and leave as ours (``tpu/errors.py``), cause attached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from raytpu_ops.tpu.capacity import AnyCapacity
from raytpu_ops.tpu.deadlines import Deadlines
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.tpu.words import near

if TYPE_CHECKING:
    from raytpu_ops.ray.client import RayClient
    from raytpu_ops.ray.credentials import Credentials


Say = Callable[[str], None]


def silent(line: str) -> None:
    """Where nobody reads a log."""


class Patience(NamedTuple):
    """How long a far side that is away is asked again before a call is given up, and who is told.

    :param within: how long.
    :param say: takes a line whenever something changes.
    """

    within: timedelta
    say: Say = silent


@runtime_checkable
class Patient(Protocol):
    """A backend whose far side may be away.

    :ivar patience: how it bears that.
    """

    patience: Patience


class Plan(BaseModel):
    """Everything that would be created, checked, with nothing touched.

    :param backend: the backend that would grant it.
    :param spec: what is wanted.
    :param ladder: the rungs of capacity, in the order in which they are tried.
    :param lease_for: how long the lease lasts before the reaper may take it.
    :param deadlines: how long each phase may last; a rung without a ``within`` of its own goes by them.
    :param creates: what would be made, in words, one line an object.
    :param notes: what a person should know before saying yes (chips, cost, limits).
    :param names: what things would be called, with the room that there is; empty where nobody says whose they are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str
    spec: SliceSpec
    ladder: list[AnyCapacity]
    lease_for: timedelta = timedelta(hours=24)
    deadlines: Deadlines = Field(default_factory=Deadlines)
    creates: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    names: list[str] = Field(default_factory=list)


class Released(BaseModel):
    """What a release did.

    :param removed: what is gone now, in words.
    :param left: what is still there and why; empty when nothing is.
    :param held: how much longer than usual all that may take at most, since the far side does not let go of
        something yet.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    removed: list[str] = Field(default_factory=list)
    left: list[str] = Field(default_factory=list)
    held: timedelta = Field(default=timedelta(0), exclude=True)


#: By what leases can be narrowed: fields of their owner.
_NARROWS = ("dag_id", "run_id", "task_id")


def check_narrowing(labels: Mapping[str, str]) -> None:
    """Refuse labels by which :meth:`Backend.list_leases` does not narrow.

    :raises InvalidSpec: naming them, and those that there are.
    """
    if unknown := set(labels) - set(_NARROWS):
        raise InvalidSpec(f"leases can't be narrowed by {', '.join(sorted(unknown))}: use {', '.join(_NARROWS)}")


def belongs(lease: SliceLease, labels: Mapping[str, str]) -> bool:
    """Whether a lease is one of those that :func:`check_narrowing`'s labels leave."""
    return all(getattr(lease.owner, key) == value for key, value in labels.items())


@runtime_checkable
class Backend(Protocol):
    """Who grants slices. See the module's docstring for what holds for every method."""

    name: str
    #: ``acquire`` returns within seconds and must run on the machine of the task itself; a backend
    #: that waits for a cloud has False and is awaited in the triggerer.
    acquires_in_task: bool

    @property
    def ships_runtime(self) -> bool:
        """The cluster's image may lack this package: what of it runs there is uploaded (``ray/packages.py``)."""

    async def plan(
        self, spec: SliceSpec, ladder: Sequence[AnyCapacity], *, lease_for: timedelta, owner: Owner | None = None
    ) -> Plan:
        """Check everything that can be checked without creating anything.

        :param owner: whose the lease will be; None: the plan names nothing, and looks for nobody else's things of
            these names.
        :raises InvalidSpec: what is wrong, where, and what would be right.
        :raises Misconfigured: who is asked says already that it can't be had.
        """

    async def acquire(self, plan: Plan, owner: Owner, *, say: Say = silent) -> SliceLease:
        """Grant the lease: adopt what the owner has, finish what is half made, else create.

        Rolls itself back when it fails. Cancelled, it leaves everything as it is: the next call adopts it.

        :param say: takes a line for the log whenever something changes.
        :raises CapacityUnavailable: no rung of the ladder had the chips; the message names each and why.
        """

    async def find(self, owner: Owner) -> SliceLease | None:
        """The owner's lease, read from the real objects; None when there is none."""

    async def observe(self, lease: SliceLease) -> Readiness:
        """How whole the lease is now. Cheap; never raises for a far side that does not answer yet."""

    async def repair(self, lease: SliceLease, *, say: Say = silent) -> SliceLease:
        """Replace each broken slice whole; a lease with none comes back as it is.

        :param say: takes a line for the log whenever something changes.
        :raises CapacityUnavailable: there are no chips in the place of those that are gone.
        """

    async def release(self, lease: SliceLease) -> Released:
        """Give everything back. Every step is tried, whatever the others did; nothing left is a success."""

    async def list_leases(self, say: Say = silent, /, **labels: str) -> list[SliceLease]:
        """Leases found on the real objects.

        :param say: takes a line for each object of ours that can't be read, which bills all the same.
        :param labels: narrow by ``dag_id``, ``run_id``, ``task_id``.
        """

    def ray(self, lease: SliceLease) -> RayClient:
        """A client for the lease's Ray, with its token. Use it as an async context manager."""

    def serve_credentials(self, lease: SliceLease) -> Credentials | None:
        """What the way to the lease's Serve asks for; None where everybody is let through."""


_BACKENDS = {
    "local": "raytpu_ops.backends.local:LocalBackend",
    "gke": "raytpu_ops.backends.gke:GkeBackend",
    "tpu_vm": "raytpu_ops.backends.tpu_vm:TpuVmBackend",
}


def backend_names() -> list[str]:
    """The backends there are, in the order in which the docs name them."""
    return list(_BACKENDS)


def make_backend(name: str, **options: Any) -> Backend:
    """The backend of that name.

    :param name: one of :func:`backend_names`.
    :param options: what the backend's class takes.
    :raises InvalidSpec: for a name that is none, or options that it does not take.
    """
    try:
        path = _BACKENDS[name]
    except (KeyError, TypeError):
        raise InvalidSpec(f"backend {name!r} does not exist; there are {', '.join(_BACKENDS)}") from None
    module, _, attribute = path.partition(":")
    factory = getattr(import_module(module), attribute)
    taken = signature(factory).parameters
    if not any(one.kind is Parameter.VAR_KEYWORD for one in taken.values()):
        for key in options.keys() - taken.keys():
            known = ", ".join(taken)
            raise InvalidSpec(f"backend {name!r}: there is no option {key!r}{near(key, taken)}; there are {known}")
    try:
        backend: Backend = factory(**options)
    except TypeError as error:
        raise InvalidSpec(f"backend {name!r}: {error}") from error
    return backend
