"""Credentials on the wire: asked for before each request, and once more where the answer is 401 (F38).

Not here: what is remembered between two requests; that is the credentials' own business.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping

import httpx


class RenewingAuth(httpx.Auth):
    """For an async client.

    :param ask: gives the headers; with True it is asked to fetch new ones.
    """

    def __init__(self, ask: Callable[[bool], Awaitable[Mapping[str, str]]]) -> None:
        self._ask = ask

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """Send; where it is refused, with new credentials again."""
        shown = await self._ask(False)
        request.headers.update(shown)
        response = yield request
        # Ray answers 403 to a token that is not its own any more.
        if response.status_code in (401, 403) and replaced(request, shown, await self._ask(True)):
            yield request


class BlockingRenewingAuth(httpx.Auth):
    """For a blocking client, and for addresses below one URL only: nobody else is shown the credentials.

    :param ask: gives the headers; with True it is asked to fetch new ones.
    :param base: the URL.
    """

    def __init__(self, ask: Callable[[bool], Mapping[str, str]], base: httpx.URL) -> None:
        self._ask = ask
        self._base = base

    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send; where it is refused, with new credentials again."""
        if not self._is_below(request.url):
            yield request
            return
        shown = self._ask(False)
        request.headers.update(shown)
        response = yield request
        if response.status_code == 401 and replaced(request, shown, self._ask(True)):
            yield request

    def _is_below(self, url: httpx.URL) -> bool:
        path = self._base.path.rstrip("/")
        same_place = (url.scheme, url.host, url.port) == (self._base.scheme, self._base.host, self._base.port)
        return same_place and (url.path == path or url.path.startswith(f"{path}/")) and "/../" not in f"{url.path}/"


def replaced(request: httpx.Request, shown: Mapping[str, str], renewed: Mapping[str, str]) -> bool:
    """Put new headers into the place of refused ones.

    :return: False where they are the same: then asking again cannot help.
    """
    if dict(renewed) == dict(shown):
        return False
    for name in shown:
        request.headers.pop(name, None)
    request.headers.update(renewed)
    return True
