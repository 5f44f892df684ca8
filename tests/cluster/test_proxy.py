"""The fault proxy against a small TLS server: what is handed on, and each fault."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from tests.testbed.pki import Authority
from tests.testbed.proxy import Fault, FaultProxy


class Upstream:
    """Stands where the API server stands."""

    def __init__(self) -> None:
        self.created: list[str] = []
        self.tokens: list[str | None] = []
        self.streams = 0
        self.left = asyncio.Event()

    async def shout(self, request: web.Request) -> web.WebSocketResponse:
        answer = web.WebSocketResponse()
        await answer.prepare(request)
        async for message in answer:
            await answer.send_str(message.data.upper())
        return answer

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization"))
        if request.method == "POST":
            self.created.append(await request.text())
            return web.json_response({"created": True}, status=201)
        if request.query.get("watch"):
            stream = web.StreamResponse()
            await stream.prepare(request)
            self.streams += 1
            self.left.clear()
            try:
                await stream.write(b'{"type":"ADDED"}\n')
                await asyncio.Event().wait()
            finally:
                self.streams -= 1
                self.left.set()
        return web.json_response({"items": [], "path": request.path_qs})


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
async def proxy(tmp_path: Path, upstream: Upstream) -> AsyncIterator[FaultProxy]:
    authority = Authority(tmp_path / "pki")
    authority.issue("server", "server", hosts=("localhost", "127.0.0.1"))
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_tls.load_cert_chain(tmp_path / "pki" / "server.crt", tmp_path / "pki" / "server.key")
    client_tls = ssl.create_default_context(cafile=str(authority.ca))
    app = web.Application()
    app.router.add_get("/exec", upstream.shout)
    app.router.add_route("*", "/{tail:.*}", upstream.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_tls)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", number))
        one = FaultProxy(listener, server_tls, client_tls, port)
        await one.open()
        yield one
        await one.close()
    await runner.cleanup()


@pytest.fixture
async def client(proxy: FaultProxy, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    verify = ssl.create_default_context(cafile=str(tmp_path / "pki" / "ca.crt"))
    port = proxy._listener.getsockname()[1]
    async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=verify, timeout=10) as one:
        yield one


async def test_requests_go_through_with_their_token_and_are_recorded(
    client: httpx.AsyncClient, proxy: FaultProxy, upstream: Upstream
) -> None:
    for _ in range(2):  # the second on the same connection
        answer = await client.get("/api/v1/pods?limit=1", headers={"Authorization": "Bearer me"})
        assert answer.json() == {"items": [], "path": "/api/v1/pods?limit=1"}
    assert upstream.tokens == ["Bearer me"] * 2
    assert [(one["method"], one["status"]) for one in proxy.record] == [("GET", 200)] * 2


async def test_a_body_arrives_whole(client: httpx.AsyncClient, upstream: Upstream) -> None:
    text = json.dumps({"data": "x" * 300_000})
    assert (await client.post("/api/v1/pods", content=text)).status_code == 201
    assert upstream.created == [text]


async def test_a_status_hits_as_often_as_it_was_told_and_says_when_to_come_back(
    client: httpx.AsyncClient, proxy: FaultProxy
) -> None:
    proxy.add(Fault("status", method="GET", path="/pods", status=429, retry_after=3, after=1, times=2))
    answers = [await client.get("/api/v1/pods") for _ in range(4)]
    assert [one.status_code for one in answers] == [200, 429, 429, 200]
    assert answers[1].headers["retry-after"] == "3"
    assert answers[1].json()["reason"] == "TooManyRequests"
    assert (await client.get("/api/v1/nodes")).status_code == 200


async def test_gone_is_an_event_on_a_watch_and_a_status_elsewhere(client: httpx.AsyncClient, proxy: FaultProxy) -> None:
    proxy.add(Fault("gone"))
    event = (await client.get("/api/v1/pods?watch=true")).json()
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")
    assert (await client.get("/api/v1/pods")).status_code == 410


async def test_a_reset_drops_the_connection_before_anything_is_done(
    client: httpx.AsyncClient, proxy: FaultProxy, upstream: Upstream
) -> None:
    proxy.add(Fault("reset", method="POST", times=1))
    with pytest.raises(httpx.TransportError):
        await client.post("/api/v1/pods", content="{}")
    assert upstream.created == []


async def test_a_lost_answer_was_carried_out(client: httpx.AsyncClient, proxy: FaultProxy, upstream: Upstream) -> None:
    proxy.add(Fault("lost", method="POST", times=1))
    with pytest.raises(httpx.TransportError):
        await client.post("/api/v1/pods", content="{}")
    assert upstream.created == ["{}"]


async def test_watches_can_be_cut(client: httpx.AsyncClient, proxy: FaultProxy) -> None:
    async with client.stream("GET", "/api/v1/pods?watch=1") as answer:
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines)) == {"type": "ADDED"}
        assert proxy.cut_watches() == 1
        with pytest.raises(httpx.TransportError):
            await anext(lines)


async def test_a_watch_that_its_client_leaves_ends_upstream_too(client: httpx.AsyncClient, upstream: Upstream) -> None:
    async with client.stream("GET", "/api/v1/pods?watch=1") as answer:
        await anext(answer.aiter_lines())
    await asyncio.wait_for(upstream.left.wait(), 10)
    assert upstream.streams == 0


async def test_closed_means_refused_and_the_port_stays_ours(client: httpx.AsyncClient, proxy: FaultProxy) -> None:
    address = proxy._listener.getsockname()
    await client.get("/api/v1/pods")
    await proxy.close()
    with pytest.raises(httpx.TransportError):  # the open connection was dropped
        await client.get("/api/v1/pods")
    with pytest.raises(httpx.ConnectError):  # and there is no new one
        await client.get("/api/v1/pods")
    with socket.socket() as thief, pytest.raises(OSError, match="in use"):
        thief.bind(address)
    await proxy.open()
    assert (await client.get("/api/v1/pods")).status_code == 200


async def test_an_upgrade_becomes_a_tunnel(proxy: FaultProxy, tmp_path: Path) -> None:
    verify = ssl.create_default_context(cafile=str(tmp_path / "pki" / "ca.crt"))
    port = proxy._listener.getsockname()[1]
    async with connect(f"wss://127.0.0.1:{port}/exec", ssl=verify, proxy=None) as websocket:
        await websocket.send("hello")
        assert await websocket.recv() == "HELLO"


async def test_tunnels_can_be_cut(proxy: FaultProxy, tmp_path: Path) -> None:
    verify = ssl.create_default_context(cafile=str(tmp_path / "pki" / "ca.crt"))
    port = proxy._listener.getsockname()[1]
    assert proxy.cut_tunnels() == 0
    async with connect(f"wss://127.0.0.1:{port}/exec", ssl=verify, proxy=None) as websocket:
        await websocket.send("hello")
        assert await websocket.recv() == "HELLO"
        assert proxy.cut_tunnels() == 1
        with pytest.raises(ConnectionClosedError):
            await websocket.recv()


def test_a_fault_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="one of status"):
        Fault("explode")
