"""Credentials for tests: tokens that follow one another, and certificates of an authority of their own."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from raytpu_ops.tpu.errors import RayTpuError
from tests.testbed.pki import Authority


class Rotating:
    """Tokens that follow one another, one for each renewal; the last one for ever.

    :param tokens: for the server in front, in ``authorization``.
    :param ray: Ray's own token.
    :param trusts: whom TLS trusts.
    :param failures: what is raised first, one by one, before headers or TLS are to be had.
    """

    def __init__(
        self,
        *tokens: str,
        ray: str | None = None,
        trusts: ssl.SSLContext | None = None,
        failures: list[RayTpuError] | None = None,
    ) -> None:
        self.tokens = list(tokens)
        self.renewals = 0
        self.asked = 0
        self._ray, self._trusts = ray, trusts
        self.failures = failures or []
        #: URL of a proxy that leads there.
        self.way: str | None = None

    async def headers(self, *, renew: bool = False) -> Mapping[str, str]:
        self._fail()
        self.asked += 1
        if renew:
            self.renewals += 1
            self.tokens = self.tokens[1:] or self.tokens
        ray = {"x-ray-authorization": f"Bearer {self._ray}"} if self._ray else {}
        return {"authorization": f"Bearer {self.tokens[0]}", **ray}

    async def tls(self) -> ssl.SSLContext | None:
        self._fail()
        return self._trusts

    async def proxy(self) -> str | None:
        self._fail()
        return self.way

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


def tls_pair(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """What a server on loopback shows, and what a client trusts that knows its authority."""
    authority = Authority(folder)
    authority.issue("server", "server", hosts=("127.0.0.1",))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    return server, ssl.create_default_context(cafile=str(authority.ca))
