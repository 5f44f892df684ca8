"""What a lease serves is asked by the way that the lease's connection knows."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from raytpu_ops.hooks.ray_tpu import RayTpuHook
from raytpu_ops.tpu.errors import Misconfigured
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.spec import SliceSpec
from tests.testbed.pki import Authority

PROXY = "/api/v1/namespaces/ml/services/d-1-head-svc:serve/proxy"


def handed_on(serve_address: str | None, backend: str, conn_id: str | None = None, **place: str) -> dict[str, Any]:
    """A lease as another task gets it."""
    return SliceLease(
        id="d-1",
        owner=Owner(dag_id="d", run_id="r", task_id="t"),
        backend=backend,
        spec=SliceSpec.of("v4", "2x2x2"),
        place=place,
        ray=RayEndpoint(address="http://127.0.0.1:1", serve_address=serve_address),
        conn_id=conn_id,
        granted_at=datetime.now(UTC),
        expires_at=datetime.now(UTC) + timedelta(hours=1),
    ).to_xcom()


def ask(lease: dict[str, Any]) -> Any:
    with RayTpuHook.for_lease(lease).serve_client(lease) as client:
        return client.post("/digits", json={"images": [1]}).raise_for_status().json()


async def test_a_model_behind_the_api_server_is_asked_with_what_the_connection_has(
    tmp_path: Path, connect: Callable[..., str]
) -> None:
    authority = Authority(tmp_path)
    authority.issue("server", "server", hosts=("127.0.0.1",))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response({"digits": [7]})

    async def released(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response({"kind": "Status", "code": 404, "details": {"name": name}}, status=404)

    app = web.Application()
    app.router.add_post(f"{PROXY}/digits", answer)
    app.router.add_get("/apis/ray.io/v1/namespaces/ml/rayclusters/{name}", released)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        kubeconfig = authority.kubeconfig(tmp_path / "kubeconfig", url, token="t0ken")
        connect("tpus", "ray_tpu", backend="gke", kubeconfig=str(kubeconfig), namespace="ml")
        lease = handed_on(f"{url}{PROXY}", "gke", "tpus", namespace="ml")
        assert await asyncio.to_thread(ask, lease) == {"digits": [7]}
    finally:
        await runner.cleanup()
    assert seen[0].headers["authorization"] == "Bearer t0ken"
    assert "x-ray-authorization" not in seen[0].headers, "Serve asks for no token of Ray's"


async def test_a_local_model_is_asked_as_it_is() -> None:
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response({"digits": [7]})

    app = web.Application()
    app.router.add_post("/digits", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        lease = handed_on(f"http://127.0.0.1:{runner.addresses[0][1]}", "local")
        assert await asyncio.to_thread(ask, lease) == {"digits": [7]}
    finally:
        await runner.cleanup()
    assert "authorization" not in seen[0].headers


def test_a_lease_without_an_address_for_serve_says_so() -> None:
    with pytest.raises(Misconfigured, match="lease d-1 has no address for Serve: its backend 'local' cannot serve"):
        ask(handed_on(None, "local"))
