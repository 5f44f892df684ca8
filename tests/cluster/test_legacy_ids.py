"""KubeRay without its indexing labels: GKE's TPU webhook then counts pods, and may count wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from tests.cluster.manifests import ray_cluster
from tests.testbed.client import Testbed
from tests.testbed.faults import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_WORKERS = "ray.io/node-type=worker"


class Host(NamedTuple):
    """What the webhook made of one pod."""

    pod: str
    slice: str
    worker_id: str
    hostname: str
    node: str | None


@pytest.fixture(scope="module")
def legacy(slices: Testbed) -> Iterator[Testbed]:
    """KubeRay gives no index to pods."""
    with slices.operator_gates("RayMultiHostIndexing=false"):
        yield slices


@pytest.fixture
def clusters(legacy: Testbed) -> Iterator[Any]:
    """RayClusters; those of the test are gone after it."""
    resource = legacy.dynamic.resources.get(api_version="ray.io/v1", kind="RayCluster")
    yield resource
    for one in resource.get(namespace="default").items:
        resource.delete(name=one.metadata.name, namespace="default", body={"propagationPolicy": "Foreground"})
    wait_until(lambda: not legacy.core.list_namespaced_pod("default").items, 120, "pods are left")


def create(testbed: Testbed, clusters: Any, hosts: int = 4) -> list[Host]:
    """A RayCluster of two slices of two hosts, and what its hosts were told; Ray itself is not started."""
    manifest = ray_cluster("counted", without_ray=True)
    del manifest["spec"]["authOptions"]
    clusters.create(body=manifest, namespace="default")
    wait_until(lambda: len(hosts_of(testbed)) == hosts, 120, lambda: f"hosts: {hosts_of(testbed)}")
    return hosts_of(testbed)


def hosts_of(testbed: Testbed) -> list[Host]:
    found = []
    for pod in testbed.core.list_namespaced_pod("default", label_selector=_WORKERS).items:
        if pod.metadata.deletion_timestamp is None:
            [worker_id] = [one.value for one in pod.spec.containers[0].env if one.name == "TPU_WORKER_ID"]
            labels = pod.metadata.labels
            assert "ray.io/replica-host-index" not in labels  # else nothing is counted
            found.append(
                Host(pod.metadata.name, labels["replicaIndex"], worker_id, pod.spec.hostname, pod.spec.node_name)
            )
    return sorted(found, key=lambda one: (one.slice, one.worker_id))


def ids(hosts: list[Host]) -> list[tuple[str, str]]:
    return [(one.slice, one.worker_id) for one in hosts]


_RIGHT = [("slices-0", "0"), ("slices-0", "1"), ("slices-1", "0"), ("slices-1", "1")]


def test_ids_are_counted_and_each_slice_has_a_pool_of_its_own(legacy: Testbed, clusters: Any) -> None:
    assert ids(create(legacy, clusters)) == _RIGHT
    wait_until(lambda: all(one.node for one in hosts_of(legacy)), 120, lambda: f"no node yet: {hosts_of(legacy)}")
    pools = {one.slice: set[str]() for one in hosts_of(legacy)}
    for one in hosts_of(legacy):
        assert one.node is not None
        pools[one.slice].add(one.node.rsplit("-", 1)[0])
    assert sorted(pools.values(), key=min) == [{"v4-2x2x2-0"}, {"v4-2x2x2-1"}]
    assert [one.hostname for one in hosts_of(legacy)] == ["slices-0-0", "slices-0-1", "slices-1-0", "slices-1-1"]


def test_a_host_that_is_replaced_gets_the_id_that_became_free(legacy: Testbed, clusters: Any) -> None:
    gone = create(legacy, clusters)[1]
    legacy.core.delete_namespaced_pod(gone.pod, "default", grace_period_seconds=0)
    # Without an index KubeRay replaces the one pod, not the slice.
    wait_until(
        lambda: len(found := hosts_of(legacy)) == 4 and gone.pod not in {one.pod for one in found},
        120,
        lambda: f"hosts: {hosts_of(legacy)}",
    )
    assert ids(hosts_of(legacy)) == _RIGHT


def test_a_stale_count_gives_the_same_place_to_all(legacy: Testbed, clusters: Any) -> None:
    with legacy.webhook_faults(stale=True):
        hosts = create(legacy, clusters)
    assert ids(hosts) == [("slices-0", "0")] * 4
    assert {one.hostname for one in hosts} == {"slices-0-0"}


def test_ids_are_handed_out_twice_within_a_slice(legacy: Testbed, clusters: Any) -> None:
    with legacy.webhook_faults(duplicate_ids=True):
        hosts = create(legacy, clusters)
    assert [one.worker_id for one in hosts] == ["0"] * 4


def test_kuberays_gates_can_change_while_it_runs(legacy: Testbed, clusters: Any) -> None:
    with legacy.operator_gates("RayMultiHostIndexing=true"):
        manifest = ray_cluster("indexed", slices=1, without_ray=True)
        del manifest["spec"]["authOptions"]
        clusters.create(body=manifest, namespace="default")

        def indices() -> list[str]:
            pods = legacy.core.list_namespaced_pod("default", label_selector=_WORKERS).items
            return sorted(pod.metadata.labels["ray.io/replica-host-index"] for pod in pods)

        wait_until(lambda: indices() == ["0", "1"], 120, lambda: f"indices: {indices()}")
        clusters.delete(name="indexed", namespace="default", body={"propagationPolicy": "Foreground"})
        wait_until(lambda: not legacy.core.list_namespaced_pod("default").items, 120, "pods are left")
    assert ids(create(legacy, clusters)) == _RIGHT
