"""The second tier of the testbed: TPU hosts as real nodes, and what can go wrong with them.

Pods here run a short command instead of Ray: what is shown is Kubernetes' side. Ray is in `test_testbed.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from tests.cluster.manifests import host_pod, plain_pod, ray_cluster
from tests.testbed.client import Testbed
from tests.testbed.faults import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _no_pods_are_left(slices: Testbed) -> Iterator[None]:
    yield
    slices.core.delete_collection_namespaced_pod("default", grace_period_seconds=0)
    wait_until(lambda: not slices.core.list_namespaced_pod("default").items, 90, "pods are left")


def create(testbed: Testbed, manifest: dict[str, Any]) -> str:
    testbed.core.create_namespaced_pod("default", manifest)
    return str(manifest["metadata"]["name"])


def pod(testbed: Testbed, name: str) -> Any:
    return testbed.core.read_namespaced_pod(name, "default")


def wait_for_phase(testbed: Testbed, name: str, *phases: str) -> Any:
    wait_until(lambda: pod(testbed, name).status.phase in phases, 120, lambda: f"{name}: {pod(testbed, name).status}")
    return pod(testbed, name)


def waiting(testbed: Testbed, name: str) -> tuple[str, str]:
    states = [one.state.waiting for one in pod(testbed, name).status.container_statuses or []]
    return (states[0].reason or "", states[0].message or "") if states and states[0] else ("", "")


def is_ready(testbed: Testbed, node: str) -> bool:
    conditions = testbed.core.read_node(node).status.conditions
    return any(one.type == "Ready" and one.status == "True" for one in conditions)


def test_tpu_hosts_look_as_on_gke(slices: Testbed) -> None:
    assert slices.pools() == {
        "cpu-0": ["cpu-0-0"],
        "v4-2x2x2-0": ["v4-2x2x2-0-0", "v4-2x2x2-0-1"],
        "v4-2x2x2-1": ["v4-2x2x2-1-0", "v4-2x2x2-1-1"],
    }
    node = slices.core.read_node("v4-2x2x2-1-0")
    assert node.metadata.labels["cloud.google.com/gke-tpu-accelerator"] == "tpu-v4-podslice"
    assert node.metadata.labels["cloud.google.com/gke-tpu-topology"] == "2x2x2"
    assert node.metadata.labels["cloud.google.com/gke-nodepool"] == "v4-2x2x2-1"
    assert node.metadata.labels["node.kubernetes.io/instance-type"] == "ct4p-hightpu-4t"
    assert node.status.allocatable["google.com/tpu"] == "4"
    assert [(one.key, one.value, one.effect) for one in node.spec.taints] == [
        ("google.com/tpu", "present", "NoSchedule")
    ]
    assert "google.com/tpu" not in slices.core.read_node("cpu-0-0").status.allocatable


def test_a_container_gets_the_variables_of_webhook_and_device_plugin(slices: Testbed) -> None:
    name = create(slices, host_pod("variables", "env", host=1))
    wait_for_phase(slices, name, "Succeeded")
    log = slices.logs(name)
    found = dict(line.split("=", 1) for line in log.splitlines() if "=" in line)
    assert {key: found[key] for key in ("TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY", "TPU_WORKER_ID", "TPU_NAME")} == {
        "TPU_ACCELERATOR_TYPE": "v4-16",
        "TPU_TOPOLOGY": "2x2x2",
        "TPU_WORKER_ID": "1",
        "TPU_NAME": "slices-0",
    }
    assert found["TPU_DEVICE_PLUGIN_ADDR"].endswith(":2112")


def test_pods_find_each_other_by_name_and_the_api_server_by_its_service(slices: Testbed) -> None:
    look = "import socket; socket.create_connection(('kubernetes.default.svc', 443), 30); print('reached')"
    name = create(slices, plain_pod("dns", "python", "-c", look))
    done = wait_for_phase(slices, name, "Succeeded", "Failed")
    assert slices.logs(name).strip() == "reached", done.status


def test_two_runs_with_nodes_never_meet(slices: Testbed) -> None:
    """Pods of both, by the same names, at work at the same time."""
    with Testbed.up("cpu") as other:
        assert other.pools() == {"cpu-0": ["cpu-0-0"]}
        assert len(slices.pools()) == 3
        for testbed in (slices, other):
            create(testbed, plain_pod("here", "python", "-c", "print('of', __import__('socket').gethostname())"))
        for testbed in (slices, other):
            done = wait_for_phase(testbed, "here", "Succeeded", "Failed")
            assert testbed.logs("here").strip() == "of here", done.status
            assert [one.metadata.name for one in testbed.core.list_namespaced_pod("default").items] == ["here"]


def test_commands_run_in_pods_through_the_proxy(slices: Testbed) -> None:
    name = create(slices, plain_pod("exec"))
    wait_for_phase(slices, name, "Running")
    assert slices.run_in(name, "python", "-c", "import os; print(os.getuid())").strip() == "1000"


def test_an_image_that_is_missing_says_so(slices: Testbed) -> None:
    with slices.image_faults("*/ray:missing", missing=True):
        name = create(slices, plain_pod("missing", image="rayproject/ray:missing"))
        wait_until(lambda: waiting(slices, name)[0] in ("ErrImagePull", "ImagePullBackOff"), 60, "no word of the image")
        wait_until(lambda: "rayproject/ray:missing" in waiting(slices, name)[1], 60, lambda: str(waiting(slices, name)))


def test_an_unknown_image_is_missing_by_itself(slices: Testbed) -> None:
    name = create(slices, plain_pod("unknown", image="example.invalid/nothing:1"))
    wait_until(lambda: waiting(slices, name)[0] in ("ErrImagePull", "ImagePullBackOff"), 60, "no word of the image")


def test_a_slow_image_holds_its_pod_and_then_lets_it_go(slices: Testbed) -> None:
    with slices.image_faults("*/ray:slow", delay=5):
        name = create(slices, plain_pod("slow", image="rayproject/ray:slow"))
        wait_until(lambda: waiting(slices, name)[0] == "ContainerCreating", 60, "the pod does not wait")
        wait_for_phase(slices, name, "Running")
    assert "docker.io/rayproject/ray:slow" in slices.status()["pulled"]


def test_where_no_node_fits_the_scheduler_says_why(slices: Testbed) -> None:
    with slices.no_node_fits():
        name = create(slices, host_pod("unschedulable"))
        refused = wait_until(
            lambda: [one for one in pod(slices, name).status.conditions or [] if one.type == "PodScheduled"],
            60,
            "no word",
        )
        assert refused[0].reason == "Unschedulable"
        assert "unschedulable" in refused[0].message
    wait_for_phase(slices, name, "Running")


def test_two_slices_never_share_a_pool(slices: Testbed) -> None:
    names = [
        create(slices, host_pod(f"host-{replica}-{host}", replica=replica, host=host))
        for replica in (0, 1)
        for host in (0, 1)
    ]
    nodes = [wait_for_phase(slices, name, "Running").spec.node_name for name in names]
    first, second = {node.rsplit("-", 1)[0] for node in nodes[:2]}, {node.rsplit("-", 1)[0] for node in nodes[2:]}
    assert len(first) == len(second) == 1
    assert first != second


def test_duplicate_ids_can_be_handed_out(slices: Testbed) -> None:
    with slices.webhook_faults(duplicate_ids=True):
        names = [create(slices, host_pod(f"twin-{host}", host=host)) for host in (0, 1)]
    ids = [
        next(one.value for one in pod(slices, name).spec.containers[0].env if one.name == "TPU_WORKER_ID")
        for name in names
    ]
    assert ids == ["0", "0"]


def test_a_head_can_crash_loop(slices: Testbed) -> None:
    clusters = slices.dynamic.resources.get(api_version="ray.io/v1", kind="RayCluster")
    manifest = ray_cluster("crash", slices=0)
    del manifest["spec"]["authOptions"]
    with slices.webhook_faults(crash_heads=True):
        clusters.create(body=manifest, namespace="default")
        heads = wait_until(
            lambda: [
                one
                for one in slices.core.list_namespaced_pod("default", label_selector="ray.io/cluster=crash").items
                if one.status.container_statuses and one.status.container_statuses[0].restart_count
            ],
            120,
            "the head does not restart",
        )
    assert heads[0].status.container_statuses[0].last_state.terminated.exit_code == 13
    log = slices.logs(heads[0].metadata.name)
    assert "lets this head crash" in log
    clusters.delete(name="crash", namespace="default", body={"propagationPolicy": "Foreground"})
    wait_until(lambda: not slices.count("ray.io/v1", "RayCluster"), 90, "the RayCluster is left")


def test_broken_chips_are_taken_from_the_node(slices: Testbed) -> None:
    node = "v4-2x2x2-1-1"

    def chips() -> str:
        return str(slices.core.read_node(node).status.allocatable["google.com/tpu"])

    with slices.broken_chips(node):
        wait_until(lambda: chips() == "0", 60, "the node still offers chips")
    wait_until(lambda: chips() == "4", 60, "the chips do not come back")


def test_a_drained_node_loses_its_pods_and_takes_no_new_ones(slices: Testbed) -> None:
    name = create(slices, plain_pod("evicted"))
    node = wait_for_phase(slices, name, "Running").spec.node_name
    assert node == "cpu-0-0"
    assert slices.drain_node(node) == [name]
    slices.cordon(node, on=False)


def test_a_host_vanishes_and_comes_back(slices: Testbed) -> None:
    node = "v4-2x2x2-0-1"
    slices.kill_node(node)
    wait_until(lambda: not is_ready(slices, node), 90, f"{node} is still ready")
    slices.start_node(node)
    assert is_ready(slices, node)
    name = create(slices, host_pod("after"))
    wait_for_phase(slices, name, "Running")


def test_pools_come_and_go_while_it_runs(slices: Testbed) -> None:
    [pool] = slices.add_pools("v6e-2x2", labels={"cloud.google.com/gke-spot": "true"})
    [node] = slices.nodes(f"cloud.google.com/gke-nodepool={pool}")
    assert slices.core.read_node(node).metadata.labels["cloud.google.com/gke-spot"] == "true"
    slices.remove_pool(pool)
    assert slices.nodes(f"cloud.google.com/gke-nodepool={pool}") == []
