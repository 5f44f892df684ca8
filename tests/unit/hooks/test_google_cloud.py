"""Options of a connection, a task and a lease say who acts at Google, for node pools and for TPU VMs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from airflow.sdk import BaseHook
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import RefreshError

from raytpu_ops.backends.google.access import CloudAccess, DefaultAccess, HeldAccess
from raytpu_ops.hooks import google_cloud
from raytpu_ops.hooks.google import GoogleAccess
from raytpu_ops.hooks.google_cloud import cloud_from
from raytpu_ops.hooks.kubernetes import ByName
from raytpu_ops.hooks.ray_tpu import RayTpuHook
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.spec import SliceSpec

Connect = Callable[..., str]
CLUSTER = "projects/p/locations/us-central2-b/clusters/tpus"


@pytest.fixture(params=[True, False], ids=["with the provider", "without"])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the Google provider is installed; it is imported only when credentials are fetched."""
    there: bool = request.param
    monkeypatch.setattr(google_cloud, "find_spec", lambda name: object() if there else None)
    return there


def lease(conn_id: str | None, backend: str, place: dict[str, str]) -> SliceLease:
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


def cloud(hook: RayTpuHook) -> CloudAccess:
    backend: Any = hook.backend
    found = backend.cloud if hook.backend.name == "tpu_vm" else backend._pools._cloud
    assert isinstance(found, HeldAccess)
    return found


class TestOptions:
    def test_empty_fields_say_nothing(self, provider: bool) -> None:
        found, rest = cloud_from({"project_id": "", "gcp_conn_id": None, "zones": ["z"]}, "tpu_vm")
        assert (found.selectors, rest) == ({}, {"zones": ["z"]})
        assert isinstance(found, DefaultAccess) is not provider

    def test_they_are_found_again_as_text(self, provider: bool) -> None:
        asked = {"project_id": "p", "google_endpoints": {"tpu": "localhost:1", "compute": "localhost:2"}}
        found, _ = cloud_from(asked, "tpu_vm")
        assert found.selectors == {"project_id": "p", "google_endpoints": "compute=localhost:2,tpu=localhost:1"}
        again, _ = cloud_from(found.selectors, "tpu_vm")
        assert (again.selectors, again.endpoints) == (found.selectors, asked["google_endpoints"])

    @pytest.mark.parametrize("option", [{"gcp_conn_id": "gcp"}, {"impersonation_chain": "a@x.iam"}])
    def test_what_only_the_provider_has_says_how_to_get_it(
        self, monkeypatch: pytest.MonkeyPatch, option: dict[str, str]
    ) -> None:
        monkeypatch.setattr(google_cloud, "find_spec", lambda name: None)
        with pytest.raises(Misconfigured, match=r"needs the Google provider: pip install 'raytpu-ops\[google\]'"):
            cloud_from(option, "tpu_vm")

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"google_endpoints": {"gke": "localhost:1"}}, "google_endpoints: there is no API 'gke'"),
            ({"google_endpoints": "localhost:1"}, "google_endpoints: must be addresses by API"),
            ({"google_endpoints": {"tpu": "https://tpu.example.net"}}, "google_endpoints.tpu: must be 'host:port'"),
            ({"project_id": 7}, "backend 'tpu_vm': project_id"),
        ],
    )
    def test_what_is_wrong_is_named(self, option: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidSpec, match=message):
            cloud_from(option, "tpu_vm")

    @pytest.mark.parametrize("address", ["http://u:SEKRET@h", "u:SEKRET@h:443", "h:443/SEKRET"])
    def test_an_address_with_a_password_is_refused_without_it(self, provider: bool, address: str) -> None:
        with pytest.raises(InvalidSpec, match="google_endpoints.tpu: must be 'host:port'") as caught:
            cloud_from({"google_endpoints": {"tpu": address}}, "tpu_vm")
        assert "SEKRET" not in str(caught.value)

    @pytest.mark.parametrize("address", ["tpu.example.net", "10.0.0.1:8443", "[fd00::1]:443", "localhost:1"])
    def test_an_address_is_a_host_and_a_port(self, provider: bool, address: str) -> None:
        found, _ = cloud_from({"google_endpoints": {"tpu": address}}, "tpu_vm")
        assert found.endpoints == {"tpu": address}


class TestTpuVms:
    def test_a_task_goes_over_the_connection(self, provider: bool, connect: Connect) -> None:
        connect("tpus", "ray_tpu", backend="tpu_vm", project_id="p", zones="us-central2-b", root="")
        hook = RayTpuHook("tpus", options={"project_id": "q", "zones": ["us-east5-b"]})
        assert cloud(hook).selectors == {"project_id": "q"}
        assert hook.backend.settings.zones == ["us-east5-b"]  # type: ignore[attr-defined]

    def test_a_lease_leads_to_the_account_that_got_it(self, provider: bool, connect: Connect) -> None:
        connect("tpus", "ray_tpu", backend="tpu_vm", project_id="p", zones="us-central2-b", google_endpoints="tpu=a:1")
        place = {"zones": "us-east5-b,us-east5-c", "project_id": "q"}
        hook = RayTpuHook.for_lease(lease("tpus", "tpu_vm", place))
        assert cloud(hook).selectors == {"project_id": "q"}
        assert hook.backend.settings.zones == ["us-east5-b", "us-east5-c"]  # type: ignore[attr-defined]

    def test_what_a_task_said_of_a_ray_head_is_not_needed_by_those_that_come_after(
        self, provider: bool, connect: Connect
    ) -> None:
        """F43: the token is in the connection, the head in the DAG; the reaper has no lease's place either."""
        connect("tpus", "ray_tpu", backend="tpu_vm", zones="us-central2-b", ray_token="the-users-own")
        head = {"ray_head": "10.0.0.1:6379", "dashboard_url": "http://10.0.0.1:8265"}
        granting = RayTpuHook("tpus", options=head).backend
        assert granting.settings.ray_head == "10.0.0.1:6379"  # type: ignore[attr-defined]
        assert RayTpuHook.for_lease(lease("tpus", "tpu_vm", {"zones": "us-east5-b"})).backend.name == "tpu_vm"
        assert RayTpuHook("tpus").backend.name == "tpu_vm"


class TestNodePools:
    def test_without_them_google_is_not_asked(self, connect: Connect) -> None:
        connect("tpus", "ray_tpu", backend="gke", kubeconfig="/k")
        backend: Any = RayTpuHook("tpus").backend
        assert backend._pools is None

    @pytest.mark.parametrize("asked", [True, {}, "{}", "true"])
    def test_nothing_further_about_them_asks_for_some(self, provider: bool, connect: Connect, asked: object) -> None:
        connect("tpus", "ray_tpu", backend="gke", kubeconfig="/k", project_id="p")
        hook = RayTpuHook("tpus", options={"node_pools": asked})
        assert cloud(hook).selectors == {"project_id": "p"}
        assert hook.cloud is cloud(hook)

    @pytest.mark.parametrize("off", [False, "false", ""])
    def test_a_task_turns_the_connections_off(self, connect: Connect, off: object) -> None:
        connect("tpus", "ray_tpu", backend="gke", kubeconfig="/k", node_pools={"cluster": CLUSTER})
        hook = RayTpuHook("tpus", options={"node_pools": off})
        backend: Any = hook.backend
        assert backend.settings.node_pools is None
        assert hook.cloud is None

    def test_a_kubeconfig_leads_to_the_server_and_an_account_to_the_pools(
        self, provider: bool, connect: Connect
    ) -> None:
        connect("tpus", "ray_tpu", backend="gke", kubeconfig="/k", node_pools={"cluster": CLUSTER}, project_id="p")
        hook = RayTpuHook("tpus", options={"google_endpoints": {"container": "localhost:1"}})
        backend: Any = hook.backend
        assert backend.access.selectors == {"kubeconfig": "/k"}
        assert cloud(hook).selectors == {"project_id": "p", "google_endpoints": "container=localhost:1"}

    def test_a_task_may_say_who_makes_the_pools_and_keeps_the_way_to_the_server(
        self, provider: bool, connect: Connect
    ) -> None:
        connect("tpus", "ray_tpu", backend="gke", kubeconfig="/k")
        hook = RayTpuHook("tpus", options={"node_pools": {"cluster": CLUSTER}, "project_id": "q"})
        backend: Any = hook.backend
        assert backend.access.selectors == {"kubeconfig": "/k"}
        assert cloud(hook).selectors == {"project_id": "q"}

    def test_a_lease_leads_to_both_again(self, provider: bool, connect: Connect) -> None:
        connect("tpus", "ray_tpu", backend="gke", kubernetes_conn_id="k8s", project_id="p")
        place = {
            "namespace": "ml",
            "kubeconfig": "/k",
            "node_pools": f'{{"cluster": "{CLUSTER}"}}',
            "project_id": "q",
            "google_endpoints": "container=localhost:1",
            "zone": "us-central2-b",
        }
        hook = RayTpuHook.for_lease(lease("tpus", "gke", place))
        backend: Any = hook.backend
        assert backend.access.selectors == {"kubeconfig": "/k"}
        assert backend.settings.namespace == "ml"
        assert backend.settings.node_pools.cluster == CLUSTER
        assert cloud(hook).selectors == {"project_id": "q", "google_endpoints": "container=localhost:1"}


class TestTheConnection:
    """What the provider is asked, and what is made of its answers; its hook is played."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
        """The connections from which credentials were taken. This machine has none of its own."""
        names: list[str] = []

        class Hook(BaseHook):
            def __init__(self, gcp_conn_id: str, impersonation_chain: list[str] | None = None) -> None:
                self.conn_id = gcp_conn_id

            def get_credentials_and_project_id(self) -> tuple[object, str | None]:
                names.append(self.conn_id)
                return AnonymousCredentials(), "p"

        module = ModuleType("base_google")
        module.GoogleBaseHook = Hook  # type: ignore[attr-defined]
        name = "airflow.providers.google"
        for parent in (name, f"{name}.common", f"{name}.common.hooks"):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, f"{name}.common.hooks.base_google", module)
        monkeypatch.setattr(google_cloud, "find_spec", lambda name: object())
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
        return names

    async def test_an_absent_default_is_not_blamed(self, asked: list[str]) -> None:
        found, _ = cloud_from({}, "tpu_vm")
        told = r"Google's default credentials of this machine \(there is no connection 'google_cloud_default'\): no"
        with pytest.raises(Misconfigured, match=f"^{told}"):
            await found.credentials()
        assert asked == []

    async def test_nor_where_this_machine_gets_no_token_for_a_cluster(
        self, asked: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Refused(AnonymousCredentials):  # type: ignore[misc]
            def refresh(self, request: object) -> None:
                raise RefreshError("revoked")

        monkeypatch.setattr("google.auth.default", lambda scopes: (Refused(), "p"))
        found = GoogleAccess(ByName(cluster_name="tpus", location="us-central2-b"))
        told = r"Google's default credentials of this machine \(there is no connection 'google_cloud_default'\): Google"
        with pytest.raises(Misconfigured, match=f"^{told} gives out no token: revoked"):
            await found.configuration()
        assert asked == []

    async def test_a_named_one_that_is_absent_is_an_error(self, asked: list[str]) -> None:
        found, _ = cloud_from({"gcp_conn_id": "nowhere"}, "tpu_vm")
        with pytest.raises(Misconfigured, match="^connection 'nowhere' does not exist: add it with type"):
            await found.credentials()

    @pytest.mark.parametrize("option", [{}, {"gcp_conn_id": "google_cloud_default"}])
    async def test_one_of_another_type_is_refused(
        self, asked: list[str], connect: Connect, option: dict[str, str]
    ) -> None:
        connect("google_cloud_default", "aws")
        found, _ = cloud_from(option, "tpu_vm")
        with pytest.raises(Misconfigured, match="^connection 'google_cloud_default' is of type 'aws', and a Google"):
            await found.credentials()
        assert asked == []

    async def test_one_of_the_right_type_is_used(self, asked: list[str], connect: Connect) -> None:
        connect("google_cloud_default", "google_cloud_platform")
        found, _ = cloud_from({}, "tpu_vm")
        assert await found.project() == "p"
        assert asked == ["google_cloud_default"]
