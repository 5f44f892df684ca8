"""``raytpu plan``: the same judgement as the provisioning task's, with or without a cloud to ask."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.cloud.container_v1 import ClusterManagerClient
from google.cloud.tpu_v2 import TpuClient
from typer.testing import CliRunner

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.google import access
from raytpu_ops.cli import app as cli
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured
from tests.google_fake import GoogleFake
from tests.google_fake.fake import CLUSTER, PROJECT, ZONE

RUNNER = CliRunner()
NO_JAX = (
    "rayproject/ray:2.60.0-py311 has no JAX: training needs an image with it, or runtime_env={'pip': ['jax[tpu]', …]} "
    "in the task"
)
#: Has a plan in it, and what it prints.
DOCUMENTED = Path(__file__).parents[3] / "docs" / "google.md"


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine has no credentials, whoever runs the test."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[GoogleFake]:
    """Google, and Airflow connections ``pools`` and ``vms`` that lead there."""
    with GoogleFake() as fake:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(fake.key_file(tmp_path)))
        options = {
            "pools": {"backend": "gke", "kubeconfig": "/k", "node_pools": {"cluster": CLUSTER, "zones": [ZONE]}},
            "vms": {"backend": "tpu_vm", "zones": [ZONE], "price_per_chip_hour": {"v4": 3}},
        }
        for name, extra in options.items():
            told = {**extra, "google_endpoints": fake.endpoints}
            monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps({"conn_type": "ray_tpu", "extra": told}))
        yield fake


def plan(*words: str) -> dict[str, Any]:
    result = RUNNER.invoke(cli.app, ["plan", *words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def notes(*words: str) -> str:
    return "\n".join(plan(*words)["notes"])


class TestWithoutACloud:
    def test_a_plan_says_what_would_be_made_and_what_was_not_asked(self) -> None:
        words = ("v6e", "--topology", "4x4", "--num-slices", "2", "--price-per-chip-hour", "2.7")
        found = plan(*words, "--zone", "us-east5-b")
        assert found["creates"] == [
            "1 RayCluster in namespace default with rayproject/ray:2.60.0-py311",
            "1 head pod",
            "8 host pods: 2 x v6e 4x4 (ct6e-standard-4t), 4 chips on each host",
            "2 GKE node pools in us-east5-b, each of 4 ct6e-standard-4t nodes",
        ]
        assert found["notes"] == [
            "2 node pools may come and go one after the other, each in two to four minutes: provisioning has 0:34:00, "
            "releasing 0:19:00, where deadlines says nothing else",
            NO_JAX,
            "32 chips for at most 24 h are 768 chip-hours, 2,073.60 at 2.7 each; less where the lease is released "
            "earlier",
            "Google was not asked: no cluster is named: pass --cluster",
        ]

    def test_node_pools_are_made_where_somebody_asks_for_them(self) -> None:
        found = plan("v6e", "--topology", "2x4", "--machine-type", "ct6e-standard-8t", "--price-per-chip-hour", "2")
        assert found["creates"][1:] == [
            "1 head pod",
            "1 host pod: 1 x v6e 2x4 (ct6e-standard-8t), 8 chips on each host",
        ]
        assert len(found["names"]) == 1
        assert found["notes"] == [
            NO_JAX,
            "8 chips for at most 24 h are 192 chip-hours, 384.00 at 2 each; less where the lease is released earlier",
            "nobody was asked about permissions, reservations, quota and zones: --cluster and --zone plan node pools "
            "and ask Google, --conn-id plans by an Airflow connection",
        ]
        [_, unasked] = plan("v6e", "--topology", "4x4")["notes"]
        assert unasked.startswith("nobody was asked about permissions, reservations, quota, zones and cost: ")
        assert unasked.endswith("; --price-per-chip-hour counts")
        found = plan("v5e", "--topology", "1x1", "--zone", "us-west4-a")
        assert found["creates"][2:] == [
            "1 host pod: 1 x v5e 1x1 (ct5lp-hightpu-1t), 1 chip on each host",
            "1 GKE node pool in us-west4-a, of 1 ct5lp-hightpu-1t node",
        ]

    def test_an_image_without_jax_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else the chips come, and the first training fails: No module named 'jax'."""
        words = ("v6e", "--topology", "4x4", "--conn-id", "tpus")
        for image, has in ((None, False), ("rayproject/ray:2.60.0-py311-tpu", True), ("me/rayproject-ray:1", True)):
            extra = {"backend": "gke", "kubeconfig": "/k", **({"image": image} if image else {})}
            monkeypatch.setenv("AIRFLOW_CONN_TPUS", json.dumps({"conn_type": "ray_tpu", "extra": extra}))
            assert (NO_JAX not in notes(*words)) == has

    @pytest.mark.parametrize("more", [(), ("--zone", "us-east5-b")])
    def test_flex_start_that_ends_before_the_lease_is_said(self, more: tuple[str, ...]) -> None:
        words = ["v6e", "--topology", "4x4", "--capacity", "flex_start=2h", *more]
        assert "flex_start hosts are taken back after 2:00:00, the lease is for 1 day, 0:00:00" in notes(*words)
        assert "taken back" not in notes(*words, "--lease-hours", "2")
        assert "flex_start for 2:00:00" in RUNNER.invoke(cli.app, ["plan", *words], env={"COLUMNS": "200"}).output

    def test_no_credentials_are_a_note(self) -> None:
        found = notes("v6e", "--topology", "4x4", "--cluster", CLUSTER)
        assert "Google was not asked: Google's default credentials: no credentials that work here" in found
        found = notes("v6e", "--topology", "4x4", "--backend", "tpu_vm", "--zone", "us-east5-b")
        assert "Google was not asked: Google's default credentials: no credentials that work here" in found

    def test_names_are_shown_with_the_room_that_there_is(self) -> None:
        words = ("v6e", "--topology", "4x4", "--num-slices", "3", "--dag-id", "a_very_long_dag_name_of_somebody")
        lease, pool = plan(*words, "--zone", "us-east5-b")["names"]
        assert lease.startswith("lease a-very-long-")
        assert lease.endswith("(40 of 40 characters)")
        assert "-s2 (" in pool

    def test_a_ladder_is_typed_rung_by_rung(self) -> None:
        words = ["reservation=team-a", "flex-start=24h", "spot"]
        options = [option for word in words for option in ("--capacity", word)]
        rungs = plan("v6e", "--topology", "4x4", "--zone", "us-east5-b", *options)["ladder"]
        assert [one["kind"] for one in rungs] == ["reservation", "flex_start", "spot"]
        assert rungs[0]["name"] == "team-a"
        [queued] = plan(
            "v4", "--topology", "2x2x1", "--backend", "tpu_vm", "--zone", "us-central2-b", "--capacity", "queued=90m"
        )["ladder"]
        assert queued["valid_for"] in (5400.0, "PT1H30M", "PT5400S")

    def test_the_local_backend_asks_this_machine(self) -> None:
        found = plan("v4", "--topology", "2x2x1", "--backend", "local")
        assert "4 chips exist in name only: JAX runs on this machine's CPUs" in found["notes"]

    def test_a_table_for_people(self) -> None:
        result = RUNNER.invoke(
            cli.app, ["plan", "v5e", "--topology", "1x1", "--zone", "us-west4-a"], env={"COLUMNS": "200"}
        )
        rows = dict(line.split(None, 1) for line in result.output.splitlines()[:5])
        assert rows["slices"].strip() == "1 x v5e 1x1 (ct5lp-hightpu-1t)"
        assert list(rows) == ["slices", "hosts", "chips", "capacity", "backend"]
        assert "Google was not asked" in result.output

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("v6e", "--topology", "9x9"), "topology: v6e has no '9x9'"),
            (("v6e", "--topology", "2x4"), "machine_type: v6e 2x4 leaves a choice"),
            (("v6e", "--topology", "4x4", "--capacity", "cheap"), "'cheap' is no kind of capacity"),
            (("v6e", "--topology", "4x4", "--capacity", "reservation"), "needs a value, as in reservation=NAME"),
            (("v6e", "--topology", "4x4", "--capacity", "flex_start=soon"), "'soon' is no duration; write 90m"),
            (("v6e", "--topology", "4x4", "--capacity", "flex_start=8d"), "must be at most 7 days"),
            (
                ("v6e", "--topology", "4x4", "--capacity", "queued=2h"),
                "queues at Google for node pools that it makes",
            ),
            (("v6e", "--topology", "4x4", "--backend", "tpu_vm"), "--zone: backend 'tpu_vm' needs to know where"),
            (("7x", "--topology", "2x2x2", "--backend", "tpu_vm", "--zone", "us-east5-b"), "there is no 7x"),
            (("v6e", "--topology", "4x4", "--cluster", "tpus"), "node_pools.cluster: must be 'projects/PROJECT/"),
            (("v6e", "--topology", "4x4", "--lease-hours", "inf"), "--lease-hours: must be a finite number"),
            (("v6e", "--topology", "4x4", "--lease-hours", "1e10"), "--lease-hours: must be at most 365 days"),
            (
                ("v6e", "--topology", "4x4", "--price-per-chip-hour", "-2"),
                "price_per_chip_hour: must be a number above",
            ),
            (("v6e", "--topology", "4x4", "--backend", "aws"), "backend 'aws' does not exist"),
            (("7x", "--topology", "4x4x12"), "the nearest that it has is '4x4x8'"),
            (("v5p", "--topology", "4x4x28", "--zone", "us-east5-a"), "the nearest that it has is '4x4x24'"),
            (("v4", "--topology", "4x4x20", "--backend", "local"), "the nearest that it has is '4x4x16'"),
            (
                ("v4", "--topology", "4x4x20", "--backend", "tpu_vm", "--zone", "us-central2-b"),
                "the nearest that it has is '4x4x16'",
            ),
        ],
    )
    def test_what_can_not_work_is_refused_in_one_line(self, words: tuple[str, ...], message: str) -> None:
        with pytest.raises(InvalidSpec) as caught:
            RUNNER.invoke(cli.app, ["plan", *words], catch_exceptions=False)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_refusal_is_a_failed_exit(self) -> None:
        code = "import sys; sys.argv = ['raytpu', 'plan', 'v6e', '--topology', '9x9']\n"
        code += "from raytpu_ops.cli import main\nmain()\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert len(done.stderr.splitlines()) == 1


class TestWithAConnection:
    def test_google_is_asked_and_nothing_is_made(self, google: GoogleFake) -> None:
        google.compute.add_reservation("team-a", "ct6e-standard-4t", 8, zone=ZONE, project=PROJECT, in_use=6)
        found = notes("v6e", "--topology", "4x4", "--conn-id", "pools", "--capacity", "reservation=team-a")
        assert f"reservation team-a in {ZONE} has 2 of 8 VMs free now, 4 are needed" in found
        found = notes("v4", "--topology", "2x2x2", "--conn-id", "vms", "--backend", "tpu_vm")
        assert "8 chips for at most 24 h are 192 chip-hours, 576.00 at 3 each" in found
        assert {call.method for call in google.calls} == {
            "ListNodePools",
            "machineTypes.get",
            "reservations.get",
            "testIamPermissions",
            "GetAcceleratorType",
            "GetRuntimeVersion",
        }

    def test_what_google_says_already_is_refused(self, google: GoogleFake) -> None:
        google.deny("container.clusters.update")
        with pytest.raises(Misconfigured, match=r"lacks container\.clusters\.update"):
            RUNNER.invoke(cli.app, ["plan", "v6e", "--topology", "4x4", "--conn-id", "pools"], catch_exceptions=False)

    def test_other_zones_go_over_the_connections(self, google: GoogleFake) -> None:
        google.tpu.zones = {ZONE: frozenset({"v4-16"})}
        with pytest.raises(Misconfigured, match="zones: Cloud TPU is not in us-nowhere1-a"):
            plan("v4", "--topology", "2x2x2", "--conn-id", "vms", "--backend", "tpu_vm", "--zone", "us-nowhere1-a")


class TestWithTheMachinesCredentials:
    """No connection: what the options say, and the account that this machine has."""

    @pytest.fixture(autouse=True)
    def _public(self, google: GoogleFake, monkeypatch: pytest.MonkeyPatch) -> None:
        """The public addresses of Google's APIs lead to the fake."""
        for api, endpoint in google.endpoints.items():
            monkeypatch.setitem(access.PUBLIC, api, endpoint)
        monkeypatch.setattr(TpuClient, "_DEFAULT_ENDPOINT_TEMPLATE", google.endpoints["tpu"])
        monkeypatch.setattr(ClusterManagerClient, "_DEFAULT_ENDPOINT_TEMPLATE", google.endpoints["container"])

    def test_the_documented_one_prints_what_is_documented(self, google: GoogleFake) -> None:
        [block] = re.findall(r"```console\n\$ raytpu (plan .*?)```", DOCUMENTED.read_text(), re.DOTALL)
        command, _, told = block.replace("\\\n", "").partition("\n")
        google.add_cluster("projects/my-project/locations/us-east5/clusters/tpu", zones=["us-east5-b"])
        google.compute.add_reservation(
            "team-a", "ct6e-standard-4t", 16, zone="us-east5-b", project="my-project", in_use=10
        )
        result = RUNNER.invoke(cli.app, shlex.split(command), catch_exceptions=False, env={"COLUMNS": "200"})
        assert [line.rstrip() for line in result.output.splitlines()] == told.splitlines()
        assert {call.method for call in google.calls} == {
            "ListNodePools",
            "machineTypes.get",
            "reservations.get",
            "testIamPermissions",
        }

    def test_tpu_vms(self, google: GoogleFake) -> None:
        words = ("v4", "--topology", "2x2x2", "--backend", "tpu_vm", "--zone", ZONE, "--capacity", "reservation=team-a")
        google.compute.add_reservation("team-a", "ct4p-hightpu-4t", 8, zone=ZONE, project=PROJECT)
        assert f"reservation team-a in {ZONE} has 8 of 8 VMs free, 2 are needed" in notes(*words)
        assert {call.method for call in google.calls} == {
            "reservations.get",
            "testIamPermissions",
            "GetAcceleratorType",
            "GetRuntimeVersion",
        }
        google.deny("tpu.nodes.create")
        with pytest.raises(Misconfigured, match=r"project tpu-project: the account lacks tpu\.nodes\.create"):
            plan(*words)


class TestOptionsOverAConnection:
    """Without credentials, too: what could not be asked is a note."""

    @pytest.fixture(autouse=True)
    def _connections(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pools = {"cluster": CLUSTER, "zones": [ZONE], "disk_size_gb": 200}
        options = {
            "pools": {"backend": "gke", "kubeconfig": "/k", "namespace": "ml", "node_pools": pools},
            "nodes": {"backend": "gke", "kubeconfig": "/k"},
            "vms": {"backend": "tpu_vm", "zones": [ZONE], "price_per_chip_hour": {"v4": 3}},
        }
        for name, extra in options.items():
            monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps({"conn_type": "ray_tpu", "extra": extra}))

    def test_a_zone_leaves_the_connections_cluster_and_pools(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Any] = []
        real = GkeBackend.plan

        async def keep(self: GkeBackend, *args: Any, **options: Any) -> Any:
            seen.append(self.settings.node_pools)
            return await real(self, *args, **options)

        monkeypatch.setattr(GkeBackend, "plan", keep)
        found = plan("v4", "--topology", "2x2x2", "--conn-id", "pools", "--zone", "us-central2-c")
        [pools] = seen
        assert (pools.cluster, pools.zones, pools.disk_size_gb) == (CLUSTER, ["us-central2-c"], 200)
        assert "1 GKE node pool in us-central2-c, of 2 ct4p-hightpu-4t nodes" in found["creates"]
        assert found["creates"][0].startswith("1 RayCluster in namespace ml ")

    def test_namespace_and_price_go_over_it(self) -> None:
        words = ["v4", "--topology", "2x2x2", "--namespace", "eval", "--price-per-chip-hour", "2"]
        for name in ("pools", "nodes"):
            found = plan(*words, "--conn-id", name)
            assert found["creates"][0].startswith("1 RayCluster in namespace eval ")
            assert any("384.00 at 2 each" in note for note in found["notes"])
        words = ["v4", "--topology", "2x2x2", "--backend", "tpu_vm", "--conn-id", "vms"]
        assert "576.00 at 3 each" in notes(*words)
        assert "384.00 at 2 each" in notes(*words, "--price-per-chip-hour", "2")

    def test_no_credentials_are_a_note(self) -> None:
        words = ["v4", "--topology", "2x2x2", "--conn-id"]
        for more in (("pools",), ("vms", "--backend", "tpu_vm")):
            assert "Google was not asked: " in notes(*words, *more)
        assert "Google was not asked" not in notes(*words, "nodes")
