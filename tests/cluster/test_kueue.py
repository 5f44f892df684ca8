"""Kueue on the testbed: over quota means suspended, and it says so in its own words."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from tests.cluster.manifests import ray_cluster
from tests.testbed.client import Testbed
from tests.testbed.faults import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_VERSION = "kueue.x-k8s.io/v1beta2"


def make(testbed: Testbed, kind: str, name: str, spec: dict[str, Any], namespace: str | None = None) -> None:
    body = {"apiVersion": _VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
    testbed.dynamic.resources.get(api_version=_VERSION, kind=kind).create(body=body, namespace=namespace)


def conditions(testbed: Testbed, cluster: str) -> dict[str, tuple[str, str]]:
    """Of the Workload of a RayCluster: type -> status and message."""
    workloads = testbed.dynamic.resources.get(api_version=_VERSION, kind="Workload").get().to_dict()["items"]
    return {
        one["type"]: (one["status"], one["message"])
        for workload in workloads
        if workload["metadata"]["ownerReferences"][0]["name"] == cluster
        for one in (workload.get("status") or {}).get("conditions") or []
    }


def test_a_cluster_over_quota_stays_suspended_and_one_within_it_is_admitted(queued: Testbed) -> None:
    def group(resources: dict[str, str], flavor: str) -> dict[str, Any]:
        quotas = [{"name": name, "nominalQuota": quota} for name, quota in resources.items()]
        return {"coveredResources": list(resources), "flavors": [{"name": flavor, "resources": quotas}]}

    make(queued, "ResourceFlavor", "v4", {"nodeLabels": {"cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice"}})
    make(queued, "ResourceFlavor", "any", {})
    groups = [group({"google.com/tpu": "8"}, "v4"), group({"cpu": "100", "memory": "100Gi"}, "any")]
    make(queued, "ClusterQueue", "tpus", {"namespaceSelector": {}, "resourceGroups": groups})
    make(queued, "LocalQueue", "team", {"clusterQueue": "tpus"}, "default")

    clusters = queued.dynamic.resources.get(api_version="ray.io/v1", kind="RayCluster")
    label = {"kueue.x-k8s.io/queue-name": "team"}
    clusters.create(body=ray_cluster("large", slices=2, labels=label), namespace="default")
    clusters.create(body=ray_cluster("small", slices=1, labels=label), namespace="default")

    wait_until(lambda: "QuotaReserved" in conditions(queued, "large"), 60, "no word of the large one")
    status, message = conditions(queued, "large")["QuotaReserved"]
    assert status == "False"
    assert "insufficient quota for google.com/tpu in flavor v4" in message
    wait_until(
        lambda: conditions(queued, "small").get("Admitted", ("", ""))[0] == "True", 60, "the small one is not admitted"
    )
    wait_until(lambda: not clusters.get(name="small", namespace="default").spec.suspend, 60, "it stays suspended")
    assert clusters.get(name="large", namespace="default").spec.suspend is True
