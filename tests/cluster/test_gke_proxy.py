"""What a real API server answers in front of Ray while Ray is not there, or to somebody who may not ask."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="tests on a cluster need the extra `dev`")

import httpx

from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.reach import ProxyCredentials
from raytpu_ops.ray.client import RayClient
from raytpu_ops.ray.http import serve_client
from raytpu_ops.ray.kubernetes import status_of
from raytpu_ops.tpu.errors import Misconfigured, RayTpuError, RemoteUnavailable
from tests.testbed.faults import KubernetesFaults, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PROXY = {"apiGroups": [""], "resources": ["services/proxy"], "verbs": ["get", "create"]}


@pytest.fixture(scope="module")
def place(any_cluster: KubernetesFaults) -> Iterator[str]:
    with any_cluster.namespace("proxy") as name:
        yield name


@pytest.fixture(scope="module")
def allowed(any_cluster: KubernetesFaults, place: str) -> Path:
    """A kubeconfig that may use the proxy and nothing else."""
    kubeconfig = any_cluster.kubeconfig_for([PROXY], place)
    # The API server takes a moment to know of a new role.
    wait_until(lambda: isinstance(error_of(kubeconfig, place, "x"), RemoteUnavailable), 60, "the role does not hold")
    return kubeconfig


@pytest.fixture(scope="module")
def services(any_cluster: KubernetesFaults, place: str) -> None:
    """``empty`` has nobody behind it, ``closed`` a pod whose machine is there and whose port is not."""
    core = any_cluster.core
    ip = core.read_namespaced_endpoints("kubernetes", "default").subsets[0].addresses[0].ip
    for name in ("empty", "closed"):
        ports = [{"name": "dashboard", "port": 8265}]
        core.create_namespaced_service(place, {"metadata": {"name": name}, "spec": {"ports": ports}})
    spec = {"schedulerName": "nobody", "containers": [{"name": "x", "image": "none"}]}
    core.create_namespaced_pod(place, {"metadata": {"name": "closed"}, "spec": spec})
    core.patch_namespaced_pod_status("closed", place, {"status": {"podIP": ip, "podIPs": [{"ip": ip}]}})
    slices = any_cluster.dynamic.resources.get(api_version="discovery.k8s.io/v1", kind="EndpointSlice")
    target = {"kind": "Pod", "name": "closed", "namespace": place}
    slices.create(
        namespace=place,
        body={
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": "closed", "labels": {"kubernetes.io/service-name": "closed"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [ip], "conditions": {"ready": True}, "targetRef": target}],
            "ports": [{"name": "dashboard", "port": 1}],
        },
    )


def address(kubeconfig: Path, place: str, service: str) -> str:
    server = json.loads(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    return f"{server}/api/v1/namespaces/{place}/services/{service}:dashboard/proxy"


def error_of(kubeconfig: Path, place: str, service: str) -> RayTpuError:
    async def ask() -> Any:
        credentials = ProxyCredentials(KubeconfigAccess(str(kubeconfig)))
        async with RayClient(address(kubeconfig, place, service), credentials=credentials) as client:
            return await client.version()

    with pytest.raises(RayTpuError) as caught:
        asyncio.run(ask())
    return caught.value


@pytest.mark.usefixtures("services")
@pytest.mark.parametrize(
    ("service", "words"),
    [
        ("nobody", '(no endpoints available for service|services) "nobody"'),  # 1.37 says the first
        ("empty", 'no endpoints available for service "empty'),
        ("closed", "error trying to reach service: dial tcp "),
    ],
)
def test_a_ray_that_is_not_there_yet_is_waited_for(allowed: Path, place: str, service: str, words: str) -> None:
    seen: list[RayTpuError] = []

    def said() -> bool:  # the API server takes a moment to know of new objects
        seen.append(error_of(allowed, place, service))
        assert isinstance(seen[-1], RemoteUnavailable), seen[-1]
        return bool(re.search(f"^Kubernetes in front of Ray at https://.* to GET /api/version: {words}", str(seen[-1])))

    wait_until(said, 30, lambda: str(seen[-1]))


def test_a_missing_right_is_named_with_what_grants_it(any_cluster: KubernetesFaults, place: str) -> None:
    with any_cluster.namespace("proxy", wait=False) as another:
        stranger = any_cluster.kubeconfig_for([PROXY], another)
        error = error_of(stranger, place, "empty")
    assert isinstance(error, Misconfigured), error
    words = f"lacks the right to get services/proxy in namespace '{place}'; grant it with the role in deploy/gke"
    assert words in str(error)


def test_a_token_that_nobody_knows_is_about_kubernetes(allowed: Path, place: str, tmp_path: Path) -> None:
    config = json.loads(allowed.read_text())
    config["users"][0]["user"]["token"] = "n0t-a-token"
    stranger = tmp_path / "kubeconfig"
    stranger.write_text(json.dumps(config))
    error = error_of(stranger, place, "empty")
    assert isinstance(error, Misconfigured), error
    assert "answered 401" in str(error)
    assert "does not accept the credentials" in str(error)
    assert "n0t-a-token" not in str(error)


@pytest.mark.usefixtures("services")
@pytest.mark.parametrize("service", ["empty", "closed"])
def test_a_question_that_reached_nobody_is_known_as_such(allowed: Path, place: str, service: str) -> None:
    credentials = ProxyCredentials(KubeconfigAccess(str(allowed)))
    with serve_client(address(allowed, place, service), credentials, patience_s=0) as client:
        reply: httpx.Response = client.post("/digits", json={})
    status = status_of(reply.status_code, reply.text)
    assert status is not None, reply.text
    assert status.is_undelivered, status
