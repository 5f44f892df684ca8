"""What was granted: the lease that tasks hand on, and the owner that everything is found by.

Both are plain JSON with no secret inside; they travel through XCom. Not here: how capacity is
granted or found again; that is a backend's work.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.fields import Count, Instant, Line, PlainDict, Text, Url, Word
from raytpu_ops.tpu.naming import Kind, check_name
from raytpu_ops.tpu.problems import Checked, first_problem, read
from raytpu_ops.tpu.spec import SliceSpec

__all__ = ["Owner", "RayEndpoint", "SliceLease", "first_problem"]


def _lease_name(value: str) -> str:
    return check_name(value, Kind.LEASE, "id")


class Owner(Checked):
    """The task instance that a lease belongs to: the same over retries, and known without a database.

    :param dag_id: the DAG.
    :param run_id: the DAG run.
    :param task_id: the task that acquires.
    :param map_index: the index of a mapped task, -1 where it is not mapped.
    :param deployment: the Airflow that runs it, where its configuration has a name for itself.
    :raises InvalidSpec: for ids that Airflow could not have made.
    """

    dag_id: Word
    run_id: Word
    task_id: Word
    map_index: Count = Field(default=-1, ge=-1)
    deployment: Word | None = None

    @property
    def key(self) -> str:
        """Readable identity, for logs: ``dag/run/task`` with ``[index]`` where mapped, ``deployment:`` before it."""
        return f"{self._airflow}{self.dag_id}/{self.run_id}/{self.task_id}{self._index}"

    @property
    def every_run(self) -> str:
        """Readable identity of the same task in all runs: ``dag/task``, with what :attr:`key` has around it."""
        return f"{self._airflow}{self.dag_id}/{self.task_id}{self._index}"

    @property
    def _airflow(self) -> str:
        return "" if self.deployment is None else f"{self.deployment}:"

    @property
    def _index(self) -> str:
        return "" if self.map_index < 0 else f"[{self.map_index}]"

    @property
    def digest(self) -> str:
        """Sixteen hex digits that identify the owner in labels and names."""
        # No id has a NUL in it (see Word), so different owners never join to the same text.
        parts = [self.dag_id, self.run_id, self.task_id, str(self.map_index), *filter(None, [self.deployment])]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class RayEndpoint(Checked):
    """How Ray is reached. The token itself is never here: the backend knows where it is kept.

    :param address: base URL of the dashboard, ``http://host:port``.
    :param serve_address: base URL of Serve's HTTP proxy.
    :param serve_listens: ``host:port`` on which that proxy is to listen, where it is not that of the URL.
    :param token: where the backend keeps the token (a file, a Kubernetes Secret's name); never its value.
    """

    address: Url
    serve_address: Url | None = None
    serve_listens: Line | None = None
    token: Line | None = None


class SliceLease(Checked):
    """What was granted, for whom, under which names, until when.

    :param id: the lease's name; everything created for it carries it.
    :param owner: whose it is.
    :param backend: the backend that granted it and that releases it.
    :param spec: what was asked for.
    :param capacity: the rung of the ladder that was granted, as its JSON.
    :param created: names of everything created, by kind: ``{"slice": [...], "host": [...]}``.
    :param place: what the backend needs to find it again (a folder; project, zone and cluster).
    :param ray: how Ray is reached.
    :param conn_id: the Airflow connection by which it was granted; later tasks use the same.
    :param attempts: what was tried before and why it failed, in order.
    :param granted_at: when, UTC.
    :param expires_at: when the reaper may take it, UTC.
    """

    id: Annotated[Word, AfterValidator(_lease_name)]
    owner: Owner
    backend: Word
    spec: SliceSpec
    capacity: PlainDict = Field(default_factory=dict)
    created: dict[Word, list[Line]] = Field(default_factory=dict)
    place: dict[Word, Text] = Field(default_factory=dict)
    ray: RayEndpoint
    conn_id: str | None = None
    attempts: list[Text] = Field(default_factory=list)
    granted_at: Instant
    expires_at: Instant

    @model_validator(mode="after")
    def _expires_later(self) -> Self:
        if self.expires_at < self.granted_at:
            raise InvalidSpec(
                f"lease: expires_at {self.expires_at.isoformat()} is before granted_at {self.granted_at.isoformat()}"
            )
        return self

    def to_xcom(self) -> dict[str, Any]:
        """The lease as plain JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def from_xcom(cls, value: object) -> SliceLease:
        """Read a lease that another task handed on.

        :param value: a :class:`SliceLease` or the dict that :meth:`to_xcom` made.
        :raises InvalidSpec: when it is neither; the message says what arrived.
        """
        if value is None:
            raise InvalidSpec(
                "lease is None: the task that provisions has not pushed one. "
                "Pass `lease=provision.output` and make it an upstream task."
            )
        if isinstance(value, str):
            raise InvalidSpec(
                "lease: must be the dict that a provisioning task pushed, got text: "
                "pass `lease=provision.output` instead of a template that renders it as text"
            )
        return read(cls, value, "lease")
