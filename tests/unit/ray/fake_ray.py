"""Plays Ray's dashboard on loopback: answers as Ray 2.60 does, with faults on the wire on demand.

Texts and shapes of the answers are copied from a real one; ``tests/integration/test_ray_client.py``
asks the real one the same questions.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import WSCloseCode, web

HEAD = "a" * 56
TERMINAL = ("STOPPED", "SUCCEEDED", "FAILED")


@dataclass
class Tail:
    """How one connection to the tail of a job's log behaves; the default shows all until the job is over.

    :param upto: characters after which it ends; None goes on until the job is over.
    :param end: how it ends: ``close`` as Ray does, ``reset`` without a word, ``hang`` not at all.
    :param once: it ends when it has shown what there is.
    :param extra_newlines: the "\\r" and "\\n" of a line come apart.
    """

    upto: int | None = None
    end: Literal["close", "reset", "hang"] = "close"
    once: bool = False
    extra_newlines: bool = False


@dataclass
class FakeJob:
    """A job; ``steps`` run one by one, one each time somebody asks for its state."""

    status: str = "PENDING"
    log: str = ""
    entrypoint: str = "python -m raytpu_ops.runtime"
    message: str = ""
    error_type: str | None = None
    exit_code: int | None = None
    driver_node_id: str | None = HEAD
    metadata: dict[str, str] = field(default_factory=dict)
    steps: deque[Callable[[FakeJob], None]] = field(default_factory=deque)
    tails: deque[Tail] = field(default_factory=deque)
    further_tails: Tail = field(default_factory=Tail)
    stops_needed: int = 1
    when_stopped: Callable[[FakeJob], None] | None = None
    stops: int = 0
    tail_connections: int = 0
    undecodable: bool = False

    def at_each_look(self, *steps: Callable[[FakeJob], None]) -> FakeJob:
        self.steps.extend(steps)
        return self


def becomes(status: str, log: str = "", **changes: Any) -> Callable[[FakeJob], None]:
    """A step: the job gets that state, and that text is added to its log."""

    def step(job: FakeJob) -> None:
        job.log += log
        job.status = status
        for name, value in changes.items():
            setattr(job, name, value)

    return step


@dataclass(frozen=True)
class Fault:
    """One answer that is none."""

    kind: Literal["status", "garbage", "reset", "hang"]
    status: int = 500
    text: str = "Internal Server Error"


def status(code: int, text: str = "some text") -> Fault:
    """A fault: that status."""
    return Fault("status", code, text)


GARBAGE, RESET, HANG = Fault("garbage"), Fault("reset"), Fault("hang")


def kubernetes_status(code: int, message: str, reason: str = "") -> Fault:
    """A fault: what a Kubernetes API server in front of Ray answers by itself."""
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
    return status(code, json.dumps({**body, "reason": reason, "code": code}))


class FakeRay:
    """The dashboard; use as an async context manager.

    :param token: what Ray asks for.
    :param prefix: the path below which it answers.
    :param tls: speak TLS.
    :param front: a Kubernetes API server stands in front that keeps ``authorization`` for itself and
        accepts these tokens in it.
    """

    def __init__(
        self,
        token: str | None = None,
        *,
        prefix: str = "",
        tls: ssl.SSLContext | None = None,
        front: Collection[str] | None = None,
    ) -> None:
        self.token = token
        self.prefix, self.tls, self.front = prefix, tls, front
        self.jobs: dict[str, FakeJob] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {"nodes": [], "placement_groups": [], "actors": [], "tasks": []}
        self.usage: dict[str, Any] = {}
        self.packages: dict[str, bytes] = {}
        self.serve: dict[str, Any] = {"controller_info": {}, "proxies": {}, "applications": {}, "target_capacity": None}
        self.deployed: list[dict[str, Any]] = []
        self.serve_steps: deque[Callable[[dict[str, Any]], None]] = deque()
        self.requests: list[str] = []
        self.seen: list[web.Request] = []
        self._faults: list[tuple[str, deque[Fault]]] = []
        self._hanging = asyncio.Event()

    def fails(self, request: str, *faults: Fault) -> None:
        """The next requests that begin like this (``GET /api/jobs/x``) get these answers instead."""
        self._faults.append((request, deque(faults)))

    async def __aenter__(self) -> FakeRay:
        outer = web.Application(middlewares=[self._door], client_max_size=200 * 1024**2)
        app = web.Application(client_max_size=200 * 1024**2) if self.prefix else outer
        app.add_routes(
            [
                web.get("/api/version", self._version),
                web.get("/api/cluster_status", self._cluster_status),
                web.get("/api/v0/logs/file", self._log_file),
                web.get("/api/v0/{kind}", self._state),
                web.get("/api/jobs/", self._list_jobs),
                web.post("/api/jobs/", self._submit),
                web.get("/api/jobs/{id}", self._job),
                web.delete("/api/jobs/{id}", self._delete),
                web.post("/api/jobs/{id}/stop", self._stop),
                web.get("/api/jobs/{id}/logs", self._logs),
                web.get("/api/jobs/{id}/logs/tail", self._tail),
                web.get("/api/packages/gcs/{name}", self._package),
                web.put("/api/packages/gcs/{name}", self._upload),
                web.get("/api/serve/applications/", self._applications),
                web.put("/api/serve/applications/", self._deploy),
            ]
        )
        if self.prefix:
            outer.add_subapp(self.prefix, app)
        self._runner = web.AppRunner(outer, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.tls)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.address = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}{self.prefix}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._hanging.set()
        await self._runner.cleanup()

    def count(self, request: str) -> int:
        """How many requests began like this."""
        return sum(one.startswith(request) for one in self.requests)

    @web.middleware
    async def _door(self, request: web.Request, handler: Any) -> web.StreamResponse:
        asked = f"{request.method} {request.path.removeprefix(self.prefix)}"
        self.requests.append(asked)
        self.seen.append(request)
        names = ["authorization", "x-ray-authorization"]
        if self.front is not None:
            front = request.headers.get(names.pop(0))
            if front not in {f"Bearer {token}" for token in self.front}:
                return await self._fault(request, kubernetes_status(401, "Unauthorized", "Unauthorized"))
        if self.token is not None:
            shown = next((request.headers[name] for name in names if request.headers.get(name)), None)
            if shown is None:
                return web.Response(status=401, text="Unauthorized: Missing authentication token")
            if shown != f"Bearer {self.token}":
                return web.Response(status=403, text="Forbidden: Invalid authentication token")
        for wanted, faults in self._faults:
            if faults and asked.startswith(wanted):
                return await self._fault(request, faults.popleft())
        response: web.StreamResponse = await handler(request)
        return response

    async def _fault(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        if fault.kind == "garbage":
            return web.Response(text="<html>hello from a proxy</html>", content_type="text/html")
        if fault.kind == "hang":
            await self._hanging.wait()
        if fault.kind in ("hang", "reset"):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        headers = {"location": "http://elsewhere.invalid/"} if 300 <= fault.status < 400 else None
        return web.Response(status=fault.status, text=fault.text, headers=headers)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "4", "ray_version": "2.60.0", "session_name": "session_1"})

    async def _cluster_status(self, _: web.Request) -> web.Response:
        status = {"loadMetricsReport": {"usageByNode": self.usage}} if self.usage else None
        return web.json_response({"result": True, "msg": "", "data": {"clusterStatus": status}})

    async def _state(self, request: web.Request) -> web.Response:
        rows = self.rows[request.match_info["kind"]]
        for key, value in zip(
            request.query.getall("filter_keys", []), request.query.getall("filter_values", []), strict=True
        ):
            rows = [row for row in rows if row.get(key) == value]
        rows = rows[: int(request.query.get("limit", 100))]
        return web.json_response({"result": True, "msg": "", "data": {"result": {"total": len(rows), "result": rows}}})

    def _find(self, request: web.Request) -> FakeJob | web.Response:
        name = request.match_info["id"]
        return self.jobs.get(name) or web.Response(status=404, text=f"Job {name} does not exist")

    @staticmethod
    def _details(name: str, job: FakeJob) -> dict[str, Any]:
        return {
            "type": "SUBMISSION",
            "job_id": f"job-of-{name}",
            "submission_id": name,
            "status": job.status,
            "entrypoint": job.entrypoint,
            "message": job.message or f"Job is {job.status.lower()}.",
            "error_type": job.error_type,
            "start_time": 1796010288563,
            "end_time": 1796010298563 if job.status in TERMINAL else None,
            "metadata": job.metadata or None,
            "runtime_env": None,
            "driver_node_id": job.driver_node_id if job.status != "PENDING" else None,
            "driver_exit_code": job.exit_code,
        }

    async def _list_jobs(self, _: web.Request) -> web.Response:
        driver = {"type": "DRIVER", "job_id": "09", "submission_id": None, "status": "RUNNING", "entrypoint": "x.py"}
        return web.json_response([*(self._details(name, job) for name, job in self.jobs.items()), driver])

    async def _submit(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["submission_id"]
        if name in self.jobs:
            text = f"ValueError: Job with submission_id {name} already exists. Please use a different submission_id.\n."
            return web.Response(status=500, text=f"Traceback (most recent call last):\nRuntimeError: {WRAPPED}{text}")
        self.jobs[name] = FakeJob(entrypoint=body["entrypoint"], metadata=body.get("metadata") or {})
        return web.json_response({"job_id": name, "submission_id": name})

    async def _job(self, request: web.Request) -> web.Response:
        job = self._find(request)
        if isinstance(job, web.Response):
            return job
        if job.steps:
            job.steps.popleft()(job)
        if job.status == "GONE":
            del self.jobs[request.match_info["id"]]
            return await self._job(request)
        return web.json_response(self._details(request.match_info["id"], job))

    async def _stop(self, request: web.Request) -> web.Response:
        job = self._find(request)
        if isinstance(job, web.Response):
            return job
        job.stops += 1
        if job.status not in TERMINAL and job.stops >= job.stops_needed:
            (job.when_stopped or becomes("STOPPED"))(job)
        return web.json_response({"stopped": True})

    async def _delete(self, request: web.Request) -> web.Response:
        job = self._find(request)
        if isinstance(job, web.Response):
            return job
        if job.status not in TERMINAL:
            text = f"RuntimeError: Attempted to delete job 'x', but it is in a non-terminal state {job.status}."
            return web.Response(status=500, text=f"Traceback (most recent call last):\n{text}")
        del self.jobs[request.match_info["id"]]
        return web.json_response({"deleted": True})

    async def _logs(self, request: web.Request) -> web.Response:
        job = self._find(request)
        if isinstance(job, web.Response):
            return job
        if job.undecodable:
            text = "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 145: invalid start byte"
            return web.Response(status=500, text=f"Traceback (most recent call last):\n{text}")
        return web.json_response({"logs": job.log if job.driver_node_id else ""})

    async def _log_file(self, request: web.Request) -> web.Response:
        name = request.query["filename"].removeprefix("job-driver-").removesuffix(".log")
        job = self.jobs.get(name)
        if job is None or not job.log:
            return web.Response(status=500, text=f"A file is not found at: /tmp/ray/{request.query['filename']}")
        return web.Response(body=job.log.encode("utf-8", "surrogateescape"), content_type="text/plain")

    async def _tail(self, request: web.Request) -> web.StreamResponse:
        job = self._find(request)
        if isinstance(job, web.Response):
            return job
        job.tail_connections += 1
        script = job.tails.popleft() if job.tails else job.further_tails
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if not job.undecodable:
            await self._play(request, socket, job, script)
        if script.end == "hang":
            await self._hanging.wait()
        if script.end == "reset":
            assert request.transport is not None
            request.transport.abort()
            return socket
        await socket.close(code=WSCloseCode.OK)
        return socket

    async def _play(self, request: web.Request, socket: web.WebSocketResponse, job: FakeJob, script: Tail) -> None:
        sent = 0
        while not self._hanging.is_set() and request.transport is not None:
            over = job.status in TERMINAL or job.status == "GONE"
            text = job.log if script.extra_newlines else job.log.replace("\r\n", "\n").replace("\r", "\n")
            shown = text if script.extra_newlines is False else text.replace("\r", "\n")
            piece = shown[sent : len(shown) if script.upto is None else script.upto][:50]
            if piece:
                await socket.send_str(piece)
                sent += len(piece)
            elif over or script.once or (script.upto is not None and sent >= script.upto):
                return
            else:
                await asyncio.sleep(0.005)

    async def _package(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.packages:
            return web.Response(status=404, text=f"Package gcs://{name} does not exist")
        return web.Response()

    async def _upload(self, request: web.Request) -> web.Response:
        self.packages[request.match_info["name"]] = await request.read()
        return web.Response()

    async def _applications(self, _: web.Request) -> web.Response:
        if self.serve_steps:
            self.serve_steps.popleft()(self.serve)
        return web.json_response(self.serve)

    async def _deploy(self, request: web.Request) -> web.Response:
        config = json.loads(await request.text())
        if any(not application.get("import_path") for application in config["applications"]):
            return web.Response(status=400, text="1 validation error for ServeDeploySchema\napplications.0.import_path")
        self.deployed.append(config)
        if "http_options" not in self.serve:
            self.serve |= {"http_options": config["http_options"], "proxy_location": config["proxy_location"]}
        declared = {application["name"]: application for application in config["applications"]}
        rows = self.serve["applications"]
        for name in [name for name, row in rows.items() if row.get("deployed_app_config") and name not in declared]:
            del rows[name]
        for name, application in declared.items():
            rows[name] = application_row(name, "DEPLOYING", config=application)
        return web.Response()


WRAPPED = "Request failed with status code 400: Traceback (most recent call last):\n"


def application_row(
    name: str, status: str, message: str = "", *, config: dict[str, Any] | None = None
) -> dict[str, Any]:
    """An application as Serve shows it."""
    return {
        "name": name,
        "route_prefix": f"/{name}",
        "status": status,
        "message": message,
        "deployed_app_config": config,
        "deployments": {
            "Model": {
                "name": "Model",
                "status": "HEALTHY" if status == "RUNNING" else "UPDATING",
                "message": "",
                "replicas": [{"state": "RUNNING"}, {"state": "STARTING"}],
            }
        },
    }


def node_row(
    node_id: str,
    address: str,
    *,
    slice_name: str | None = None,
    worker_id: int | None = None,
    chips: int = 0,
    state: str = "ALIVE",
    head: bool = False,
) -> dict[str, Any]:
    """A node as Ray shows it, a v4 ``2x2x2`` host where it has a slice's name."""
    labels = {"ray.io/node-id": node_id}
    if slice_name is not None:
        labels |= {
            "ray.io/tpu-slice-name": slice_name,
            "ray.io/tpu-worker-id": str(worker_id),
            "ray.io/tpu-topology": "2x2x2",
            "ray.io/tpu-pod-type": "v4-16",
            "ray.io/accelerator-type": "TPU-V4",
        }
    return {
        "node_id": node_id,
        "node_ip": address,
        "is_head_node": head,
        "state": state,
        "state_message": "the host went away" if state == "DEAD" else None,
        "resources_total": {"CPU": 1.0, **({"TPU": float(chips)} if chips else {})},
        "labels": labels,
    }
