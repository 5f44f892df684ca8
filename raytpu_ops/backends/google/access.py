"""Whose word counts at Google, and where its APIs are reached.

Not here: Airflow connections (``hooks/google_cloud.py``), which bring an access of their own, and what is
asked of the APIs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from google.auth.credentials import Credentials


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
