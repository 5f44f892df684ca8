"""How far node pools have come is written on the RayCluster: a real API server takes it only as it was seen."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.backends.gke.manifest import ray_cluster
from raytpu_ops.backends.gke.node_pools import own_nodes
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.tpu.capacity import OnDemand
from raytpu_ops.tpu.errors import RemoteUnavailable
from tests.cluster.leases import V4
from tests.testbed.faults import KubernetesFaults
from tests.waiting import eventually_async

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(600)]

RBAC = Path(__file__).parents[2] / "deploy" / "gke" / "rbac.yaml"
NAME = "changes"


async def test_a_raycluster_changes_as_it_was_seen_or_not_at_all(any_cluster: KubernetesFaults) -> None:
    with any_cluster.namespace("gke-changes") as namespace:
        manifest = ray_cluster(NAME, V4, OnDemand(), Settings.of({"namespace": namespace}), own_nodes(NAME))
        manifest["spec"]["suspend"] = True
        access = KubeconfigAccess(str(any_cluster.kubeconfig_for(RBAC, namespace)))
        async with KubeApi(access, namespace) as api:
            await api.apply_ray_cluster(manifest)

            seen = await api.ray_cluster(NAME)
            assert seen is not None

            async def changed() -> bool:
                """KubeRay writes its status meanwhile, and whoever comes later looks again."""
                nonlocal seen
                seen = await api.ray_cluster(NAME)
                assert seen is not None
                try:
                    return await api.change_ray_cluster(seen, {"a": "1"}, suspend=True)
                except RemoteUnavailable:
                    return False

            await eventually_async(changed, "it is changed")
            with pytest.raises(RemoteUnavailable, match="the object has been modified"):
                await api.change_ray_cluster(seen, {"a": "2"}, suspend=False)
            now = await api.ray_cluster(NAME)
            assert now is not None
            assert (now["metadata"]["annotations"]["a"], now["spec"]["suspend"]) == ("1", True)
            assert now["spec"]["workerGroupSpecs"] == seen["spec"]["workerGroupSpecs"]

            await api.delete_ray_cluster(NAME, now["metadata"]["uid"])

            async def gone() -> bool:
                return await api.ray_cluster(NAME) is None

            await eventually_async(gone, "it is gone")
            assert not await api.change_ray_cluster(now, {"a": "3"}, suspend=False)
