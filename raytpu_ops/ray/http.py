"""What a lease serves, over plain HTTP, for blocking code of the user's own.

An :class:`httpx.Client` as everybody knows it, with three things added: the credentials that the way
to Serve asks for, renewed after a 401; nobody else is shown them; and what certainly did not reach
the model, because the way there was gone for the moment, is sent again.
Not here: deploying (``serving.py``).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import httpx
import tenacity

from raytpu_ops.ray.auth import BlockingRenewingAuth
from raytpu_ops.ray.credentials import Credentials
from raytpu_ops.ray.kubernetes import status_of
from raytpu_ops.ray.transport import check_address, is_loopback, is_untrusted
from raytpu_ops.tpu.errors import RemoteUnavailable

Answer = TypeVar("Answer")

#: Seconds for which a way that is not there is tried again: an API server takes less to restart.
PATIENCE_S = 60.0


def serve_client(
    base_url: str,
    credentials: Credentials | None = None,
    timeout_s: float = 60.0,
    *,
    patience_s: float = PATIENCE_S,
) -> httpx.Client:
    """A client whose paths begin at Serve's own: ``client.post("/digits", json=…)``. Use it with ``with``.

    :param base_url: where Serve answers.
    :param credentials: what the way there asks for, None where it asks for nothing.
    :param timeout_s: seconds until one request counts as unanswered.
    :param patience_s: seconds for which a request that reached nobody is sent again.
    :raises RayTpuError: the credentials cannot be had.
    """
    base = check_address(base_url)
    asking = _Asking()
    try:
        tls, proxy = None, None
        if credentials is not None and base.startswith("https:"):
            tls, proxy = asking(credentials.tls()), asking(credentials.proxy())
        return _ServeClient(base, credentials, asking, tls, proxy, timeout_s, patience_s)
    except BaseException:
        asking.close()
        raise


class _Asking:
    """Runs what is async about credentials in one event loop, in a thread of its own.

    In one, because what credentials remember may belong to its loop; in a thread, because the caller
    may sit in an event loop himself.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raytpu-credentials")
        self._runner = asyncio.Runner()
        self._closed = False

    def __call__(self, question: Coroutine[Any, Any, Answer]) -> Answer:
        return self._thread.submit(self._runner.run, question).result()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.submit(self._runner.close).result()
            self._thread.shutdown()


class _ServeClient(httpx.Client):
    def __init__(
        self,
        base: str,
        credentials: Credentials | None,
        asking: _Asking,
        tls: ssl.SSLContext | None,
        proxy: str | None,
        timeout_s: float,
        patience_s: float,
    ) -> None:
        auth = None
        if credentials is not None:
            auth = BlockingRenewingAuth(lambda renew: asking(credentials.headers(renew=renew)), httpx.URL(base))
        super().__init__(
            base_url=base,
            auth=auth,
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            proxy=proxy,
            trust_env=not is_loopback(base),
            # Without TLS on this machine: nothing to load, nothing to check.
            verify=tls or base.startswith("https:") or not is_loopback(base),
        )
        self._asking = asking
        self._retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_reached_nobody) | tenacity.retry_if_result(_undelivered),
            stop=tenacity.stop_after_delay(patience_s),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=3),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,  # as it is
        )

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Send it; again while nobody is there to take it."""
        response: httpx.Response = self._retrying.copy()(super().send, request, **options)
        return response

    def close(self) -> None:
        """End; safe to call again."""
        super().close()
        self._asking.close()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._asking.close()


def _reached_nobody(error: BaseException) -> bool:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return not is_untrusted(error)
    return isinstance(error, RemoteUnavailable)  # there are no credentials for the moment


def _undelivered(response: httpx.Response) -> bool:
    if response.status_code not in (429, 503):
        return False
    status = status_of(response.status_code, response.read().decode(errors="replace"))
    return status is not None and status.is_undelivered
