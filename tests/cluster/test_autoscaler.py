"""Nodes that come and go with the pods that want them: real nodes, real scheduler, the autoscaler played."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from tests.cluster.manifests import host_pod, ray_cluster
from tests.testbed.client import Testbed, TestbedFailed
from tests.testbed.faults import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _nothing_is_left(growing: Testbed) -> Iterator[None]:
    yield
    growing.core.delete_collection_namespaced_pod("default", grace_period_seconds=0)
    wait_until(lambda: set(growing.pools()) == {"cpu-0"}, 180, lambda: f"pools are left: {growing.status()}")


def create(testbed: Testbed, manifest: dict[str, Any]) -> str:
    testbed.core.create_namespaced_pod("default", manifest)
    return str(manifest["metadata"]["name"])


def single(name: str, replica: int = 0) -> dict[str, Any]:
    """The one host of a slice of one."""
    return host_pod(name, replica=replica, topology="2x2x1")


def wait_for_running(testbed: Testbed, *names: str) -> list[str]:
    """The nodes that the pods are on."""

    def nodes() -> list[str] | None:
        pods = [testbed.core.read_namespaced_pod(name, "default") for name in names]
        there = testbed.nodes()  # a pod whose node is gone is said to run for a while
        running = all(pod.status.phase == "Running" and pod.spec.node_name in there for pod in pods)
        return [pod.spec.node_name for pod in pods] if running else None

    found: list[str] = wait_until(nodes, 240, lambda: f"{names} do not run: {[told(testbed, one) for one in names]}")
    return found


def told(testbed: Testbed, name: str) -> list[tuple[str, str]]:
    """What the autoscaler wrote about an object: reason and message."""
    events = testbed.core.list_namespaced_event("default", field_selector=f"involvedObject.name={name}").items
    mine = [one for one in events if one.source.component == "cluster-autoscaler"]
    return [(one.reason, one.message) for one in sorted(mine, key=lambda one: int(one.metadata.resource_version))]


def wait_for_word(testbed: Testbed, name: str, reason: str, part: str = "") -> None:
    wait_until(
        lambda: any(one == reason and part in message for one, message in told(testbed, name)),
        120,
        lambda: f"{name} is not told {reason} … {part}: {told(testbed, name)}",
    )


def test_each_waiting_slice_brings_a_pool_and_an_empty_pool_goes(growing: Testbed) -> None:
    names = [
        create(growing, host_pod(f"host-{replica}-{host}", replica=replica, host=host))
        for replica in (0, 1)
        for host in (0, 1)
    ]
    nodes = wait_for_running(growing, *names)
    pools = {name: growing.core.read_node(name).metadata.labels["cloud.google.com/gke-nodepool"] for name in nodes}
    first, second = {pools[node] for node in nodes[:2]}, {pools[node] for node in nodes[2:]}
    assert len(first) == len(second) == 1
    assert first != second
    for name in ("host-0-0", "host-1-0"):
        assert told(growing, name)[0][0] == "TriggeredScaleUp"
        assert "0->2 (max: 2)" in told(growing, name)[0][1]
    growing.core.delete_collection_namespaced_pod("default", grace_period_seconds=0)
    wait_until(lambda: growing.nodes() == ["cpu-0-0"], 180, lambda: f"nodes are left: {growing.nodes()}")
    assert set(growing.pools()) == {"cpu-0"}
    assert told(growing, nodes[0]) == [("ScaleDown", "node removed by cluster autoscaler")]


def test_more_than_the_maximum_waits_and_gets_the_place_that_is_left(growing: Testbed) -> None:
    names = [create(growing, single(f"one-{number}", number)) for number in range(3)]

    def running() -> dict[str, str]:
        pods = growing.core.list_namespaced_pod("default").items
        return {pod.metadata.name: pod.spec.node_name for pod in pods if pod.status.phase == "Running"}

    wait_until(lambda: len(running()) == 2, 240, lambda: f"of three run {sorted(running())}")
    # Single hosts know no affinity: any two of the three may have got the two nodes.
    [late] = set(names) - set(running())
    wait_for_word(
        growing,
        late,
        "NotTriggerScaleUp",
        "pod didn't trigger scale-up: 1 max node group size reached, "
        "1 node(s) didn't match Pod's node affinity/selector",
    )
    first, node = next(iter(running().items()))
    growing.core.delete_namespaced_pod(first, "default", grace_period_seconds=0)
    assert wait_for_running(growing, late) == [node]  # it is not removed, it was wanted


def test_a_stockout_fails_loudly_and_passes(growing: Testbed) -> None:
    with growing.stockout("v4-*"):
        name = create(growing, single("unlucky"))
        wait_for_word(growing, name, "NotTriggerScaleUp", "1 in backoff after failed scale-up")
        first, second, *_ = told(growing, name)
        assert first[0] == "TriggeredScaleUp"
        assert second == (
            "FailedScaleUp",
            "Node scale up in zones test-region1-a associated with this pod failed: GCE out of resources. "
            "Pod is at risk of not being scheduled.",
        )
        assert set(growing.pools()) <= {"cpu-0", *growing.status()["autoscaler"]["pools"]}
        assert growing.nodes() == ["cpu-0-0"]
    wait_for_running(growing, name)


def test_what_no_pool_can_be_is_refused_with_the_reason(growing: Testbed) -> None:
    unknown = create(growing, host_pod("unknown", topology="2x2x4"))
    untolerated = single("untolerated", replica=1)
    untolerated["spec"]["tolerations"] = []
    create(growing, untolerated)
    wait_for_word(growing, unknown, "NotTriggerScaleUp", "2 node(s) didn't match Pod's node affinity/selector")
    wait_for_word(growing, "untolerated", "NotTriggerScaleUp", "1 node(s) had untolerated taint(s)")
    assert growing.nodes() == ["cpu-0-0"]


def test_a_pool_is_made_as_the_selectors_ask(growing: Testbed) -> None:
    pod = single("asking")
    pod["spec"]["nodeSelector"] |= {"cloud.google.com/compute-class": "tpus", "cloud.google.com/gke-spot": "true"}
    pod["spec"]["tolerations"].append({"key": "cloud.google.com/gke-spot", "operator": "Exists"})
    [name] = wait_for_running(growing, create(growing, pod))
    node = growing.core.read_node(name)
    assert node.metadata.labels["cloud.google.com/compute-class"] == "tpus"
    assert "cloud.google.com/gke-spot" in {taint.key for taint in node.spec.taints}


def test_a_raycluster_brings_its_nodes(growing: Testbed) -> None:
    # KubeRay's pods, as they are scheduled; that Ray runs in them is shown elsewhere.
    manifest = ray_cluster("bringing", slices=1, without_ray=True)
    del manifest["spec"]["authOptions"]
    clusters = growing.dynamic.resources.get(api_version="ray.io/v1", kind="RayCluster")
    clusters.create(body=manifest, namespace="default")

    def hosts() -> list[Any]:
        pods = growing.core.list_namespaced_pod("default", label_selector="ray.io/node-type=worker").items
        return [pod for pod in pods if pod.spec.node_name]

    wait_until(lambda: len(hosts()) == 2, 240, lambda: f"hosts with a node: {len(hosts())}")
    assert {pod.spec.node_name.rsplit("-", 1)[0] for pod in hosts()} <= set(growing.pools())
    clusters.delete(name="bringing", namespace="default", body={"propagationPolicy": "Foreground"})
    wait_until(lambda: not growing.count("ray.io/v1", "RayCluster"), 120, "the RayCluster is left")


def test_the_autoscaler_outlives_the_api_server(growing: Testbed) -> None:
    growing.restart_api(3)
    wait_for_running(growing, create(growing, single("after")))
    assert growing.status()["autoscaler"]["running"]


def test_a_run_has_one_autoscaler_or_none(growing: Testbed) -> None:
    with pytest.raises(TestbedFailed, match="has an autoscaler already"), growing.autoscaler("v4-2x2x1"):
        pass
