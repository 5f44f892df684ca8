"""How the Ray of a RayCluster is reached, and what proves to it and to the API server who asks.

By default through the API server's service proxy, which needs no open port and no way into the
cluster's network. The API server keeps ``authorization`` for itself, so Ray's token travels in
``x-ray-authorization``, which Ray takes as well.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from raytpu_ops.backends.gke.access import KubeAccess
from raytpu_ops.backends.gke.manifest import PORTS
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.ray.credentials import FetchedToken
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured

if TYPE_CHECKING:
    from kubernetes_asyncio.client import Configuration

ReadToken = Callable[[], Awaitable[str | None]]


def addresses(settings: Settings, name: str, server: str) -> tuple[str, str]:
    """Base URLs of Ray's dashboard and of Serve.

    :param name: of the RayCluster.
    :param server: URL of the API server.
    :raises InvalidSpec: a URL of the settings cannot be filled in.
    """
    service = f"{name}-head-svc"
    if settings.reach == "service":
        host = f"{service}.{settings.namespace}.svc"
        found = (f"http://{host}:{PORTS['dashboard']}", f"http://{host}:{PORTS['serve']}")
    else:
        base = f"{server.rstrip('/')}/api/v1/namespaces/{settings.namespace}/services/{service}"
        found = (f"{base}:dashboard/proxy", f"{base}:serve/proxy")
    return (
        _filled("dashboard_url", settings.dashboard_url, name, settings) or found[0],
        _filled("serve_url", settings.serve_url, name, settings) or found[1],
    )


def server_of(configuration: Configuration, settings: Settings) -> str:
    """URL of the API server; refused where Ray could not be reached through it, before anything is made.

    :raises Misconfigured: the configuration asks for what is not possible on the way to Ray.
    """
    if settings.proxied:
        proxy_of(configuration)
        if configuration.tls_server_name:
            raise Misconfigured(
                f"Kubernetes at {configuration.host}: its configuration has tls-server-name "
                f"{configuration.tls_server_name!r}, which holds for Kubernetes alone and not for Ray behind it: put "
                "that name into `server`, or say dashboard_url and serve_url"
            )
    return configuration.host or ""


def proxy_of(configuration: Configuration) -> str | None:
    """The HTTP proxy in front of the API server, by ``proxy-url`` of a kubeconfig.

    :raises Misconfigured: it is of another kind.
    """
    proxy: str | None = configuration.proxy or None
    if proxy and not proxy.startswith(("http://", "https://")):
        kind = proxy.partition(":")[0]
        raise Misconfigured(
            f"Kubernetes at {configuration.host}: its proxy-url is of the kind {kind!r}: Ray is reached through one "
            "that begins with http:// or https://"
        )
    return proxy


def _filled(setting: str, url: str | None, name: str, settings: Settings) -> str | None:
    from raytpu_ops.ray.transport import check_address

    if url is None:
        return None
    filled = url.replace("{name}", name).replace("{namespace}", settings.namespace)
    if "{" in filled or "}" in filled:
        raise InvalidSpec(f"{setting}: {url!r} may hold {{name}} and {{namespace}} and no other braces")
    try:
        return check_address(filled)
    except InvalidSpec as error:
        raise InvalidSpec(f"{setting}: {error}") from None


def through_proxy(address: str) -> bool:
    """Whether an address leads through the API server."""
    return "/api/v1/namespaces/" in address and "/proxy" in address


class RayCredentials(FetchedToken):
    """Ray's token, for a dashboard that is reached directly.

    :param read_token: reads it from the Secret; None while there is none.
    """

    def __init__(self, read_token: ReadToken) -> None:
        super().__init__(read_token, "Ray's token is not there yet: KubeRay makes its Secret with the RayCluster")


class ProxyCredentials:
    """Who asks the API server, and behind it Ray.

    :param access: the way to the API server.
    :param ray: Ray's token; None for Serve, which asks for none.
    """

    def __init__(self, access: KubeAccess, ray: RayCredentials | None = None) -> None:
        self._access = access
        self._ray = ray

    async def headers(self, *, renew: bool = False) -> Mapping[str, str]:
        """See :class:`~raytpu_ops.ray.credentials.Credentials`."""
        configuration = await self._access.configuration(renew=renew)
        bearer = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        headers = {"authorization": bearer} if bearer else {}
        if self._ray is not None:
            headers["x-ray-authorization"] = f"Bearer {await self._ray.token(renew=renew)}"
        return headers

    async def tls(self) -> ssl.SSLContext | None:
        """The API server's certificate authority, and our certificate where the connection has one."""
        return tls_context(await self._access.configuration())

    async def proxy(self) -> str | None:
        """The one in front of the API server."""
        return proxy_of(await self._access.configuration())


def tls_context(configuration: Configuration) -> ssl.SSLContext:
    """The TLS that a configuration asks for, as the Kubernetes client itself makes it.

    :raises Misconfigured: its files can't be read.
    """
    try:
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    except OSError as error:  # TLS errors are such
        raise Misconfigured(
            f"Kubernetes at {configuration.host}: the certificates of its configuration can't be read: {error}"
        ) from error
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.disable_strict_ssl_verification:
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
