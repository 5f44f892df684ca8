"""A lease travels through XCom and comes back the same; what is none says so."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from raytpu_ops.tpu.capacity import Spot
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.naming import lease_id, slice_name
from raytpu_ops.tpu.spec import SliceSpec

OWNER = Owner(dag_id="train", run_id="manual__2026-01-01", task_id="provision")


def a_lease(**changes: object) -> SliceLease:
    name = lease_id(OWNER)
    fields = {
        "id": name,
        "owner": OWNER,
        "backend": "local",
        "spec": SliceSpec.of("v4", "2x2x2", num_slices=2),
        "capacity": Spot().model_dump(mode="json"),
        "created": {"slice": [slice_name(name, 0), slice_name(name, 1)]},
        "place": {"root": "/tmp/raytpu"},
        "ray": RayEndpoint(address="http://127.1.2.1:8265", serve_address="http://127.1.2.1:8000", token="/tmp/t"),
        "attempts": ["reservation team-a: full"],
        "granted_at": datetime(2026, 1, 1, tzinfo=UTC),
        "expires_at": datetime(2026, 1, 2, tzinfo=UTC),
    }
    return SliceLease(**{**fields, **changes})


def test_a_lease_survives_xcom():
    lease = a_lease()
    wire = json.loads(json.dumps(lease.to_xcom(), allow_nan=False))
    assert SliceLease.from_xcom(wire) == lease
    assert SliceLease.from_xcom(wire).to_xcom() == wire


def test_a_lease_passes_through():
    lease = a_lease()
    assert SliceLease.from_xcom(lease) is lease


def test_none_says_what_to_write():
    with pytest.raises(InvalidSpec, match=r"lease=provision\.output"):
        SliceLease.from_xcom(None)


def test_a_rendered_template_says_what_to_write():
    with pytest.raises(InvalidSpec, match=r"lease=provision\.output"):
        SliceLease.from_xcom(str(a_lease().to_xcom()))


def test_the_token_is_never_shown_by_a_refusal():
    wire = a_lease().to_xcom()
    wire["ray"]["token"] = ["hunter2-hunter2"]
    wire["ray"]["address"] = "http://user:hunter2-hunter2@host:8265"
    with pytest.raises(InvalidSpec) as refused:
        SliceLease.from_xcom(wire)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


def test_a_lease_that_ends_before_it_begins_is_refused():
    with pytest.raises(InvalidSpec, match="before granted_at"):
        a_lease(expires_at=datetime(2025, 1, 1, tzinfo=UTC))


def test_an_instant_without_a_time_zone_is_refused():
    with pytest.raises(InvalidSpec, match="expires_at"):
        a_lease(expires_at="2026-01-02T00:00:00")


class TestOwner:
    def test_the_key_reads_like_a_path(self):
        assert OWNER.key == "train/manual__2026-01-01/provision"
        mapped = OWNER.model_copy(update={"map_index": 2, "deployment": "staging"})
        assert mapped.key == "staging:train/manual__2026-01-01/provision[2]"
        assert mapped.every_run == "staging:train/provision[2]"

    def test_the_digest_stays_what_it_was(self):
        """Leases of an older release are found by it: a change orphans them."""
        assert OWNER.digest == "e74743028fb2488e"

    def test_parts_do_not_run_into_each_other(self):
        one = Owner(dag_id="a", run_id="bc", task_id="d")
        other = Owner(dag_id="ab", run_id="c", task_id="d")
        assert one.digest != other.digest

    def test_an_owner_survives_json(self):
        assert Owner(**json.loads(OWNER.model_dump_json())) == OWNER


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1:8265", "https://10.0.0.1/api/v1/namespaces/a/services/b:8265/proxy", "http://[::1]:80"],
)
def test_addresses_of_every_kind_of_cluster(address):
    assert RayEndpoint(address=address).address == address


def test_a_lease_of_a_mapped_task_has_its_own_name():
    mapped = [lease_id(OWNER.model_copy(update={"map_index": index})) for index in range(-1, 5)]
    assert len(set(mapped)) == len(mapped)


def test_expiry_may_equal_the_grant():
    now = datetime.now(UTC)
    assert a_lease(granted_at=now, expires_at=now).expires_at - now == timedelta(0)
