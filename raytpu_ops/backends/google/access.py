"""Whose word counts at Google, and where its APIs are reached.

Not here: Airflow connections (``hooks/google_cloud.py``), which bring an access of their own, and what is
asked of the APIs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from raytpu_ops.backends.google.refusals import not_proven, one_line
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured

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


class DefaultAccess:
    """What this machine or this pod is to Google: Application Default Credentials.

    A key file in ``$GOOGLE_APPLICATION_CREDENTIALS``, what ``gcloud auth application-default login`` left, or
    the metadata server's account (Workload Identity in a pod).

    :param project_id: the project; default the one of the credentials.
    :param endpoints: addresses that stand in for public ones, by the API's short name.
    """

    def __init__(self, project_id: str | None = None, *, endpoints: Mapping[str, str] | None = None) -> None:
        self.endpoints: Mapping[str, str] = checked_endpoints(endpoints or {})
        self._asked_project = project_id
        self._lock = threading.Lock()
        self._found: tuple[Credentials, str | None] | None = None
        self.selectors: Mapping[str, str] = selectors_of(project_id=project_id, google_endpoints=self.endpoints)

    def __repr__(self) -> str:
        return f"DefaultAccess({', '.join(f'{key}={value!r}' for key, value in self.selectors.items())})"

    async def project(self) -> str:
        """See :meth:`CloudAccess.project`."""
        if self._asked_project:
            return self._asked_project
        _, project = await asyncio.to_thread(self._load)
        if not project:
            raise Misconfigured(
                "project_id is missing: neither the options nor Google's default credentials say it; set project_id"
            )
        return project

    async def credentials(self, *, renew: bool = False) -> Credentials:
        """See :meth:`CloudAccess.credentials`."""
        if not renew and self._found is not None and self._found[0].valid:
            return self._found[0]
        return await asyncio.to_thread(self._fresh, renew)

    def _fresh(self, renew: bool) -> Credentials:
        from google.auth.transport.requests import Request

        credentials, _ = self._load()
        # Calls whose token ended at the same moment need one new token, not one each.
        with self._lock, _errors_as_ours():
            if renew or not credentials.valid:
                credentials.refresh(Request())
            return credentials

    def _load(self) -> tuple[Credentials, str | None]:
        import google.auth

        with self._lock, _errors_as_ours():
            if self._found is None:
                self._found = google.auth.default(scopes=[SCOPE])
            return self._found


@contextmanager
def _errors_as_ours() -> Iterator[None]:
    from google.auth.exceptions import GoogleAuthError

    try:
        yield
    except GoogleAuthError as error:
        raise not_proven(error, "Google's default credentials") from error
    except (ValueError, OSError) as error:  # a key file that is none, or can't be read
        raise Misconfigured(f"Google's default credentials: {one_line(error)}") from error


def checked_endpoints(endpoints: Mapping[str, str]) -> dict[str, str]:
    """Endpoints by name, each of an API that is called here.

    :raises InvalidSpec: for a name that is none.
    """
    for name in endpoints:
        if name not in PUBLIC:
            raise InvalidSpec(f"google_endpoints: there is no API {name!r}; there are {', '.join(PUBLIC)}")
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
