"""Which hosts are gone: Ray's word, and a knock at the door for those that died a moment ago."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from raytpu_ops.runtime import cluster, place
from raytpu_ops.runtime.cluster import host_names, lost_hosts, tpu_hosts


def node(number: int, port: int = 1, **more: Any) -> dict[str, Any]:
    """A row of ``ray.nodes()``."""
    labels = {
        "ray.io/tpu-slice-name": "s0",
        "ray.io/tpu-worker-id": str(number),
        "ray.io/tpu-pod-type": "v4-16",
    }
    return {
        "NodeID": f"n{number}",
        "Alive": True,
        "NodeManagerAddress": "127.0.0.1",
        "NodeManagerPort": port,
        "Resources": {"TPU": 4.0},
        "Labels": labels,
        **more,
    }


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    import ray

    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "nodes", lambda: rows)
    return rows


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_hosts_come_by_slice_and_worker_id_and_others_are_left_out(nodes: list[dict[str, Any]]) -> None:
    nodes += [node(1), node(0), {**node(7), "Labels": {}}, {**node(8), "Labels": {"ray.io/tpu-slice-name": "s0"}}]
    assert [(host.name, host.chips) for host in tpu_hosts()] == [("s0 worker 0", 4), ("s0 worker 1", 4)]
    assert tpu_hosts("v6e-16") == []


def test_hosts_that_share_an_address_have_no_name_by_it(nodes: list[dict[str, Any]]) -> None:
    nodes += [
        node(0),
        node(1),
        node(2, NodeManagerAddress="127.0.0.3"),
        node(3, NodeManagerAddress="127.0.0.4", Alive=False),
    ]
    assert host_names() == {"127.0.0.3": "s0 worker 2"}


def test_hosts_that_listen_are_there(nodes: list[dict[str, Any]], port: int) -> None:
    nodes += [node(0, port), node(1, port)]
    assert lost_hosts(tpu_hosts()) == []


def test_a_host_that_ray_still_believes_in_is_lost_when_nobody_listens(
    nodes: list[dict[str, Any]], port: int, closed: int
) -> None:
    nodes += [node(0, port), node(1, closed)]
    assert [host.name for host in lost_hosts(tpu_hosts(), grace_s=30)] == ["s0 worker 1"]


def test_a_host_that_ray_calls_dead_is_lost(nodes: list[dict[str, Any]], port: int) -> None:
    nodes += [node(0, port)]
    gone = replace(tpu_hosts()[0], node_id="n9", worker_id=9)
    assert lost_hosts([*tpu_hosts(), gone]) == [gone]


@pytest.mark.parametrize(("grace_s", "lost"), [(0.0, []), (0.2, ["s0 worker 0"])])
def test_a_host_that_does_not_answer_counts_only_after_the_grace(
    nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, grace_s: float, lost: list[str]
) -> None:
    nodes.append(node(0))
    monkeypatch.setattr(cluster, "_probe", lambda _host: None)
    monkeypatch.setattr(cluster, "_PAUSE_S", 0.05)
    assert [host.name for host in lost_hosts(tpu_hosts(), grace_s)] == lost


def test_a_host_that_dies_within_the_grace_is_found(
    nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.append(node(0))
    answers = iter([True, True, False])
    monkeypatch.setattr(cluster, "_probe", lambda _host: next(answers))
    monkeypatch.setattr(cluster, "_PAUSE_S", 0.01)
    began = time.monotonic()
    assert [host.name for host in lost_hosts(tpu_hosts(), grace_s=60)] == ["s0 worker 0"]
    assert time.monotonic() - began < 30, "it does not wait any longer than it must"


@pytest.mark.parametrize(
    ("config", "has_one"),
    [
        ("", False),
        ('{"metadata": {}}', False),
        ('{"runtime_env": {"env_vars": {}}}', False),
        ('{"runtime_env": {"worker_process_setup_hook": "mine.hook"}}', True),
    ],
)
def test_a_jobs_own_hook_for_its_workers_wins(config, has_one):
    assert cluster._has_hook(config) is has_one


def test_jax_does_not_take_a_pod_for_a_cluster_of_its_own(monkeypatch):
    """In a pod without a service account token its detection would raise, told everything or not."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")

    place.hide_kubernetes()

    from jax._src.clusters.k8s_cluster import K8sCluster

    assert not K8sCluster.is_env_present()
