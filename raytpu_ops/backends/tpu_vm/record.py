"""What is written on the VMs of a queued resource so that a lease is found again from it alone.

A queued resource has no labels of its own: those of its nodes are part of it from the moment in which it is asked
for. Labels say whose it is; the metadata entry :data:`RECORD` holds the rest as JSON. No secret is in either.
Not here: the request itself (``request.py``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.ladder import Climb
from raytpu_ops.backends.tpu_vm.settings import Settings
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.capacity import AnyCapacity
from raytpu_ops.tpu.deadlines import Deadlines
from raytpu_ops.tpu.fields import Duration, Instant, PlainDict, Url, Word
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.problems import Checked
from raytpu_ops.tpu.spec import SliceSpec

#: The metadata entry that holds the record.
RECORD = f"{naming.LABEL_PREFIX}lease"
#: The metadata entry that holds Ray's token. Whoever may read the VMs' metadata can read it.
TOKEN = f"{naming.LABEL_PREFIX}token"
#: The label by which everything of ours is found, whoever owns it.
OWNER = f"{naming.LABEL_PREFIX}owner"


class Record(Checked):
    """A lease as its queued resource carries it.

    :param owner: whose it is.
    :param spec: what was asked for.
    :param capacity: the rung that is tried, as its JSON.
    :param climb: where on the ladder that is, and what was tried before.
    :param ladder: all rungs, for slices in the place of those that Google takes back.
    :param settings: the options that it was asked for with.
    :param digest: of everything that was asked for.
    :param lease_for: how long the lease lasts from the moment in which it is granted first.
    :param ends: when it is over, UTC, of slices in the place of those that are lost; None for the first ones.
    :param deadlines: how long its phases may last, also for slices in the place of those that are lost.
    :param until: when waiting for this rung is over, UTC.
    :param dashboard: where Ray's dashboard is reached, where it is not the head's own address.
    :param serve: the same for Serve.
    :param external: the head is reached at its public address.
    """

    owner: Owner
    spec: SliceSpec
    capacity: PlainDict
    climb: Climb
    ladder: list[AnyCapacity]
    settings: PlainDict
    digest: Word
    lease_for: Duration
    ends: Instant | None = None
    deadlines: Deadlines = Field(default_factory=Deadlines)
    until: Instant
    dashboard: Url | None = None
    serve: Url | None = None
    external: bool = False


def read_record(labels: Mapping[str, str], metadata: Mapping[str, str]) -> Record | None:
    """The record of a node or a node spec; None where somebody else made it, or wrote over it."""
    try:
        # A newer version may have written it.
        record = Record.model_validate_json(metadata.get(RECORD, ""), extra="ignore")
    except ValidationError:
        return None
    return record if labels.get(OWNER) == record.owner.digest else None


def asked_with(settings: Settings) -> dict[str, Any]:
    """All options that reach Google, as plain JSON."""
    return settings.model_dump(mode="json", exclude={"price_per_chip_hour"})


def digest(plan: Plan, settings: Settings) -> str:
    """Sixteen hex digits that say whether two requests ask for the same.

    :param plan: its spec and its ladder count.
    :param settings: all that reaches Google.
    """
    asked: list[Any] = [
        plan.spec.model_dump(mode="json"),
        [rung.model_dump(mode="json") for rung in plan.ladder],
        asked_with(settings),
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
