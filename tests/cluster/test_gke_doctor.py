"""`raytpu doctor --backend gke` and the manifests of `deploy/gke` on a real API server.

What is asked about rights runs on a cluster that `RAYTPU_TEST_KUBECONFIG` names too.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
import yaml
from typer.testing import CliRunner

from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.rights import PROXY, RIGHTS, needed
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.cli import app as cli
from raytpu_ops.cli import doctor_gke
from raytpu_ops.cli.doctor import Check

if TYPE_CHECKING:
    from tests.testbed.client import Testbed
    from tests.testbed.faults import KubernetesFaults

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(600)]

DEPLOY = Path(__file__).parents[2] / "deploy" / "gke"
RULES = next(one for one in yaml.safe_load_all((DEPLOY / "rbac.yaml").read_text()) if one["kind"] == "Role")["rules"]


@pytest.fixture
def place(any_cluster: KubernetesFaults) -> Iterator[str]:
    """A namespace for one test; there are many, and nobody waits for each of them to go."""
    with any_cluster.namespace("doctor", wait=False) as name:
        yield name


def look(kubeconfig: Path, namespace: str, **options: str) -> dict[str, Check]:
    settings = Settings.of({"namespace": namespace, **options})
    found = asyncio.run(doctor_gke.checks(KubeconfigAccess(str(kubeconfig)), settings))
    return {check.name.removesuffix(f" in {namespace}"): check for check in found}


def missing(found: dict[str, Check]) -> list[str]:
    return [name for name, check in found.items() if check.missing]


def test_an_administrator_sees_a_cluster_that_is_right(control_plane: Testbed, place: str) -> None:
    found = look(control_plane.kubeconfig, place)
    assert missing(found) == []
    assert found["API server"].found.startswith("v1.")
    assert found["KubeRay's API"].found == "ray.io/v1, v1alpha1, with token authentication"
    assert found["TPU webhook"].found == "gives each host its TPU_WORKER_ID"
    assert found["TPU nodes"].found.startswith("none now")
    # The testbed runs the operator outside of the cluster, as Google's add-on may.
    assert [name for name, check in found.items() if not check.seen] == ["KubeRay operator", "RayMultiHostIndexing"]


def test_the_role_alone_is_enough_and_what_it_cannot_read_is_said(control_plane: Testbed, place: str) -> None:
    kubeconfig = control_plane.kubeconfig_for(DEPLOY / "rbac.yaml", place)
    result = CliRunner().invoke(
        cli.app,
        ["doctor", "--backend", "gke", "--kubeconfig", str(kubeconfig), "--namespace", place, "--json"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    found = {row["name"]: row for row in json.loads(result.output)}
    assert found[f"rights in {place}"]["found"] == f"all {len(needed(PROXY))}"
    assert found["TPU webhook"]["found"] == "refuses a RayCluster with too many hosts for its topology"
    assert f"system:serviceaccount:{place}:raytpu-airflow" in found["API server"]["found"]
    unread = {name for name, row in found.items() if not row["seen"]}
    assert unread == {"namespace", "KubeRay operator", "RayMultiHostIndexing", "TPU nodes", "node for the head"}


def test_with_the_doctors_own_role_the_cluster_is_read(control_plane: Testbed, place: str) -> None:
    kubeconfig = control_plane.kubeconfig_for(DEPLOY / "rbac.yaml", place)
    assert not look(kubeconfig, place)["TPU nodes"].seen
    control_plane.kubeconfig_for(DEPLOY / "doctor.yaml", place)
    found = look(kubeconfig, place)
    assert (found["namespace"].ok, found["TPU nodes"].ok) == (True, True)
    assert found["KubeRay operator"].found.startswith("no Deployment of it")


@pytest.mark.parametrize("left_out", RULES, ids=lambda rule: rule["resources"][0])
def test_each_rule_of_the_role_is_missed_by_name(
    any_cluster: KubernetesFaults, place: str, left_out: dict[str, list[str]]
) -> None:
    kubeconfig = any_cluster.kubeconfig_for([rule for rule in RULES if rule is not left_out], place)
    check = look(kubeconfig, place)["rights"]
    wanted = [right for right in needed(PROXY) if right.path in left_out["resources"]]
    if left_out["resources"] == ["services/proxy"]:
        assert look(kubeconfig, place, reach="service")["rights"].ok, "as its comment says"
    if not wanted:
        assert set(left_out["resources"]) <= {right.path for right in RIGHTS}
        assert check.ok
        return
    assert check.missing
    assert check.found == f"not allowed: {', '.join(right.verb for right in wanted)} {wanted[0].full_name}"
    assert f"--serviceaccount {place}:few-rights" in check.help


@pytest.mark.parametrize("as_administrator", [True, False])
def test_a_webhook_that_is_down_is_named_with_few_rights_too(
    control_plane: Testbed, place: str, as_administrator: bool
) -> None:
    few = control_plane.kubeconfig_for(DEPLOY / "rbac.yaml", place)
    with control_plane.webhook_down():
        check = look(control_plane.kubeconfig if as_administrator else few, place)["TPU webhook"]
    assert check.missing
    assert "failed calling webhook" in check.found


def test_an_operator_without_a_pod_is_named(control_plane: Testbed, place: str) -> None:
    container = {"name": "kuberay-operator", "image": "kuberay/operator:v1.6.2", "args": ["--watch-namespace", place]}
    template = {"metadata": {"labels": {"app": "operator"}}, "spec": {"containers": [container]}}
    deployments = control_plane.dynamic.resources.get(api_version="apps/v1", kind="Deployment")
    deployments.create(
        namespace=place,
        body={
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "kuberay-operator"},
            "spec": {"selector": {"matchLabels": {"app": "operator"}}, "template": template},
        },
    )
    found = look(control_plane.kubeconfig, place)
    assert found["KubeRay operator"].found == f"{place}/kuberay-operator has no pod that is up"
    assert found["RayMultiHostIndexing"].found == "on by default"
    deployments.delete("kuberay-operator", namespace=place)  # the namespace goes when it likes


def test_nodes_with_chips_and_without_labels_are_named_with_the_command_that_mends_them(
    control_plane: Testbed, place: str
) -> None:
    node, core = f"{place}-host", control_plane.core
    size = {"cpu": "8", "memory": "32Gi", "google.com/tpu": "4"}
    labels = {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice",
        "cloud.google.com/gke-tpu-topology": "2x2x2",
    }
    taint = {"key": "google.com/tpu", "value": "present", "effect": "NoSchedule"}
    core.create_node({"metadata": {"name": node, "labels": labels}, "spec": {"taints": [taint]}})
    try:
        core.patch_node_status(node, {"status": {"capacity": size, "allocatable": size}})
        found = look(control_plane.kubeconfig, place)
        assert found["TPU nodes"].missing
        assert f"kubectl label node {node} cloud.google.com/gke-nodepool=POOL" in found["TPU nodes"].help
        assert not found["node for the head"].ok, "the only node is for TPUs"
        core.patch_node(node, {"metadata": {"labels": {"cloud.google.com/gke-nodepool": "pool-0"}}})
        assert look(control_plane.kubeconfig, place)["TPU nodes"].ok
    finally:
        core.delete_node(node)


def test_a_namespace_that_is_not_there_is_missed(any_cluster: KubernetesFaults) -> None:
    found = look(any_cluster.kubeconfig, "nowhere")
    assert missing(found) == ["namespace"]
    assert not found["TPU webhook"].seen


@pytest.fixture(scope="module")
def with_one_verb(any_cluster: KubernetesFaults) -> Iterator[Callable[[str], Path]]:
    """Kubeconfigs that may do one verb on a proxied service, and nothing else."""
    with any_cluster.namespace("proxied") as name:

        def made(verb: str) -> Path:
            rules = [{"apiGroups": [""], "resources": ["services/proxy"], "verbs": [verb]}]
            return any_cluster.kubeconfig_for(rules, name)

        yield made


@pytest.mark.parametrize(
    ("verb", "allowed"),
    [
        ("get", {"GET", "websocket"}),
        ("create", {"POST"}),
        ("update", {"PUT"}),
        ("delete", {"DELETE"}),
    ],
)
def test_the_api_server_asks_for_the_verb_of_the_http_method_when_it_proxies(
    with_one_verb: Callable[[str], Path], verb: str, allowed: set[str]
) -> None:
    kubeconfig = with_one_verb(verb)
    passed = {method for method in ("GET", "websocket", "POST", "PUT", "DELETE") if proxied(kubeconfig, method) != 403}
    assert passed == allowed


def proxied(kubeconfig: Path, method: str) -> int:
    """The status of one request to a service that does not exist: 403 only for want of rights."""
    content = yaml.safe_load(kubeconfig.read_text())
    cluster = content["clusters"][0]["cluster"]
    namespace = content["contexts"][0]["context"]["namespace"]
    server = urlsplit(cluster["server"])
    trust = ssl.create_default_context(cafile=cluster["certificate-authority"])
    headers = {"Authorization": f"Bearer {content['users'][0]['user']['token']}"}
    if method == "websocket":
        headers |= {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
    assert server.hostname is not None
    connection = http.client.HTTPSConnection(server.hostname, server.port, context=trust, timeout=30)
    try:
        path = f"/api/v1/namespaces/{namespace}/services/none-head-svc:dashboard/proxy/api/jobs/"
        connection.request("GET" if method == "websocket" else method, path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()
