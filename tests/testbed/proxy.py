"""The fault proxy before the API server: TLS on the host's loopback, faults by rule, a record of calls.

Whoever is tested reaches the API server only through it; the cluster's own programs go past it.
It ends TLS, so clients prove who they are by bearer token. Everything else is handed on as it is:
watches, logs, exec (any upgrade becomes a plain tunnel).
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import h11

from tests.testbed.layout import API_PORT

ACTIONS = ("status", "gone", "reset", "lost", "hang", "delay")
_REASONS = {
    401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 410: "Expired",
    429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout",
}  # fmt: skip


@dataclass
class Fault:
    """What happens to requests that match.

    :param action: `status` answers `status`; `gone` is 410, on a watch as an event in its stream;
        `reset` drops the connection; `lost` does what is asked and drops the answer; `hang` never
        answers; `delay` waits, then goes on.
    :param method: HTTP method, `*` for any.
    :param path: regular expression, searched for in path and query.
    :param watch: only watches, only others, or (None) both.
    :param status: for `status`.
    :param message: the answer's message.
    :param retry_after: seconds, sent as Retry-After; 0 sends none. Kubernetes' Python client obeys it unasked.
    :param seconds: for `delay`.
    :param after: this many matching requests pass first.
    :param times: then this many meet the fault; None for all.
    """

    action: str
    method: str = "*"
    path: str = ""
    watch: bool | None = None
    status: int = 500
    message: str = "the testbed's fault"
    retry_after: int = 0
    seconds: float = 0.0
    after: int = 0
    times: int | None = None
    matched: int = field(default=0, compare=False)
    hits: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"fault {self.action!r}: one of {', '.join(ACTIONS)}")
        re.compile(self.path)

    def takes(self, method: str, target: str, watch: bool) -> bool:
        """Whether this request meets it; counts."""
        if self.method not in ("*", method) or (self.watch is not None and self.watch != watch):
            return False
        if re.search(self.path, target) is None:
            return False
        self.matched += 1
        if self.matched <= self.after or (self.times is not None and self.hits >= self.times):
            return False
        self.hits += 1
        return True


class _Drop(Exception):
    """End both connections now, without an answer."""


class FaultProxy:
    """The proxy.

    :param listener: a listening socket of the host's network namespace.
    :param server_tls: what clients see.
    :param client_tls: for the API server.
    :param port: of the API server, on this loopback.
    """

    def __init__(
        self, listener: socket.socket, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext, port: int = API_PORT
    ) -> None:
        self._port = port
        self._listener = listener
        self._server_tls, self._client_tls = server_tls, client_tls
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._watches: set[asyncio.StreamWriter] = set()
        self._tunnels: set[asyncio.StreamWriter] = set()
        self.faults: dict[int, Fault] = {}
        self.record: deque[dict[str, Any]] = deque(maxlen=5000)
        self._next = 1

    async def open(self) -> None:
        """Take connections."""
        if self._server is None:
            self._listener.listen(128)
            self._server = await asyncio.start_server(
                self._serve, sock=self._listener.dup(), ssl=self._server_tls, limit=2**20
            )

    async def close(self) -> None:
        """Refuse connections, as a machine does where nothing listens, and drop those that are open.

        The port stays ours: shutting down a listening socket stops it, `listen` starts it again.
        """
        if self._server is not None:
            self._server.close()
            self._server = None
            self._listener.shutdown(socket.SHUT_RD)
        self.drop(self._open)

    def add(self, fault: Fault) -> int:
        """From now on.

        :param fault: what happens, and to which requests.
        :return: the number that removes it.
        """
        number, self._next = self._next, self._next + 1
        self.faults[number] = fault
        return number

    def cut_watches(self) -> int:
        """Drop every watch that is open.

        :return: how many there were.
        """
        return self.drop(self._watches)

    def cut_tunnels(self) -> int:
        """Drop every connection that was upgraded: a log that is followed through a websocket, an exec.

        :return: how many there were.
        """
        return self.drop(self._tunnels)

    def drop(self, writers: set[asyncio.StreamWriter]) -> int:
        """Drop connections.

        :param writers: their client's side.
        """
        for writer in list(writers):
            writer.transport.abort()
        return len(writers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        upstream: _Side | None = None
        client = _Side(reader, writer, h11.Connection(h11.SERVER, max_incomplete_event_size=2**20))
        try:
            while True:
                request = await client.event()
                if not isinstance(request, h11.Request):
                    return
                body = b"".join([bytes(part) async for part in client.body()])
                if upstream is None:
                    upstream = await self._connect()
                if not await self._exchange(client, upstream, request, body):
                    return
                client.http.start_next_cycle()
                upstream.http.start_next_cycle()
        except (_Drop, OSError, ssl.SSLError, h11.RemoteProtocolError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            self._open.discard(writer)
            self._watches.discard(writer)
            self._tunnels.discard(writer)
            writer.transport.abort() if writer.is_closing() else writer.close()
            if upstream is not None:
                upstream.writer.transport.abort()

    async def _connect(self) -> _Side:
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self._port, ssl=self._client_tls, server_hostname="localhost", limit=2**20
            )
        except OSError:
            raise _Drop from None  # the API server is down; so are we
        return _Side(reader, writer, h11.Connection(h11.CLIENT, max_incomplete_event_size=2**20))

    async def _exchange(self, client: _Side, upstream: _Side, request: h11.Request, body: bytes) -> bool:
        """One request and its answer; False when the connection ends with it."""
        method, target = request.method.decode(), request.target.decode()
        watch = parse_qs(urlsplit(target).query).get("watch", [""])[0].lower() in ("true", "1")
        entry: dict[str, Any] = {"method": method, "target": target, "watch": watch, "status": 0, "fault": ""}
        self.record.append(entry)
        fault = next((one for one in self.faults.values() if one.takes(method, target, watch)), None)
        if fault is not None:
            entry["fault"] = fault.action
            if await self._play(fault, client, watch, entry):
                return False
        await upstream.send(request, h11.Data(data=body), h11.EndOfMessage())
        while True:
            answer = await upstream.event()
            if isinstance(answer, h11.InformationalResponse):
                if answer.status_code != 101:
                    continue
                entry["status"] = 101
                await client.send(answer)
                self._tunnels.add(client.writer)
                await _tunnel(client, upstream)
                return False
            if isinstance(answer, h11.Response):
                break
            raise _Drop
        if fault is not None and fault.action == "lost":
            raise _Drop
        entry["status"] = answer.status_code
        await client.send(answer)
        if watch:
            self._watches.add(client.writer)
        leaving = asyncio.create_task(_hang_up(client, upstream)) if watch or "follow=true" in target else None
        try:
            async for part in upstream.body():
                await client.send(h11.Data(data=part))
        finally:
            self._watches.discard(client.writer)
            if leaving is not None:
                leaving.cancel()
        await client.send(h11.EndOfMessage())
        return client.http.our_state is h11.DONE and upstream.http.our_state is h11.DONE

    async def _play(self, fault: Fault, client: _Side, watch: bool, entry: dict[str, Any]) -> bool:
        """Meet a fault; True when the request ends here."""
        if fault.action == "reset":
            raise _Drop
        if fault.action == "hang":
            await client.reader.read()  # until the client gives up
            raise _Drop
        if fault.action in ("delay", "lost"):
            await asyncio.sleep(fault.seconds)
            return False
        code = 410 if fault.action == "gone" else fault.status
        status = json.dumps(
            {
                "kind": "Status",
                "apiVersion": "v1",
                "metadata": {},
                "status": "Failure",
                "message": "too old resource version: 1 (2)" if code == 410 else fault.message,
                "reason": _REASONS.get(code, "Unknown"),
                "code": code,
            }
        )
        if code == 410 and watch:
            # So the API server says it: the watch is granted, and its only event is the error.
            code, status = 200, f'{{"type":"ERROR","object":{status}}}\n'
        entry["status"] = code
        headers = [("content-type", "application/json"), ("content-length", str(len(status))), ("connection", "close")]
        if fault.retry_after:
            headers.append(("retry-after", str(fault.retry_after)))
        await client.send(
            h11.Response(status_code=code, headers=headers), h11.Data(data=status.encode()), h11.EndOfMessage()
        )
        return True

    def describe(self) -> dict[str, Any]:
        """Faults with their counts, and the number of connections and watches."""
        return {
            "faults": {str(number): asdict(fault) for number, fault in self.faults.items()},
            "connections": len(self._open),
            "watches": len(self._watches),
        }


@dataclass
class _Side:
    """A connection and where its protocol stands."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection

    async def event(self) -> Any:
        while True:
            event = self.http.next_event()
            if event is h11.NEED_DATA:
                if self.http.they_are_waiting_for_100_continue:
                    await self.send(h11.InformationalResponse(status_code=100, headers=[]))
                self.http.receive_data(await self.reader.read(2**16))
                continue
            return event

    async def body(self) -> AsyncIterator[bytes]:
        while True:
            event = await self.event()
            if isinstance(event, h11.EndOfMessage):
                return
            if not isinstance(event, h11.Data):
                raise _Drop
            yield bytes(event.data)

    async def send(self, *events: Any) -> None:
        for event in events:
            data = self.http.send(event)
            if data:
                self.writer.write(data)
        await self.writer.drain()


async def _hang_up(client: _Side, upstream: _Side) -> None:
    """A stream that nobody reads any more ends, though the API server may be silent for minutes."""
    with suppress(OSError):
        await client.reader.read(1)
    upstream.writer.transport.abort()


async def _tunnel(client: _Side, upstream: _Side) -> None:
    async def pump(source: _Side, target: _Side) -> None:
        early, _ = source.http.trailing_data
        target.writer.write(early)
        with suppress(OSError):
            while data := await source.reader.read(2**16):
                target.writer.write(data)
                await target.writer.drain()
        target.writer.close()

    await asyncio.gather(pump(client, upstream), pump(upstream, client))
