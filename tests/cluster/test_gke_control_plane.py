"""The `gke` backend against a real API server, KubeRay and the TPU webhook; no nodes are needed for this.

But for what stops the webhook or the API server, it runs on a cluster that `RAYTPU_TEST_KUBECONFIG` names too.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.backends.gke.manifest import ray_cluster
from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.flows.leases import give_back
from raytpu_ops.tpu.capacity import OnDemand, Spot
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.errors import DeadlineExceeded, Misconfigured
from raytpu_ops.tpu.naming import lease_id
from raytpu_ops.tpu.shapes import SliceShape, catalogue
from raytpu_ops.tpu.spec import SliceSpec
from tests.cluster import killed_acquire
from tests.cluster.leases import RBAC, V4, acquired, backend, owner, released
from tests.testbed.client import Testbed
from tests.testbed.faults import KubernetesFaults, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def namespace(any_cluster: KubernetesFaults) -> Iterator[str]:
    with any_cluster.namespace("gke-control-plane") as name:
        yield name


@pytest.fixture(scope="module")
def kubeconfig(any_cluster: KubernetesFaults, namespace: str) -> Path:
    """Everything here runs with the rights of deploy/gke/rbac.yaml and no more."""
    return any_cluster.kubeconfig_for(RBAC, namespace)


@pytest.fixture
def gke(kubeconfig: Path, namespace: str) -> GkeBackend:
    return backend(kubeconfig, namespace=namespace)


def ours(cluster: KubernetesFaults, namespace: str) -> int:
    return cluster.count("ray.io/v1", "RayCluster", OWNER, namespace)


def tokens(cluster: KubernetesFaults, namespace: str) -> list[str]:
    """Secrets that hold a Ray token."""
    found = cluster.core.list_namespaced_secret(namespace).items
    return [one.metadata.name for one in found if "auth_token" in (one.data or {})]


async def test_every_shape_is_accepted_by_the_crd_and_by_the_webhook(kubeconfig: Path, namespace: str) -> None:
    """KubeRay's schema and the TPU webhook's validation, by dry runs on the real API server."""
    from raytpu_ops.backends.gke.access import KubeconfigAccess

    settings = Settings.of({"namespace": namespace})

    async def tried(api: KubeApi, shape: SliceShape) -> None:
        spec = SliceSpec.of(shape.generation.name, shape.topology, machine_type=shape.machine_type, num_slices=2)
        made = await api.apply_ray_cluster(ray_cluster("dry-run", spec, OnDemand(), settings), dry_run=True)
        (group,) = made["spec"]["workerGroupSpecs"]
        assert (group["replicas"], group["numOfHosts"]) == (2, shape.hosts), shape
        # Else nobody may have looked: the webhook does see these.
        wrong = ray_cluster("dry-run", spec, OnDemand(), settings)
        wrong["spec"]["workerGroupSpecs"][0]["numOfHosts"] = shape.hosts + 1
        with pytest.raises(Misconfigured, match="Number of workers in worker group not equal to specified topology"):
            await api.apply_ray_cluster(wrong, dry_run=True)

    async with KubeApi(KubeconfigAccess(str(kubeconfig)), namespace) as api:
        for shape in catalogue():
            await tried(api, shape)


def host_with(resources: dict[str, dict[str, str]]) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "ray-worker", "resources": resources}]}}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"spec": {"nodeSelector": {"cloud.google.com/gke-tpu-topology": "4x4x4"}}}, "follows from the spec"),
        ({"spec": {"nodeSelector": {"cloud.google.com/gke-tpu-topology": None}}}, "follows from the spec"),
        (host_with({"requests": {"google.com/tpu": "1"}}), "have 4 chips; requests"),
        (host_with({"limits": {"google.com/tpu": "1"}}), "have 4 chips; limits"),
        ({"metadata": {"labels": {"app.kubernetes.io/name": "mine"}}}, "is what GKE's TPU webhook goes by"),
    ],
    ids=["topology", "no-topology", "requests", "limits", "label"],
)
async def test_what_the_webhook_would_refuse_or_overlook_is_refused_by_us_first(
    kubeconfig: Path, any_cluster: KubernetesFaults, namespace: str, template: Any, words: str
) -> None:
    with pytest.raises(Misconfigured, match=words):
        await acquired(backend(kubeconfig, namespace=namespace, host_template=template), "refused")
    assert ours(any_cluster, namespace) == 0


async def test_a_lease_is_acquired_adopted_found_and_released(
    any_cluster: KubernetesFaults, gke: GkeBackend, namespace: str
) -> None:
    lease = await acquired(gke, "provision")
    again = await acquired(gke, "provision")

    assert again == lease
    assert ours(any_cluster, namespace) == 1
    assert await gke.find(lease.owner) == lease
    assert await gke.list_leases(dag_id="cluster", task_id="provision") == [lease]
    assert await gke.list_leases(dag_id="another") == []
    wait_until(lambda: tokens(any_cluster, namespace) == [lease.id], 60, "KubeRay makes the token")

    report = await gke.observe(lease)
    assert report.phase in (Phase.PROVISIONING, Phase.LABELLED)  # the second where there are nodes
    assert not report.ready

    await released(gke, lease)
    assert ours(any_cluster, namespace) == 0
    assert any_cluster.count("v1", "Pod", f"ray.io/cluster={lease.id}", namespace) == 0
    wait_until(lambda: tokens(any_cluster, namespace) == [], 60, "the token goes with the RayCluster")
    assert await gke.find(lease.owner) is None
    await released(gke, lease)  # and once more without harm


async def test_the_owners_lease_with_another_spec_is_not_adopted(
    any_cluster: KubernetesFaults, gke: GkeBackend, namespace: str
) -> None:
    lease = await acquired(gke, "changed")
    with pytest.raises(
        Misconfigured, match=r"exists for cluster/manual__1/changed with another spec.*release it first"
    ):
        await acquired(gke, "changed", SliceSpec.of("v4", "2x2x2", num_slices=1))
    assert ours(any_cluster, namespace) == 1
    await released(gke, lease)


async def test_a_stranger_with_the_name_is_named_and_left_alone(
    any_cluster: KubernetesFaults, gke: GkeBackend, namespace: str
) -> None:
    """F03."""
    name = lease_id(owner("stranger"))
    manifest = ray_cluster(name, V4, Spot(), gke.settings)
    clusters = any_cluster.dynamic.resources.get(api_version="ray.io/v1", kind="RayCluster")
    clusters.create(body=manifest, namespace=namespace)
    try:
        with pytest.raises(Misconfigured, match=f"RayCluster {namespace}/{name} exists and was not made by raytpu-ops"):
            await acquired(gke, "stranger")
        assert await gke.find(owner("stranger")) is None
    finally:
        clusters.delete(name=name, namespace=namespace)


async def test_a_finalizer_that_holds_is_named_while_the_chips_are_given_back(
    any_cluster: KubernetesFaults, gke: GkeBackend, namespace: str
) -> None:
    """F24, F25."""
    lease = await acquired(gke, "held")
    pods = f"ray.io/cluster={lease.id}"
    wait_until(lambda: any_cluster.count("v1", "Pod", pods) == 5, 60, "KubeRay makes the pods")
    with any_cluster.held("ray.io/v1", "RayCluster", lease.id, namespace):
        with pytest.raises(DeadlineExceeded, match="is being deleted; it is held by finalizers .*hold"):
            await give_back(gke, lease, by=datetime.now(UTC) + timedelta(seconds=15), say=print, poll_s=0.5)
        assert any_cluster.count("v1", "Pod", pods) == 0
    await released(gke, lease)


async def test_one_that_is_still_being_deleted_is_waited_for_and_made_anew(
    any_cluster: KubernetesFaults, gke: GkeBackend, namespace: str
) -> None:
    """F08."""
    first = await acquired(gke, "again")
    with any_cluster.held("ray.io/v1", "RayCluster", first.id, namespace):
        await gke.release(first)
        making = asyncio.create_task(acquired(gke, "again"))
        done, _ = await asyncio.wait([making], timeout=3)
        assert not done
    second = await making
    assert second.granted_at > first.granted_at
    await released(gke, second)


async def test_a_webhook_that_is_down_is_waited_for(control_plane: Testbed, gke: GkeBackend) -> None:
    """F16."""
    with control_plane.webhook_down():
        making = asyncio.create_task(acquired(gke, "webhook"))
        done, _ = await asyncio.wait([making], timeout=3)
        assert not done
    await released(gke, await making)


async def test_an_api_server_that_restarts_is_waited_for(control_plane: Testbed, gke: GkeBackend) -> None:
    with control_plane.api_down():
        making = asyncio.create_task(acquired(gke, "outage"))
        report = asyncio.create_task(gke.list_leases())
        done, _ = await asyncio.wait([making, report], timeout=3)
        assert not done
    lease = await making
    assert lease in await gke.list_leases()
    await report
    await released(gke, lease)


def test_a_task_killed_between_any_two_calls_is_adopted_by_its_retry(
    any_cluster: KubernetesFaults, kubeconfig: Path, namespace: str
) -> None:
    """F39: `kill -9` before and after each call that `acquire` makes, until one try survives."""

    def attempt(task: str, kill_at: int) -> int:
        return subprocess.run(
            [sys.executable, "-m", killed_acquire.__name__, str(kubeconfig), namespace, task, str(kill_at)],
            cwd=REPOSITORY,
            timeout=120,
        ).returncode

    gke, number = backend(kubeconfig, namespace=namespace), 0
    while (code := attempt(f"killed-{number}", number)) == -signal.SIGKILL:
        assert attempt(f"killed-{number}", -1) == 0
        assert ours(any_cluster, namespace) == 1
        lease = asyncio.run(gke.find(owner(f"killed-{number}")))
        assert lease is not None
        asyncio.run(released(gke, lease))
        number += 1
    assert code == 0
    assert number == 4  # before and after the look, before and after the create
    lease = asyncio.run(gke.find(owner(f"killed-{number}")))
    assert lease is not None
    asyncio.run(released(gke, lease))
    assert ours(any_cluster, namespace) == 0
    wait_until(lambda: tokens(any_cluster, namespace) == [], 60, "no token is left")
