"""The few calls that this backend makes to the Kubernetes API server, and its answers as our errors.

Each call is one request; who waits and for how long is decided elsewhere. Credentials that expired
are renewed once in each call (F38). Not here: what the objects mean (``objects.py``).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from raytpu_ops.backends.gke.access import KubeAccess
from raytpu_ops.backends.gke.record import FIELD_MANAGER
from raytpu_ops.tpu.errors import CapacityUnavailable, Misconfigured, RayTpuError, RemoteUnavailable

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient
    from kubernetes_asyncio.client.exceptions import ApiException

Answer = TypeVar("Answer")
Object = dict[str, Any]

RAY_GROUP, RAY_VERSION, RAY_PLURAL = "ray.io", "v1", "rayclusters"
KUEUE_GROUP, KUEUE_VERSIONS = "kueue.x-k8s.io", ("v1beta2", "v1beta1")
#: The key of the token in the Secret that KubeRay makes.
TOKEN_KEY = "auth_token"  # noqa: S105 - a key, no token
#: What the server answers while it, a webhook or etcd restarts, or when it has too much to do.
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
#: In answers of 500 and 403 that will never go away by themselves.
_BAD_FIELD = "field not declared in schema"
_QUOTA = "exceeded quota"
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
        self._timeout_s = timeout_s
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
        if self._client is not None:
            await self._client.close()
        self._client = ApiClient(configuration)

    async def ray_cluster(self, name: str) -> Object | None:
        """The RayCluster; None only where the server says that it does not exist."""
        return await self._get(
            f"get RayCluster {self.namespace}/{name}",
            lambda client: _custom(client).get_namespaced_custom_object(
                RAY_GROUP, RAY_VERSION, self.namespace, RAY_PLURAL, name, _request_timeout=self._timeout_s
            ),
        )

    async def ray_clusters(self, selector: str) -> list[Object]:
        """RayClusters with these labels."""
        answer = await self._call(
            f"list RayClusters in {self.namespace}",
            lambda client: _custom(client).list_namespaced_custom_object(
                RAY_GROUP,
                RAY_VERSION,
                self.namespace,
                RAY_PLURAL,
                label_selector=selector,
                _request_timeout=self._timeout_s,
            ),
        )
        return list(answer["items"])

    async def apply_ray_cluster(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """Make the RayCluster by server-side apply.

        :param dry_run: let the server check everything, webhooks too, and store nothing.
        """
        name = manifest["metadata"]["name"]
        options = {"dry_run": "All"} if dry_run else {}
        answer: Object = await self._call(
            f"apply RayCluster {self.namespace}/{name}",
            lambda client: _custom(client).patch_namespaced_custom_object(
                RAY_GROUP,
                RAY_VERSION,
                self.namespace,
                RAY_PLURAL,
                name,
                dict(manifest),
                field_manager=FIELD_MANAGER,
                force=True,
                _content_type="application/apply-patch+yaml",
                _request_timeout=self._timeout_s,
                **options,
            ),
        )
        return answer

    async def delete_ray_cluster(self, name: str, uid: str) -> None:
        """Delete that very RayCluster, its pods first; nothing happens where it is gone or another one."""
        await self._get(
            f"delete RayCluster {self.namespace}/{name}",
            lambda client: _custom(client).delete_namespaced_custom_object(
                RAY_GROUP,
                RAY_VERSION,
                self.namespace,
                RAY_PLURAL,
                name,
                body={"propagationPolicy": "Foreground", "preconditions": {"uid": uid}},
                _request_timeout=self._timeout_s,
            ),
        )

    async def pods(self, cluster: str) -> list[Object]:
        """The pods of a RayCluster."""

        async def listed(client: ApiClient) -> list[Object]:
            found = await _core(client).list_namespaced_pod(
                self.namespace, label_selector=f"ray.io/cluster={cluster}", _request_timeout=self._timeout_s
            )
            return [client.sanitize_for_serialization(pod) for pod in found.items]

        return await self._call(f"list pods of RayCluster {self.namespace}/{cluster}", listed)

    async def delete_pod(self, name: str, uid: str, *, at_once: bool = False) -> None:
        """Delete that very pod; nothing happens where it is gone.

        :param at_once: do not wait for its host, which is not there any more.
        """
        grace = {"gracePeriodSeconds": 0} if at_once else {}
        await self._get(
            f"delete pod {self.namespace}/{name}",
            lambda client: _core(client).delete_namespaced_pod(
                name, self.namespace, body={"preconditions": {"uid": uid}, **grace}, _request_timeout=self._timeout_s
            ),
        )

    async def last_lines(self, pod: str, container: str, *, lines: int = 5, previous: bool = True) -> list[str]:
        """What a container wrote last; nothing where there is no such log.

        :param previous: of its run before this one.
        """

        async def read(client: ApiClient) -> str:
            answer = await _core(client).read_namespaced_pod_log(
                pod,
                self.namespace,
                container=container,
                previous=previous,
                tail_lines=lines,
                _preload_content=False,
                _request_timeout=self._timeout_s,
            )
            return (await answer.read()).decode(errors="replace") if answer.status == 200 else ""

        text = await self._call(f"read the log of pod {self.namespace}/{pod}", read)
        return [line for line in text.splitlines() if line.strip()]

    async def token(self, secret: str) -> str | None:
        """Ray's token out of the Secret that KubeRay made; None while there is none."""

        async def read(client: ApiClient) -> str | None:
            # Not preloaded: the client library writes the bodies that it loads to its log at DEBUG.
            answer = await _core(client).read_namespaced_secret(
                secret, self.namespace, _preload_content=False, _request_timeout=self._timeout_s
            )
            body = await answer.read()
            if answer.status == 404:
                return None
            if answer.status != 200:
                raise _api_exception(answer.status, body)
            return _decoded(body, f"Secret {self.namespace}/{secret}")

        return await self._call(f"get Secret {self.namespace}/{secret}", read)

    async def workload(self, uid: str) -> Object | None:
        """Kueue's Workload of the object with that uid; None while there is none, or no Kueue."""
        for version in KUEUE_VERSIONS:
            answer = await self._get(
                f"list Kueue's Workloads in {self.namespace}",
                lambda client, version=version: _custom(client).list_namespaced_custom_object(  # type: ignore[misc]
                    KUEUE_GROUP,
                    version,
                    self.namespace,
                    "workloads",
                    label_selector=f"kueue.x-k8s.io/job-uid={uid}",
                    _request_timeout=self._timeout_s,
                ),
            )
            if answer is not None:
                return next(iter(answer["items"]), None)
        return None

    async def _get(self, asked: str, call: Callable[[ApiClient], Awaitable[Answer]]) -> Answer | None:
        """A call to which "does not exist", or "is another one by now", is an answer."""
        from kubernetes_asyncio.client.exceptions import ApiException

        async def or_none(client: ApiClient) -> Answer | None:
            try:
                return await call(client)
            except ApiException as error:
                if error.status == 404 or (error.status == 409 and "uid in precondition" in str(error.body)):
                    return None
                raise

        return await self._call(asked, or_none)

    async def _call(self, asked: str, call: Callable[[ApiClient], Awaitable[Answer]]) -> Answer:
        import aiohttp
        from kubernetes_asyncio.client.exceptions import ApiException

        for renewed in (False, True):
            assert self._client is not None, "use `async with KubeApi(...)`"
            try:
                return await call(self._client)
            except ApiException as error:
                if error.status == 401 and not renewed:
                    await self._open(renew=True)
                    continue
                raise refused(error, asked) from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise self._unreachable(error, asked) from error
        raise AssertionError("unreachable: the second round returns or raises")

    def _unreachable(self, error: Exception, asked: str) -> RayTpuError:
        import aiohttp

        assert self._client is not None
        where = f"Kubernetes at {self._client.configuration.host}, {asked}"
        detail = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return Misconfigured(f"{where}: its certificate is not trusted here: {detail}")
        return RemoteUnavailable(f"{where}: {detail}")


def refused(error: ApiException, asked: str) -> RayTpuError:
    """The error that an answer stands for.

    :param error: as the client library raised it.
    :param asked: verb and object, for the message.
    """
    status, message = int(error.status or 0), _message(error)
    answer = f"Kubernetes refused to {asked} ({status}): {message}"
    if status == 401:
        return Misconfigured(f"{answer}; the credentials of the connection are not valid there")
    if status == 403 and _QUOTA in message:
        return CapacityUnavailable(f"{answer}; the namespace's ResourceQuota is used up")
    if status == 403 and "admission webhook" not in message:
        return Misconfigured(f"{answer}; {_ROLE}")
    if status == 404 and "could not find the requested resource" in message:
        return Misconfigured(f"{answer}; KubeRay is not installed there: it brings the kind RayCluster")
    if _BAD_FIELD in message:
        return Misconfigured(f"{answer}; KubeRay there does not know that field: install 1.5 or newer")
    if status in _TRANSIENT or status >= 500:
        return RemoteUnavailable(f"Kubernetes is not able to {asked} now ({status}): {message}")
    return Misconfigured(answer)


def _message(error: ApiException) -> str:
    try:
        text = json.loads(error.body or b"")["message"]
    except (ValueError, TypeError, KeyError):
        text = error.body or error.reason or "no text"
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
    return " ".join(str(text).split())[:800]


def _api_exception(status: int, body: bytes) -> ApiException:
    from kubernetes_asyncio.client.exceptions import ApiException

    error = ApiException(status=status)
    error.body = body
    return error


def _decoded(body: bytes, what: str) -> str | None:
    try:
        data = (json.loads(body).get("data") or {}).get(TOKEN_KEY)
        return base64.b64decode(data, validate=True).decode("ascii").strip() if data else None
    except (ValueError, binascii.Error):
        # Not `from`: the cause would carry the secret's bytes.
        raise Misconfigured(f"{what}: its {TOKEN_KEY!r} is no text in base64") from None


def _custom(client: ApiClient) -> Any:
    from kubernetes_asyncio.client import CustomObjectsApi

    return CustomObjectsApi(client)


def _core(client: ApiClient) -> Any:
    from kubernetes_asyncio.client import CoreV1Api

    return CoreV1Api(client)
