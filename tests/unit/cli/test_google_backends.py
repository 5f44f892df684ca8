"""``raytpu leases`` and its siblings where slices come from Google: by options, or by an Airflow connection."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytpu_ops.backends.base import make_backend
from raytpu_ops.cli import app as cli
from raytpu_ops.cli.backends import Where
from raytpu_ops.tpu.capacity import OnDemand
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake import GoogleFake
from tests.google_fake.access import FakeAccess
from tests.google_fake.fake import PROJECT, ZONE

#: Where the fake's leases are.
VMS = f"on tpu_vm in project {PROJECT}"


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[GoogleFake]:
    """Google, and an Airflow connection ``vms`` that leads there."""
    with GoogleFake() as fake:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(fake.key_file(tmp_path)))
        extra = {"backend": "tpu_vm", "zones": [ZONE], "google_endpoints": fake.endpoints}
        monkeypatch.setenv("AIRFLOW_CONN_VMS", json.dumps({"conn_type": "ray_tpu", "extra": extra}))
        yield fake


def granted(google: GoogleFake) -> SliceLease:
    async def acquire() -> SliceLease:
        backend = make_backend(
            "tpu_vm", cloud=FakeAccess(google), zones=[ZONE], clock=google.clock.now, sleep=google.clock.sleep
        )
        plan = await backend.plan(SliceSpec.of("v4", "2x2x1"), [OnDemand()], lease_for=timedelta(hours=1))
        return await backend.acquire(plan, Owner(dag_id="d", run_id="r", task_id="t"))

    return asyncio.run(acquire())


def test_a_lease_is_listed_by_the_connection_that_granted_it(google: GoogleFake) -> None:
    lease = granted(google)
    result = CliRunner().invoke(
        cli.app, ["leases", "--backend", "tpu_vm", "--conn-id", "vms", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    [row] = json.loads(result.stdout)
    assert row["id"] == lease.id


@pytest.fixture
def default(google: GoogleFake, monkeypatch: pytest.MonkeyPatch) -> None:
    """That connection is the one of tasks which name none."""
    monkeypatch.delenv("RAYTPU_LOCAL_ROOT", raising=False)
    monkeypatch.setenv("AIRFLOW_CONN_RAY_TPU_DEFAULT", os.environ["AIRFLOW_CONN_VMS"])


@pytest.mark.usefixtures("default")
def test_leases_are_looked_for_where_tasks_that_name_no_connection_get_them(google: GoogleFake) -> None:
    """F09: "no leases on local", with success, while VMs bill."""
    lease = granted(google)
    result = CliRunner().invoke(cli.app, ["leases", "--json"], catch_exceptions=False)
    assert [row["id"] for row in json.loads(result.stdout)] == [lease.id]
    assert result.stderr == (
        f"raytpu: by connection 'ray_tpu_default', as tasks that name none\nraytpu: leases {VMS}\n"
    )

    assert CliRunner().invoke(cli.app, ["reap"], catch_exceptions=False).stdout == f"nothing has expired {VMS}\n"
    with pytest.raises(InvalidSpec, match=f"'another' does not exist {VMS}; there are {lease.id}: --conn-id or"):
        CliRunner().invoke(cli.app, ["release", "another"], catch_exceptions=False)


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("command", [["leases"], ["release", "a-lease"], ["reap"]])
def test_a_default_connection_that_cannot_be_read_is_no_absent_one(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_RAY_TPU_DEFAULT", '{"conn_type": "ray_tpu", "extra": {"backend": "gke",}}')
    with pytest.raises(Misconfigured, match="AIRFLOW_CONN_RAY_TPU_DEFAULT is set, and Airflow cannot read it"):
        CliRunner().invoke(cli.app, command, catch_exceptions=False)


def test_a_backend_alone_still_goes_by_the_connection_of_tasks(
    google: GoogleFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F09: a connection that names no backend was dropped, and other credentials' leases looked at."""
    extra = {"zones": [ZONE], "google_endpoints": google.endpoints}
    monkeypatch.setenv("AIRFLOW_CONN_RAY_TPU_DEFAULT", json.dumps({"conn_type": "ray_tpu", "extra": extra}))
    lease = granted(google)
    result = CliRunner().invoke(cli.app, ["leases", "--backend", "tpu_vm", "--json"], catch_exceptions=False)
    assert [row["id"] for row in json.loads(result.stdout)] == [lease.id]
    assert result.stderr.startswith("raytpu: by connection 'ray_tpu_default', as tasks that name none\n")


@pytest.mark.parametrize("command", ["leases", "reap"])
def test_a_kubeconfig_of_the_shell_and_the_connection_of_tasks_are_not_taken_for_each_other(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Whoever had one in mind would read of the other that there is nothing."""
    extra = {"backend": "gke", "cluster_name": "tpu", "location": ZONE}
    monkeypatch.setenv("AIRFLOW_CONN_RAY_TPU_DEFAULT", json.dumps({"conn_type": "ray_tpu", "extra": extra}))
    monkeypatch.setenv("KUBECONFIG", "/etc/another/cluster")
    with pytest.raises(InvalidSpec, match=r"say --conn-id ray_tpu_default or --kubeconfig$"):
        CliRunner().invoke(cli.app, [command, "--backend", "gke"], catch_exceptions=False)


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("command", ["leases", "reap"])
def test_the_variable_of_the_local_root_chooses_no_backend(
    google: GoogleFake, monkeypatch: pytest.MonkeyPatch, short_dir: Path, command: str
) -> None:
    """F09: a shell that had tried the demo saw no lease any more while VMs bill."""
    monkeypatch.setenv("RAYTPU_LOCAL_ROOT", str(short_dir / "r"))
    lease = granted(google)
    result = CliRunner().invoke(cli.app, [command], catch_exceptions=False)
    assert "raytpu: by connection 'ray_tpu_default', as tasks that name none" in result.stderr
    assert lease.id in result.stdout if command == "leases" else result.stdout == f"nothing has expired {VMS}\n"
    with pytest.raises(InvalidSpec, match=f"'another' does not exist {VMS}; there are {lease.id}: "):
        CliRunner().invoke(cli.app, ["release", "another"], catch_exceptions=False)


@pytest.mark.usefixtures("default")
def test_options_of_another_backend_go_over_the_default_connection(
    monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    monkeypatch.setenv("RAYTPU_LOCAL_ROOT", str(short_dir / "v"))
    found = CliRunner().invoke(cli.app, ["leases", "--backend", "local"], catch_exceptions=False)
    assert found.stdout == f"no leases on local below {short_dir / 'v'}\n"
    assert found.stderr == "raytpu: not by connection 'ray_tpu_default', which is for 'tpu_vm'\n"
    found = CliRunner().invoke(cli.app, ["leases", "--root", str(short_dir / "r")], catch_exceptions=False)
    assert (found.stdout, found.stderr) == (f"no leases on local below {short_dir / 'r'}\n", "")


def test_without_that_connection_it_is_said_where_was_looked(monkeypatch: pytest.MonkeyPatch, short_dir: Path) -> None:
    monkeypatch.setenv("RAYTPU_LOCAL_ROOT", str(short_dir / "r"))
    found = CliRunner().invoke(cli.app, ["leases"], catch_exceptions=False)
    assert found.stdout == f"no leases on local below {short_dir / 'r'}\n"
    assert found.stderr == (
        "raytpu: on this machine (local), since no connection 'ray_tpu_default' was found: --conn-id or --backend "
        "looks elsewhere\n"
    )
    with pytest.raises(InvalidSpec, match=f"not exist on local below {short_dir}/r; there are none: --conn-id or --b"):
        CliRunner().invoke(cli.app, ["release", "a-lease"], catch_exceptions=False)


@pytest.mark.parametrize("options", [[], ["--backend", "tpu_vm"]])
def test_where_airflow_does_not_answer_nobody_takes_its_connection_for_absent(
    tmp_path: Path, options: list[str]
) -> None:
    """F07: Airflow calls every error "not defined", and nothing had expired on this machine."""
    database = tmp_path / "airflow.db"
    database.write_text("this is no database" * 99)
    told = {"AIRFLOW_HOME": str(tmp_path), "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{database}"}
    code = "from raytpu_ops.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "reap", *options],
        env=os.environ | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "raytpu: connection 'ray_tpu_default': Airflow's MetastoreBackend does not say whether there is one "
        "(DatabaseError): try again once it answers, or say where to look with --conn-id, --root, --kubeconfig or "
        "--context"
    )


def test_the_variable_of_the_local_root_may_not_name_a_strange_folder(
    monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    """It would look like a root without leases."""
    (short_dir / "notes").touch()
    short_dir.chmod(0o700)
    monkeypatch.setenv("RAYTPU_LOCAL_ROOT", str(short_dir))
    for command in (["leases"], ["reap"], ["fault", "list"]):
        with pytest.raises(InvalidSpec, match="no root of the local backend"):
            CliRunner().invoke(cli.app, command, catch_exceptions=False)


def test_a_root_goes_over_the_one_of_a_connection(monkeypatch: pytest.MonkeyPatch, short_dir: Path) -> None:
    """It was dropped without a word, and leases were looked for below the connection's."""
    extra = {"backend": "local", "root": str(short_dir / "c")}
    monkeypatch.setenv("AIRFLOW_CONN_HERE", json.dumps({"conn_type": "ray_tpu", "extra": extra}))
    for options, root in (([], "c"), (["--root", str(short_dir / "r")], "r")):
        for command, told in (("leases", "no leases"), ("reap", "nothing has expired")):
            found = CliRunner().invoke(cli.app, [command, "--conn-id", "here", *options], catch_exceptions=False)
            assert found.stdout == f"{told} on local below {short_dir / root}\n"
        words = ["plan", "v4-8", "--conn-id", "here", *options, "--json"]
        planned = CliRunner().invoke(cli.app, words, catch_exceptions=False)
        assert f"a folder below {short_dir / root}" in json.loads(planned.stdout)["creates"]


@pytest.mark.parametrize("command", ["leases", "doctor", "plan"])
def test_the_connection_says_which_backend_it_is_for(google: GoogleFake, command: str) -> None:
    words = [command, "v4", "--topology", "2x2x1"] if command == "plan" else [command]
    result = CliRunner().invoke(cli.app, [*words, "--conn-id", "vms", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == [] if command == "leases" else ZONE in result.stdout


def test_a_connection_that_says_nothing_or_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_VMS", json.dumps({"conn_type": "ray_tpu", "extra": {"backend": "tpu_vm"}}))
    monkeypatch.setenv("AIRFLOW_CONN_BARE", json.dumps({"conn_type": "ray_tpu"}))
    with pytest.raises(InvalidSpec, match="^--backend gke: connection 'vms' is for 'tpu_vm': leave --backend out, or"):
        CliRunner().invoke(cli.app, ["leases", "--backend", "gke", "--conn-id", "vms"], catch_exceptions=False)
    with pytest.raises(InvalidSpec, match="^--backend: is missing, connection 'bare' does not say"):
        CliRunner().invoke(cli.app, ["leases", "--conn-id", "bare"], catch_exceptions=False)


def test_options_alone_say_whose_leases_are_looked_for() -> None:
    """F09: they are listed and given back wherever they are; only a doctor needs to know where to look."""
    backend = Where("tpu_vm", project="p").open()
    assert backend.cloud.selectors == {"project_id": "p"}  # type: ignore[attr-defined]
    with pytest.raises(InvalidSpec, match="--zone: is missing, and no connection says where"):
        CliRunner().invoke(cli.app, ["doctor", "--backend", "tpu_vm", "--project", "p"], catch_exceptions=False)


def test_a_connection_without_zones_is_enough_for_the_reaper(
    google: GoogleFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F09: they are in the `backend_options` of a DAG."""
    lease = granted(google)
    extra = {"backend": "tpu_vm", "google_endpoints": google.endpoints}
    monkeypatch.setenv("AIRFLOW_CONN_VMS", json.dumps({"conn_type": "ray_tpu", "extra": extra}))
    words = ["leases", "--backend", "tpu_vm", "--conn-id", "vms", "--json"]
    result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert [row["id"] for row in json.loads(result.stdout)] == [lease.id]
