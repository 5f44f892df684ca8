"""The command line: light to start, plain errors, JSON that programs can read."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raytpu_ops.backends.base import Released
from raytpu_ops.cli import app as cli
from raytpu_ops.cli import backends
from raytpu_ops.cli.backends import Where
from raytpu_ops.tpu.deadlines import Deadlines
from raytpu_ops.tpu.errors import DeadlineExceeded, InvalidSpec, Misconfigured, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.readiness import HostReport, Readiness, SliceReport
from raytpu_ops.tpu.shapes import catalogue
from raytpu_ops.tpu.spec import SliceSpec
from tests.unit.cli.fake_cluster import kubeconfig

RUNNER = CliRunner()


def run(*words: str, code: int = 0) -> str:
    result = RUNNER.invoke(cli.app, list(words), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['raytpu', '--help']\n"
        "from raytpu_ops.cli import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "heavy = {'airflow', 'ray', 'jax', 'httpx', 'psutil', 'pydantic', 'google', 'kubernetes'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage" in done.stdout
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_an_error_of_ours_is_one_line_and_a_failed_exit():
    code = "import sys; sys.argv = ['raytpu', 'shapes', 'v99']\nfrom raytpu_ops.cli import main\nmain()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("raytpu: generation")


def test_version():
    from raytpu_ops import __version__

    assert run("--version").strip() == __version__


def test_shapes_as_json_is_the_whole_catalogue():
    rows = json.loads(run("shapes", "--json"))
    assert len(rows) == len(catalogue())
    [row] = [row for row in rows if row["generation"] == "v4" and row["topology"] == "2x2x2"]
    assert (row["hosts"], row["chips"], row["pod_type"]) == (2, 8, "v4-16")


def test_shapes_of_one_generation_in_any_spelling():
    assert {row["generation"] for row in json.loads(run("shapes", "ironwood", "--json"))} == {"7x"}


def test_shapes_that_nothing_could_run_on_are_marked():
    rows = {row["topology"]: row for row in json.loads(run("shapes", "7x", "--json"))}
    assert [rows[topology]["ray_reserves"] for topology in ("4x4x8", "4x4x12")] == [True, False]
    lines = run("shapes", "7x").splitlines()
    marked = {line.split()[1]: line.rstrip().endswith(" no") for line in lines if line.startswith("7x ")}
    assert (marked["4x4x8"], marked["4x4x12"]) == (False, True)
    assert lines[-1] == "no: Ray 2.60 can't reserve it, so no task could use it; a plan refuses it"


def test_the_table_of_all_shapes_says_what_it_leaves_out():
    text = run("shapes")
    assert "v6e" in text
    assert "larger shapes of v4: raytpu shapes v4" in text


class Backend:
    """A backend with one lease."""

    name = "local"

    def __init__(self, *, unreachable: bool = False, left: tuple[str, ...] = ()) -> None:
        now = datetime.now(UTC)
        self.lease = SliceLease(
            id="demo-lease",
            owner=Owner(dag_id="dag", run_id="run", task_id="provision"),
            backend="local",
            spec=SliceSpec.of("v4", "2x2x2"),
            ray=RayEndpoint(address="http://127.0.0.1:1"),
            granted_at=now - timedelta(hours=1, minutes=2),
            expires_at=now - timedelta(seconds=1),
        )
        self.unreachable = unreachable
        self.left = left
        self.unread: list[str] = []

    async def list_leases(self, say: Callable[[str], None]) -> list[SliceLease]:
        for line in self.unread:
            say(line)
        return [self.lease]

    async def observe(self, lease: SliceLease) -> Readiness:
        if self.unreachable:
            raise RemoteUnavailable("Ray at http://127.0.0.1:1 does not answer")
        hosts = [HostReport(node_id="n", address="127.0.0.2", worker_id=0, chips=4, chips_free=4)]
        missing = ["worker 1 is not there"]
        return Readiness(slices=[SliceReport(name="s0", hosts_wanted=2, hosts=hosts, missing=missing)])

    async def release(self, lease: SliceLease) -> Released:
        return Released(removed=["3 processes"], left=list(self.left))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    one = Backend()
    monkeypatch.setattr(Where, "open", lambda where: one)
    return one


def test_leases_tell_owner_age_expiry_and_what_is_missing(backend: Backend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = run("leases", "--verbose")
    for wanted in ("demo-lease", "dag/run/provision", "1 h 02 min", "expired", "worker 1 is not there"):
        assert wanted in text


@pytest.mark.parametrize("columns", ["40", "80", "100", "200"])
def test_a_leases_id_can_be_copied_from_any_terminal(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    backend.lease = backend.lease.model_copy(update={"id": "tpu-train-and-serve-provision-0123456789abcdef"})
    monkeypatch.setenv("COLUMNS", columns)

    text = run("leases")

    assert backend.lease.id in text.split()
    assert "worker 1" not in text


def test_reap_takes_what_has_expired_unless_it_only_looks(backend: Backend) -> None:
    assert "would release: demo-lease of dag/run/provision: it expired at" in run("reap", "--dry-run")
    assert run("reap").startswith("released: demo-lease")

    backend.lease = backend.lease.model_copy(update={"expires_at": datetime.now(UTC) + timedelta(hours=1)})
    assert run("reap").strip() == "nothing has expired on local"


@pytest.mark.parametrize(
    ("command", "code"), [(("leases", "--json"), 1), (("release", "demo-lease"), 0), (("reap",), 1)]
)
def test_what_cannot_be_read_is_told_beside_the_leases(backend: Backend, command: tuple[str, ...], code: int) -> None:
    backend.unread = ["RayCluster ml/x can't be read: delete it"]

    result = RUNNER.invoke(cli.app, list(command), catch_exceptions=False)

    assert result.exit_code == code
    assert backend.unread[0] in (result.stdout if command == ("reap",) else result.stderr)


def test_leases_that_cannot_be_read_are_not_none(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """F09: "no leases" and success, while something of ours bills."""

    async def list_leases(say: Callable[[str], None]) -> list[SliceLease]:
        say("RayCluster ml/x can't be read: delete it")
        return []

    monkeypatch.setattr(backend, "list_leases", list_leases)
    assert run("leases", code=1) == "no leases on local that can be read\n"
    with pytest.raises(InvalidSpec, match="'x' does not exist on local; there are none that can be read: "):
        run("release", "x")


@pytest.mark.parametrize("command", [("leases",), ("release", "x"), ("reap",)])
def test_a_cluster_is_named_alike_everywhere(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from raytpu_ops.backends.gke import GkeBackend

    opened: list[GkeBackend] = []

    async def none(self: GkeBackend, say: Callable[[str], None]) -> list[SliceLease]:
        opened.append(self)
        return []

    monkeypatch.setattr(GkeBackend, "list_leases", none)
    RUNNER.invoke(cli.app, [*command, "--backend", "gke", "--kubeconfig", "/k", "--context", "c", "--namespace", "n"])

    assert [(one.settings.namespace, repr(one.access)) for one in opened] == [("n", "KubeconfigAccess('/k', 'c')")]
    with pytest.raises(InvalidSpec, match="--context: not for --backend local, but for gke"):
        run(*command, "--context", "c")


def test_leases_as_json(backend: Backend):
    [row] = json.loads(run("leases", "--json"))
    assert row["id"] == "demo-lease"
    assert row["whole"] is False


def test_a_lease_whose_ray_does_not_answer_is_listed_all_the_same(backend: Backend):
    backend.unreachable = True
    [row] = json.loads(run("leases", "--json"))
    assert row["whole"] is None
    assert "does not answer" in row["readiness"]


def test_no_leases(short_dir: Path):
    words = ["leases", "--root", str(short_dir / "r")]
    assert run(*words) == f"no leases on local below {short_dir / 'r'}\n"
    as_json = RUNNER.invoke(cli.app, [*words, "--json"], catch_exceptions=False)
    assert json.loads(as_json.stdout) == []
    assert as_json.stderr == f"raytpu: leases on local below {short_dir / 'r'}\n"


@pytest.mark.parametrize("root", ["/etc", ""])
def test_what_is_no_root_is_refused(root: str):
    """It would look like a root without leases."""
    with pytest.raises(Misconfigured, match="local root"):
        run("leases", "--root", root)


def test_release_waits_until_all_is_gone_and_says_what_is_left_where_that_takes_too_long(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
):
    rounds = [Released(removed=["3 processes"], left=["process 7"]), Released(removed=["process 7"])]

    async def release(lease: SliceLease) -> Released:
        return rounds.pop(0)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "release", release)
        assert "removed: 3 processes\nremoved: process 7" in run("release", "demo-lease")
    backend.left = ("process 7",)
    monkeypatch.setattr(Deadlines, "at", lambda self, phase, begin=None: datetime.now(UTC))
    assert "left: lease demo-lease: the releasing deadline" in run("release", "demo-lease", code=1)


def test_release_gives_back_all_that_has_the_name(backend: Backend, monkeypatch: pytest.MonkeyPatch):
    """F09: a task that was cleared with other zones has a lease in each."""
    zones = ["us-central2-b", "europe-west4-b"]
    leases = [backend.lease.model_copy(update={"place": {"zones": zone}}) for zone in zones]

    async def list_leases(say: object, /) -> list[SliceLease]:
        return leases

    async def release(lease: SliceLease) -> Released:
        return Released(removed=[f"what is in {lease.place['zones']}"])

    monkeypatch.setattr(backend, "list_leases", list_leases)
    monkeypatch.setattr(backend, "release", release)
    assert run("release", "demo-lease").splitlines() == [f"removed: what is in {zone}" for zone in zones]


def test_a_lease_that_cannot_be_released_keeps_none_of_its_name_from_it(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F09: the one in the other zone was not even tried."""
    leases = [backend.lease.model_copy(update={"place": {"zones": zone}}) for zone in ("a", "b")]

    async def list_leases(say: object, /) -> list[SliceLease]:
        return leases

    async def release(lease: SliceLease) -> Released:
        if lease.place["zones"] == "a":
            raise Misconfigured("the account lacks tpu.nodes.delete")
        return Released(removed=["what is in b"])

    monkeypatch.setattr(backend, "list_leases", list_leases)
    monkeypatch.setattr(backend, "release", release)
    told = "removed: what is in b\nleft: the account lacks tpu.nodes.delete\n"
    assert run("release", "demo-lease", code=1) == told


def test_release_of_a_lease_that_is_none_names_those_that_are(backend: Backend):
    with pytest.raises(InvalidSpec, match="'nonsense' does not exist on local; there are demo-lease"):
        run("release", "nonsense")


def test_faults_wait_in_the_root_are_listed_and_forgotten(short_dir: Path):
    root = ["--root", str(short_dir / "r")]
    told = run("fault", "no-capacity", "--times", "2", "--rung", "spot", *root)
    assert told == f"the next 2 acquires below {short_dir / 'r'} find no capacity for spot\n"
    run("fault", "slow-host", "--slice", "1", "--worker", "1", "--seconds", "5", *root)
    run("fault", "duplicate-worker-id", *root)
    waiting = [json.loads(line) for line in run("fault", "list", *root).splitlines()]
    assert [fault["kind"] for fault in waiting] == ["no_capacity", "slow_host", "duplicate_worker_id"]
    assert (waiting[0]["times"], waiting[0]["rungs"]) == (2, ["spot"])
    assert (waiting[1]["slice"], waiting[1]["worker"], waiting[1]["seconds"]) == (1, 1, 5)
    run("fault", "clear", *root)
    assert run("fault", "list", *root) == f"no fault waits below {short_dir / 'r'}\n"
    assert not (short_dir / "r").exists()


@pytest.mark.parametrize("words", [["kill-host", "no-such-lease"], ["preempt-slice", "no-such-lease"]])
def test_a_fault_for_a_lease_that_is_none_says_so(short_dir: Path, words: list[str]):
    with pytest.raises(InvalidSpec, match="no-such-lease"):
        run("fault", *words, "--root", str(short_dir / "r"))


def test_demo_refuses_a_bad_shape_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch):
    from raytpu_ops.demo import show

    monkeypatch.setattr(show, "run_demo", lambda *_, **__: pytest.fail("it started"))
    with pytest.raises(InvalidSpec, match="topology"):
        run("demo", "--generation", "v4", "--topology", "4x4")


def test_demo_hands_the_dag_what_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    from raytpu_ops.demo import show

    seen: dict[str, Any] = {}
    monkeypatch.setattr(show, "run_demo", lambda console, params, **options: seen.update(params) or 0)
    run("demo", "--generation", "trillium", "--topology", "2x2", "--slices", "1", "--epochs", "3")
    assert seen == {"backend": "local", "generation": "v6e", "topology": "2x2", "slices": 1, "epochs": 3}


def test_a_cluster_that_is_away_is_said_and_given_up_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # nobody listens there any more
    monkeypatch.setattr(backends, "PATIENCE", timedelta(seconds=1))
    backend = backends.Where("gke", kubeconfig=str(kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))).open()
    with pytest.raises(DeadlineExceeded, match="RayClusters in default: the deadline"):
        asyncio.run(backend.list_leases())
    said = capsys.readouterr().err
    assert "raytpu: RayClusters in default does not answer, trying again: " in said
    assert re.search(r"; given up at \d\d:\d\d:\d\d UTC$", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("leases", "--zone", "us-east5-b"), "--zone: not for --backend local here, but for tpu_vm"),
        (("leases", "--project", "p"), "--project: not for --backend local, but for tpu_vm and gke"),
        (
            ("leases", "--backend", "tpu_vm", "--zone", "us-east5-b", "--kubeconfig", "/k"),
            "--kubeconfig: not for --backend tpu_vm, but for gke",
        ),
        (("leases", "--backend", "gke", "--zone", "us-east5-b"), "--zone: not for --backend gke here"),
        (("reap", "--backend", "gke", "--project", "p"), "--project: for --backend gke only with --conn-id"),
        (("plan", "v4-8", "--backend", "local", "--cluster", "x"), "--cluster: not for --backend local, but for gke"),
        (("plan", "v4-8", "--backend", "local", "--zone", "x"), "--zone: not for --backend local, but for tpu_vm and"),
        (("leases", "--backend", "gke", "--root", "/r"), "--root: not for --backend gke, but for local"),
        (("plan", "v4-8", "--project", "p"), "--project: for --backend gke only with --cluster or --conn-id"),
        (("plan", "v4-8", "--root", "/r"), "--root: not for --backend gke, but for local"),
        (("doctor", "--backend", "tpu_vm", "--root", "/r"), "--root: not for --backend tpu_vm, but for local"),
        (("doctor", "--zone", "us-east5-b"), "--zone: not for --backend local here, but for tpu_vm"),
        (("doctor", "--backend", "gke", "--project", "p"), "--project: not for --backend gke here, but for tpu_vm"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_option_that_would_be_ignored_is_refused(words: tuple[str, ...], told: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        RUNNER.invoke(cli.app, list(words), catch_exceptions=False)
    assert told in str(caught.value)


@pytest.mark.parametrize("command", ["leases", "release x", "reap", "doctor", "plan v4-8"])
@pytest.mark.parametrize("option", ["--backend", "--conn-id", "--context", "--namespace", "--project", "--zone"])
def test_an_option_that_is_empty_says_nothing_and_is_refused(command: str, option: str) -> None:
    """F09: `--conn-id "$UNSET"` looked somewhere else, found nothing and was content."""
    if (command, option) == ("plan v4-8", "--context"):
        option = "--cluster"
    with pytest.raises(InvalidSpec, match=f"^{option}: is empty: give it a value, or leave it out$"):
        RUNNER.invoke(cli.app, [*command.split(), option, ""], catch_exceptions=False)


@pytest.mark.parametrize("command", ["leases", "doctor"])
def test_a_password_in_the_servers_url_is_refused_without_it(tmp_path: Path, command: str) -> None:
    file = kubeconfig(tmp_path, "https://user:SEKRET@127.0.0.1:1")
    result = RUNNER.invoke(cli.app, [command, "--backend", "gke", "--kubeconfig", str(file), "--json"])
    told = f"{result.output} {result.exception}"
    assert "127.0.0.1 has a user name or a password in it" in " ".join(told.split())
    assert "SEKRET" not in told
    assert not isinstance(result.exception, ValueError)
