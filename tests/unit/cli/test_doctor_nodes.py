"""What `raytpu doctor --backend gke` says of nodes on which a lease would wait for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raytpu_ops.cli.doctor import Check
from tests.unit.cli.fake_cluster import NODES, TAINT, FakeCluster, node, nodes, plain_node

Look = Callable[..., dict[str, Check]]


def test_no_nodes_now_is_fine(cluster: FakeCluster, look: Look):
    cluster.answers[f"get {NODES}"] = nodes(plain_node())
    assert look()["TPU nodes"].ok


def test_nodes_without_chips_lack_the_device_plugin(cluster: FakeCluster, look: Look):
    cluster.answers[f"get {NODES}"] = nodes(node("pool-a", chips="0"))
    check = look()["TPU nodes"]
    assert (check.ok, check.missing) == (False, False)
    assert "device plugin" in check.help


@pytest.mark.parametrize("label", ["gke-nodepool", "gke-tpu-accelerator", "gke-tpu-topology"])
def test_chips_on_nodes_that_no_slice_can_be_placed_on_are_not_fine(cluster: FakeCluster, look: Look, label: str):
    unlabelled = node("pool-a", without=[label])
    cluster.answers[f"get {NODES}"] = nodes(unlabelled, plain_node())
    check = look()["TPU nodes"]
    assert check.missing
    assert check.found.endswith(f"pool-a-x without cloud.google.com/{label}")
    assert check.help.startswith(f"kubectl label node pool-a-x cloud.google.com/{label}=")

    cluster.answers[f"get {NODES}"] = nodes(unlabelled, node("pool-b"), plain_node())
    check = look()["TPU nodes"]
    assert (check.ok, check.missing) == (False, False), "a slice fits on the other pool"
    assert "pool-b-x" not in check.help


def test_nodes_that_lack_the_same_are_labelled_by_one_command(cluster: FakeCluster, look: Look):
    names = ["gke-nodepool", "gke-tpu-accelerator", "gke-tpu-topology"]
    cluster.answers[f"get {NODES}"] = nodes(node("a", without=names), node("b", without=names), plain_node())
    assert look()["TPU nodes"].help.startswith(
        "kubectl label node a-x b-x cloud.google.com/gke-tpu-accelerator=ACCELERATOR "
        "cloud.google.com/gke-tpu-topology=TOPOLOGY cloud.google.com/gke-nodepool=POOL"
    )


@pytest.mark.parametrize(
    ("of_the_cluster", "options", "ok"),
    [
        ([plain_node()], {}, True),
        # The machine that `gcloud container clusters create` takes where nobody names one.
        ([plain_node("940m", "2870Mi")] * 3, {}, False),
        ([plain_node(memory="7Gi")], {}, False),
        ([plain_node(memory="7Gi")], {"head": {"cpu": "500m", "memory": "4Gi"}}, True),
        ([plain_node("3920m", "13Gi", TAINT)], {}, False),
        ([plain_node("3920m", "13Gi", TAINT | {"effect": "PreferNoSchedule"})], {}, True),
        ([], {}, False),
    ],
)
def test_a_cluster_without_room_for_the_head_is_told_so(
    cluster: FakeCluster, look: Look, of_the_cluster: list[dict[str, Any]], options: dict[str, Any], ok: bool
):
    cluster.answers[f"get {NODES}"] = nodes(node("pool-a"), *of_the_cluster)
    check = look(**options)["node for the head"]
    assert check.ok is ok
    assert not check.missing, "nodes may come when pods ask for them"
    assert ("--machine-type n2-standard-4" in check.help) is not ok
