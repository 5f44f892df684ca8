"""The few calls that this backend makes to the Kubernetes API server, and its answers as our errors.

Each call is one request; who waits and for how long is decided elsewhere. Credentials that expired
are renewed once in each call (F38). Bodies are read here, not by the client library, which writes
them to its log at DEBUG and stumbles over those that are no JSON.
Not here: what the objects mean (``objects.py``).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from raytpu_ops.backends.gke.access import KubeAccess
from raytpu_ops.backends.gke.record import FIELD_MANAGER
from raytpu_ops.tpu.errors import CapacityUnavailable, Misconfigured, RayTpuError, RemoteUnavailable

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from kubernetes_asyncio.client import ApiClient

Object = dict[str, Any]
Send = Callable[["ApiClient"], Awaitable["ClientResponse"]]

RAY_GROUP, RAY_VERSION, RAY_PLURAL = "ray.io", "v1", "rayclusters"
KUEUE_GROUP, KUEUE_VERSIONS = "kueue.x-k8s.io", ("v1beta2", "v1beta1")
#: The key of the token in the Secret that KubeRay makes.
TOKEN_KEY = "auth_token"  # noqa: S105 - a key, no token
#: What the server answers while it, a webhook or etcd restarts, or when it has too much to do.
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
#: In answers of 500 and 403 that will never go away by themselves.
_BAD_PATCH = ("failed to create typed patch object", "field not declared in schema")
_QUOTA = "exceeded quota"
#: How it says that an object of that name is another one by now: at its door, and from its storage.
_ANOTHER = ("UID in the precondition", "UID in precondition")
#: Paths that the server does not have: its own words, and those of clients that stand in front of it.
_NO_SUCH_KIND = ("page not found", "could not find the requested resource")
_ROLE = "deploy/gke/rbac.yaml holds the rights that are needed; `raytpu doctor --backend gke` says which are missing"


class KubeApi:
    """A connection to the API server, for one namespace; use it as an async context manager.

    Every method raises :class:`RemoteUnavailable` while the server does not answer or is not able to,
    and :class:`Misconfigured` where asking again cannot help.

    :param access: the way to the server.
    :param namespace: where everything is.
    :param timeout_s: seconds until one request counts as unanswered.
    """

    def __init__(self, access: KubeAccess, namespace: str, *, timeout_s: float = 20.0) -> None:
        self.namespace = namespace
        self._access = access
        self._raw = {"_preload_content": False, "_request_timeout": timeout_s}
        self._ray_clusters = (RAY_GROUP, RAY_VERSION, namespace, RAY_PLURAL)
        self._client: ApiClient | None = None

    async def __aenter__(self) -> Self:
        await self._open(renew=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def _open(self, *, renew: bool) -> None:
        from kubernetes_asyncio.client import ApiClient

        configuration = await self._access.configuration(renew=renew)
        try:
            client = ApiClient(configuration)
        except OSError as error:  # TLS errors are such
            raise Misconfigured(
                f"Kubernetes at {configuration.host}: the certificates of its configuration can't be read: {error}"
            ) from error
        if self._client is not None:
            await self._client.close()
        self._client = client

    async def ray_cluster(self, name: str) -> Object | None:
        """The RayCluster; None only where the server says that it does not exist (F07)."""
        return await self._object_or_none(
            name,
            f"get RayCluster {self.namespace}/{name}",
            lambda client: _custom(client).get_namespaced_custom_object(*self._ray_clusters, name, **self._raw),
        )

    async def ray_clusters(self, selector: str) -> list[Object]:
        """RayClusters with these labels."""
        return await self._items(
            f"list RayClusters in {self.namespace}",
            lambda client: _custom(client).list_namespaced_custom_object(
                *self._ray_clusters, label_selector=selector, **self._raw
            ),
        )

    async def apply_ray_cluster(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """Make the RayCluster by server-side apply.

        :param dry_run: let the server check everything, webhooks too, and store nothing.
        """
        name = manifest["metadata"]["name"]
        return await self._object(
            f"apply RayCluster {self.namespace}/{name}",
            lambda client: _custom(client).patch_namespaced_custom_object(
                *self._ray_clusters,
                name,
                dict(manifest),
                field_manager=FIELD_MANAGER,
                force=True,
                _content_type="application/apply-patch+yaml",
                **({"dry_run": "All"} if dry_run else {}),
                **self._raw,
            ),
        )

    async def change_ray_cluster(
        self, seen: Mapping[str, Any], annotations: Mapping[str, str], *, suspend: bool
    ) -> bool:
        """Change a RayCluster as it was seen, and no other.

        :param seen: what it was when it was read; where somebody has changed it since, this is refused as
            :class:`RemoteUnavailable`: read it again.
        :param annotations: the ones that change.
        :param suspend: whether its pods are unwanted.
        :return: False where it is gone.
        """
        return await self._changed(seen, {"annotations": dict(annotations)}, spec={"suspend": suspend})

    async def let_go(self, seen: Mapping[str, Any], finalizer: str) -> None:
        """Take a finalizer off a RayCluster as it was seen; nothing happens where it is gone."""
        rest = [one for one in seen["metadata"]["finalizers"] if one != finalizer]
        await self._changed(seen, {"finalizers": rest})

    async def _changed(self, seen: Mapping[str, Any], metadata: Object, **fields: Object) -> bool:
        name, version = seen["metadata"]["name"], seen["metadata"]["resourceVersion"]
        changed = await self._object_or_none(
            name,
            f"change RayCluster {self.namespace}/{name}",
            lambda client: _custom(client).patch_namespaced_custom_object(
                *self._ray_clusters,
                name,
                {"metadata": {"resourceVersion": version, **metadata}, **fields},
                field_manager=FIELD_MANAGER,
                _content_type="application/merge-patch+json",
                **self._raw,
            ),
        )
        return changed is not None

    async def delete_ray_cluster(self, name: str, uid: str) -> None:
        """Delete that very RayCluster, its pods first; nothing happens where it is gone or another one."""
        await self._object_or_none(
            name,
            f"delete RayCluster {self.namespace}/{name}",
            lambda client: _custom(client).delete_namespaced_custom_object(
                *self._ray_clusters,
                name,
                body={"propagationPolicy": "Foreground", "preconditions": {"uid": uid}},
                **self._raw,
            ),
        )

    async def pods(self, cluster: str) -> list[Object]:
        """The pods of a RayCluster."""
        return await self._items(
            f"list pods of RayCluster {self.namespace}/{cluster}",
            lambda client: _core(client).list_namespaced_pod(
                self.namespace, label_selector=f"ray.io/cluster={cluster}", **self._raw
            ),
        )

    async def delete_pod(self, name: str, uid: str, *, at_once: bool = False) -> None:
        """Delete that very pod; nothing happens where it is gone or another one.

        :param at_once: do not wait for its host, which is not there any more.
        """
        grace = {"gracePeriodSeconds": 0} if at_once else {}
        await self._object_or_none(
            name,
            f"delete pod {self.namespace}/{name}",
            lambda client: _core(client).delete_namespaced_pod(
                name, self.namespace, body={"preconditions": {"uid": uid}, **grace}, **self._raw
            ),
        )

    async def last_lines(self, pod: str, container: str, *, lines: int = 5, previous: bool = True) -> list[str]:
        """What a container wrote last; nothing where there is no such log.

        :param previous: of its run before this one.
        """
        asked = f"read the log of pod {self.namespace}/{pod}"
        status, body = await self._answer(
            asked,
            lambda client: _core(client).read_namespaced_pod_log(
                pod, self.namespace, container=container, previous=previous, tail_lines=lines, **self._raw
            ),
        )
        if status in (400, 404):  # that container has not run yet, or not before, or its pod is gone
            return []
        if not _is_success(status):
            raise refused(status, body, asked)
        return [line for line in body.decode(errors="replace").splitlines() if line.strip()]

    async def token(self, secret: str) -> str | None:
        """Ray's token out of the Secret that KubeRay made; None while there is none."""
        found = await self._object_or_none(
            secret,
            f"get Secret {self.namespace}/{secret}",
            lambda client: _core(client).read_namespaced_secret(secret, self.namespace, **self._raw),
        )
        return None if found is None else _decoded(found, f"Secret {self.namespace}/{secret}")

    async def workload(self, uid: str) -> Object | None:
        """Kueue's Workload of the object with that uid; None while there is none, or no Kueue."""
        asked = f"list Kueue's Workloads in {self.namespace}"
        for version in KUEUE_VERSIONS:
            status, body = await self._answer(
                asked,
                lambda client, version=version: _custom(client).list_namespaced_custom_object(  # type: ignore[misc]
                    KUEUE_GROUP,
                    version,
                    self.namespace,
                    "workloads",
                    label_selector=f"kueue.x-k8s.io/job-uid={uid}",
                    **self._raw,
                ),
            )
            if status != 404:
                return next(iter(_items_of(_parsed(status, body, asked), asked)), None)
        return None

    async def _items(self, asked: str, send: Send) -> list[Object]:
        return _items_of(await self._object(asked, send), asked)

    async def _object(self, asked: str, send: Send) -> Object:
        return _parsed(*await self._answer(asked, send), asked)

    async def _object_or_none(self, name: str, asked: str, send: Send) -> Object | None:
        """A call to which "does not exist", or "is another one by now", is an answer."""
        status, body = await self._answer(asked, send)
        if status == 404 and _details(body).get("name") == name:
            return None
        if status == 409 and any(words in _message(body) for words in _ANOTHER):
            return None
        return _parsed(status, body, asked)

    async def _answer(self, asked: str, send: Send) -> tuple[int, bytes]:
        """Status and body of one request, sent again with renewed credentials where they were refused."""
        import aiohttp
        from kubernetes_asyncio.config import ConfigException

        for renewed in (False, True):
            assert self._client is not None, "use `async with KubeApi(...)`"
            where = f"Kubernetes at {self._client.configuration.host}, {asked}"
            try:
                response = await send(self._client)
                body = await response.read()
            except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, ConfigException) as error:
                raise Misconfigured(f"{where}: {_detail(error)}; check the kubeconfig or the connection") from error
            except aiohttp.ClientConnectorCertificateError as error:
                raise Misconfigured(f"{where}: its certificate is not trusted here: {_detail(error)}") from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise RemoteUnavailable(f"{where}: {_detail(error)}") from error
            if response.status != 401 or renewed:
                return response.status, body
            await self._open(renew=True)
        raise AssertionError("unreachable: the second round returns or raises")


def refused(status: int, body: bytes, asked: str) -> RayTpuError:
    """The error that an answer stands for.

    :param status: the HTTP status, which is no success.
    :param body: the answer: a ``Status`` of Kubernetes, or anything.
    :param asked: verb and object, for the message.
    """
    message = _message(body)
    answer = f"Kubernetes refused to {asked} ({status}): {message}"
    if any(words in message for words in _BAD_PATCH):
        return Misconfigured(
            f"{answer}; KubeRay there does not know that field: it is misspelt in a template, or KubeRay is older "
            "than 1.5"
        )
    if status in _TRANSIENT or status >= 500:
        return RemoteUnavailable(f"Kubernetes is not able to {asked} now ({status}): {message}")
    if status == 403 and _QUOTA in message:
        return CapacityUnavailable(
            f"{answer}; the namespace's ResourceQuota is used up: release leases or have it raised"
        )
    return Misconfigured(f"{answer}; {_next_step(status, message)}")


def _next_step(status: int, message: str) -> str:
    """What a person can do about an answer that asking again does not change."""
    if status == 401 or "system:anonymous" in message:
        return "credentials, also renewed ones, are not valid there: check the kubeconfig or the connection"
    if "being terminated" in message:
        return "the namespace is being deleted: name another one in the option namespace"
    if status == 403 and " cannot " in message:
        return _ROLE
    if "admission webhook" in message or "denied" in message:
        return (
            "a rule of that cluster wants it otherwise: change the option that it speaks of, or ask who made the rule"
        )
    if status == 404 and message.startswith("namespaces "):
        return "create it with `kubectl create namespace`, or name another one in the option namespace"
    if status == 404 and any(words in message for words in _NO_SUCH_KIND):
        return "KubeRay is not installed there, it brings the kind RayCluster; or that is no API server"
    return "change the option or the template that leads to it; `raytpu doctor --backend gke` checks the rest"


def _is_success(status: int) -> bool:
    return 200 <= status < 300


def _parsed(status: int, body: bytes, asked: str) -> Object:
    """The object that a success brought.

    :raises RayTpuError: for anything else. The message never shows a body that was a success: it may be a Secret.
    """
    if not _is_success(status):
        raise refused(status, body, asked)
    found = _json(body)
    if not isinstance(found.get("metadata"), dict):
        raise RemoteUnavailable(
            f"Kubernetes was asked to {asked}, and what answered is no Kubernetes: {len(body)} bytes that are no "
            "object of it; does a proxy stand in between?"
        )
    return found


def _items_of(answer: Object, asked: str) -> list[Object]:
    items = answer.get("items")
    if not isinstance(items, list):
        raise RemoteUnavailable(f"Kubernetes was asked to {asked}, and the answer is no list")
    return items


def _json(body: bytes) -> Object:
    """The body as a JSON object; empty where it is none."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _details(body: bytes) -> Object:
    found = _json(body).get("details")
    return found if isinstance(found, dict) else {}


def _message(body: bytes) -> str:
    text = _json(body).get("message") or body.decode(errors="replace") or "no text"
    return " ".join(str(text).split())[:800]


def _detail(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _decoded(secret: Object, what: str) -> str | None:
    try:
        data = (secret.get("data") or {}).get(TOKEN_KEY)
        return (base64.b64decode(data, validate=True).decode("ascii").strip() or None) if data else None
    except (ValueError, TypeError, AttributeError):
        # Not `from`: the cause would carry the secret's bytes.
        raise Misconfigured(f"{what}: its {TOKEN_KEY!r} is no text in base64") from None


def _custom(client: ApiClient) -> Any:
    from kubernetes_asyncio.client import CustomObjectsApi

    return CustomObjectsApi(client)


def _core(client: ApiClient) -> Any:
    from kubernetes_asyncio.client import CoreV1Api

    return CoreV1Api(client)
