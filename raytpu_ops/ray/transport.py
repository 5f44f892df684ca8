"""One door to Ray's dashboard: requests go out here, errors come back as ours.

Transient cases stand in one list with a reason beside each; everything that is not on it is
permanent. Not here: what is asked for and what the answers mean (``jobs.py``, ``cluster.py``,
``serving.py``, ``packages.py``, ``logs.py``), and long waiting (``waits.py``): a request is tried
again for seconds only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import tenacity

from raytpu_ops.ray.auth import RenewingAuth
from raytpu_ops.ray.credentials import AuthHeader as AuthHeader
from raytpu_ops.ray.credentials import Credentials
from raytpu_ops.ray.kubernetes import status_of
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, RayTpuError, RemoteUnavailable

Answer = TypeVar("Answer")

#: HTTP statuses that go away by themselves, each with the reason (F28). 5xx beyond these too.
RETRYABLE_STATUS: Mapping[int, str] = {
    404: "a proxy in front of Ray answers this until the dashboard is up; Ray's own 404 says what does not exist",
    408: "the far side gave up waiting for the request",
    409: "another change of the same object is under way",
    425: "a proxy is not willing to replay an early request yet",
    429: "Ray's state API answers this at 100 requests in progress",
    500: "Ray answers this for nearly everything, above all while no agent has registered",
    502: "a proxy reaches nothing behind it",
    503: "the Kubernetes service has no endpoint yet, or Serve's controller is recovering",
    504: "a proxy gave up waiting",
}

#: What httpx raises when the far side is not there for the moment, each with the reason.
RETRYABLE_ERRORS: Mapping[type[httpx.HTTPError], str] = {
    httpx.ConnectError: "refused or no such host: the head is starting or being replaced",
    httpx.TimeoutException: "no answer in time",
    httpx.ReadError: "reset while reading",
    httpx.WriteError: "reset while writing",
    httpx.CloseError: "reset while closing",
    httpx.RemoteProtocolError: "closed without an answer, or an answer that is no HTTP",
    httpx.ProxyError: "a proxy on the way failed",
    httpx.DecodingError: "an answer cut off in the middle",
}

#: Ray passes an agent's refusal on as a 500 with this text: the request itself is wrong.
_WRAPPED_REFUSAL = "Request failed with status code 400"
#: How many times a request is sent within seconds before its error leaves; waits do the long retrying.
ATTEMPTS = 4
#: Characters of a foreign text that an error carries.
_QUOTED = 300


class Transport:
    """Sends requests to one dashboard.

    :param address: base URL, ``http://host:port``, with a path where a proxy needs one.
    :param credentials: prove who asks; None where Ray runs without a token.
    :param timeout_s: seconds until one request counts as unanswered.
    :param transport: an httpx transport that takes the network's place in tests.
    :param sleep: pauses between attempts.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials | None = None,
        timeout_s: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.address = check_address(address)
        self.timeout_s = timeout_s
        self.sleep = sleep
        self._credentials = credentials
        self._transport = transport
        self._shown: tuple[str, ...] = ()  # names of the headers that were sent last
        self._is_open = False
        self._opening = asyncio.Lock()
        self._tls: ssl.SSLContext | None = None
        self._http: httpx.AsyncClient | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    async def headers(self, renew: bool = False) -> dict[str, str]:
        """Headers that prove who asks. A secret: for the wire only.

        :param renew: the last ones were refused.
        :raises RayTpuError: they cannot be had.
        """
        headers = {} if self._credentials is None else dict(await self._credentials.headers(renew=renew))
        self._shown = tuple(headers)
        return headers

    @property
    def is_loopback(self) -> bool:
        """The dashboard is on this machine, where no proxy of the environment may step in between."""
        return is_loopback(self.address)

    async def open(self) -> None:
        """Begin; safe to call again. Nobody is asked yet: whatever fails, fails where it is tried again."""
        self._is_open = True

    async def close(self) -> None:
        """End; safe to call again."""
        self._is_open = False
        if self._http is not None:
            http, self._http = self._http, None
            await http.aclose()

    async def tls(self) -> ssl.SSLContext | None:
        """What an ``https`` address is checked against; None for an address without TLS.

        :raises RayTpuError: the credentials cannot say.
        """
        if self._tls is None and self.address.startswith("https:"):
            own = None if self._credentials is None else await self._credentials.tls()
            # Loading the machine's certificates takes a tenth of a second.
            self._tls = own or await asyncio.to_thread(httpx.create_ssl_context, trust_env=not self.is_loopback)
        return self._tls

    async def proxy(self) -> str | None:
        """URL of the HTTP proxy that the credentials know of; None for the environment's, if any.

        :raises RayTpuError: the credentials cannot say.
        """
        return None if self._credentials is None else await self._credentials.proxy()

    async def http(self) -> httpx.AsyncClient:
        """The client, made when it is first asked for.

        :raises RuntimeError: outside ``async with``.
        """
        if not self._is_open:
            raise RuntimeError(f"{self!r} is not open: use `async with client:`")
        async with self._opening:
            if self._http is None:
                self._http = httpx.AsyncClient(
                    auth=RenewingAuth(self.headers),
                    timeout=httpx.Timeout(self.timeout_s, connect=min(10.0, self.timeout_s)),
                    transport=self._transport,
                    proxy=await self.proxy(),
                    follow_redirects=False,  # a redirect would carry the token to somebody else
                    trust_env=not self.is_loopback,
                    # Without TLS on this machine: nothing to load, nothing to check.
                    verify=await self.tls() or not self.is_loopback,
                )
        return self._http

    async def get(self, path: str, *, params: Mapping[str, str | int] | None = None) -> httpx.Response:
        """A GET, tried again for seconds; :raises RayTpuError: as :meth:`send` does."""
        return await self.send("GET", path, params=params)

    async def json(self, path: str, *, params: Mapping[str, str | int] | None = None) -> Any:
        """The JSON that a GET answers; nonsense is tried again too.

        :raises RemoteUnavailable: when it stays nonsense.
        """

        async def ask() -> Any:
            return decoded(await self.once("GET", path, params=params))

        return await self.again(ask)

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A request that is safe to send twice, tried again for seconds.

        :param options: what httpx takes: ``params``, ``json``, ``content``, ``timeout``.
        :raises RemoteUnavailable: for whatever :data:`RETRYABLE_STATUS` and :data:`RETRYABLE_ERRORS` list.
        :raises Misconfigured: for the rest: the token, the request, the address.
        """
        return await self.again(lambda: self.once(method, path, **options))

    async def again(self, act: Callable[[], Awaitable[Answer]]) -> Answer:
        """Run something idempotent until it is through or has failed :data:`ATTEMPTS` times."""
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(RemoteUnavailable),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=3),
            sleep=self.sleep,
            reraise=True,
        )

        async def once() -> Answer:  # tenacity awaits only what is a coroutine function itself
            return await act()

        return await retrying(once)

    async def bare(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request with whatever status comes, for callers to whom some statuses are answers.

        :raises RayTpuError: nothing came.
        """
        http = await self.http()
        try:
            return await http.request(method, f"{self.address}{path}", **options)
        except httpx.HTTPError as error:
            raise self.translate(error, f"{method} {path}") from error

    @asynccontextmanager
    async def stream(self, path: str, params: Mapping[str, str | int]) -> AsyncGenerator[httpx.Response, None]:
        """A GET whose answer is read piece by piece, with whatever status comes.

        :raises RayTpuError: nothing came, or it broke.
        """
        http = await self.http()
        try:
            async with http.stream("GET", f"{self.address}{path}", params=dict(params)) as response:
                yield response
        except httpx.HTTPError as error:
            raise self.translate(error, f"GET {path}") from error

    async def once(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A request that is sent once, for several that only make sense together (:meth:`again`).

        :raises RayTpuError: as :meth:`send` does.
        """
        response = await self.bare(method, path, **options)
        self.check(response)
        return response

    def check(self, response: httpx.Response) -> None:
        """Nothing for a 2xx; the error that the status stands for otherwise.

        :raises RayTpuError: see :meth:`send`.
        """
        if response.is_success:
            return
        path = response.request.url.path.removeprefix(urlsplit(self.address).path)
        asked = f"{response.request.method} {path}"
        raise self.refused(response.status_code, response.text, asked, response.headers.get("location"))

    def refused(self, status: int, text: str, asked: str, location: str | None = None) -> RayTpuError:
        """The error for a status that is no success.

        :param text: the body.
        :param asked: method and path, for the message.
        :param location: where a redirect points.
        """
        if (kubernetes := status_of(status, text)) is not None:
            answer = f"Kubernetes in front of Ray at {self.address} answered {status} to {asked}"
            if kubernetes.is_refusal:
                return Misconfigured(f"{answer}: {kubernetes.refusal()}")
            text = kubernetes.message
        else:
            answer = f"Ray at {self.address} answered {status} to {asked}"
            if status in (401, 403):
                return Misconfigured(f"{answer}: {self._refused_token()} {quoted(text)}".strip())
        if 300 <= status < 400:
            return Misconfigured(f"{answer}: a redirect to {location!r}; give the address behind it")
        if status == 501 or _WRAPPED_REFUSAL in text:
            return Misconfigured(f"{answer}: {quoted(text)}")
        if status in RETRYABLE_STATUS or status >= 500:
            return RemoteUnavailable(f"{answer}: {quoted(text) or RETRYABLE_STATUS.get(status, 'no text')}")
        return Misconfigured(f"{answer}: {quoted(text)}")

    def _refused_token(self) -> str:
        had = "the token that was sent is not the cluster's" if self._shown else "no token was sent"
        header = ", ".join(self._shown) or "authorization"
        if "x-ray-authorization" in self._shown:
            return f"{had} (header {header}). Pass the cluster's token."
        return (
            f"{had} (header {header}). Pass the cluster's token; where a proxy keeps that header for itself, use "
            "auth_header='x-ray-authorization'."
        )

    def translate(self, error: httpx.HTTPError, asked: str) -> RayTpuError:
        """Our error for one of httpx."""
        where = f"Ray at {self.address}, {asked}"
        if is_untrusted(error):
            return Misconfigured(f"{where}: its certificate is not trusted here: {error}")
        for kind, reason in RETRYABLE_ERRORS.items():
            if isinstance(error, kind):
                detail = str(error)
                return RemoteUnavailable(f"{where}: {reason}{f' ({detail})' if detail else ''}")
        return Misconfigured(f"{where}: {type(error).__name__}: {error}")


def decoded(response: httpx.Response) -> Any:
    """The JSON of an answer.

    :raises RemoteUnavailable: when it is none, such as a proxy's own page.
    """
    try:
        return response.json()
    except ValueError as error:
        asked = f"{response.request.method} {response.request.url.path}"
        raise RemoteUnavailable(f"{asked}: the answer is no JSON: {quoted(response.text)}") from error


def is_loopback(address: str) -> bool:
    """Whether the host of that URL is this machine."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(address: str) -> str:
    """The base URL without a slash at the end.

    :raises InvalidSpec: when it is no http(s) URL or carries a password.
    """
    try:
        parts = urlsplit(str(address))
        proper = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or beyond 65535
        proper = False
    if not proper or any(letter.isspace() or not letter.isprintable() for letter in str(address)):
        raise InvalidSpec(f"Ray's address {_safe(address)!r} is no URL; write http://host:port")
    if parts.username or parts.password:
        raise InvalidSpec(f"Ray's address {_safe(address)!r} carries credentials; leave them out")
    if parts.query or parts.fragment:
        raise InvalidSpec(f"Ray's address {_safe(address)!r} has more than a path; write http://host:port")
    return str(address).rstrip("/")


def quoted(text: str) -> str:
    """A foreign text as one line fit for an error: of a traceback its last line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip(" .")]
    if not lines:
        return ""
    line = lines[-1] if "Traceback (most recent call last)" in text else " ".join(lines)
    return line if len(line) <= _QUOTED else f"{line[:_QUOTED]}…"


def _safe(address: object) -> str:
    return re.sub(r"//[^/]*@", "//***@", str(address)).partition("?")[0]


def is_untrusted(error: BaseException | None) -> bool:
    """Whether a certificate that is not trusted here is behind the error."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
