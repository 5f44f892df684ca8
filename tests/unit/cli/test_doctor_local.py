"""`raytpu doctor` for this machine: what is missing is named, with the command that gets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytpu_ops.cli import app as cli
from raytpu_ops.cli import doctor, doctor_local

RUNNER = CliRunner()


def run(*words: str, code: int = 0) -> str:
    result = RUNNER.invoke(cli.app, list(words), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_doctor_is_content_with_this_machine(short_dir: Path):
    found = json.loads(run("doctor", "--json", "--root", str(short_dir / "r")))
    assert {check["name"] for check in found if check["needed"] and not check["ok"]} == set()
    assert {"python", "apache-airflow", "ray", "jax", "local root", "example DAGs"} <= {c["name"] for c in found}


def test_doctor_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: {"ray": "2.9.3", "jax": "0.10.2"}[name])
    check = doctor_local._package("ray")
    assert not check.ok
    assert check.help == "2.55 or newer is needed: pip install 'raytpu-ops[local]'"
    assert doctor_local._package("jax").ok


def test_doctor_names_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    assert doctor_local._package("ray") == doctor.Check(
        "ray", False, "not installed", "pip install 'raytpu-ops[local]'"
    )


def test_doctor_fails_for_a_root_that_ray_cannot_use(tmp_path: Path):
    text = run("doctor", "--json", "--root", str(tmp_path / ("x" * 100)), code=1)
    [check] = [check for check in json.loads(text) if check["name"] == "local root"]
    assert "shorter" in check["help"]


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.60.0", (2, 60, 0)), ("2.60.0rc1", (2, 60, 1)), ("0.10", (0, 10)), ("3.3.2.post1", (3, 3, 2))],
)
def test_versions_are_compared_as_numbers(version: str, numbers: tuple[int, ...]):
    assert doctor.numbers(version)[:2] == numbers[:2]
