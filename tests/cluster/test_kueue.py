"""Kueue on the testbed: over quota means suspended, and it says so in its own words."""

from __future__ import annotations

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from tests.cluster.manifests import ray_cluster
from tests.cluster.queues import quota, workloads
from tests.testbed.client import Testbed
from tests.testbed.faults import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def conditions(testbed: Testbed, cluster: str) -> dict[str, tuple[str, str]]:
    """Of the Workload of a RayCluster: type -> status and message."""
    return {
        one["type"]: (one["status"], one["message"])
        for workload in workloads(testbed, "default")
        if workload["metadata"]["ownerReferences"][0]["name"] == cluster
        for one in (workload.get("status") or {}).get("conditions") or []
    }


def test_a_cluster_over_quota_stays_suspended_and_one_within_it_is_admitted(queued: Testbed) -> None:
    clusters = queued.dynamic.resources.get(api_version="ray.io/v1", kind="RayCluster")
    with quota(queued, "default", chips=8) as queue:
        label = {"kueue.x-k8s.io/queue-name": queue.name}
        clusters.create(body=ray_cluster("large", slices=2, labels=label), namespace="default")
        clusters.create(body=ray_cluster("small", slices=1, labels=label), namespace="default")

        wait_until(lambda: "QuotaReserved" in conditions(queued, "large"), 60, "no word of the large one")
        status, message = conditions(queued, "large")["QuotaReserved"]
        assert status == "False"
        assert f"insufficient quota for google.com/tpu in flavor {queue.flavor}" in message
        wait_until(
            lambda: conditions(queued, "small").get("Admitted", ("", ""))[0] == "True",
            60,
            "the small one is not admitted",
        )
        wait_until(lambda: not clusters.get(name="small", namespace="default").spec.suspend, 60, "it stays suspended")
        assert clusters.get(name="large", namespace="default").spec.suspend is True
        for name in ("large", "small"):
            clusters.delete(name=name, namespace="default", body={"propagationPolicy": "Foreground"})
        wait_until(lambda: not queued.count("ray.io/v1", "RayCluster"), 60, "a RayCluster is left")
