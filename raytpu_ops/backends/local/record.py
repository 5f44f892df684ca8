"""What a lease consists of, written down before any of it exists.

Every name, address and port is known ahead, so whoever comes next, after a kill at any moment, knows
what to look for and what is missing. Plain JSON in the lease's folder; the token is a file of its own.

Not here: whether any of it is alive (``cluster.py``).
"""

from __future__ import annotations

import secrets
from datetime import datetime
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raytpu_ops.backends.local import addresses
from raytpu_ops.backends.local.launch import write_atomically
from raytpu_ops.backends.local.layout import HEAD, RECORD, short_name
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.spec import SliceSpec

#: The file that holds the Ray token.
TOKEN = "token"  # noqa: S105 - its name


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HostRecord(_Record):
    """One host: the folder, address and port of its own, and what faults do to it.

    :param part: name of its folder, a number that is never used twice in a lease.
    :param worker_id: its place in the slice.
    :param agent_port: where Ray's agent on it listens.
    :param delay_s: seconds by which it starts late (fault).
    :param shown_worker_id: the id that it shows instead of its own (fault).
    """

    part: str
    worker_id: int
    address: str
    agent_port: int
    delay_s: float = 0.0
    shown_worker_id: int | None = None

    @property
    def label(self) -> int:
        """The worker id that Ray will be told."""
        return self.worker_id if self.shown_worker_id is None else self.shown_worker_id


class SliceRecord(_Record):
    """One slice.

    :param index: its place in the lease, the same over replacements.
    :param replacement: how often it was replaced.
    """

    name: str
    index: int
    replacement: int = 0
    hosts: list[HostRecord]


class LeaseRecord(_Record):
    """One lease.

    :param block: the loopback block, or the only address that the system has.
    :param head_address: where the head listens.
    :param gcs_port: Ray's own port on it.
    :param client_port: Ray's client server, which can't be turned off.
    :param agent_port: where Ray's agent on the head listens.
    :param next_part: the number that the next host gets.
    """

    version: int = 1
    id: str
    owner: Owner
    spec: SliceSpec
    capacity: dict[str, object]
    attempts: list[str] = Field(default_factory=list)
    granted_at: datetime
    expires_at: datetime
    root: str
    block: str
    head_address: str
    gcs_port: int
    dashboard_port: int
    serve_port: int
    client_port: int
    agent_port: int
    slices: list[SliceRecord] = Field(default_factory=list)
    next_part: int = 1

    @property
    def folder(self) -> Path:
        """The lease's folder."""
        return Path(self.root) / short_name(self.id)

    @property
    def hosts(self) -> list[tuple[SliceRecord, HostRecord]]:
        """Every host with its slice, in the order in which they were made."""
        return [(item, host) for item in self.slices for host in item.hosts]

    @property
    def parts(self) -> list[str]:
        """Names of the folders of all processes, the head's first."""
        return [HEAD, *(host.part for _, host in self.hosts)]

    @property
    def ports(self) -> set[int]:
        """Every port that is written down."""
        own = {self.gcs_port, self.dashboard_port, self.serve_port, self.client_port, self.agent_port}
        return own | {host.agent_port for _, host in self.hosts}

    def lease(self) -> SliceLease:
        """The lease as tasks hand it on."""
        return SliceLease(
            id=self.id,
            owner=self.owner,
            backend="local",
            spec=self.spec,
            capacity=self.capacity,
            created={
                "head": [self.head_address],
                "slice": [item.name for item in self.slices],
                "host": [f"{item.name}/{host.worker_id} at {host.address}" for item, host in self.hosts],
            },
            place={"root": self.root, "folder": str(self.folder)},
            ray=RayEndpoint(
                address=f"http://{self.head_address}:{self.dashboard_port}",
                serve_address=f"http://{self.head_address}:{self.serve_port}",
                token=str(self.folder / TOKEN),
            ),
            attempts=self.attempts,
            granted_at=self.granted_at,
            expires_at=self.expires_at,
        )

    def with_slice(self, index: int, *, replacement: int = 0) -> Self:
        """The record with a fresh slice at ``index``, in place of the one that was there."""
        ports = addresses.free_ports(f"{self.root}/{self.id}/{index}/{replacement}", self.ports)
        hosts = [
            HostRecord(
                part=str(self.next_part + worker_id),
                worker_id=worker_id,
                address=addresses.of_host(self.block, self.next_part + worker_id),
                agent_port=next(ports),
            )
            for worker_id in range(self.spec.shape.hosts)
        ]
        fresh = SliceRecord(
            name=naming.slice_name(self.id, index, replacement=replacement),
            index=index,
            replacement=replacement,
            hosts=hosts,
        )
        others = [item for item in self.slices if item.index != index]
        slices = sorted([*others, fresh], key=lambda item: item.index)
        return self.model_copy(update={"slices": slices, "next_part": self.next_part + len(hosts)})

    def write(self) -> None:
        """Write it down, whole or not at all."""
        write_atomically(self.folder / RECORD, self.model_dump_json(indent=1))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The record of a lease's folder; None where there is none that we understand."""
        try:
            return cls.model_validate_json((folder / RECORD).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValidationError:
            return None


def read_token(folder: Path) -> str | None:
    """The lease's Ray token; None when it is gone."""
    try:
        return (folder / TOKEN).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def make_token(folder: Path) -> None:
    """Write a fresh Ray token where only this user can read it."""
    write_atomically(folder / TOKEN, secrets.token_hex(32))
