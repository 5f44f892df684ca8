"""What is written on a RayCluster, and on node pools, so that a lease is found again from it alone.

Labels say whose it is and can be searched; an annotation holds the rest as JSON. No secret in it.
Not here: the manifest itself (``manifest.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from raytpu_ops.backends.gke.manifest import GROUP, PORTS
from raytpu_ops.backends.gke.pool_settings import NodePools
from raytpu_ops.backends.ladder import Climb
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.deadlines import Deadlines
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.fields import Flag, Instant, Line, PlainDict, Url, Word
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.problems import Checked
from raytpu_ops.tpu.spec import SliceSpec

#: Whose field it is when our manifest is applied.
FIELD_MANAGER = "raytpu-ops"
#: The annotation that holds the record.
RECORD = f"{naming.LABEL_PREFIX}lease"
#: The label by which everything of ours is found, whoever owns it.
OWNER = f"{naming.LABEL_PREFIX}owner"
#: The label, and the taint, of the nodes that were made for a lease: its id.
LEASE = f"{naming.LABEL_PREFIX}lease"
#: The finalizer of a RayCluster for which node pools are made. It has to outlive them, and the workload policy that
#: they may need: who looks for leases finds RayClusters, and need not be told to look for pools as well.
HOLD = "raytpu-ops/node-pools"


class Pools(Checked):
    """The node pools that are made for a lease.

    :param cluster: path of the GKE cluster that they are in.
    :param zone: where they are, in the present step of the ladder.
    :param names: one pool for each slice.
    :param options: those that they are made with, whatever the connection of a later task says.
    :param coming: names of pools that stand in for lost ones and have not been there yet.
    :param spent: names of operations that failed and have been dealt with.
    :param granted: all of them were there.
    """

    cluster: Line
    zone: Word
    names: list[Word]
    options: NodePools = Field(default_factory=NodePools)
    coming: list[Word] = Field(default_factory=list)
    spent: list[Word] = Field(default_factory=list)
    granted: Flag = False


class Record(Checked):
    """A lease as its RayCluster carries it.

    :param owner: whose it is.
    :param spec: what was asked for.
    :param capacity: the rung that was granted, as its JSON.
    :param digest: of the manifest's spec, as we wrote it.
    :param granted_at: when, UTC.
    :param expires_at: when the reaper may take it, UTC.
    :param dashboard: where Ray's dashboard is reached.
    :param serve: where Serve is reached.
    :param deadlines: of the plan; a mend goes by them as well.
    :param climb: where on its ladder it stands; None where it has no pools of its own.
    :param pools: its node pools; None where it has none of its own.
    """

    owner: Owner
    spec: SliceSpec
    capacity: PlainDict
    digest: Word
    granted_at: Instant
    expires_at: Instant
    dashboard: Url
    serve: Url
    deadlines: Deadlines = Field(default_factory=Deadlines)
    climb: Climb | None = None
    pools: Pools | None = None

    @model_validator(mode="after")
    def _expires_later(self) -> Self:
        if self.expires_at < self.granted_at:
            raise InvalidSpec("record: expires_at is before granted_at")
        return self


def labels_for(owner: Owner) -> dict[str, str]:
    """Labels of everything that is made for an owner."""
    return naming.owner_labels(owner)


def written(manifest: Mapping[str, Any], record: Record) -> dict[str, Any]:
    """The manifest with the record on it, and with the owner's labels on it and on every pod."""
    labels = labels_for(record.owner)
    found: dict[str, Any] = copy.deepcopy(dict(manifest))
    found["metadata"].setdefault("annotations", {})[RECORD] = record.model_dump_json()
    groups = [found["spec"]["headGroupSpec"], *found["spec"]["workerGroupSpecs"]]
    for metadata in (found["metadata"], *(group["template"]["metadata"] for group in groups)):
        metadata["labels"] |= labels
    return found


def owned_by(made: Mapping[str, Any], owner: Owner) -> bool:
    """Whether the labels of an object say that it was made for that owner.

    :param made: a RayCluster, or one of its pods.
    """
    return (made["metadata"].get("labels") or {}).get(OWNER) == owner.digest


def read_record(cluster: Mapping[str, Any]) -> Record | None:
    """The record of a RayCluster; None where somebody else made it, or wrote over it."""
    metadata = cluster["metadata"]
    text = (metadata.get("annotations") or {}).get(RECORD)
    record = parsed(text)
    return record if record is not None and owned_by(cluster, record.owner) else None


def parsed(text: str | None) -> Record | None:
    """A record's JSON; None where it is none."""
    if text is None:
        return None
    try:
        return Record.model_validate_json(text, extra="ignore")  # a newer version may have written it
    except ValidationError:
        return None


def as_lease(record: Record, namespace: str, place: Mapping[str, str]) -> SliceLease:
    """The lease that a record is of.

    :param namespace: of the RayCluster.
    :param place: what a later task needs to find it.
    """
    name = naming.lease_id(record.owner)
    created = {"RayCluster": [name], "slice": [f"{GROUP}-{number}" for number in range(record.spec.num_slices)]}
    if record.pools is not None:
        created["node pool"] = list(record.pools.names)
    return SliceLease(
        id=name,
        owner=record.owner,
        backend="gke",
        spec=record.spec,
        capacity=record.capacity,
        created=created,
        place=dict(place),
        ray=RayEndpoint(
            address=record.dashboard,
            serve_address=record.serve,
            serve_listens=f"0.0.0.0:{PORTS['serve']}",  # in the head's pod, behind its service
            token=f"Secret {namespace}/{name}",
        ),
        attempts=record.climb.tried if record.climb is not None else [],
        granted_at=record.granted_at,
        expires_at=record.expires_at,
    )


def instant(text: str | None) -> datetime | None:
    """A time of Kubernetes, ``2026-11-30T08:00:00Z``."""
    return datetime.fromisoformat(text) if text else None
