"""How Ray and Serve are reached, and what proves who asks."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.reach import ProxyCredentials, RayCredentials, addresses, server_of, through_proxy
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.ray.http import serve_client
from raytpu_ops.tpu.capacity import OnDemand
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, RemoteUnavailable
from raytpu_ops.tpu.lease import SliceLease
from tests.testbed.pki import Authority
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import RAY_TOKEN, FakeKube, kubeconfig, refusal
from tests.unit.gke.seen import SPEC
from tests.unit.ray.fake_ray import FakeRay

Make = Callable[..., GkeBackend]
PROXY = "https://api:6443/api/v1/namespaces/ml/services/one-head-svc"


class Secret:
    """Ray's token where KubeRay keeps it."""

    def __init__(self, token: str | None) -> None:
        self.token = token
        self.reads = 0

    async def __call__(self) -> str | None:
        self.reads += 1
        return self.token


async def lease_of(backend: GkeBackend) -> SliceLease:
    return await backend.acquire(await backend.plan(SPEC, [OnDemand()], lease_for=timedelta(hours=1)), ME)


# Addresses


@pytest.mark.parametrize(
    ("options", "dashboard", "serve"),
    [
        ({}, f"{PROXY}:dashboard/proxy", f"{PROXY}:serve/proxy"),
        ({"reach": "service"}, "http://one-head-svc.ml.svc:8265", "http://one-head-svc.ml.svc:8000"),
        (
            {"dashboard_url": "https://{name}.{namespace}.example.com/ray/"},
            "https://one.ml.example.com/ray",
            f"{PROXY}:serve/proxy",
        ),
        ({"serve_url": "http://10.0.0.1:80/{name}"}, f"{PROXY}:dashboard/proxy", "http://10.0.0.1:80/one"),
        (
            {"reach": "service", "dashboard_url": "http://fixed:1", "serve_url": "http://fixed:2"},
            "http://fixed:1",
            "http://fixed:2",
        ),
    ],
    ids=str,
)
def test_ray_and_serve_have_addresses(options: dict[str, Any], dashboard: str, serve: str):
    settings = Settings.of({"namespace": "ml", **options})

    assert addresses(settings, "one", "https://api:6443/") == (dashboard, serve)
    assert (through_proxy(dashboard), through_proxy(serve)) == (PROXY in dashboard, PROXY in serve)


@pytest.mark.parametrize("setting", ["dashboard_url", "serve_url"])
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://{node}", "no other braces"),
        ("http://{}", "no other braces"),
        ("http://{0}", "no other braces"),
        ("http://{", "no other braces"),
        ("http://}", "no other braces"),
        ("http://{name.__class__}", "no other braces"),
        ("http://{name!r}", "no other braces"),
        ("http://{name:>9}", "no other braces"),
        ("{name}:8265", "is no URL"),
        ("ftp://{name}", "is no URL"),
        ("http://user:hidden-word@{name}", "carries credentials"),
        ("http://{name}?a=b", "more than a path"),
    ],
)
async def test_urls_that_cannot_be_are_refused_before_anything_is_made(
    kube: FakeKube, make: Make, setting: str, url: str, said: str
):
    with pytest.raises(InvalidSpec, match=f"{setting}: .*{said}") as refused:
        await lease_of(make(**{setting: url}))

    assert "hidden-word" not in str(refused.value)
    assert kube.calls == []


# The kubeconfig's own ways


async def test_a_proxy_in_front_of_the_api_server_leads_to_ray_too(access: KubeconfigAccess):
    assert await ProxyCredentials(access).proxy() is None
    (await access.configuration()).proxy = "http://bastion:8888"
    assert await ProxyCredentials(access).proxy() == "http://bastion:8888"


async def test_a_proxy_of_another_kind_is_refused_by_its_kind_alone(access: KubeconfigAccess):
    configuration = await access.configuration()
    configuration.proxy = "socks5://me:s3cret@bastion:1080"
    with pytest.raises(Misconfigured, match="its proxy-url is of the kind 'socks5'") as refused:
        server_of(configuration, Settings.of({}))
    assert "s3cret" not in str(refused.value)
    assert server_of(configuration, Settings.of({"reach": "service"})) == configuration.host


async def test_a_name_for_tls_alone_is_refused_before_anything_is_made(
    kube: FakeKube, access: KubeconfigAccess, make: Make
):
    (await access.configuration()).tls_server_name = "kubernetes.default"
    with pytest.raises(Misconfigured, match="tls-server-name 'kubernetes.default', which holds for Kubernetes alone"):
        await lease_of(make())
    assert [call for call in kube.calls if not call.startswith("get")] == []
    await lease_of(make(dashboard_url="https://ray.example.com", serve_url="https://serve.example.com"))


# Headers


async def test_through_the_proxy_rays_token_has_a_header_of_its_own(access: KubeconfigAccess):
    found = ProxyCredentials(access, RayCredentials(Secret("t")))

    assert await found.headers() == {"authorization": "Bearer first", "x-ray-authorization": "Bearer t"}


async def test_serve_is_not_shown_rays_token(access: KubeconfigAccess):
    assert await ProxyCredentials(access).headers() == {"authorization": "Bearer first"}


async def test_directly_rays_token_is_all_there_is():
    found = RayCredentials(Secret("t"))

    assert await found.headers() == {"authorization": "Bearer t"}
    assert await found.tls() is None


async def test_who_proves_it_by_a_certificate_shows_no_token(access: KubeconfigAccess, tmp_path: Path):
    authority = Authority(tmp_path / "pki")
    authority.issue("me", "me")
    configuration = await access.configuration()
    configuration.api_key.clear()
    configuration.ssl_ca_cert = str(authority.ca)
    configuration.cert_file, configuration.key_file = str(tmp_path / "pki/me.crt"), str(tmp_path / "pki/me.key")
    found = ProxyCredentials(access)

    assert await found.headers() == {}
    context = await found.tls()
    assert context is not None
    assert len(context.get_ca_certs()) == 1
    assert context.verify_mode is ssl.CERT_REQUIRED


async def test_a_configuration_that_trusts_everybody_is_followed(access: KubeconfigAccess):
    (await access.configuration()).verify_ssl = False
    context = await ProxyCredentials(access).tls()

    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)


async def test_a_certificate_without_its_key_is_told_as_such(access: KubeconfigAccess, tmp_path: Path):
    (await access.configuration()).cert_file = str(tmp_path / "none.crt")

    with pytest.raises(Misconfigured, match="certificates of its configuration can't be read"):
        await ProxyCredentials(access).tls()


# Ray's token


async def test_the_token_is_read_once_and_again_where_it_was_refused():
    """F38."""
    secret = Secret("old")
    found = RayCredentials(secret)
    assert [await found.headers() for _ in range(3)] == [{"authorization": "Bearer old"}] * 3
    assert secret.reads == 1

    secret.token = "new"
    assert await found.headers(renew=True) == {"authorization": "Bearer new"}
    assert await found.headers() == {"authorization": "Bearer new"}
    assert secret.reads == 2


async def test_a_token_that_is_not_there_yet_is_waited_for():
    secret = Secret(None)
    found = RayCredentials(secret)
    for _ in range(2):
        with pytest.raises(RemoteUnavailable, match="Ray's token is not there yet"):
            await found.headers()

    secret.token = "t"
    assert await found.headers() == {"authorization": "Bearer t"}


async def test_a_token_that_went_away_is_not_shown_any_more():
    secret = Secret("t")
    found = RayCredentials(secret)
    await found.headers()
    secret.token = None

    with pytest.raises(RemoteUnavailable):
        await found.headers(renew=True)


# The backend's clients


async def test_the_client_of_a_lease_goes_on_when_the_api_servers_token_expires(
    kube: FakeKube, backend: GkeBackend, lease: SliceLease, tmp_path: Path
):
    """F38: in the middle, through the proxy; Ray's own token is read anew with it."""
    kube.become_whole(lease.id)
    async with FakeRay(RAY_TOKEN) as ray, backend.ray(lease) as client:
        kube.ray = ray.address
        assert (await client.version()).ray_version == "2.60.0"

        kubeconfig(tmp_path / "kubeconfig", kube.address, "second")
        kube.tokens = {"second"}
        assert (await client.version()).ray_version == "2.60.0"

    assert ray.count("GET /api/version") == 2


async def test_a_token_of_rays_that_was_made_anew_is_read_again_through_the_proxy(
    kube: FakeKube, backend: GkeBackend, lease: SliceLease
):
    """F38."""
    kube.become_whole(lease.id)
    async with FakeRay(RAY_TOKEN) as ray, backend.ray(lease) as client:
        kube.ray = ray.address
        await client.version()
        ray.token = "another"
        kube.set_token(lease.id, "another")

        assert (await client.version()).ray_version == "2.60.0"


async def test_without_the_right_to_the_proxy_it_is_named(kube: FakeKube, backend: GkeBackend, lease: SliceLease):
    kube.become_whole(lease.id)
    said = 'User "me" cannot get resource "services/proxy" in API group "" in the namespace "ml"'
    kube.fails("get services/proxy", refusal(403, said, "Forbidden"), always=True)

    async with backend.ray(lease) as client:
        with pytest.raises(Misconfigured, match=r"'me' lacks the right to get services/proxy in namespace 'ml'.*rbac"):
            await client.version()


async def test_a_direct_address_is_shown_rays_token_and_no_other(kube: FakeKube, make: Make):
    async with FakeRay(RAY_TOKEN) as ray:
        backend = make(dashboard_url=ray.address)
        lease = await lease_of(backend)
        kube.become_whole(lease.id)
        async with backend.ray(lease) as client:
            await client.version()

    (request,) = ray.seen
    assert request.headers["authorization"] == f"Bearer {RAY_TOKEN}"
    assert "x-ray-authorization" not in request.headers
    assert kube.count("get services/proxy") == 0


async def test_serve_through_the_proxy_asks_the_api_server_alone(
    kube: FakeKube, backend: GkeBackend, lease: SliceLease
):
    credentials = backend.serve_credentials(lease)

    assert credentials is not None
    assert await credentials.headers() == {"authorization": "Bearer first"}
    assert kube.count("get secrets") == 0


@pytest.mark.parametrize("options", [{"reach": "service"}, {"serve_url": "http://models.example.com"}], ids=str)
async def test_serve_at_an_address_of_its_own_lets_everybody_in(make: Make, options: dict[str, Any]):
    backend = make(**options)

    assert backend.serve_credentials(await lease_of(backend)) is None


async def test_no_secret_is_part_of_a_lease_or_of_a_repr(kube: FakeKube, backend: GkeBackend, lease: SliceLease):
    kube.become_whole(lease.id)
    client = backend.ray(lease)
    async with client:
        with pytest.raises(RemoteUnavailable):  # nobody is behind the service
            await client.version()
    shown = f"{lease!r} {lease.to_xcom()} {backend!r} {vars(backend)!r} {client!r} {backend.serve_credentials(lease)!r}"

    assert RAY_TOKEN not in shown
    assert "first" not in shown.replace(str(lease.place["kubeconfig"]), "")


async def test_ones_own_blocking_code_asks_a_model_through_the_proxy(
    kube: FakeKube, backend: GkeBackend, lease: SliceLease, tmp_path: Path
):
    """F38: also after the API server's token has expired."""

    def ask() -> list[int]:
        with serve_client(str(lease.ray.serve_address), backend.serve_credentials(lease), 5) as client:
            first = client.get("/api/version").status_code
            kubeconfig(tmp_path / "kubeconfig", kube.address, "second")
            kube.tokens = {"second"}
            return [first, client.get("/api/version").status_code]

    async with FakeRay() as model:
        kube.ray = model.address
        assert await asyncio.to_thread(ask) == [200, 200]

    assert all("authorization" not in request.headers for request in model.seen)
    assert all("x-ray-authorization" not in request.headers for request in model.seen)


@pytest.mark.parametrize(
    "content",
    [
        "no: [yaml",
        "just text",
        "clusters: 7",
        """
apiVersion: v1
clusters: [{name: c, cluster: {server: "https://h"}}]
users: [{name: u, user: {exec: {apiVersion: client.authentication.k8s.io/v1beta1, command: no-such-plugin, args: []}}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
""",
    ],
)
async def test_a_kubeconfig_that_does_not_work_is_named_in_one_line(tmp_path, content):
    file = tmp_path / "config"
    file.write_text(content)

    with pytest.raises(Misconfigured) as refused:
        await KubeconfigAccess(str(file)).configuration()

    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)
