"""Whose word counts at Google, and where its APIs are reached.

Not here: Airflow connections (``hooks/google_cloud.py``), which bring an access of their own, and what is
asked of the APIs.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from raytpu_ops.backends.google.refusals import not_proven, one_line
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, RemoteUnavailable

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

#: What Google's own tools ask for; IAM decides what it is good for.
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
#: The short names of the APIs that this package calls, with their public addresses.
PUBLIC = {
    "container": "container.googleapis.com",
    "tpu": "tpu.googleapis.com",
    "compute": "compute.googleapis.com",
    "cloudresourcemanager": "cloudresourcemanager.googleapis.com",
}

#: A name, an address or one of IPv6 in brackets, and a port or none.
_ENDPOINT = re.compile(r"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?\Z")
#: The APIs that are reached over gRPC.
_GRPC = frozenset({"container", "tpu"})


@runtime_checkable
class CloudAccess(Protocol):
    """A project and somebody who may act in it. Nothing of it is ever logged or part of a ``repr``."""

    #: What a later task needs to find the same access again: names of connections, no secret. It
    #: travels in the lease's ``place``.
    selectors: Mapping[str, str]
    #: Where an API is reached instead of its public name, ``host:port`` by the API's short name
    #: (``container``, ``tpu``, ``compute``, ``cloudresourcemanager``): private endpoints, and tests.
    endpoints: Mapping[str, str]

    async def project(self) -> str:
        """The id of the project.

        :raises Misconfigured: neither options, connection nor credentials say it.
        """

    async def credentials(self, *, renew: bool = False) -> Credentials:
        """Credentials of google-auth, valid now.

        :param renew: the last ones were refused: fetch a new token.
        :raises Misconfigured: there are none that work here.
        :raises RemoteUnavailable: whoever gives them out does not answer.
        """


class HeldAccess:
    """An access that fetches credentials once, keeps them, and renews their token. Subclasses say where from.

    Fetching blocks, so each round is one thread's work.

    :param project_id: the project; default the one that comes with the credentials.
    :param endpoints: addresses that stand in for public ones, by the API's short name.
    :param selectors: further options by which the same access is found again.
    """

    def __init__(
        self, project_id: str | None = None, *, endpoints: Mapping[str, str] | None = None, **selectors: Any
    ) -> None:
        self.endpoints: Mapping[str, str] = checked_endpoints(endpoints or {})
        self._asked_project = project_id
        self._lock = threading.RLock()
        self._found: tuple[Credentials, str | None] | None = None
        self.selectors: Mapping[str, str] = selectors_of(
            project_id=project_id, google_endpoints=self.endpoints, **selectors
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.selectors.items())})"

    def fetch(self) -> tuple[Credentials, str | None]:
        """Credentials, and the project that they come with."""
        raise NotImplementedError

    def errors_as_ours(self) -> AbstractContextManager[None]:
        """The door through which errors of :meth:`fetch` and of a refresh leave."""
        raise NotImplementedError

    @property
    def who(self) -> str:
        """Whose credentials these are, for messages."""
        raise NotImplementedError

    async def project(self) -> str:
        """See :meth:`CloudAccess.project`."""
        if self._asked_project:
            return self._asked_project
        _, project = await asyncio.to_thread(self._held)
        if not project:
            raise Misconfigured(f"project_id is missing: neither the options nor {self.who} say it; set project_id")
        return project

    async def credentials(self, *, renew: bool = False) -> Credentials:
        """See :meth:`CloudAccess.credentials`."""
        if not renew and self._found is not None and self._found[0].valid:
            return self._found[0]
        return await asyncio.to_thread(self._fresh, renew)

    def _fresh(self, renew: bool) -> Credentials:
        from google.auth.transport.requests import Request

        # Calls whose token ended at the same moment need one new token, not one each.
        with self._lock:
            credentials, _ = self._held()
            with self.errors_as_ours():
                if renew or not credentials.valid:
                    credentials.refresh(Request())
            return credentials

    def _held(self) -> tuple[Credentials, str | None]:
        with self._lock:
            if self._found is None:
                with self.errors_as_ours():
                    self._found = self.fetch()
            return self._found


class DefaultAccess(HeldAccess):
    """What this machine or this pod is to Google: Application Default Credentials.

    A key file in ``$GOOGLE_APPLICATION_CREDENTIALS``, what ``gcloud auth application-default login`` left, or
    the metadata server's account (Workload Identity in a pod).

    :param project_id: the project; default the one of the credentials.
    :param endpoints: addresses that stand in for public ones, by the API's short name.
    """

    who = "Google's default credentials"

    def __init__(self, project_id: str | None = None, *, endpoints: Mapping[str, str] | None = None) -> None:
        super().__init__(project_id, endpoints=endpoints)

    def fetch(self) -> tuple[Credentials, str | None]:
        """See :meth:`HeldAccess.fetch`."""
        try:
            import google.auth
        except ImportError as error:
            raise Misconfigured(f"{error}: pip install 'raytpu-ops[google]'") from error

        found: tuple[Credentials, str | None] = google.auth.default(scopes=[SCOPE])
        return found

    @contextmanager
    def errors_as_ours(self) -> Iterator[None]:
        """See :meth:`HeldAccess.errors_as_ours`."""
        from google.auth.exceptions import GoogleAuthError

        try:
            yield
        except GoogleAuthError as error:
            raise not_proven(error, self.who) from error
        except (ValueError, OSError) as error:  # a key file that is none, or can't be read
            raise Misconfigured(f"{self.who}: {one_line(error)}") from error


class NoAccess:
    """Nobody: plans are made all the same, and say that Google was not asked.

    :param why: what is missing.
    """

    selectors: Mapping[str, str] = MappingProxyType({})
    endpoints: Mapping[str, str] = MappingProxyType({})

    def __init__(self, why: str) -> None:
        self._why = why

    async def project(self) -> str:
        """A word that stands for it."""
        return "PROJECT"

    async def credentials(self, *, renew: bool = False) -> Credentials:
        """There are none."""
        raise RemoteUnavailable(self._why)


def checked_endpoints(endpoints: Mapping[str, str]) -> dict[str, str]:
    """Endpoints by name, each of an API that is called here.

    :raises InvalidSpec: for a name that is none, or no address there; that may hold a password and is not shown.
    """
    for name, address in endpoints.items():
        if name not in PUBLIC:
            raise InvalidSpec(f"google_endpoints: there is no API {name!r}; there are {', '.join(PUBLIC)}")
        # Google's clients, which speak gRPC, take no URL; what comes as JSON over HTTP may have one.
        bare = address if name in _GRPC else re.sub(r"^https?://", "", address)
        if not _ENDPOINT.match(bare):
            raise InvalidSpec(
                f"google_endpoints.{name}: must be 'host:port' such as 'tpu.example.net:443', without a path, a user "
                f"name or a password{' and without https://' if name in _GRPC else ''}"
            )
    return dict(endpoints)


def selectors_of(**options: Any) -> dict[str, str]:
    """Options as text, without those that say nothing: a lease's ``place`` holds nothing else.

    :param options: text, lists of text, or mappings of text.
    """
    told: dict[str, str] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            value = [f"{name}={entry}" for name, entry in sorted(value.items())]
        if value:
            told[key] = value if isinstance(value, str) else ",".join(value)
    return told
