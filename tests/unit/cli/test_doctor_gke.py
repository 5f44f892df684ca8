"""`raytpu doctor --backend gke` against an API server that the test plays, one flaw at a time."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import raytpu_ops
from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.backends.google.roles import GKE
from raytpu_ops.cli import app as cli
from raytpu_ops.cli import doctor, doctor_gke
from raytpu_ops.cli.doctor import Check
from raytpu_ops.tpu.errors import InvalidSpec
from tests.unit.cli.fake_cluster import (
    ACCOUNT,
    DEPLOYMENTS,
    NODES,
    REVIEWS,
    WHO,
    FakeCluster,
    deployment,
    kubeconfig,
    refusal,
)


def test_a_whole_cluster_is_all_right(look: Callable[[], dict[str, Check]]):
    found = look()
    assert {name: check.found for name, check in found.items() if not check.ok} == {}
    assert "knows you as " + ACCOUNT in found["API server"].found
    assert found["KubeRay operator"].found == "operator:v1.6.2 as ray-system/kuberay-operator"
    assert found["TPU nodes"].found == (
        "pool-a: 2 x tpu-v4-podslice 2x2x2, 4 chips each; pool-b: 1 x tpu-v4-podslice 2x2x2, 4 chips each"
    )
    assert found["node for the head"].found == "1 with room for 2 CPU and 8Gi"
    assert found["Kueue"].found == "v1beta1"
    assert found["queued provisioning"].found == "v1"


# The connection


def test_a_server_that_is_not_there_ends_it_with_the_command_for_a_kubeconfig(tmp_path: Path):
    found = asyncio.run(
        doctor_gke.checks(KubeconfigAccess(str(kubeconfig(tmp_path, "http://127.0.0.1:1"))), Settings())
    )
    assert found[-1].name == "API server"
    assert found[-1].missing
    assert "Cannot connect" in found[-1].found
    assert "gcloud container clusters get-credentials" in found[-1].help


def test_credentials_that_are_refused_end_it(cluster: FakeCluster, look: Callable[[], dict[str, Check]]):
    cluster.answers["get /version"] = refusal(401, "Unauthorized")
    found = look()
    assert list(found) == ["kubernetes-asyncio", "API server"]
    assert "refuses the credentials: 401 Unauthorized" in found["API server"].found


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path):
    found = asyncio.run(doctor_gke.checks(KubeconfigAccess(str(tmp_path / "none")), Settings()))
    assert "none' is no file on this machine" in found[-1].found


def test_without_the_extra_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def missing(name: str) -> str:
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    [check] = asyncio.run(doctor_gke.checks(KubeconfigAccess(), Settings()))
    assert (check.found, check.help) == ("not installed", "pip install 'raytpu-ops[gke]'")


def test_a_server_that_does_not_say_who_we_are_is_no_flaw(cluster: FakeCluster, look: Callable[[], dict[str, Check]]):
    cluster.answers[f"post {WHO}"] = refusal(404, "not found")
    cluster.refused.add("get secrets")
    found = look()
    assert found["API server"].ok
    assert found["rights in raytpu"].help.endswith("--role raytpu --user USER")


def test_a_namespace_that_is_not_there(cluster: FakeCluster, look: Callable[[], dict[str, Check]]):
    cluster.answers["get /api/v1/namespaces/raytpu"] = refusal(404, "not found")
    check = look()["namespace"]
    assert check.missing
    assert check.help == "kubectl create namespace raytpu"


def test_a_namespace_in_deletion_is_no_place(cluster: FakeCluster, look: Callable[[], dict[str, Check]]):
    cluster.answers["get /api/v1/namespaces/raytpu"] = (200, {"status": {"phase": "Terminating"}})
    assert look()["namespace"].missing


# KubeRay


def test_a_cluster_without_kuberay(cluster: FakeCluster, look: Callable[[], dict[str, Check]]):
    cluster.answers["get /apis/ray.io"] = refusal(404, "not found")
    check = look()["KubeRay's API"]
    assert check.missing
    assert "--update-addons RayOperator=ENABLED" in check.help


def test_a_kuberay_without_token_authentication_is_too_old(cluster: FakeCluster, look: Callable[[], dict[str, Check]]):
    schema = {"io.ray.v1.RayCluster": {"properties": {"spec": {"properties": {"rayVersion": {}}}}}}
    cluster.answers["get /openapi/v3/apis/ray.io/v1"] = (200, {"components": {"schemas": schema}})
    assert "no authOptions" in look()["KubeRay's API"].found
    assert look()["KubeRay's API"].missing


def test_a_kuberay_of_old_versions_only(cluster: FakeCluster, look: Callable[[], dict[str, Check]]):
    cluster.answers["get /apis/ray.io"] = (200, {"versions": [{"version": "v1alpha1"}]})
    assert look()["KubeRay's API"].missing


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        (deployment("kuberay/operator:v1.4.2"), "is too old"),
        (deployment("mirror:5000/kuberay/operator:v1.4.2@sha256:abc"), "is too old"),
        (deployment(available=0), "has no pod that is up"),
        (deployment("kuberay/operator:v1.6.2", "--watch-namespace", "team-a,team-b"), "minds only team-a, team-b"),
        (deployment("kuberay/operator:v1.6.2", "--watch-namespace=team-a"), "minds only team-a"),
        (
            deployment("kuberay/operator:v1.6.2", "--feature-gates=A=true,RayClusterStatusConditions=false"),
            "RayClusterStatusConditions off: no lease is ever ready",
        ),
    ],
)
def test_an_operator_that_will_not_do(
    cluster: FakeCluster, look: Callable[[], dict[str, Check]], operator: dict[str, Any], words: str
):
    cluster.answers[f"get {DEPLOYMENTS}"] = (200, {"items": [operator]})
    check = look()["KubeRay operator"]
    assert words in check.found
    assert check.missing
    assert check.help


def test_an_operator_that_minds_our_namespace_among_others(cluster: FakeCluster, look: Callable[[], dict[str, Check]]):
    watching = deployment("kuberay/operator:v1.6.2", "--watch-namespace", "team-a,raytpu")
    cluster.answers[f"get {DEPLOYMENTS}"] = (200, {"items": [watching]})
    assert look()["KubeRay operator"].ok


OF_TEAM_A = deployment("kuberay/operator:v1.5.1", "--watch-namespace=team-a")


@pytest.mark.parametrize("turned", [False, True])
def test_of_several_operators_one_that_is_right_is_enough(
    cluster: FakeCluster, look: Callable[[], dict[str, Check]], turned: bool
):
    both = [OF_TEAM_A, deployment("kuberay/operator:v1.6.2", "--watch-namespace", "raytpu")]
    cluster.answers[f"get {DEPLOYMENTS}"] = (200, {"items": both[::-1] if turned else both})
    found = look()
    assert found["KubeRay operator"].ok
    assert found["KubeRay operator"].found.startswith("operator:v1.6.2")
    assert found["RayMultiHostIndexing"].found == "on by default", "that of the operator which minds us"


def test_of_several_operators_none_is_right_and_each_is_named(
    cluster: FakeCluster, look: Callable[[], dict[str, Check]]
):
    both = [OF_TEAM_A, deployment("kuberay/operator:v1.6.2", available=0)]
    cluster.answers[f"get {DEPLOYMENTS}"] = (200, {"items": both})
    check = look()["KubeRay operator"]
    assert check.missing
    assert check.found == (
        "ray-system/kuberay-operator minds only team-a; ray-system/kuberay-operator has no pod that is up"
    )
    assert "--watch-namespace" in check.help
    assert "kubectl describe deployment" in check.help


@pytest.mark.parametrize(
    ("operator", "ok", "seen"),
    [
        (deployment("kuberay/operator:v1.5.1"), False, True),
        (deployment("kuberay/operator:v1.5.1", "--feature-gates=A=false,RayMultiHostIndexing=true"), True, True),
        (deployment("kuberay/operator:v1.6.2", "--feature-gates", "RayMultiHostIndexing=false"), False, True),
        (deployment("kuberay/operator:nightly"), False, False),
        (deployment("kuberay/operator:v1.6.2", "--config", "/etc/kuberay/config.yaml"), False, False),
    ],
)
def test_the_gate_that_numbers_hosts(
    cluster: FakeCluster, look: Callable[[], dict[str, Check]], operator: dict[str, Any], ok: bool, seen: bool
):
    cluster.answers[f"get {DEPLOYMENTS}"] = (200, {"items": [operator]})
    check = look()["RayMultiHostIndexing"]
    assert (check.ok, check.seen) == (ok, seen)
    assert not check.missing, "things work without it, only worse"


@pytest.mark.parametrize(
    ("where", "row", "right"),
    [
        (f"get {DEPLOYMENTS}", "KubeRay operator", "deployments of all namespaces"),
        (f"get {NODES}", "TPU nodes", "nodes"),
        (f"get {NODES}", "node for the head", "nodes"),
        ("get /api/v1/namespaces/raytpu", "namespace", "namespaces"),
    ],
)
def test_what_may_not_be_read_is_no_failure_and_says_how_it_could_be(
    cluster: FakeCluster, look: Callable[[], dict[str, Check]], where: str, row: str, right: str
):
    cluster.answers[where] = refusal(403, "forbidden")
    check = look()[row]
    assert (check.seen, check.missing) == (False, False)
    assert check.found == f"not readable: no right on {right}"
    assert "doctor.yaml" in check.help


def test_an_operator_that_is_hidden_is_no_failure(cluster: FakeCluster, look: Callable[[], dict[str, Check]]):
    cluster.answers[f"get {DEPLOYMENTS}"] = (200, {"items": [deployment("other/operator:v1")]})
    assert not look()["KubeRay operator"].seen


# Rights


def test_each_missing_right_is_named_with_the_manifest_that_grants_it(
    cluster: FakeCluster, look: Callable[[], dict[str, Check]]
):
    cluster.refused |= {"patch rayclusters", "delete rayclusters", "get services/proxy"}
    check = look()["rights in raytpu"]
    assert check.missing
    assert check.found == "not allowed: patch, delete rayclusters.ray.io; get services/proxy"
    assert check.help == f"kubectl apply -f {doctor_gke.manifest('rbac.yaml')}"
    assert Path(doctor_gke.manifest("rbac.yaml")).is_file()


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, True),
        ({"dashboard_url": "https://ray.example.net/{name}"}, True),  # Serve still goes through the API server
        ({"dashboard_url": "https://ray.example.net/{name}", "serve_url": "https://serve.example.net/{name}"}, False),
        ({"reach": "service"}, False),
    ],
)
def test_what_rbac_yaml_says_may_go_without_the_proxy_is_not_missed(
    cluster: FakeCluster, look: Callable[..., dict[str, Check]], options: dict[str, str], needed: bool
):
    cluster.refused |= {"get services/proxy", "create services/proxy", "update services/proxy"}
    check = look(**options)["rights in raytpu"]
    assert check.missing is needed
    assert ("services/proxy" in check.found) is needed


def test_an_installed_wheel_has_the_manifests_where_the_doctor_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What pyproject.toml puts into the wheel, unpacked as pip does it."""
    repository, site = Path(__file__).parents[3], tmp_path / "site-packages"
    build = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    for source, target in build["targets"]["wheel"]["force-include"].items():
        shutil.copytree(repository / source, site / target)
    monkeypatch.setattr(raytpu_ops, "__file__", str(site / "raytpu_ops" / "__init__.py"))
    for name in ("rbac.yaml", "doctor.yaml"):
        assert Path(doctor_gke.manifest(name)) == site / "raytpu_ops" / "deploy" / "gke" / name
        assert Path(doctor_gke.manifest(name)).is_file()
    assert str(site / "raytpu_ops" / "deploy" / "google" / "role-gke.yaml") in GKE.how_to_grant("p")


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("airflow@project.iam.gserviceaccount.com", "--user airflow@project.iam.gserviceaccount.com"),
        ("system:serviceaccount:airflow:airflow-worker", "--serviceaccount airflow:airflow-worker"),
    ],
)
def test_another_user_is_told_to_be_bound(
    cluster: FakeCluster, look: Callable[[], dict[str, Check]], user: str, subject: str
):
    cluster.user = user
    cluster.refused.add("get secrets")
    cluster.answers[f"get {NODES}"] = refusal(403, "forbidden")
    found = look()
    assert found["rights in raytpu"].help.endswith(f"--namespace raytpu --role raytpu {subject}")
    assert found["TPU nodes"].help.endswith(f"--clusterrole raytpu-doctor {subject}")


def test_another_namespace_is_put_into_the_manifest():
    class Elsewhere:
        namespace, user = "team-a", None

    assert "sed 's/namespace: raytpu$/namespace: team-a/'" in doctor_gke._how_to_grant(Elsewhere())  # type: ignore[arg-type]


def test_rights_on_kueue_are_only_needed_with_kueue(cluster: FakeCluster, look: Callable[[], dict[str, Check]]):
    cluster.refused.add("list workloads")
    check = look()["Kueue"]
    assert (check.ok, check.missing, check.found) == (False, False, "not allowed: list workloads.kueue.x-k8s.io")
    cluster.answers["get /apis/kueue.x-k8s.io"] = refusal(404, "not found")
    assert look()["Kueue"].ok


def test_rights_on_queued_provisioning_are_only_needed_where_it_is_asked_for(
    cluster: FakeCluster, look: Callable[[], dict[str, Check]]
):
    cluster.refused |= {"delete provisioningrequests", "create podtemplates"}
    check = look()["queued provisioning"]
    assert (check.ok, check.missing) == (False, False)
    assert check.found == "not allowed: delete provisioningrequests.autoscaling.x-k8s.io; create podtemplates"
    assert "only capacity `Queued` with the option `node_pools` needs it: " in check.help
    cluster.answers["get /apis/autoscaling.x-k8s.io"] = refusal(404, "not found")
    check = look()["queued provisioning"]
    assert check.ok
    assert check.found.startswith("not there, GKE 1.32.2-gke.1652000 or newer has it; only ")


def test_reviews_that_are_refused_are_no_answer(cluster: FakeCluster, look: Callable[[], dict[str, Check]]):
    cluster.answers[f"post {REVIEWS}"] = refusal(403, "no reviews")
    found = look()
    assert not found["rights in raytpu"].seen
    assert found["TPU webhook"].found.endswith("whether it answers was not tried")


# The command


def test_json_and_exit_code_come_from_the_same_rows(tmp_path: Path):
    file = kubeconfig(tmp_path, "http://127.0.0.1:1")
    result = CliRunner().invoke(
        cli.app, ["doctor", "--backend", "gke", "--kubeconfig", str(file), "--json"], catch_exceptions=False
    )
    assert result.exit_code == 1
    rows = json.loads(result.output)
    assert [row["name"] for row in rows] == ["kubernetes-asyncio", "API server"]
    assert set(rows[0]) == {"name", "ok", "found", "help", "needed", "seen"}


@pytest.mark.usefixtures("airflow_db")
def test_a_connection_in_airflows_database_names_cluster_and_namespace(tmp_path: Path):
    """Another process, as from a shell: nothing of this one's Airflow helps it."""
    from airflow.models import Connection
    from airflow.utils.session import create_session

    extra = {"backend": "gke", "kubeconfig": str(kubeconfig(tmp_path, "http://127.0.0.1:1")), "namespace": "team-a"}
    with create_session() as session:
        session.add(Connection(conn_id="doctored", conn_type="ray_tpu", extra=json.dumps(extra)))
    begun = [sys.executable, "-c", "from raytpu_ops.cli import main; main()"]
    command = [*begun, "doctor", "--backend", "gke", "--json", "--conn-id"]

    run = subprocess.run([*command, "doctored"], capture_output=True, text=True, check=False)
    assert [row["name"] for row in json.loads(run.stdout)] == ["kubernetes-asyncio", "API server"], run.stderr
    assert "127.0.0.1:1" in run.stdout
    run = subprocess.run([*command, "nowhere"], capture_output=True, text=True, check=False)
    assert "connection 'nowhere' does not exist" in run.stderr
    assert run.returncode == 1


def test_a_connection_leaves_no_room_for_a_kubeconfig_and_none_for_its_namespace(monkeypatch: pytest.MonkeyPatch):
    extra = {"namespace": "team-a", "reach": "service"}
    monkeypatch.setenv("AIRFLOW_CONN_DOCTORED_HERE", json.dumps({"conn_type": "ray_tpu", "extra": extra}))
    access, settings = doctor._cluster("doctored_here", None, None, None)
    assert (access.selectors, settings.namespace, settings.reach) == ({}, "team-a", "service")
    assert doctor._cluster("doctored_here", None, None, "team-b")[1].namespace == "team-b"
    with pytest.raises(InvalidSpec, match="--conn-id says which cluster it is"):
        doctor._cluster("doctored_here", "file", None, None)


def test_the_table_tells_missing_from_unread(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "160")
    rows = [Check("a", True, "fine"), doctor.unseen("b", "dark"), Check("c", False, "late", "run", needed=False)]
    assert doctor.report(rows, as_json=False) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[1:4]] == ["ok", "unread", "better"]
    assert "\nnothing is missing of what was looked at\nnot looked at: b\n" in shown
    assert doctor.report([*rows, Check("d", False, "gone", "get it")], as_json=False) == 1
    assert "missing: d" in capsys.readouterr().out
    assert doctor.report(rows[:1], as_json=False) == 0
    assert capsys.readouterr().out.endswith("\nall that is needed is here\n")


def test_options_for_a_cluster_are_refused_for_this_machine():
    with pytest.raises(InvalidSpec, match=r"--context, --namespace: not for --backend local, but for gke"):
        doctor.look("local", root=None, kubeconfig=None, context="x", namespace="y")
    with pytest.raises(InvalidSpec, match="'slurm' has no doctor; there are gke, local, tpu_vm"):
        doctor.look("slurm", root=None, kubeconfig=None, context=None, namespace=None)
