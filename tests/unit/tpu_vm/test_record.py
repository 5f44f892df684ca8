"""What is written on VMs is read again, by other versions as well."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from raytpu_ops.backends.ladder import Climb
from raytpu_ops.backends.tpu_vm.record import OWNER, RECORD, Record, read_record
from raytpu_ops.tpu.capacity import Spot
from tests.unit.tpu_vm.conftest import ME, SPEC

BEGUN = datetime(2026, 11, 30, 8, tzinfo=UTC)


def test_a_record_that_a_newer_version_wrote_is_read() -> None:
    """Airflow's machines are upgraded one by one."""
    record = Record(
        owner=ME,
        spec=SPEC,
        capacity={"kind": "spot"},
        climb=Climb.start(BEGUN),
        ladder=[Spot()],
        settings={},
        digest="d",
        lease_for=timedelta(hours=1),
        until=BEGUN + timedelta(hours=4),
    )
    newer = record.model_dump(mode="json")
    for part in (newer, newer["spec"], newer["climb"], newer["ladder"][0]):
        part["surplus"] = 1

    assert read_record({OWNER: ME.digest}, {RECORD: json.dumps(newer)}) == record
