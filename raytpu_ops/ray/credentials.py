"""Who asks: the headers and the TLS that prove it to Ray, and to whatever stands in front of it.

Credentials are asked for when a connection opens and again when they were refused, so that a token
that expires in an hour-long wait is renewed and the wait goes on (F38).
Not here: where a backend keeps its secrets; each backend brings credentials of its own.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

AuthHeader = Literal["authorization", "x-ray-authorization"]


@runtime_checkable
class Credentials(Protocol):
    """Proves who asks. Nothing of it is ever logged or part of a ``repr``."""

    async def headers(self, *, renew: bool = False) -> Mapping[str, str]:
        """Headers for the next request.

        :param renew: the last ones were refused: fetch new ones instead of those that are remembered.
        :raises RayTpuError: they cannot be had.
        """

    async def tls(self) -> ssl.SSLContext | None:
        """The TLS context for ``https`` addresses; None for the machine's own trust."""
