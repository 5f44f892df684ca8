"""Certificates, credentials and Ray's token: renewed where they expire, and never shown."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.backends.gke.reach import ProxyCredentials, RayCredentials, tls_context
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, RayTpuError
from tests.unit.gke.calls import CALLS, every_call
from tests.unit.gke.fake_kube import (
    FORBIDDEN,
    NAMESPACE,
    RAY_TOKEN,
    RESET,
    SECRETS,
    UNAUTHORIZED,
    WORKLOADS,
    FakeKube,
    Serving,
    kubeconfig,
)
from tests.unit.ray.credentials import tls_pair

# TLS


async def test_the_authority_of_the_configuration_is_trusted_and_no_other(tmp_path: Path):
    shown, trusted = tls_pair(tmp_path / "pki")
    async with Serving(FakeKube(), shown) as kube:
        authority = base64.b64encode((tmp_path / "pki" / "ca.crt").read_bytes()).decode()
        file = kubeconfig(tmp_path / "with", kube.address, **{"certificate-authority-data": authority})
        async with KubeApi(KubeconfigAccess(str(file)), NAMESPACE) as api:
            assert await api.ray_cluster("one") is None
        configuration = await KubeconfigAccess(str(file)).configuration()
        assert tls_context(configuration).get_ca_certs() == trusted.get_ca_certs()

        async with KubeApi(KubeconfigAccess(str(kubeconfig(tmp_path / "no", kube.address))), NAMESPACE) as api:
            with pytest.raises(Misconfigured, match="its certificate is not trusted here"):
                await api.ray_cluster("one")
        assert kube.calls == ["get rayclusters"]


@pytest.mark.parametrize("content", [None, b"no certificate"], ids=["missing", "nonsense"])
async def test_certificates_that_cannot_be_read_are_told_as_such(access: KubeconfigAccess, tmp_path: Path, content):
    configuration = await access.configuration()
    file = tmp_path / "ca.crt"
    configuration.ssl_ca_cert = str(file)
    if content:
        await asyncio.to_thread(file.write_bytes, content)

    with pytest.raises(Misconfigured, match="certificates of its configuration can't be read"):
        async with KubeApi(access, NAMESPACE):
            pass
    with pytest.raises(Misconfigured, match="certificates of its configuration can't be read"):
        await ProxyCredentials(access).tls()


# Credentials


@every_call
async def test_credentials_that_expired_are_renewed_and_the_call_goes_on(
    kube: FakeKube, api: KubeApi, tmp_path: Path, call: str
):
    """F38."""
    kube.kinds |= set(WORKLOADS.values())
    kubeconfig(tmp_path / "kubeconfig", kube.address, "second")
    kube.tokens = {"second"}

    await CALLS[call](api)
    await CALLS[call](api)

    assert kube.calls == [call] * 3


@every_call
async def test_renewed_credentials_that_are_refused_end_it_after_one_more_try(kube: FakeKube, api: KubeApi, call: str):
    kube.fails(call, UNAUTHORIZED, always=True)

    with pytest.raises(Misconfigured, match="credentials, also renewed ones, are not valid there"):
        await CALLS[call](api)

    assert kube.calls == [call] * 2


async def test_whoever_gives_out_credentials_and_fails_is_heard(kube: FakeKube, api: KubeApi, tmp_path: Path):
    kube.tokens = {"second"}
    (tmp_path / "kubeconfig").unlink()

    with pytest.raises(Misconfigured, match="is no file on this machine"):
        await api.ray_cluster("one")


# The token of Ray


def secret(data: dict[str, str] | None) -> dict[str, Any]:
    return {"kind": "Secret", "metadata": {"name": "one"}, "data": data}


@pytest.mark.parametrize("data", [None, {}, {"auth_token": ""}, {"other": "eA=="}, {"auth_token": "ICAK"}])
async def test_a_secret_that_is_not_filled_yet_has_no_token(kube: FakeKube, api: KubeApi, data):
    kube.store(SECRETS, secret(data))

    assert await api.token("one") is None


@pytest.mark.parametrize(
    "data",
    [
        {"auth_token": "c2VjcmV0LXRleHQ"},  # cut
        {"auth_token": "not base64: secret-text"},
        {"auth_token": base64.b64encode(b"secret-text \xff").decode()},
        {"auth_token": ["secret-text"]},
        "secret-text",
    ],
)
async def test_a_token_that_is_no_text_is_refused_without_being_shown(kube: FakeKube, api: KubeApi, data):
    kube.store(SECRETS, secret(data))

    with pytest.raises(Misconfigured, match="Secret ml/one: its 'auth_token' is no text in base64") as refused:
        await api.token("one")

    whole = "".join(traceback.format_exception(refused.value))
    assert not re.search("secret-text|c2VjcmV0", whole)


async def test_no_secret_is_ever_logged(kube: FakeKube, access: KubeconfigAccess, caplog: pytest.LogCaptureFixture):
    """At DEBUG and with the client library's own loggers on."""
    caplog.set_level(logging.DEBUG)
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith(("kubernetes_asyncio", "client", "aiohttp", "raytpu_ops")):
            caplog.set_level(logging.DEBUG, logger=name)
    kube.tokens = {"api-server-token"}
    kubeconfig(Path(access.selectors["kubeconfig"]), kube.address, "api-server-token")
    kube.kinds |= set(WORKLOADS.values())
    kube.set_token("one", RAY_TOKEN)
    said = []

    async with KubeApi(access, NAMESPACE) as api:
        ray = RayCredentials(lambda: api.token("one"))
        headers = await ProxyCredentials(access, ray).headers()
        assert headers == {"authorization": "Bearer api-server-token", "x-ray-authorization": f"Bearer {RAY_TOKEN}"}
        for name, call in CALLS.items():
            await call(api)
            for fault in (RESET, FORBIDDEN, UNAUTHORIZED):
                kube.fails(name, fault, always=True)
                with pytest.raises(RayTpuError) as failed:
                    await call(api)
                said += traceback.format_exception(failed.value)
                kube.heals()
        said += [repr(one) for one in (api, access, ray, ProxyCredentials(access, ray))]

    whole = caplog.text + "".join(said)
    assert "aiohttp.access" in whole  # it listens
    for hidden in (RAY_TOKEN, base64.b64encode(RAY_TOKEN.encode()).decode(), "api-server-token"):
        assert hidden not in whole


async def test_a_token_that_no_header_can_carry_is_refused(access: KubeconfigAccess):
    async def read() -> str:
        return "two\nlines"

    with pytest.raises(InvalidSpec) as refused:
        await RayCredentials(read).headers()
    assert "two" not in str(refused.value)
