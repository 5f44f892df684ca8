"""The few calls that this backend makes to the Kubernetes API server, and its answers as our errors.

Each call is one request; who waits and for how long is decided elsewhere. Credentials that expired
are renewed once in each call (F38). Bodies are read here, not by the client library, which writes
them to its log at DEBUG and stumbles over those that are no JSON.
Not here: which error an answer is (``answers.py``), what the objects mean (``objects.py``).
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from raytpu_ops.backends.gke import queued
from raytpu_ops.backends.gke.access import KubeAccess
from raytpu_ops.backends.gke.answers import Object, is_absent, is_success, items_of, parsed, refused, words_of
from raytpu_ops.backends.gke.record import FIELD_MANAGER
from raytpu_ops.tpu.errors import Misconfigured, RemoteUnavailable

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from kubernetes_asyncio.client import ApiClient

Send = Callable[["ApiClient"], Awaitable["ClientResponse"]]

RAY_GROUP, RAY_VERSION, RAY_PLURAL = "ray.io", "v1", "rayclusters"
KUEUE_GROUP, KUEUE_VERSIONS = "kueue.x-k8s.io", ("v1beta2", "v1beta1")
#: The key of the token in the Secret that KubeRay makes.
TOKEN_KEY = "auth_token"  # noqa: S105 - a key, no token
#: How server-side apply is asked for.
_APPLIED: Any = {"field_manager": FIELD_MANAGER, "force": True, "_content_type": "application/apply-patch+yaml"}


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
        return await self._applied(manifest, RAY_PLURAL, **({"dry_run": "All"} if dry_run else {}))

    async def change_ray_cluster(
        self,
        seen: Mapping[str, Any],
        annotations: Mapping[str, str],
        *,
        suspend: bool,
        groups: Sequence[Object] | None = None,
    ) -> bool:
        """Change a RayCluster as it was seen, and no other.

        :param seen: what it was when it was read; where somebody has changed it since, this is refused as
            :class:`RemoteUnavailable`: read it again.
        :param annotations: the ones that change.
        :param suspend: whether its pods are unwanted.
        :param groups: all worker groups, where one changes; pods that are there stay as they are.
        :return: False where it is gone.
        """
        spec: Object = {"suspend": suspend, **({} if groups is None else {"workerGroupSpecs": list(groups)})}
        return await self._changed(seen, {"annotations": dict(annotations)}, spec=spec)

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
        if not is_success(status):
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
        found = await self._any_version(
            f"list Kueue's Workloads in {self.namespace}",
            (KUEUE_GROUP, KUEUE_VERSIONS, "workloads"),
            f"kueue.x-k8s.io/job-uid={uid}",
        )
        return next(iter(found[1]), None) if found else None

    async def provisioning_requests(self, selector: str) -> tuple[str, list[Object]] | None:
        """ProvisioningRequests with these labels, and the version of the API that the server has.

        :return: None where it has none.
        """
        return await self._any_version(
            f"list ProvisioningRequests in {self.namespace}",
            (queued.GROUP, queued.VERSIONS, queued.PLURAL),
            selector,
        )

    async def apply_provisioning_request(self, manifest: Mapping[str, Any]) -> None:
        """Make the ProvisioningRequest by server-side apply."""
        await self._applied(manifest, queued.PLURAL)

    async def delete_provisioning_request(self, seen: Mapping[str, Any]) -> None:
        """Delete that very ProvisioningRequest; nothing happens where it is gone or another one."""
        name, (group, _, version) = seen["metadata"]["name"], seen["apiVersion"].partition("/")
        await self._object_or_none(
            name,
            f"delete ProvisioningRequest {self.namespace}/{name}",
            lambda client: _custom(client).delete_namespaced_custom_object(
                group,
                version,
                self.namespace,
                queued.PLURAL,
                name,
                body={"preconditions": {"uid": seen["metadata"]["uid"]}},
                **self._raw,
            ),
        )

    async def apply_pod_template(self, manifest: Mapping[str, Any]) -> None:
        """Make the PodTemplate by server-side apply."""
        name = manifest["metadata"]["name"]
        await self._object(
            f"apply PodTemplate {self.namespace}/{name}",
            lambda client: _core(client).patch_namespaced_pod_template(
                name, self.namespace, dict(manifest), **_APPLIED, **self._raw
            ),
        )

    async def _applied(self, manifest: Mapping[str, Any], plural: str, **options: str) -> Object:
        """Server-side apply of a custom resource."""
        name, (group, _, version) = manifest["metadata"]["name"], manifest["apiVersion"].partition("/")
        return await self._object(
            f"apply {manifest['kind']} {self.namespace}/{name}",
            lambda client: _custom(client).patch_namespaced_custom_object(
                group, version, self.namespace, plural, name, dict(manifest), **_APPLIED, **options, **self._raw
            ),
        )

    async def _any_version(
        self, asked: str, kind: tuple[str, Sequence[str], str], selector: str
    ) -> tuple[str, list[Object]] | None:
        """Custom resources with these labels, and their version; None where the server has none of the versions.

        :param kind: group, versions of which the first is preferred, plural.
        """
        group, versions, plural = kind
        for version in versions:
            status, body = await self._answer(
                asked,
                lambda client, version=version: _custom(client).list_namespaced_custom_object(  # type: ignore[misc]
                    group, version, self.namespace, plural, label_selector=selector, **self._raw
                ),
            )
            if status != 404:
                return version, items_of(parsed(status, body, asked), asked)
        return None

    async def _items(self, asked: str, send: Send) -> list[Object]:
        return items_of(await self._object(asked, send), asked)

    async def _object(self, asked: str, send: Send) -> Object:
        return parsed(*await self._answer(asked, send), asked)

    async def _object_or_none(self, name: str, asked: str, send: Send) -> Object | None:
        """A call to which "does not exist", or "is another one by now", is an answer."""
        status, body = await self._answer(asked, send)
        return None if is_absent(status, body, name) else parsed(status, body, asked)

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
                raise Misconfigured(f"{where}: {words_of(error)}; check the kubeconfig or the connection") from error
            except aiohttp.ClientConnectorCertificateError as error:
                raise Misconfigured(f"{where}: its certificate is not trusted here: {words_of(error)}") from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise RemoteUnavailable(f"{where}: {words_of(error)}") from error
            if response.status != 401 or renewed:
                return response.status, body
            await self._open(renew=True)
        raise AssertionError("unreachable: the second round returns or raises")


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
