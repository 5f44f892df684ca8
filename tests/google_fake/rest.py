"""HTTPS on loopback: Compute Engine, resource manager, IAM credentials and OAuth's token endpoint.

A loop in a thread of its own, so that tests may block theirs.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from typing import Any

from aiohttp import web
from google.protobuf.json_format import MessageToDict

from tests.google_fake.compute import Compute, Route
from tests.google_fake.gate import Ask, Gate
from tests.google_fake.refusals import Code, CutOff, Refusal
from tests.google_fake.trust import authority

_HTTP = {
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.ABORTED: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: 499,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}


class RestServer:
    """One port for all, open from the start until `stop`.

    :param gate: that requests pass; tokens are handed out before it.
    :param compute: Compute Engine.
    """

    def __init__(self, gate: Gate, compute: Compute) -> None:
        self._gate = gate
        self._compute = compute
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="google-fake-rest", daemon=True)
        self._thread.start()
        self._runner: web.AppRunner = self._call(self._start())
        self.endpoint = f"localhost:{self._runner.addresses[0][1]}"

    def stop(self) -> None:
        """Close the port and every connection."""
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        for route in self._compute.routes:
            app.router.add_route(route.verb, route.path, self._handler("compute", route))
        may = Route("POST", "/v3/projects/{name}", "testIamPermissions", self._ask_may, lambda names, body: {})
        app.router.add_post("/v3/projects/{name}", self._handler("cloudresourcemanager", may))
        app.router.add_post("/token", self._token)
        app.router.add_post("/v1/projects/-/serviceAccounts/{name}", self._as_another)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        folder = authority().folder
        context.load_cert_chain(folder / "localhost.crt", folder / "localhost.key")
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        return runner

    async def _end(self) -> None:
        assert self._runner.server is not None
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()  # TLS would wait for the client to say goodbye as well
        await self._runner.cleanup()
        await asyncio.sleep(0)  # sockets close at the loop's next turn

    def _handler(self, api: str, route: Route) -> Any:
        async def serve(request: web.Request) -> web.StreamResponse:
            names = dict(request.match_info)
            body = await request.json() if request.can_read_body else {}
            headers = {key.lower(): value for key, value in request.headers.items()}
            return self._answer(api, route, names, body, headers, request)

        return serve

    def _answer(
        self, api: str, route: Route, names: dict[str, str], body: Any, headers: dict[str, str], request: web.Request
    ) -> web.StreamResponse:
        def do() -> Any:
            if api == "cloudresourcemanager":
                return self._may(self._gate.calls[-1].principal, body)
            return route.do(names, body)

        try:
            return web.json_response(self._gate.enter(api, route.method, route.ask(names, body), body, headers, do))
        except Refusal as error:
            return web.json_response(_error(api, error), status=_HTTP.get(error.code, 500))
        except CutOff:
            assert request.transport is not None
            request.transport.abort()
            return web.Response(status=500)  # nobody reads it

    # Who may what

    @staticmethod
    def _ask_may(names: Any, body: Any) -> Ask:
        project, _, verb = names["name"].partition(":")
        if verb != "testIamPermissions":
            raise web.HTTPNotFound
        return Ask(f"projects/{project}")

    def _may(self, principal: str, body: Any) -> Any:
        held = [one for one in body.get("permissions", []) if self._gate.may(principal, one)]
        return {"permissions": held} if held else {}

    # Tokens

    async def _token(self, request: web.Request) -> web.Response:
        form = await request.post()
        with self._gate.clock.lock:
            try:
                return web.json_response(self._gate.tokens.from_assertion(str(form.get("assertion", ""))))
            except Refusal as error:
                return web.json_response({"error": "invalid_grant", "error_description": error.message}, status=400)

    async def _as_another(self, request: web.Request) -> web.Response:
        email, _, verb = request.match_info["name"].partition(":")
        if verb != "generateAccessToken":
            raise web.HTTPNotFound
        permission = "iam.serviceAccounts.getAccessToken"
        ask = Ask(f"projects/-/serviceAccounts/{email}", (permission,))
        route = Route(
            "POST",
            "",
            "generateAccessToken",
            lambda names, body: ask,
            lambda n, b: self._gate.tokens.for_another(email),
        )
        headers = {key.lower(): value for key, value in request.headers.items()}
        found = self._answer("iamcredentials", route, {}, await request.json(), headers, request)
        assert isinstance(found, web.Response)
        return found


def _error(api: str, error: Refusal) -> dict[str, Any]:
    """The JSON of an error; Compute Engine has a list of reasons, newer APIs a status."""
    status = _HTTP.get(error.code, 500)
    details = [
        {"@type": f"type.googleapis.com/{one.DESCRIPTOR.full_name}", **MessageToDict(one)} for one in error.details
    ]
    found: dict[str, Any] = {"code": status, "message": error.message, "status": error.code.name}
    if api == "compute":
        found["errors"] = [{"message": error.message, "domain": "global", "reason": error.reason or "backendError"}]
    if details:
        found["details"] = details
    return {"error": found}
