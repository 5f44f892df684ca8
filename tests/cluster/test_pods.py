"""What a pod finds on the testbed: what our backend's pods and KubeRay's probes rely on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from tests.cluster.manifests import host_pod, plain_pod, ray_cluster
from tests.testbed.client import Testbed
from tests.testbed.faults import wait_until
from tests.testbed.ray_view import ray_token

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

_MIB = 2**20
#: An application of Ray Serve, from inside the head: nothing of the package is needed for it.
_SERVE = """
from ray import serve

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Hello:
    def __call__(self, request):
        return "hello from " + request.url.path

serve.start(http_options={"host": "0.0.0.0"})
serve.run(Hello.bind(), route_prefix="/greet")
print("deployed")
"""


def output(testbed: Testbed, manifest: dict[str, Any], *, timeout: float = 240) -> str:
    """Run a pod to its end; what it wrote."""
    name = manifest["metadata"]["name"]
    testbed.core.create_namespaced_pod("default", manifest)
    ended = ("Succeeded", "Failed")

    def status() -> Any:
        return testbed.core.read_namespaced_pod(name, "default").status

    wait_until(lambda: status().phase in ended, timeout, lambda: f"{name}: {status()}")
    log = testbed.logs(name)
    assert status().phase == "Succeeded", log
    return log


def with_shared(testbed: Testbed, manifest: dict[str, Any]) -> dict[str, Any]:
    parts = testbed.shared_volume()
    manifest["spec"]["volumes"] = parts["volumes"]
    manifest["spec"]["containers"][0]["volumeMounts"] = parts["volumeMounts"]
    return manifest


def test_every_pod_writes_to_one_folder_of_this_machine(slices: Testbed) -> None:
    folder = slices.shared / "checkpoints"
    command = ("bash", "-c", f"mkdir {folder} && echo one > {folder}/state && id -u")
    assert output(slices, with_shared(slices, plain_pod("writes", *command))).strip() == "1000"
    assert (folder / "state").read_text() == "one\n"
    assert folder.stat().st_uid == 1000
    command = ("bash", "-c", f"echo two >> {folder}/state && cat {folder}/state")
    assert output(slices, with_shared(slices, host_pod("appends", *command))) == "one\ntwo\n"


def test_the_libraries_are_there_and_the_package_is_not(slices: Testbed) -> None:
    """So a job that runs by `raytpu_ops.runtime` proves that it was uploaded.

    An editable install leaves the example DAGs behind, a folder without code of the package.
    """
    look = (
        "import importlib.util, flax, jax, optax, orbax.checkpoint, pydantic, ray; "
        "print(ray.__version__, *(name for name in ('runtime', 'tpu') "
        "if importlib.util.find_spec('raytpu_ops') and importlib.util.find_spec('raytpu_ops.' + name)))"
    )
    *_, last = output(slices, plain_pod("imports", "python", "-c", look)).splitlines()  # libraries may warn
    assert re.fullmatch(r"\d+\.\d+\.\d+", last)


def test_pods_may_be_as_restricted_as_kubernetes_asks_for(slices: Testbed) -> None:
    """By the profile `restricted` of Kubernetes' pod security standards."""
    manifest = plain_pod("restricted", "cat", "/proc/self/status")
    manifest["spec"] |= {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 100,
            "fsGroup": 100,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    manifest["spec"]["containers"][0]["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    lines = output(slices, manifest).splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    assert status["Uid"][0] == "1000"
    assert int(status["CapBnd"][0], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == (["1"], ["2"])


def test_the_image_has_what_probes_of_older_ray_call(slices: Testbed) -> None:
    check = "wget --version | grep -c Wget && python -c 'import urllib.request'"
    assert int(output(slices, plain_pod("probes", "bash", "-c", check))) > 0


@pytest.fixture(scope="module")
def head(slices: Testbed) -> Iterator[str]:
    """The head's pod of a RayCluster with one slice of two hosts, all of it ready by KubeRay's probes."""
    clusters = slices.dynamic.resources.get(api_version="ray.io/v1", kind="RayCluster")
    manifest = ray_cluster("pods", slices=1)
    # Serve's proxy and controller want a place.
    manifest["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = "1"
    worker = manifest["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    worker["resources"]["limits"]["memory"] = "1536Mi"
    clusters.create(body=manifest, namespace="default")

    def pods() -> list[Any]:
        return list(slices.core.list_namespaced_pod("default", label_selector="ray.io/cluster=pods").items)

    def ready() -> list[str]:
        return [
            pod.metadata.name
            for pod in pods()
            if any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or [])
        ]

    wait_until(lambda: len(ready()) == 3, 900, lambda: f"ready: {ready()} of {[pod.metadata.name for pod in pods()]}")
    yield next(name for name in ready() if "-head-" in name)
    clusters.delete(name="pods", namespace="default", body={"propagationPolicy": "Foreground"})
    wait_until(lambda: not pods(), 180, "pods of the RayCluster are left")


def test_kuberays_probes_ask_ray_itself_and_pass(slices: Testbed, head: str) -> None:
    """The fixture waited until they passed; here is what they ask."""
    container = slices.core.read_namespaced_pod(head, "default").spec.containers[0]
    for probe in (container.readiness_probe, container.liveness_probe):
        assert (probe.http_get.path, probe.http_get.port) == ("/api/healthz", 52365)


def test_the_object_stores_memory_is_as_large_as_the_pods_limit(slices: Testbed, head: str) -> None:
    workers = slices.core.list_namespaced_pod("default", label_selector="ray.io/node-type=worker").items
    size = "import os; found = os.statvfs('/dev/shm'); print(found.f_blocks * found.f_frsize)"
    printed = slices.run_in(workers[0].metadata.name, "python", "-c", size)
    assert int(printed) == 1536 * _MIB


def test_serve_is_reached_through_the_head_service(slices: Testbed, head: str) -> None:
    printed = slices.run_in(head, "python", "-c", _SERVE, timeout=300)
    assert "deployed" in printed, printed
    answer = wait_until(
        lambda: found if (found := slices.proxied("default", "pods-head-svc:serve", "greet"))[0] == 200 else None,
        60,
        lambda: f"Serve answers {slices.proxied('default', 'pods-head-svc:serve', 'greet')}",
    )
    assert answer == (200, b"hello from /greet")
    status, body = slices.proxied(
        "default", "pods-head-svc:dashboard", "api/serve/applications/", ray_token(slices, "pods")
    )
    assert status == 200
    assert json.loads(body)["applications"]["default"]["status"] == "RUNNING"
