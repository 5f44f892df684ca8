"""Faults that the local backend injects, so that people can see what their DAGs make of them.

Some are set before a lease exists and wait in the root folder until an ``acquire`` takes them, so that
another process, such as the ``raytpu`` command, can set them for a DAG that is about to run:
:func:`no_capacity`, :func:`slow_host`, :func:`duplicate_worker_id`. The others strike a lease that is
there: :func:`kill_host`, :func:`preempt_slice`.

Not here: what anybody does about them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from raytpu_ops.backends.local.launch import write_atomically
from raytpu_ops.backends.local.layout import ROOT_LOCK, Root
from raytpu_ops.tpu.capacity import KINDS, AnyCapacity
from raytpu_ops.tpu.errors import CapacityUnavailable, InvalidSpec, RemoteUnavailable
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.problems import first_problem
from raytpu_ops.tpu.words import near, shown

if TYPE_CHECKING:
    from raytpu_ops.backends.local.record import LeaseRecord

_FILE = "faults.json"


class Fault(BaseModel):
    """A fault that waits.

    :param kind: what will go wrong.
    :param times: how often.
    :param slice: number of the slice in the lease.
    :param worker: worker id of the host in the slice.
    :param seconds: by which the host starts late.
    :param rungs: kinds of capacity that are refused; empty for all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["no_capacity", "slow_host", "duplicate_worker_id"]
    times: int = Field(default=1, ge=1)
    slice: int = Field(default=0, ge=0)
    worker: int = Field(default=0, ge=0)
    seconds: float = Field(default=0.0, ge=0, le=3600)
    rungs: tuple[str, ...] = ()


_FAULTS = TypeAdapter(list[Fault])


class Faults:
    """The faults that wait in a root. Its holder needs the root's lock for everything that changes them."""

    def __init__(self, root: Root) -> None:
        self._file = root.path / _FILE

    def waiting(self) -> list[Fault]:
        """Faults that no lease has taken yet."""
        try:
            return _FAULTS.validate_json(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []

    def add(self, fault: Fault) -> None:
        """Let a fault wait."""
        self._write([*self.waiting(), fault])

    def clear(self) -> None:
        """Forget them all."""
        self._file.unlink(missing_ok=True)

    def grant(self, ladder: Sequence[AnyCapacity]) -> tuple[AnyCapacity, list[str]]:
        """The first rung that no fault refuses, and why those before it were refused.

        :raises CapacityUnavailable: all of them were.
        """
        fault = next((fault for fault in self.waiting() if fault.kind == "no_capacity"), None)
        refused: list[str] = []
        for rung in ladder:
            if fault is None or (fault.rungs and rung.kind not in fault.rungs):
                break
            refused.append(f"{rung.kind}: no capacity (injected fault)")
        if fault is not None and refused:
            self._spend(fault)
        if len(refused) == len(ladder):
            raise CapacityUnavailable(f"no capacity for any of {len(ladder)} rungs: {'; '.join(refused)}")
        return ladder[len(refused)], refused

    def applied(self, record: LeaseRecord, index: int) -> LeaseRecord:
        """The record with faults done to the hosts of one slice."""
        for fault in self.waiting():
            hosts = record.slices[index].hosts
            if fault.kind == "no_capacity" or fault.slice != index or fault.worker >= len(hosts):
                continue
            if fault.kind == "slow_host":
                change: dict[str, Any] = {"delay_s": fault.seconds}
            elif len(hosts) > 1:
                change = {"shown_worker_id": (fault.worker - 1) % len(hosts)}
            else:
                continue  # one host has nobody whose id it could show
            hosts = [host.model_copy(update=change) if host.worker_id == fault.worker else host for host in hosts]
            slices = list(record.slices)
            slices[index] = slices[index].model_copy(update={"hosts": hosts})
            record = record.model_copy(update={"slices": slices})
            self._spend(fault)
        return record

    def _spend(self, fault: Fault) -> None:
        rest = list(self.waiting())
        place = rest.index(fault)
        rest[place : place + 1] = [fault.model_copy(update={"times": fault.times - 1})] if fault.times > 1 else []
        self._write(rest)

    def _write(self, faults: list[Fault]) -> None:
        if not faults:
            self.clear()
            return
        write_atomically(self._file, _FAULTS.dump_json(faults).decode())


def no_capacity(times: int = 1, *, rungs: Sequence[str] = (), root: str | os.PathLike[str] | None = None) -> Fault:
    """Let the next acquires find no capacity.

    :param times: how many of them.
    :param rungs: kinds of capacity that are refused, such as ``("reservation",)``; empty for all, and
        then the acquire raises :class:`CapacityUnavailable`.
    :param root: the local backend's root folder.
    :raises InvalidSpec: there is no such kind, so nothing would ever be refused.
    """
    for rung in rungs:
        if rung not in KINDS:
            raise InvalidSpec(
                f"rungs: {shown(rung)} is no kind of capacity{near(rung, KINDS)}; there are {', '.join(KINDS)}"
            )
    return _wait(root, kind="no_capacity", times=times, rungs=tuple(rungs))


def slow_host(
    slice: int = 0,  # noqa: A002 - the word that people use for it
    worker: int = 0,
    seconds: float = 30.0,
    *,
    times: int = 1,
    root: str | os.PathLike[str] | None = None,
) -> Fault:
    """Let a host of the next lease start late.

    :param slice: number of the slice in the lease, from 0.
    :param worker: worker id of the host in the slice.
    :param seconds: how late.
    """
    return _wait(root, kind="slow_host", times=times, slice=slice, worker=worker, seconds=seconds)


def duplicate_worker_id(
    slice: int = 0,  # noqa: A002
    worker: int = 1,
    *,
    times: int = 1,
    root: str | os.PathLike[str] | None = None,
) -> Fault:
    """Let a host of the next lease show the worker id of the host before it.

    :param slice: number of the slice in the lease, from 0.
    :param worker: worker id that the host should have had.
    """
    return _wait(root, kind="duplicate_worker_id", times=times, slice=slice, worker=worker)


def waiting(root: str | os.PathLike[str] | None = None) -> list[Fault]:
    """Faults that no lease has taken yet."""
    return Faults(Root(root)).waiting()


def clear(root: str | os.PathLike[str] | None = None) -> None:
    """Forget every fault that waits."""
    place = Root(root)
    if place.path.exists():
        with place.locked(ROOT_LOCK):
            Faults(place).clear()
        place.tidy()


def kill_host(
    lease: SliceLease | str,
    slice: int | str,  # noqa: A002
    worker: int,
    *,
    root: str | os.PathLike[str] | None = None,
) -> list[str]:
    """SIGKILL everything that runs on one host of a lease.

    :param lease: the lease or its id.
    :param slice: the slice's name, or its number in the lease.
    :param worker: worker id of the host.
    :return: the worker ids that were struck, with their addresses.
    :raises InvalidSpec: there is no such lease, slice or host.
    """
    return _strike(lease, slice, worker, root)


def preempt_slice(
    lease: SliceLease | str,
    slice: int | str,  # noqa: A002
    *,
    root: str | os.PathLike[str] | None = None,
) -> list[str]:
    """SIGKILL every host of one slice, as a preemption without notice does.

    :param lease: the lease or its id.
    :param slice: the slice's name, or its number in the lease.
    :return: the worker ids that were struck, with their addresses.
    :raises InvalidSpec: there is no such lease or slice.
    """
    return _strike(lease, slice, None, root)


def _wait(root: str | os.PathLike[str] | None, **data: Any) -> Fault:
    try:
        fault = Fault(**data)
    except ValidationError as error:
        raise InvalidSpec(f"fault {data['kind']}: {first_problem(error)}") from error
    place = Root(root)
    with place.locked(ROOT_LOCK):
        Faults(place).add(fault)
    return fault


def _strike(
    lease: SliceLease | str, wanted: int | str, worker: int | None, root: str | os.PathLike[str] | None
) -> list[str]:
    from raytpu_ops.backends.local.cluster import Cluster  # it imports this module
    from raytpu_ops.backends.local.commands import Commands

    lease_id = lease if isinstance(lease, str) else lease.id
    cluster = Cluster(Root(root if root is not None or isinstance(lease, str) else lease.place["root"]), Commands())
    record = cluster.read(lease_id)
    if record is None:
        known = ", ".join(lease.id for lease in cluster.leases()) or "none"
        raise InvalidSpec(f"lease {lease_id} is not under {cluster.root.path}; there are: {known}")
    slices = [item for item in record.slices if wanted in (item.name, item.index, str(item.index))]
    if not slices:
        known = ", ".join(f"{item.index} ({item.name})" for item in record.slices)
        raise InvalidSpec(f"lease {lease_id} has no slice {wanted}; it has {known}")
    hosts = [host for host in slices[0].hosts if worker in (None, host.worker_id)]
    if not hosts:
        raise InvalidSpec(f"slice {slices[0].name} has no worker {worker}; it has 0 to {len(slices[0].hosts) - 1}")
    left = cluster.kill(record, [host.part for host in hosts])
    if left:
        raise RemoteUnavailable(f"hosts of slice {slices[0].name} can't be killed: {'; '.join(left)}")
    return [f"{slices[0].name}/{host.worker_id} at {host.address}" for host in hosts]
