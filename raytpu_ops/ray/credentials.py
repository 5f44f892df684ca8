"""Who asks: the headers and the TLS that prove it to Ray, and to whatever stands in front of it.

Credentials are asked for when a connection opens and again when they were refused, so that a token
that expires in an hour-long wait is renewed and the wait goes on (F38).
Not here: where a backend keeps its secrets; each backend brings credentials of its own.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, Protocol, runtime_checkable

from raytpu_ops.tpu.errors import InvalidSpec, RemoteUnavailable

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

    async def proxy(self) -> str | None:
        """URL of the HTTP proxy that leads there; None for what the environment says."""


class BearerToken:
    """A token that stays as it is.

    :param token: Ray's token.
    :param header: the header that carries it. ``x-ray-authorization`` where a proxy such as the
        Kubernetes API server keeps ``authorization`` for itself.
    :raises InvalidSpec: it cannot stand in a header; the message does not show it.
    """

    def __init__(self, token: str, header: AuthHeader = "authorization") -> None:
        self._token = check_token(token)
        self.header = header

    def __repr__(self) -> str:
        return f"BearerToken('***', {self.header!r})"

    async def headers(self, *, renew: bool = False) -> Mapping[str, str]:
        """The header; the same again where a new one is asked for."""
        return {self.header: f"Bearer {self._token}"}

    async def tls(self) -> ssl.SSLContext | None:
        """The machine's own trust."""
        return None

    async def proxy(self) -> str | None:
        """None that we know of."""
        return None


class FetchedToken:
    """A token that is kept elsewhere, read when it is first needed and again where it was refused.

    :param read: reads it; None while there is none.
    :param missing: the message where there is none.
    """

    def __init__(self, read: Callable[[], Awaitable[str | None]], missing: str) -> None:
        self._read = read
        self._missing = missing
        self._token: str | None = None

    async def headers(self, *, renew: bool = False) -> Mapping[str, str]:
        """See :class:`Credentials`."""
        return {"authorization": f"Bearer {await self.token(renew=renew)}"}

    async def token(self, *, renew: bool) -> str:
        """Ray's token.

        :raises RemoteUnavailable: there is none yet, or none any more.
        """
        if renew or self._token is None:
            self._token = await self._read()
        if self._token is None:
            raise RemoteUnavailable(self._missing)
        return check_token(self._token)

    async def tls(self) -> ssl.SSLContext | None:
        """The machine's own trust."""
        return None

    async def proxy(self) -> str | None:
        """None that we know of."""
        return None


def check_token(token: object) -> str:
    """The token without white space around it.

    :raises InvalidSpec: when it cannot stand in a header; the message does not show it.
    """
    if not isinstance(token, str):
        raise InvalidSpec(f"Ray's token must be text, got {type(token).__name__}")
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidSpec("Ray's token is empty or holds characters that no header can carry; read its file again")
    return token
