"""A GKE cluster by its name: address, trust and tokens come from Google's APIs, by the provider's own hooks."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

WHY = "needs the extra `google`: pip install 'raytpu-ops[google]', or make test-cluster"
pytest.importorskip("airflow.providers.google.common.hooks.base_google", reason=WHY)

import grpc
from google.api_core.client_options import ClientOptions
from google.cloud.container_v1.types import Cluster

from raytpu_ops.hooks.google import GoogleAccess
from raytpu_ops.hooks.kubernetes import access_from
from raytpu_ops.tpu.errors import Misconfigured, RemoteUnavailable
from tests.google_fake.trust import authority
from tests.testbed.pki import Authority
from tests.unit.hooks.conftest import ApiServer, ask
from tests.unit.hooks.fake_google import POD, Gke, Tokens

Connect = Callable[..., str]
pytestmark = pytest.mark.core
NAME = "projects/tpu-project/locations/us-central2-b/clusters/tpus"


@pytest.fixture(scope="session")
def trust() -> Iterator[Authority]:
    """The authority of the whole process: gRPC reads its roots once."""
    found = authority()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(found.ca))
        yield found


@pytest.fixture(autouse=True)
def _stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to the real Google is a mistake of the test."""
    look_up = socket.getaddrinfo

    def local(host: Any, *args: Any, **kwargs: Any) -> Any:
        assert host in ("127.0.0.1", "localhost", None), f"a test asked for {host}"
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", local)


@pytest.fixture
def gke(trust: Authority, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gke]:
    from google.cloud import container_v1

    found = Gke(trust.folder / "localhost.crt", trust.folder / "localhost.key")
    trusted = base64.b64encode(server.authority.ca.read_bytes()).decode()
    found.clusters[NAME] = Cluster(
        name="tpus", endpoint=server.address, master_auth={"cluster_ca_certificate": trusted}
    )
    here = partial(container_v1.ClusterManagerClient, client_options=ClientOptions(api_endpoint=found.endpoint))
    monkeypatch.setattr(container_v1, "ClusterManagerClient", here)
    yield found
    found.stop()


@pytest.fixture
def by_key(tokens: Tokens, connect: Connect) -> str:
    return connect("gcp", "google_cloud_platform", keyfile_dict=json.dumps(tokens.key()))


def tpus(**more: Any) -> GoogleAccess:
    options = {"cluster_name": "tpus", "location": "us-central2-b", "gcp_conn_id": "gcp", **more}
    access, rest = access_from(options)
    assert isinstance(access, GoogleAccess)
    assert rest == {}
    return access


async def test_a_key_in_the_connection(server: ApiServer, gke: Gke, by_key: str) -> None:
    server.tokens = {"key-1"}

    assert await ask(tpus()) == 200
    assert gke.asked == [NAME]


async def test_a_key_file_and_a_project_of_the_task(
    server: ApiServer, gke: Gke, tokens: Tokens, connect: Connect, tmp_path: Path
) -> None:
    path = tmp_path / "key.json"
    path.write_text(json.dumps(tokens.key("another-project")))
    connect("gcp", "google_cloud_platform", key_path=str(path))
    server.tokens = {"key-1"}

    assert await ask(tpus(project_id="tpu-project")) == 200


async def test_workload_identity_is_what_an_empty_connection_means(
    server: ApiServer, gke: Gke, tokens: Tokens, connect: Connect
) -> None:
    connect("gcp", "google_cloud_platform")
    server.tokens = {"pod-1"}

    assert await ask(tpus()) == 200
    assert POD.startswith("pod@")
    assert tokens.given == ["pod"]


async def test_without_any_connection_the_machines_own_credentials_count(
    server: ApiServer, gke: Gke, tokens: Tokens
) -> None:
    """As for node pools and TPU VMs: what `gcloud auth application-default login` or a pod has is enough."""
    server.tokens = {"pod-1"}
    access = tpus(gcp_conn_id=None)

    assert await ask(access) == 200
    assert (tokens.given, gke.asked) == (["pod"], [NAME])
    assert access.selectors == {"cluster_name": "tpus", "location": "us-central2-b"}


async def test_machine_credentials_without_a_right_are_named_as_such(gke: Gke, tokens: Tokens) -> None:
    gke.refusal = (grpc.StatusCode.PERMISSION_DENIED, "said the test")
    with pytest.raises(
        Misconfigured, match="clusters.get .* is missing to Google's default credentials of this machine"
    ):
        await tpus(gcp_conn_id=None).configuration()


@pytest.mark.parametrize("chain", ["trainer@tpu-project.iam.gserviceaccount.com", "a@x.iam, trainer@tpu-project.iam"])
async def test_acting_as_another_account(server: ApiServer, gke: Gke, tokens: Tokens, by_key: str, chain: str) -> None:
    server.tokens = {"trainer-2"}

    assert await ask(tpus(impersonation_chain=chain)) == 200
    assert tokens.given == ["key", "trainer"]


async def test_a_token_that_lasts_is_asked_for_once(server: ApiServer, gke: Gke, tokens: Tokens, by_key: str) -> None:
    server.tokens = {"key-1"}
    access = tpus()

    assert [await ask(access) for _ in range(3)] == [200, 200, 200]
    assert (tokens.given, gke.asked) == (["key"], [NAME])


async def test_a_client_that_was_made_long_ago_gets_a_new_token(
    server: ApiServer, gke: Gke, tokens: Tokens, by_key: str
) -> None:
    """F38: a watch of hours holds one client; its token is replaced while it can still be used."""
    from kubernetes_asyncio.client import ApiClient, VersionApi

    server.tokens = {f"key-{number}" for number in range(1, 20)}
    tokens.lifetime_s = 60  # nearer to its end than the library lets it come
    async with ApiClient(await tpus().configuration()) as client:
        await VersionApi(client).get_code()
        tokens.lifetime_s = 3600
        await VersionApi(client).get_code()
        await VersionApi(client).get_code()

    assert server.asked[-1] == server.asked[-2] == f"key-{len(tokens.given)}"
    assert len(set(server.asked)) == 2
    assert gke.asked == [NAME]


async def test_renewing_asks_for_everything_again(server: ApiServer, gke: Gke, tokens: Tokens, by_key: str) -> None:
    """F38: a token that is refused may be of a cluster that was made anew."""
    server.tokens = {"key-2"}
    access = tpus()

    assert [await ask(access), await ask(access, renew=True), await ask(access)] == [401, 200, 200]
    assert gke.asked == [NAME, NAME]


async def test_the_private_address_and_the_dns_name(
    server: ApiServer, gke: Gke, by_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.tokens = {"key-1", "key-2", "key-3"}
    cluster = gke.clusters[NAME]
    cluster.endpoint = "127.0.0.1:1"
    cluster.private_cluster_config.private_endpoint = server.address
    cluster.control_plane_endpoints_config.dns_endpoint_config.endpoint = server.address.replace(
        "127.0.0.1", "localhost"
    )
    # A DNS name has a certificate that the machine trusts.
    monkeypatch.setenv("SSL_CERT_FILE", str(server.authority.ca))

    assert await ask(tpus(use_internal_ip=True)) == 200
    by_name = tpus(use_dns_endpoint=True)
    assert (await by_name.configuration()).ssl_ca_cert is None
    assert await ask(by_name) == 200


@pytest.mark.parametrize("option", ["use_internal_ip", "use_dns_endpoint"])
async def test_an_endpoint_that_the_cluster_lacks_is_named(gke: Gke, by_key: str, option: str) -> None:
    with pytest.raises(Misconfigured, match=f"us-central2-b/tpus has no endpoint for {option}"):
        await tpus(**{option: True}).configuration()


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (grpc.StatusCode.NOT_FOUND, Misconfigured, "does not exist, or not where connection 'gcp' may look"),
        (
            grpc.StatusCode.PERMISSION_DENIED,
            Misconfigured,
            r"container\.clusters\.get .*is missing to connection 'gcp'",
        ),
        (grpc.StatusCode.INVALID_ARGUMENT, Misconfigured, ": 400 said the test"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, RemoteUnavailable, "the GKE API does not answer: 429"),
        (grpc.StatusCode.INTERNAL, RemoteUnavailable, "the GKE API does not answer: 500"),
    ],
)
async def test_what_the_gke_api_refuses(
    gke: Gke, by_key: str, status: grpc.StatusCode, kind: type[Exception], message: str
) -> None:
    gke.refusal = (status, "said the test")

    with pytest.raises(kind, match=f"^GKE cluster us-central2-b/tpus[^\n]*{message}[^\n]*$"):
        await tpus().configuration()


async def test_a_key_that_is_no_longer_good(gke: Gke, tokens: Tokens, by_key: str) -> None:
    tokens.refusal = (400, {"error": "invalid_grant", "error_description": "Invalid JWT Signature."})

    with pytest.raises(Misconfigured, match="^connection 'gcp': Google gives out no token: .*invalid_grant"):
        await tpus().configuration()
    assert gke.asked == []


async def test_a_token_endpoint_that_is_down_ends_no_wait(
    gke: Gke, tokens: Tokens, by_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("google.auth._exponential_backoff.time.sleep", lambda seconds: None)
    tokens.refusal = (503, {"error": "unavailable"})

    with pytest.raises(RemoteUnavailable, match="^connection 'gcp': Google gives out no token now: .*unavailable"):
        await tpus().configuration()


@pytest.mark.parametrize(
    ("status", "word", "kind", "message"),
    [
        (403, "PERMISSION_DENIED", Misconfigured, "needs roles/iam.serviceAccountTokenCreator"),
        (503, "UNAVAILABLE", RemoteUnavailable, "gives out no token now"),
    ],
)
async def test_acting_as_another_account_is_refused(
    gke: Gke, tokens: Tokens, connect: Connect, status: int, word: str, kind: type[Exception], message: str
) -> None:
    connect("gcp", "google_cloud_platform")
    tokens.refusal = (status, {"error": {"code": status, "status": word}})

    with pytest.raises(kind, match=f"^connection 'gcp': .*{message}"):
        await tpus(impersonation_chain="trainer@tpu-project.iam.gserviceaccount.com").configuration()


async def test_an_absent_connection_is_named() -> None:
    with pytest.raises(Misconfigured, match="'nowhere' does not exist: add it with type 'google_cloud_platform'"):
        await tpus(gcp_conn_id="nowhere").configuration()
    with pytest.raises(Misconfigured, match="'google_cloud_default' does not exist"):
        await tpus(gcp_conn_id=None, impersonation_chain="trainer@tpu-project.iam").configuration()


async def test_a_broken_key_is_refused_without_its_text(connect: Connect) -> None:
    key = {"type": "service_account", "client_email": "a@b", "token_uri": "http://127.0.0.1:1", "private_key": "s3cret"}
    connect("gcp", "google_cloud_platform", keyfile_dict=json.dumps(key))

    with pytest.raises(Misconfigured, match="^connection 'gcp'") as caught:
        await tpus().configuration()
    assert "s3cret" not in f"{caught.value} {caught.value.__cause__!r}"


async def test_nothing_that_can_be_printed_holds_a_secret(
    server: ApiServer, gke: Gke, by_key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    access = tpus(project_id="tpu-project", impersonation_chain=["a@x.iam", "b@x.iam"], use_internal_ip=False)
    found = await tpus().configuration()

    assert access.selectors == {
        "cluster_name": "tpus",
        "location": "us-central2-b",
        "project_id": "tpu-project",
        "gcp_conn_id": "gcp",
        "impersonation_chain": "a@x.iam,b@x.iam",
    }
    assert access_from(access.selectors)[0].selectors == access.selectors
    assert tpus(use_dns_endpoint=True).selectors["use_dns_endpoint"] == "true"
    assert "key-1" not in f"{access!r} {found!r} {caplog.text}"
    assert "PRIVATE KEY" not in caplog.text
