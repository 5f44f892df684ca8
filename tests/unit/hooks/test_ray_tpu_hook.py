"""A connection, a task's options and a lease become a backend on the right cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.hooks.ray_tpu import RayTpuHook
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.spec import SliceSpec

Connect = Callable[..., str]
#: A lease on nodes that exist already.
WITHOUT_POOLS: Any = SimpleNamespace(pools=None)


def lease(conn_id: str | None, backend: str = "gke", **place: str) -> SliceLease:
    return SliceLease(
        id="d-1",
        owner=Owner(dag_id="d", run_id="r", task_id="t"),
        backend=backend,
        spec=SliceSpec.of("v4", "2x2x2"),
        place=place,
        ray=RayEndpoint(address="http://127.0.0.1:1"),
        conn_id=conn_id,
        granted_at=datetime.now(UTC),
        expires_at=datetime.now(UTC) + timedelta(hours=1),
    )


def gke(hook: RayTpuHook) -> GkeBackend:
    backend = hook.backend
    assert isinstance(backend, GkeBackend)
    return backend


def test_a_gke_connection_says_which_cluster_and_what_is_made_there(connect: Connect) -> None:
    connect("tpus", "ray_tpu", backend="gke", kubernetes_conn_id="k8s", namespace="ml", queue="", use_internal_ip=False)

    backend = gke(RayTpuHook("tpus"))

    assert backend.access.selectors == {"kubernetes_conn_id": "k8s"}
    assert (backend.settings.namespace, backend.settings.queue) == ("ml", None)


def test_without_a_connection_a_task_says_it_all() -> None:
    backend = gke(RayTpuHook(None, "gke", options={"kubeconfig": "/k", "namespace": "ml", "queue": None}))

    assert backend.access.selectors == {"kubeconfig": "/k"}
    assert backend.settings.namespace == "ml"


def test_a_tasks_options_go_over_the_connections(connect: Connect) -> None:
    connect("tpus", "ray_tpu", backend="gke", kubeconfig="/k", namespace="ml", image="ray:1")

    backend = gke(RayTpuHook("tpus", options={"namespace": "eval"}))

    assert backend.access.selectors == {"kubeconfig": "/k"}
    assert (backend.settings.namespace, backend.settings.image) == ("eval", "ray:1")


def test_a_lease_leads_to_the_cluster_that_granted_it(connect: Connect) -> None:
    connect("tpus", "ray_tpu", backend="gke", kubeconfig="/k", namespace="ml", image="ray:1")
    granted = gke(RayTpuHook("tpus", options={"kubernetes_conn_id": "k8s", "namespace": "eval"}))

    later = gke(RayTpuHook.for_lease(lease("tpus", **granted._place(WITHOUT_POOLS))))

    assert later.access.selectors == {"kubernetes_conn_id": "k8s"}
    assert (later.settings.namespace, later.settings.image) == ("eval", "ray:1")


def test_local_takes_options_too(tmp_path: Path, connect: Connect) -> None:
    connect("here", "ray_tpu", backend="local", root="/nowhere", use_internal_ip=False, use_dns_endpoint=None)

    backend: Any = RayTpuHook("here", options={"root": str(tmp_path)}).backend

    assert str(tmp_path) in str(backend.root.path)


def test_options_may_be_the_json_that_a_template_renders() -> None:
    backend = gke(RayTpuHook(None, "gke", options='{"kubeconfig": "/k", "namespace": "ml"}'))
    assert backend.settings.namespace == "ml"
    assert gke(RayTpuHook(None, "gke", options=" ")).settings.namespace == "default"


@pytest.mark.parametrize("options", ["namespace=ml", "[]", ["namespace"], 7, "null"])
def test_options_that_are_none_are_refused_in_one_line(options: Any) -> None:
    with pytest.raises(InvalidSpec, match="^backend_options: must be a dict of the backend's options or its JSON, got"):
        RayTpuHook(None, "gke", options=options)


def test_an_option_that_no_backend_has_is_refused_by_name(connect: Connect) -> None:
    connect("tpus", "ray_tpu", backend="gke", namespce="ml")

    with pytest.raises(InvalidSpec, match="backend 'gke': namespce: there is no such field; did you mean 'namespace'"):
        _ = RayTpuHook("tpus").backend


def test_a_connection_of_another_backend_is_not_used(connect: Connect) -> None:
    connect("here", "ray_tpu", backend="local")

    with pytest.raises(InvalidSpec, match="'gke' was asked for, but connection 'here' is for 'local'"):
        _ = RayTpuHook("here", "gke").backend


def test_an_absent_connection_is_named() -> None:
    with pytest.raises(Misconfigured, match="connection 'nowhere' does not exist"):
        _ = RayTpuHook("nowhere", "gke").backend


def test_an_extra_that_is_no_object_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_TPUS", json.dumps({"conn_type": "ray_tpu", "extra": [1]}))
    with pytest.raises(InvalidSpec, match="connection 'tpus': its extra must be a JSON object"):
        RayTpuHook("tpus").backend  # noqa: B018 - it is made when it is asked for


@pytest.mark.parametrize("conn_id", [None, "tpus"])
def test_a_connection_that_cannot_be_read_is_no_absent_or_empty_one(
    monkeypatch: pytest.MonkeyPatch, conn_id: str | None
) -> None:
    """Slices would be made in another cluster, or leases looked for there."""
    variable = f"AIRFLOW_CONN_{(conn_id or 'ray_tpu_default').upper()}"
    monkeypatch.setenv(variable, json.dumps({"conn_type": "ray_tpu", "extra": '{"namespace": "ml",}'}))
    with pytest.raises(InvalidSpec, match="its extra is not JSON"):
        _ = RayTpuHook(conn_id, "gke").backend
    monkeypatch.setenv(variable, '{"conn_type": "ray_tpu", "extra": {"namespace": "ml",}}')
    with pytest.raises(Misconfigured, match=f"{variable} is set, and Airflow cannot read it"):
        _ = RayTpuHook(conn_id, "gke").backend


def test_a_far_side_that_is_away_is_told_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    backend = gke(RayTpuHook(None, "gke", options={"kubeconfig": "/k"}))
    backend.patience.say("the API server does not answer")
    assert "the API server does not answer" in capsys.readouterr().out + capsys.readouterr().err


def test_a_task_that_wants_no_pools_needs_nobody_who_makes_them(connect: Connect) -> None:
    connect("tpus", "ray_tpu", backend="gke", kubeconfig="/k", project_id="p", gcp_conn_id="gcp", node_pools={})

    backend = gke(RayTpuHook("tpus", options={"node_pools": False}))

    assert backend.settings.node_pools is None
    assert backend.access.selectors == {"kubeconfig": "/k"}
