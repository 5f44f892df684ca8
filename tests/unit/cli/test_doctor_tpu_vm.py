"""``raytpu doctor --backend tpu_vm`` against the fake Google."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytpu_ops.backends.google.roles import TPU_VM
from raytpu_ops.cli import app as cli
from raytpu_ops.cli.doctor import Check
from raytpu_ops.cli.doctor_tpu_vm import checks
from tests.google_fake import GoogleFake
from tests.google_fake.access import FakeAccess
from tests.google_fake.fake import PROJECT, ZONE
from tests.google_fake.roles import Watch

ROOT = Path(__file__).parents[3]
OTHER = "europe-west4-b"


@pytest.fixture
def google() -> Iterator[GoogleFake]:
    """Everybody has the rights of our role and no others."""
    with GoogleFake() as fake:
        Watch(fake, TPU_VM)
        yield fake


async def looked(google: GoogleFake, *zones: str) -> dict[str, Check]:
    return {one.name: one for one in await checks(FakeAccess(google), zones or (ZONE,))}


async def test_all_is_well_with_the_role_alone(google: GoogleFake) -> None:
    found = await looked(google, ZONE, OTHER)
    assert [name for name, one in found.items() if not one.ok] == []
    assert found["credentials"].found == f"there are some, for project {PROJECT}"
    assert found[ZONE].found == found[OTHER].found == "v4, v5e, v5p, v6e"
    assert google.tpu.made == []


async def test_a_permission_that_is_missing_is_named_with_the_role(google: GoogleFake) -> None:
    google.deny("tpu.nodes.delete", "compute.reservations.get")
    found = await looked(google)
    assert found["permissions"].missing
    assert found["permissions"].found == "without tpu.nodes.delete"
    assert found["permissions"].help == TPU_VM.how_to_grant(PROJECT)
    assert f"create raytpu_tpu_vm --project {PROJECT} --file {ROOT}/deploy/google/role-tpu-vm.yaml" in (
        found["permissions"].help
    )
    assert not found["permissions of plans"].ok
    assert not found["permissions of plans"].missing


async def test_a_zone_says_what_it_has(google: GoogleFake) -> None:
    google.tpu.zones = {ZONE: frozenset({"v4-8", "v4-16"}), OTHER: frozenset()}
    found = await looked(google, ZONE, OTHER, "us-east1-z")
    assert found[ZONE].found == "v4"
    assert found[OTHER].missing
    assert "no TPUs" in found[OTHER].found
    assert found["us-east1-z"].missing
    assert "gcloud compute tpus locations list" in found["us-east1-z"].help


async def test_an_api_that_is_off_is_named(google: GoogleFake) -> None:
    google.disable("tpu")
    found = await looked(google)
    assert found[ZONE].missing
    assert "enable" in f"{found[ZONE].found} {found[ZONE].help}"


async def test_what_cannot_be_looked_at_is_neither_good_nor_bad(google: GoogleFake) -> None:
    google.deny("tpu.acceleratortypes.get")
    google.disable("cloudresourcemanager")
    found = await looked(google)
    for name in (ZONE, "permissions"):
        assert not found[name].seen
        assert not found[name].missing


async def test_a_google_that_is_away_is_said(google: GoogleFake) -> None:
    google.faults.unavailable("tpu.*", None)
    assert not (await looked(google))[ZONE].seen


def test_the_command_says_it(google: GoogleFake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(google.key_file(tmp_path)))
    extra = {"backend": "tpu_vm", "zones": [ZONE], "google_endpoints": google.endpoints}
    monkeypatch.setenv("AIRFLOW_CONN_VMS", json.dumps({"conn_type": "ray_tpu", "extra": extra}))
    result = CliRunner().invoke(
        cli.app, ["doctor", "--backend", "tpu_vm", "--conn-id", "vms", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    assert ZONE in [row["name"] for row in json.loads(result.stdout)]


def test_without_credentials_it_says_how_to_get_some(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    result = CliRunner().invoke(
        cli.app, ["doctor", "--backend", "tpu_vm", "--zone", ZONE, "--project", "p", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 1
    (row,) = [row for row in json.loads(result.stdout) if row["name"] == "credentials"]
    assert not row["ok"]
    assert "gcloud auth application-default login" in row["help"]
