"""What is written on a RayCluster so that a lease is found again from it alone.

Labels say whose it is and can be searched; an annotation holds the rest as JSON. No secret in it.
Not here: the manifest itself (``manifest.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Self

from pydantic import ValidationError, model_validator

from raytpu_ops.tpu import naming
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.fields import Instant, PlainDict, Url, Word
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.problems import Checked
from raytpu_ops.tpu.spec import SliceSpec

#: Whose field it is when our manifest is applied.
FIELD_MANAGER = "raytpu-ops"
#: The annotation that holds the record.
RECORD = f"{naming.LABEL_PREFIX}lease"
#: The label by which everything of ours is found, whoever owns it.
OWNER = f"{naming.LABEL_PREFIX}owner"


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
    """

    owner: Owner
    spec: SliceSpec
    capacity: PlainDict
    digest: Word
    granted_at: Instant
    expires_at: Instant
    dashboard: Url
    serve: Url

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
    if text is None:
        return None
    try:
        record = Record.model_validate_json(text)
    except ValidationError:
        return None
    return record if owned_by(cluster, record.owner) else None


def instant(text: str | None) -> datetime | None:
    """A time of Kubernetes, ``2026-11-30T08:00:00Z``."""
    return datetime.fromisoformat(text) if text else None
