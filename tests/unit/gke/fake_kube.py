"""A Kubernetes API server on loopback: kmock's emulator, with what KubeRay's world needs beside.

kmock parses requests and keeps objects. Added here, with the real server's texts (Kubernetes 1.37):
server-side apply of a new object, label selectors, preconditions, deletion that takes its time, who
may come in, and faults on the wire. KubeRay and the kubelets move only when a test says so.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import json
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import aiohttp
import kmock
import yaml
from aiohttp import web

from raytpu_ops.waits import utc_now
from tests.unit.gke import seen

Json = dict[str, Any]

NAMESPACE = "ml"
RAY_CLUSTERS = kmock.resource("ray.io", "v1", "rayclusters")
PODS, SECRETS = kmock.resource("", "v1", "pods"), kmock.resource("", "v1", "secrets")
POD_TEMPLATES = kmock.resource("", "v1", "podtemplates")
REQUESTS = kmock.resource("autoscaling.x-k8s.io", "v1", "provisioningrequests")
WORKLOADS = {version: kmock.resource("kueue.x-k8s.io", version, "workloads") for version in ("v1beta1", "v1beta2")}
#: How long a pod may take to end, as our manifests say.
_GRACE_S = 10
RAY_TOKEN = "of-ray-7f3a"
_FOREGROUND = "foregroundDeletion"
_CHANGED = "the object has been modified; please apply your changes to the latest version and try again"


@dataclass(frozen=True)
class Fault:
    """One answer that is none.

    :param kind: what comes instead of the answer.
    :param applied: the request takes effect all the same.
    :param then: called before the fault shows.
    """

    kind: Literal["answer", "reset", "hang", "cut"]
    status: int = 500
    body: bytes = b""
    applied: bool = False
    then: Callable[[], object] | None = None


def refusal(status: int, message: str, reason: str = "", **details: Any) -> Fault:
    """What a Kubernetes API server says to a request that it does not let through."""
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
    return Fault("answer", status, json.dumps({**body, "reason": reason, "details": details, "code": status}).encode())


def answer(status: int, body: str | bytes) -> Fault:
    """Any answer."""
    return Fault("answer", status, body.encode() if isinstance(body, str) else body)


#: The HTTP client sends a request that is safe to repeat once more by itself after a reset.
RESET, HANG, CUT = Fault("reset"), Fault("hang"), Fault("cut")
#: The request took effect, and its answer got lost.
LOST = Fault("reset", applied=True)
#: The words of a real server, by what is wrong.
UNAUTHORIZED = refusal(401, "Unauthorized", "Unauthorized")
FORBIDDEN = refusal(
    403,
    'rayclusters.ray.io is forbidden: User "system:serviceaccount:ml:airflow" cannot patch resource "rayclusters" in '
    'API group "ray.io" in the namespace "ml"',
    "Forbidden",
)
QUOTA = refusal(
    403,
    'rayclusters.ray.io "x" is forbidden: exceeded quota: chips, requested: count/rayclusters.ray.io=1, used: '
    "count/rayclusters.ray.io=2, limited: count/rayclusters.ray.io=2",
    "Forbidden",
)
NO_WEBHOOK = refusal(
    500,
    'Internal error occurred: failed calling webhook "mraycluster.kb.io": failed to call webhook: Post '
    '"https://kueue-webhook-service.kueue-system.svc:443/mutate": connect: connection refused',
    "InternalError",
)
AWAY = refusal(503, "apiserver is shutting down", "ServiceUnavailable")
NO_SUCH_PATH = answer(404, "404 page not found\n")


class FakeKube(kmock.KubernetesEmulator):
    """The API server; use as an async context manager, or with :func:`serving`."""

    def __init__(self, clock: Callable[[], datetime] = utc_now) -> None:
        super().__init__()
        self.clock = clock
        self.tokens = {"first"}
        self.namespaces = {NAMESPACE}
        self.kinds = {RAY_CLUSTERS, PODS, SECRETS, POD_TEMPLATES, REQUESTS}
        #: Every request in words: ``get rayclusters``, ``list pods``, ``get pods/log``.
        self.calls: list[str] = []
        #: What a container wrote, by pod.
        self.logs: dict[str, str] = {}
        #: Pods that nobody ends, because their host is gone.
        self.lost: set[str] = set()
        #: Where Ray's dashboard really is; None while nothing answers behind the service.
        self.ray: str | None = None
        self.address = ""
        self._uids, self._versions = itertools.count(1), itertools.count(1)
        self._faults: list[tuple[str, deque[Fault] | Fault]] = []
        self._over = asyncio.Event()

    def fails(self, call: str, *faults: Fault, always: bool = False) -> None:
        """The next calls of that name get these answers instead, or every call gets this one."""
        self._faults.append((call, faults[0] if always else deque(faults)))

    def heals(self) -> None:
        """No faults from now on."""
        self._faults.clear()

    def count(self, call: str) -> int:
        """How many calls began like this."""
        return sum(one.startswith(call) for one in self.calls)

    def empty(self) -> None:
        """As if nothing had ever been asked or made."""
        self.objects.clear()
        self.calls.clear()
        self.forget_requests()

    def forget_requests(self) -> None:
        """For tests that ask much: kmock looks through all former requests at each new one."""
        self._requests.clear()

    def stop(self) -> None:
        """Requests that hang are let go."""
        self._over.set()

    # What is there

    def all(self, kind: kmock.resource) -> dict[str, Json]:
        """Objects of a kind, by name."""
        return {name: found.raw for (one, _, name), found in self.objects.items() if one == kind}

    def store(self, kind: kmock.resource, made: Json) -> Json:
        """Store an object, as the server stores a new one."""
        metadata = made["metadata"]
        metadata.setdefault("uid", f"uid-{next(self._uids)}")
        metadata.setdefault("creationTimestamp", _text(self.clock()))
        metadata.setdefault("generation", 1)
        metadata.setdefault("namespace", NAMESPACE)
        metadata["resourceVersion"] = str(next(self._versions))
        self.objects[kind, NAMESPACE, metadata["name"]] = made
        return made

    def change(self, kind: kmock.resource, name: str, **metadata: Any) -> None:
        """Change an object's metadata, as somebody with kubectl does."""
        made = copy.deepcopy(self.all(kind)[name])
        made["metadata"] |= metadata
        self.store(kind, made)

    def become_whole(self, name: str, token: str = RAY_TOKEN) -> None:
        """What KubeRay, its webhook and the kubelets make of a RayCluster: pods that are ready, and a Secret."""
        cluster = copy.deepcopy(self.all(RAY_CLUSTERS)[name])
        group = cluster["spec"]["workerGroupSpecs"][0]
        hosts = [(number, host) for number in range(group["replicas"]) for host in range(group["numOfHosts"])]
        for number, host in [(None, 0), *hosts]:
            template = cluster["spec"]["headGroupSpec" if number is None else "workerGroupSpecs"]
            labels = (template if number is None else template[0])["template"]["metadata"]["labels"]
            made = seen.pod(number, host, labels={**labels, "ray.io/cluster": name})
            made["metadata"]["name"] = f"{name}-{made['metadata']['name']}"
            del made["metadata"]["uid"]
            self.store(PODS, made)
        conditions = [seen.condition("HeadPodReady"), seen.condition("RayClusterProvisioned")]
        cluster["status"] = {
            "observedGeneration": cluster["metadata"]["generation"],
            "readyWorkerReplicas": len(hosts),
            "desiredWorkerReplicas": len(hosts),
            "conditions": conditions,
        }
        self.store(RAY_CLUSTERS, cluster)
        self.set_token(name, token)

    def set_token(self, name: str, token: str) -> None:
        """KubeRay's Secret of a RayCluster."""
        data = {"auth_token": base64.b64encode(token.encode()).decode()}
        self.store(SECRETS, {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": name}, "data": data})

    def settle(self) -> None:
        """Kubelets end the pods that were told to go, then the garbage collector goes on."""
        for name, pod in self.all(PODS).items():
            if pod["metadata"].get("deletionTimestamp") and name not in self.lost:
                self.forget(PODS, name)
        for name, cluster in self.all(RAY_CLUSTERS).items():
            if cluster["metadata"].get("deletionTimestamp") and not self._pods_of(name):
                rest = [one for one in cluster["metadata"]["finalizers"] if one != _FOREGROUND]
                self.change(RAY_CLUSTERS, name, finalizers=rest)
                self._collect(name)
        owners = {one["metadata"]["uid"] for one in self.all(RAY_CLUSTERS).values()}
        for kind in (POD_TEMPLATES, REQUESTS):
            for name, one in self.all(kind).items():
                if not owners & {ref["uid"] for ref in one["metadata"].get("ownerReferences", [])}:
                    self.forget(kind, name)

    def _collect(self, name: str) -> None:
        """A RayCluster that nothing holds in deletion is gone, and what belongs to it."""
        metadata = self.all(RAY_CLUSTERS)[name]["metadata"]
        if metadata.get("deletionTimestamp") and not metadata["finalizers"]:
            self.forget(RAY_CLUSTERS, name)
            if name in self.all(SECRETS):
                self.forget(SECRETS, name)

    def _pods_of(self, cluster: str) -> list[Json]:
        return [pod for pod in self.all(PODS).values() if pod["metadata"]["labels"].get("ray.io/cluster") == cluster]

    def forget(self, kind: kmock.resource, name: str) -> None:
        """The object is gone."""
        del self.objects[kind, NAMESPACE, name]

    # What is answered

    async def _handle(self, request: kmock.Request) -> web.StreamResponse:
        asked = _words(request)
        self.calls.append(asked)
        if request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            return await self._fail(request, UNAUTHORIZED)
        fault = self._fault_for(asked)
        if fault is None:
            return await self._served(request)
        if fault.applied:
            await self._served(request)
        return await self._fail(request, fault)

    def _fault_for(self, asked: str) -> Fault | None:
        for call, faults in self._faults:
            if asked.startswith(call) and faults:
                return faults if isinstance(faults, Fault) else faults.popleft()
        return None

    async def _fail(self, request: kmock.Request, fault: Fault) -> web.StreamResponse:
        if fault.then is not None:
            fault.then()
        if fault.kind == "answer":
            kind = "application/json" if fault.body.startswith(b"{") else "text/plain"
            return web.Response(status=fault.status, body=fault.body, content_type=kind)
        if fault.kind == "hang":
            await self._over.wait()
        raw = request._raw_request
        assert raw is not None
        assert raw.transport is not None
        response = web.StreamResponse()
        if fault.kind == "cut":
            response.content_length = 1000
            await response.prepare(raw)
            await response.write(b'{"kind": ')
        raw.transport.abort()
        return response

    async def _served(self, request: kmock.Request) -> web.StreamResponse:
        kind, name = request.resource, request.name
        if kind is not None and kind.plural == "services":
            return await self._proxied(request)
        if kind is None or kind not in self.kinds:
            return await self._fail(request, NO_SUCH_PATH)
        if request.method.value == "PATCH" and request.headers["Content-Type"] == "application/apply-patch+yaml":
            return self._apply(request, kind)
        if name is not None and name not in self.all(kind):
            message = f'{_named(kind)} "{name}" not found'
            return _status(404, message, "NotFound", name=name, kind=kind.plural)
        if request.subresource == "log":
            return await self._log(request)
        if request.method.value == "PATCH":
            return self._merge(request, kind, name or "")
        if request.method.value == "DELETE":
            return self._delete(request, kind, name or "")
        assert request.method.value == "GET"
        # Not by kmock, which looks for a rule among all of its rules and all former requests.
        return web.json_response(self._listed(request, kind) if name is None else self.all(kind)[name])

    def _listed(self, request: kmock.Request, kind: kmock.resource) -> Json:
        wanted = [part.partition("=") for part in request.params.get("labelSelector", "").split(",") if part]
        found = []
        for made in self.all(kind).values():
            labels = made["metadata"].get("labels") or {}
            if all(key in labels and (not equal or labels[key] == value) for key, equal, value in wanted):
                found.append(made)
        return {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": found}

    def _apply(self, request: kmock.Request, kind: kmock.resource) -> web.StreamResponse:
        assert request.params["fieldManager"] == "raytpu-ops"
        if request.namespace not in self.namespaces:
            message = f'namespaces "{request.namespace}" not found'
            return _status(404, message, "NotFound", name=request.namespace, kind="namespaces")
        made: Json = request.data
        there = self.all(kind).get(request.name or "")
        if there is not None:
            made = {**there, **made, "metadata": {**there["metadata"], **made["metadata"]}}
        if request.params.get("dryRun") != "All":
            self.store(kind, made)
        return web.json_response(made, status=200 if there else 201)

    def _merge(self, request: kmock.Request, kind: kmock.resource, name: str) -> web.StreamResponse:
        """A JSON merge patch, which names the object as it was seen."""
        assert request.headers["Content-Type"] == "application/merge-patch+json"
        made, change = copy.deepcopy(self.all(kind)[name]), request.data
        metadata = made["metadata"]
        if change["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            message = f'Operation cannot be fulfilled on {_named(kind)} "{name}": {_CHANGED}'
            return _status(409, message, "Conflict", name=name, kind=kind.plural)
        metadata.setdefault("annotations", {}).update(change["metadata"].get("annotations", {}))
        made["spec"] |= change.get("spec", {})
        metadata["generation"] += "spec" in change
        metadata |= {key: value for key, value in change["metadata"].items() if key == "finalizers"}
        self.store(kind, made)
        self._collect(name)
        return web.json_response(made)

    def _delete(self, request: kmock.Request, kind: kmock.resource, name: str) -> web.StreamResponse:
        there = self.all(kind)[name]
        options, metadata = request.data or {}, there["metadata"]
        wanted = options.get("preconditions", {}).get("uid", metadata["uid"])
        if wanted != metadata["uid"]:
            message = (
                f'Operation cannot be fulfilled on {_named(kind)} "{name}": the UID in the precondition ({wanted}) '
                f"does not match the UID in record ({metadata['uid']}). The object might have been deleted and then "
                "recreated"
            )
            return _status(409, message, "Conflict", name=name, kind=kind.plural)
        grace = timedelta(seconds=options.get("gracePeriodSeconds", _GRACE_S if kind == PODS else 0))
        if kind == PODS and not grace:
            self.forget(PODS, name)
        elif kind == REQUESTS:
            self.forget(kind, name)
        elif not metadata.get("deletionTimestamp"):
            held = {} if kind == PODS else {"finalizers": [*metadata.get("finalizers", []), _FOREGROUND]}
            self.change(kind, name, deletionTimestamp=_text(self.clock() + grace), **held)
        return web.json_response(there)

    async def _log(self, request: kmock.Request) -> web.StreamResponse:
        text = self.logs.get(request.name or "")
        if text is None:
            return _status(400, "previous terminated container not found", "BadRequest")
        lines = text.splitlines()[-int(request.params["tailLines"]) :]
        return web.Response(text="\n".join(lines))

    async def _proxied(self, request: kmock.Request) -> web.StreamResponse:
        """The service proxy: what it is asked goes on to Ray, but for the header that it keeps for itself."""
        if self.ray is None:
            return _status(503, f'no endpoints available for service "{request.name}"', "ServiceUnavailable")
        path = (request.subresource or "").removeprefix("proxy")
        headers = {key: value for key, value in request.headers.items() if key.lower().startswith("x-ray")}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(request.method.value, f"{self.ray}{path}?{request.url.raw_query_string}") as found,
        ):
            return web.Response(status=found.status, body=await found.read(), content_type=found.content_type)


class Serving:
    """Serves it on loopback; use as an async context manager.

    :param tls: speak TLS.
    """

    def __init__(self, kube: FakeKube, tls: ssl.SSLContext | None = None) -> None:
        self._kube, self._tls = kube, tls

    async def __aenter__(self) -> FakeKube:
        await self._kube.__aenter__()
        self._runner = web.ServerRunner(web.Server(self._kube), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls).start()
        self._kube.address = f"{'https' if self._tls else 'http'}://127.0.0.1:{self._runner.addresses[0][1]}"
        return self._kube

    async def __aexit__(self, *_: object) -> None:
        self._kube.stop()
        await self._runner.cleanup()
        await self._kube.__aexit__(None, None, None)


def kubeconfig(path: Path, server: str, token: str = "first", **cluster: Any) -> Path:
    """A file that leads there; a test may write it anew, as a plugin that renews tokens does."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "one", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "one", "user": {"token": token}}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
        "current-context": "one",
    }
    path.write_text(yaml.safe_dump(content))
    return path


def _words(request: kmock.Request) -> str:
    resource = request.resource.plural if request.resource is not None else request.url.path
    sub = f"/{request.subresource.partition('/')[0]}" if request.subresource else ""
    verb = request.method.value.lower()
    return f"{'list' if verb == 'get' and request.name is None else verb} {resource}{sub}"


def _named(kind: kmock.resource) -> str:
    return ".".join(part for part in (kind.plural, kind.group) if part)


def _status(status: int, message: str, reason: str, **details: Any) -> web.Response:
    fault = refusal(status, message, reason, **details)
    return web.Response(status=status, body=fault.body, content_type="application/json")


def _text(instant: datetime) -> str:
    return instant.strftime("%Y-%m-%dT%H:%M:%SZ")
