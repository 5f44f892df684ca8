"""Google's clients with one door for all calls: credentials, bounded time, errors as ours.

GKE and Cloud TPU go through Google's async clients. The Compute and Resource Manager APIs have none (their
library blocks, and takes seconds and a hundred megabytes to import), so the few calls there are JSON
over HTTP. No call is tried again here, but for an expired token: who waits, and for how long, is decided
elsewhere. Not here: what is asked (the backends), what a refusal means (``refusals.py``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from raytpu_ops.backends.google.access import PUBLIC, CloudAccess
from raytpu_ops.backends.google.refusals import is_absent, refused
from raytpu_ops.tpu.errors import Misconfigured, RayTpuError, RemoteUnavailable

if TYPE_CHECKING:
    import httpx
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.container_v1 import ClusterManagerAsyncClient
    from google.cloud.tpu_v2 import TpuAsyncClient

T = TypeVar("T")
Json = dict[str, Any]
#: Takes the locations that did not answer when all were asked; it raises where they are needed.
Unheard = Callable[[Iterable[str]], None]


class GoogleApis:
    """The clients of one task or trigger; use it as an async context manager.

    Every method raises :class:`RemoteUnavailable` while Google does not answer or is not able to, and
    :class:`CapacityUnavailable` and :class:`Misconfigured` for refusals; the cause is Google's own error, which
    ``refusals.busy_with`` and its siblings read.

    :param access: who asks, and where the APIs are.
    :param project: its id, where it is known; default the access's.
    :param timeout_s: seconds until one call counts as unanswered.
    """

    #: The id of the project.
    project: str

    def __init__(self, access: CloudAccess, *, project: str | None = None, timeout_s: float = 60.0) -> None:
        self._access = access
        self._asked_project = project
        self._timeout_s = timeout_s
        #: The headers that carry the present token.
        self._bearer: dict[str, str] = {}
        self._opened: list[ClusterManagerAsyncClient | TpuAsyncClient] = []

    async def __aenter__(self) -> Self:
        # Imported in a thread: in an event loop that would hold up everything else for seconds.
        await asyncio.to_thread(_import)
        self.project = self._asked_project or await self._access.project()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for client in self._opened:
                await client.transport.close()
        finally:
            if "_http" in vars(self):
                await self._http.aclose()

    @cached_property
    def _http(self) -> httpx.AsyncClient:
        """Opened when it is first used: most leases never need it, and the machine's certificates take time to read."""
        import httpx

        return httpx.AsyncClient(timeout=self._timeout_s, verify=_trust())

    @cached_property
    def container(self) -> ClusterManagerAsyncClient:
        """The client of GKE's API, opened when it is first used. Its calls go through :meth:`ask`."""
        from google.cloud.container_v1 import ClusterManagerAsyncClient

        carrier = _carrier(lambda: self._bearer)
        client = ClusterManagerAsyncClient(credentials=carrier, client_options=self._reached("container"))
        self._opened.append(client)
        return client

    @cached_property
    def tpu(self) -> TpuAsyncClient:
        """The client of Cloud TPU's API, opened when it is first used. Its calls go through :meth:`ask`."""
        from google.cloud.tpu_v2 import TpuAsyncClient

        # Their debug log has whole requests, and with them the token of a node's Ray.
        logging.getLogger("google.cloud.tpu_v2").setLevel(logging.INFO)
        client = TpuAsyncClient(credentials=_carrier(lambda: self._bearer), client_options=self._reached("tpu"))
        self._opened.append(client)
        return client

    def _reached(self, api: str) -> dict[str, str]:
        endpoint = self._access.endpoints.get(api)
        return {"api_endpoint": endpoint} if endpoint else {}

    async def prove(self) -> None:
        """See to it that there is a token.

        :raises Misconfigured: there are no credentials that work here.
        :raises RemoteUnavailable: whoever gives out tokens does not answer.
        """
        await self._access.credentials()

    async def ask(self, asked: str, method: Callable[..., Awaitable[T]], **fields: Any) -> T:
        """One call of one of the clients' methods.

        :param asked: verb and object, for messages: ``"get node pool a"``.
        :param method: ``apis.container.get_node_pool`` and the like.
        :param fields: what the method takes: ``name=…``, ``request=…``. Not of a ``list_…`` that comes in pages.
        """
        return await self._through_door(asked, lambda: method(**fields, retry=None, timeout=self._timeout_s))

    async def ask_or_none(self, asked: str, method: Callable[..., Awaitable[T]], **fields: Any) -> T | None:
        """A call to which "does not exist" is an answer: None only where Google says NOT_FOUND (F07)."""
        try:
            return await self.ask(asked, method, **fields)
        except RayTpuError as error:
            if is_absent(error):
                return None
            raise

    async def ask_all(
        self,
        asked: str,
        method: Callable[..., Awaitable[Any]],
        items: str,
        *,
        unheard: Unheard | None = None,
        **fields: Any,
    ) -> list[Any]:
        """All pages of a list.

        :param items: the field of a page that holds them: ``"nodes"``.
        :param unheard: takes the locations that did not answer Google, and the rest is listed.
        :raises RemoteUnavailable: also where Google lists only a part, and nobody takes that.
        """

        async def read() -> list[Any]:
            found: list[Any] = []
            pager = await method(**fields, retry=None, timeout=self._timeout_s)
            async for page in pager.pages:
                if missing := getattr(page, "unreachable", None):
                    if unheard is None:
                        raise RemoteUnavailable(f"Google, {asked}: no answer from {', '.join(missing)}")
                    unheard(missing)
                found.extend(getattr(page, items))
            return found

        return await self._through_door(asked, read)

    async def compute(self, verb: str, path: str, asked: str, *, body: Json | None = None) -> Json:
        """One call of the Compute API.

        :param verb: ``GET``, ``POST``, ``DELETE``.
        :param path: below the project: ``"zones/z/reservations/r"``; of another one: ``"projects/p/zones/…"``.
        :param asked: verb and object, for messages.
        :return: the resource, or the operation.
        """
        below = path if path.startswith("projects/") else f"projects/{self.project}/{path}"
        return await self._json("compute", verb, f"/compute/v1/{below}", asked, body)

    async def compute_or_none(self, path: str, asked: str) -> Json | None:
        """A resource of the Compute API; None only where Google says that it does not exist (F07)."""
        try:
            return await self.compute("GET", path, asked)
        except RayTpuError as error:
            if is_absent(error):
                return None
            raise

    async def permissions(self, wanted: Sequence[str], *, project: str | None = None) -> list[str]:
        """Those of the permissions that the account has in a project.

        :param project: default the access's own.
        """
        project = project or self.project
        answer = await self._json(
            "cloudresourcemanager",
            "POST",
            f"/v3/projects/{project}:testIamPermissions",
            f"test permissions in project {project}",
            {"permissions": list(wanted)},
        )
        return [str(name) for name in answer.get("permissions", [])]

    async def _json(self, api: str, verb: str, path: str, asked: str, body: Json | None) -> Json:
        endpoint = self._access.endpoints.get(api) or PUBLIC[api]
        base = endpoint if endpoint.startswith(("http://", "https://")) else f"https://{endpoint}"

        async def send() -> Json:
            from google.api_core.exceptions import format_http_response_error

            response = await self._http.request(verb, f"{base}{path}", json=body, headers=self._bearer)
            payload = _object(response)
            if response.is_success and payload is not None:
                return payload
            raise format_http_response_error(response, verb, path, payload)

        return await self._through_door(asked, send)

    async def _through_door(self, asked: str, send: Callable[[], Awaitable[T]]) -> T:
        """One call, sent again with a new token where the last one was refused (F38)."""
        import httpx
        from google.api_core.exceptions import GoogleAPIError, Unauthenticated, Unauthorized
        from google.auth.exceptions import GoogleAuthError

        for renewed in (False, True):
            await self._get_ready(renew=renewed)
            try:
                return await send()
            except (Unauthenticated, Unauthorized) as error:
                if renewed:
                    raise refused(error, asked) from error
            except (GoogleAPIError, GoogleAuthError, OSError, httpx.HTTPError) as error:
                raise refused(error, asked) from error
        raise AssertionError("unreachable: the second round returns or raises")

    async def _get_ready(self, *, renew: bool) -> None:
        credentials = await self._access.credentials(renew=renew)
        headers: dict[str, str] = {}
        credentials.apply(headers)
        self._bearer = {name.lower(): value for name, value in headers.items()}


def _carrier(bearer: Callable[[], dict[str, str]]) -> AnonymousCredentials:
    """Credentials that only carry the present token to the wire: a new one needs no new client.

    As metadata of the call it would be in Google's own debug log.
    """
    from google.auth.credentials import AnonymousCredentials

    class Carrier(AnonymousCredentials):  # type: ignore[misc] # google-auth has no types
        def before_request(self, request: Any, method: str, url: str, headers: dict[str, str]) -> None:
            headers.update(bearer())

    return Carrier()


def _trust() -> ssl.SSLContext | bool:
    """As google-auth's own requests have it: a company's proxy is named in the same variable for both."""
    bundle = os.environ.get("REQUESTS_CA_BUNDLE")
    if not bundle:
        return True
    try:
        if Path(bundle).is_dir():
            return ssl.create_default_context(capath=bundle)
        return ssl.create_default_context(cafile=bundle)
    except OSError as error:
        raise Misconfigured(f"REQUESTS_CA_BUNDLE={bundle!r} can't be read: {error}") from error


def _object(response: httpx.Response) -> Json | None:
    """The answer's JSON object; None where it is none: a proxy's page."""
    try:
        found = response.json()
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _import() -> None:
    try:
        for module in ("google.cloud.container_v1", "google.cloud.tpu_v2"):
            import_module(module)
    except ImportError as error:
        raise Misconfigured(f"{error}: pip install 'raytpu-ops[google]'") from error
