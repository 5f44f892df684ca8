"""Claims of the client for Serve: it gets through to the model, and what it may show it shows there only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx
import pytest
from aiohttp import web

from raytpu_ops.ray.http import serve_client
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, RemoteUnavailable
from tests.unit.ray.credentials import Rotating, tls_pair
from tests.unit.ray.fake_ray import Fault, kubernetes_status, status
from tests.unit.ray.tunnel import Tunnel

PROXY = "/api/v1/namespaces/team-a/services/train-head-svc:serve/proxy"
Answer = TypeVar("Answer")


class Model:
    """An application of Serve, behind an API server that accepts ``token``."""

    def __init__(self, token: str | None = None, *answers: Fault) -> None:
        self.token = token
        self.answers = list(answers)
        self.seen: list[web.Request] = []
        self.asked: list[object] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append(request)
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            fault = kubernetes_status(401, "Unauthorized")
            return web.Response(status=fault.status, text=fault.text)
        if self.answers:
            fault = self.answers.pop(0)
            return web.Response(status=fault.status, text=fault.text)
        self.asked.append(await request.json())
        return web.json_response({"digits": [7]})

    @asynccontextmanager
    async def served(self, *, port: int = 0, prefix: str = "", tls=None) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}{prefix}"
        finally:
            await runner.cleanup()


async def asked(address: str, credentials: Rotating | None = None, path: str = "/digits", **options) -> httpx.Response:
    """One question, from a thread, as a task of Airflow has no event loop."""

    def ask() -> httpx.Response:
        with serve_client(address, credentials, **options) as client:
            return client.post(path, json={"images": [1]})

    return await asyncio.to_thread(ask)


async def test_a_path_begins_at_serves_own():
    model = Model("t")
    async with model.served(prefix=PROXY) as address:
        reply = await asked(address, Rotating("t"))
        assert reply.json() == {"digits": [7]}
        assert (await asked(f"{address}/", Rotating("t"), "digits")).is_success
    assert [request.path for request in model.seen] == [f"{PROXY}/digits"] * 2
    assert model.asked == [{"images": [1]}] * 2


async def test_where_nothing_is_asked_for_nothing_is_shown():
    async with (model := Model()).served() as address:
        assert (await asked(address)).is_success
    assert "authorization" not in model.seen[0].headers


async def test_a_token_that_expires_is_renewed_and_the_question_asked_again():
    model, ours = Model("first"), Rotating("first", "second", "third")
    async with model.served() as address:

        def ask() -> list[httpx.Response]:
            with serve_client(address, ours) as client:
                replies = [client.post("/digits", json={"images": [1]})]
                model.token = "second"
                return [*replies, *(client.post("/digits", json={"images": [n]}) for n in (2, 3))]

        assert [reply.status_code for reply in await asyncio.to_thread(ask)] == [200] * 3
    assert (ours.renewals, len(model.seen)) == (1, 4)
    assert model.asked == [{"images": [1]}, {"images": [2]}, {"images": [3]}]


async def test_credentials_that_stay_refused_are_the_answer():
    async with (model := Model("another")).served() as address:
        assert (await asked(address, Rotating("first"))).status_code == 401
        assert (await asked(address, Rotating("first", "second"))).status_code == 401
    assert len(model.seen) == 3


@pytest.mark.parametrize(
    "elsewhere",
    [
        "http://127.0.0.1:{port}/api/v1/namespaces/team-a/secrets",
        "/../../../secrets",
        "/%2e%2e/%2e%2e/secrets",
        "http://localhost:{port}" + PROXY + "/digits",
        "http://127.0.0.1:{port}" + PROXY + "-of-somebody-else/digits",
    ],
)
async def test_nobody_else_is_shown_the_credentials(elsewhere):
    async with (model := Model()).served(prefix=PROXY) as address:
        port = httpx.URL(address).port
        assert (await asked(address, Rotating("s3cret"), elsewhere.format(port=port))).is_success
        assert (await asked(address, Rotating("s3cret"), f"{address}/digits")).is_success
    assert ["authorization" in request.headers for request in model.seen] == [False, True]


async def test_https_on_this_machine_with_an_authority_of_its_own(tmp_path):
    server, trusted = tls_pair(tmp_path)
    async with (model := Model("t")).served(tls=server, prefix=PROXY) as address:
        assert (await asked(address, Rotating("t", trusts=trusted))).is_success
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await asked(address, Rotating("t"))
    assert len(model.seen) == 1


async def test_a_model_is_asked_through_the_proxy_that_the_credentials_know(tmp_path):
    server, trusted = tls_pair(tmp_path)
    ours = Rotating("t", trusts=trusted)
    async with Tunnel() as tunnel, (model := Model("t")).served(tls=server, prefix=PROXY) as address:
        ours.way = tunnel.url
        assert (await asked(address, ours)).is_success
        assert tunnel.targets == [httpx.URL(address).netloc.decode()]
    assert len(model.seen) == 1


# --- a way that is gone for the moment ---

UNDELIVERED = [
    kubernetes_status(503, 'no endpoints available for service "train-head-svc:serve"'),
    kubernetes_status(503, "error trying to reach service: dial tcp 10.0.0.7:8000: connect: connection refused"),
    kubernetes_status(429, "too many requests"),
]


async def test_what_reached_nobody_is_sent_again():
    async with (model := Model("t", *UNDELIVERED)).served() as address:
        assert (await asked(address, Rotating("t"))).json() == {"digits": [7]}
    assert model.asked == [{"images": [1]}]


@pytest.mark.parametrize(
    "fault",
    [
        kubernetes_status(503, "error trying to reach service: read tcp 10.0.0.7:8000: connection reset by peer"),
        kubernetes_status(500, "etcdserver: leader changed"),
        status(503, "Request dropped due to backpressure"),
        status(500, "ValueError"),
    ],
)
async def test_what_may_have_been_answered_is_not_asked_twice(fault):
    async with (model := Model("t", fault)).served() as address:
        reply = await asked(address, Rotating("t"))
    assert (reply.status_code, reply.text) == (fault.status, fault.text)
    assert len(model.seen) == 1


async def test_a_server_that_comes_back_gets_the_question():
    async with (model := Model()).served() as address:
        pass
    question = asyncio.create_task(asked(address))
    await asyncio.sleep(0.3)
    assert not question.done()
    async with model.served(port=httpx.URL(address).port or 0):
        assert (await question).is_success
    assert model.asked == [{"images": [1]}]


async def test_patience_ends_with_what_was_there_last():
    async with Model("t", *UNDELIVERED[:1] * 99).served() as address:
        reply = await asked(address, Rotating("t"), patience_s=0.3)
        assert reply.status_code == 503
        assert "no endpoints" in reply.json()["message"]
    with pytest.raises(httpx.ConnectError):
        await asked(address, patience_s=0.3)


async def test_credentials_that_cannot_be_had_for_the_moment_are_asked_for_again():
    gone = RemoteUnavailable("the metadata server does not answer")
    async with (model := Model("t")).served() as address:
        assert (await asked(address, Rotating("t", failures=[gone, gone]))).is_success
        with pytest.raises(RemoteUnavailable, match="metadata server"):
            await asked(address, Rotating("t", failures=[gone] * 99), patience_s=0.3)
        with pytest.raises(Misconfigured, match="no such key"):
            await asked(address, Rotating("t", failures=[Misconfigured("no such key")]))
    assert len(model.seen) == 1


# --- its own loop and thread ---


async def test_credentials_live_in_one_loop_and_the_caller_may_be_in_another():
    loops: list[asyncio.AbstractEventLoop] = []

    class Bound(Rotating):
        async def headers(self, *, renew: bool = False):
            loops.append(asyncio.get_running_loop())
            return await super().headers(renew=renew)

    async with Model("t").served() as address:
        # Here, on the loop of the model itself: the question can't be answered, but the credentials are asked.
        with serve_client(address, Bound("t"), timeout_s=0.2) as client:
            for _ in range(2):
                with pytest.raises(httpx.TimeoutException):
                    client.post("/digits", json={})
    assert len(loops) == 2
    assert loops[0] is loops[1]
    assert loops[0] is not asyncio.get_running_loop()
    assert loops[0].is_closed()


@pytest.mark.parametrize("end", [lambda client: client.close(), lambda client: client.__exit__(None, None, None)])
def test_it_leaves_no_thread(end: Callable[[httpx.Client], None]):
    with serve_client("http://127.0.0.1:9", Rotating("t"), patience_s=0) as client:
        with pytest.raises(httpx.ConnectError):
            client.get("/")
        assert any(thread.name.startswith("raytpu-credentials") for thread in threading.enumerate())
        end(client)
    assert not any(thread.name.startswith("raytpu-credentials") for thread in threading.enumerate())


def test_an_address_that_is_none_is_refused():
    with pytest.raises(InvalidSpec):
        serve_client("train-head-svc:8000")
    with pytest.raises(Misconfigured, match="no such key"):
        serve_client("https://127.0.0.1:9", Rotating(failures=[Misconfigured("no such key")]))
    assert not any(thread.name.startswith("raytpu-credentials") for thread in threading.enumerate())
