"""The whole of it once: five nodes, KubeRay, Ray on two slices of two hosts, and nothing left after it."""

from __future__ import annotations

import os
import signal
import time

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from tests.cluster.manifests import host_pod, plain_pod, ray_cluster
from tests.cluster.traces import Traces, alive, assert_gone, cgroups_of, owned_by_another, processes_of
from tests.testbed.client import Testbed
from tests.testbed.faults import wait_until
from tests.testbed.ray_view import ray_labels

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("built"), pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("end", "node"),
    [("the owner is killed", "cpu"), ("Ctrl-C", "cpu"), ("the keeper is killed", "v4-2x2x1")],
)
def test_a_run_that_ends_by_force_leaves_neither_nodes_nor_pods(end: str, node: str) -> None:
    before = Traces.now()
    with owned_by_another(node) as (owner, testbed):
        pod = plain_pod("busy") if node == "cpu" else host_pod("busy", topology="2x2x1")
        testbed.core.create_namespaced_pod("default", pod)
        wait_until(
            lambda: testbed.core.read_namespaced_pod("busy", "default").status.phase == "Running", 60, "it does not run"
        )
        processes = processes_of(testbed)
        assert any("sleep" in one.name() for one in processes)
        if end == "the keeper is killed":
            os.kill(testbed.layout.state()["keeper"], signal.SIGKILL)
            wait_until(lambda: not alive(processes), 60, lambda: f"left: {alive(processes)}")
            assert cgroups_of(testbed)
            said: list[str] = []
            with Testbed.up(control_plane=True, say=said.append):
                assert f"cleared what was left of run {testbed.layout.id}" in said
        else:
            owner.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
        assert_gone(testbed, processes)
    assert Traces.now() == before


def test_ray_labels_two_slices_through_the_api_server_and_nothing_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    before = Traces.now()
    times = {}

    began = time.monotonic()
    testbed = Testbed.up("cpu", "v4-2x2x2*2")
    times["up, five nodes"] = time.monotonic() - began
    try:
        processes = processes_of(testbed)

        began = time.monotonic()
        clusters = testbed.dynamic.resources.get(api_version="ray.io/v1", kind="RayCluster")
        clusters.create(body=ray_cluster("demo"), namespace="default")
        labels = wait_until(
            lambda: found if len(found := ray_labels(testbed, "demo")) == 4 else None,
            900,
            lambda: f"labelled so far: {ray_labels(testbed, 'demo')}",
            interval=0.5,
        )
        times["RayCluster to labelled"] = time.monotonic() - began

        assert sorted(labels.values()) == [(f"slices-{one}", str(host)) for one in (0, 1) for host in (0, 1)]
        pods = testbed.core.list_namespaced_pod("default", label_selector="ray.io/node-type=worker").items
        pool_of_slice: dict[str, set[str]] = {}
        for pod in pods:
            name, _ = labels[pod.status.pod_ip]
            pool_of_slice.setdefault(name, set()).add(pod.spec.node_name.rsplit("-", 1)[0])
        assert sorted(pool_of_slice.values(), key=min) == [{"v4-2x2x2-0"}, {"v4-2x2x2-1"}]
        status, _ = testbed.proxied("default", "demo-head-svc:dashboard", "api/v0/nodes")
        assert status == 401  # without Ray's own token
        processes = processes_of(testbed)
        assert any("raylet" in one.name() for one in processes)

        began = time.monotonic()
        clusters.delete(name="demo", namespace="default", body={"propagationPolicy": "Foreground"})
        wait_until(
            lambda: not testbed.count("ray.io/v1", "RayCluster") and not testbed.count("v1", "Pod", "ray.io/cluster"),
            180,
            "the RayCluster or a pod of it is left",
        )
        times["foreground deletion"] = time.monotonic() - began
    finally:
        began = time.monotonic()
        testbed.down()
        times["down"] = time.monotonic() - began
    assert_gone(testbed, processes)
    assert Traces.now() == before
    with capsys.disabled():
        print("\n" + ", ".join(f"{what} {seconds:.1f} s" for what, seconds in times.items()))
