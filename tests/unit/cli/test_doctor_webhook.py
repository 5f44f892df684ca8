"""What `raytpu doctor` finds out about the TPU webhook, with many rights and with few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kmock
import pytest

from raytpu_ops.cli.doctor import Check
from tests.unit.cli.fake_cluster import PODS, RAY_CLUSTERS, WEBHOOKS, FakeCluster, admitted, refusal, webhook


def test_who_may_not_create_pods_has_the_webhook_refuse_a_ray_cluster(look: Callable[[], dict[str, Check]]):
    assert look()["TPU webhook"].found == "refuses a RayCluster with too many hosts for its topology"


def test_who_may_create_pods_has_the_webhook_give_an_id(cluster: FakeCluster, look: Callable[[], dict[str, Check]]):
    cluster.refused.clear()
    assert look()["TPU webhook"] == Check("TPU webhook", True, "gives each host its TPU_WORKER_ID")


@pytest.mark.parametrize("worker_id", ["1", None])
def test_a_sidecar_that_another_webhook_adds_is_not_taken_for_the_host(
    cluster: FakeCluster, look: Callable[[], dict[str, Check]], worker_id: str | None
):
    def with_sidecar(request: kmock.Request) -> Any:
        pod = admitted(request.data, worker_id)
        proxy = {"name": "istio-proxy", "image": "proxy", "env": [{"name": "TPU_WORKER_ID", "value": "7"}]}
        pod["spec"]["containers"].insert(0, proxy)
        return pod

    cluster.refused.clear()
    cluster.answers[f"post {PODS}"] = with_sidecar
    check = look()["TPU webhook"]
    assert check.ok is (worker_id is not None)
    assert check.found.startswith("gives each host its" if check.ok else "pods get no TPU_WORKER_ID")


def test_a_webhook_that_does_not_number_hosts(cluster: FakeCluster, look: Callable[[], dict[str, Check]]):
    cluster.refused.clear()
    cluster.answers[f"post {PODS}"] = lambda request: admitted(request.data, "0")
    check = look()["TPU webhook"]
    assert (check.ok, check.missing) == (False, False)
    assert "gives host 1 the TPU_WORKER_ID 0" in check.found


@pytest.mark.parametrize(
    ("may_create_pods", "registered"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_a_webhook_that_does_nothing_or_is_none(
    cluster: FakeCluster, look: Callable[[], dict[str, Check]], may_create_pods: bool, registered: bool
):
    cluster.refused = set() if may_create_pods else {"create pods"}
    cluster.answers[f"post {PODS}"] = lambda request: admitted(request.data, None)
    cluster.answers[f"post {RAY_CLUSTERS}"] = (201, {})
    if not registered:
        others = [webhook("istio", "pods") | {"webhooks": [{"name": "a", "rules": []}]}, webhook(resource="services")]
        cluster.answers[f"get {WEBHOOKS}"] = (200, {"items": others})
    check = look()["TPU webhook"]
    assert check.missing
    assert ("is registered" in check.found) is registered
    assert ("RayOperator=ENABLED" in check.help) is not registered


@pytest.mark.parametrize("may_create_pods", [True, False])
def test_a_webhook_that_does_not_answer_is_named(
    cluster: FakeCluster, look: Callable[[], dict[str, Check]], may_create_pods: bool
):
    cluster.refused = set() if may_create_pods else {"create pods"}
    down = refusal(500, 'failed calling webhook "kuberay-tpu-webhook.ray-system.svc": connection refused')
    cluster.answers[f"post {PODS}"] = cluster.answers[f"post {RAY_CLUSTERS}"] = down
    check = look()["TPU webhook"]
    assert check.missing
    assert "kuberay-tpu-webhook.ray-system.svc" in check.found


def test_a_policy_that_refuses_the_dry_run_leaves_the_webhook_unseen(
    cluster: FakeCluster, look: Callable[[], dict[str, Check]]
):
    cluster.answers[f"post {RAY_CLUSTERS}"] = refusal(403, "exceeded quota: no rayclusters here")
    check = look()["TPU webhook"]
    assert (check.seen, check.missing) == (False, False)
    assert "exceeded quota" in check.found


def test_without_any_right_the_webhooks_registration_is_all_there_is_to_see(
    cluster: FakeCluster, look: Callable[[], dict[str, Check]]
):
    cluster.refused = {"create pods", "create rayclusters"}
    assert "whether it answers was not tried" in look()["TPU webhook"].found
    cluster.answers[f"get {WEBHOOKS}"] = (200, {"items": []})
    assert look()["TPU webhook"].missing
    cluster.answers[f"get {WEBHOOKS}"] = refusal(403, "forbidden")
    assert not look()["TPU webhook"].seen
