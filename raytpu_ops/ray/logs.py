"""A job's log as whole lines, in order, each once, while it is written and after (F30).

Ray's tail (``/api/jobs/{id}/logs/tail``) always begins at the start of the file, ends at will while
the job runs (ray#57002) and can lose the last line (ray#60665). So a :class:`LogCursor` remembers
what was seen, every reconnect reads past it, and once the job is over the whole file is read.

What was seen of the tail in Ray 2.60, by running it:

* It must not be offered compression: the dashboard passes the offer on to the process behind it
  but cannot read what comes back, and the tail ends after a second without a line.
* It never answers a ping, so a client that sends some breaks the connection itself.
* It ends without a line where the log is not UTF-8, and so does ``…/logs``. The bytes are still to
  be had from ``/api/v0/logs/file``.
* A carriage return and the newline after it, written apart, come as two newlines instead of one.

Not here: what a line means (``tpu/work.py``).
"""

from __future__ import annotations

import asyncio
import codecs
import io
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedOK, InvalidStatus, WebSocketException

from raytpu_ops.ray import jobs
from raytpu_ops.ray.states import JobInfo
from raytpu_ops.ray.transport import Transport, decoded, quoted
from raytpu_ops.tpu.errors import Misconfigured, RemoteUnavailable

#: A tail that is silent for so long is opened anew: a connection may be dead without a sign.
SILENCE_S = 300.0
#: Pauses between two connections, seconds: at first, and at most while no line comes.
RECONNECT_S, RECONNECT_MAX_S = 1.0, 10.0
#: How often the end of a log is asked for before one goes without it.
END_ATTEMPTS = 5
#: Seconds for one answer that carries a whole log.
_WHOLE_LOG_S = 600
#: Where the log of a job's driver is, in its node's log folder (ray/dashboard/modules/job/common.py).
_FILE = "job-driver-{}.log"
#: Ray's words where a driver ended before it wrote anything.
_NO_FILE = "file is not found"

#: websockets writes its headers, the token among them, to the log at DEBUG.
_WIRE = logging.getLogger(f"{__name__}.wire")
_WIRE.setLevel(logging.INFO)


class LogCursor:
    """Tells new lines from seen ones in a log that can be read from its start only.

    Positions count lines that are not empty: Ray's tail may add an empty one (see above).

    :param skip: lines, not counting empty ones, that are seen already.
    """

    def __init__(self, skip: int = 0) -> None:
        self.position = skip
        self._blank = 0  # empty lines handed out since the last full one
        self.restart()

    def restart(self) -> None:
        """What is fed next begins at the start of the file."""
        self._read = 0
        self._read_blank = 0
        self._rest = ""

    def feed(self, text: str) -> Iterator[str]:
        """The new lines that are whole now, without their newline.

        :param text: what follows on the text fed before.
        """
        # Only "\n" ends a line: str.splitlines() would also cut at form feeds and the like.
        *lines, self._rest = (self._rest + text).split("\n")
        return (line for line in lines if self._is_new(line))

    def finish(self) -> Iterator[str]:
        """The last line, where the file ends without a newline."""
        line, self._rest = self._rest, ""
        return (line for line in (line,) if line and self._is_new(line))

    def _is_new(self, line: str) -> bool:
        if line:
            self._read += 1
            self._read_blank = 0
            if self._read <= self.position:
                return False
            self.position, self._blank = self._read, 0
            return True
        self._read_blank += 1
        if self._read < self.position or self._read_blank <= self._blank:
            return False
        self._blank = self._read_blank
        return True


async def follow(transport: Transport, submission_id: str, cursor: LogCursor) -> AsyncGenerator[str, None]:
    """Every line of the job's log, without its newline, in order and once, until the job is over.

    It ends without an error where the job does not exist any more. It does not give up while Ray
    does not answer: whoever iterates has the deadline.

    :param cursor: what is seen already; it moves along.
    :raises RemoteUnavailable: the job is over and the end of its log cannot be read.
    :raises Misconfigured: the token is wrong, and the like.
    """
    pause = RECONNECT_S
    while True:
        before = cursor.position
        cursor.restart()
        try:
            async with aclosing(tail(transport, submission_id)) as pieces:
                async for text in pieces:
                    for line in cursor.feed(text):
                        yield line
        except (RemoteUnavailable, Misconfigured):
            pass  # broken, or a proxy lets no websocket through: the job itself says what that means
        try:
            job = await jobs.info(transport, submission_id)
            if job is None:
                return
            if job.status.is_terminal:
                break
            if cursor.position == before:  # the tail brings nothing: the bytes may
                async for line in _reread(transport, job, cursor):
                    yield line
        except RemoteUnavailable:
            pass  # not there at the moment; the caller's deadline decides
        pause = RECONNECT_S if cursor.position > before else min(pause * 2, RECONNECT_MAX_S)
        await transport.sleep(pause)
    async for line in rest(transport, job, cursor):
        yield line


async def rest(transport: Transport, job: JobInfo, cursor: LogCursor) -> AsyncGenerator[str, None]:
    """What the log holds beyond the cursor now: once the job is over all of it, its last line included.

    :param cursor: what is seen already; it moves along, so asking again is safe.
    :raises RemoteUnavailable: it cannot be read.
    """
    for attempt in range(1, END_ATTEMPTS + 1):
        try:
            async for line in _reread(transport, job, cursor):
                yield line
            break
        except RemoteUnavailable as error:
            if attempt == END_ATTEMPTS:
                raise RemoteUnavailable(f"the end of the log of {job.submission_id} cannot be read: {error}") from error
            await transport.sleep(RECONNECT_S * 2**attempt)
    if job.status.is_terminal:  # else what has no newline yet is half a line
        for line in cursor.finish():
            yield line


async def _reread(transport: Transport, job: JobInfo, cursor: LogCursor) -> AsyncGenerator[str, None]:
    cursor.restart()
    async with aclosing(whole(transport, job)) as pieces:
        async for text in pieces:
            for line in cursor.feed(text):
                yield line


class _Connect(connect):
    """Follows no redirect: websockets takes only ``authorization`` out of one to another host."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


async def tail(transport: Transport, submission_id: str, *, silence_s: float = SILENCE_S) -> AsyncGenerator[str, None]:
    """The log from its start, in pieces, as long as Ray keeps the tail open.

    :param silence_s: seconds without a piece after which it is given up.
    :raises RemoteUnavailable: it broke, or the job does not exist.
    :raises Misconfigured: the token is wrong, and the like.
    """
    scheme, host, path, *_ = urlsplit(transport.address)
    asked = jobs.job_path(submission_id, "/logs/tail")
    url = urlunsplit(("wss" if scheme == "https" else "ws", host, f"{path}{asked}", "", ""))
    try:
        async with await _opened(transport, url) as socket:
            while True:
                # Not asyncio.wait_for: in Python 3.11 it drops a cancellation that comes together with a piece.
                async with asyncio.timeout(silence_s):
                    piece = await socket.recv()
                yield piece if isinstance(piece, str) else piece.decode(errors="replace")
    except ConnectionClosedOK:
        return
    except InvalidStatus as error:
        body = (error.response.body or b"").decode(errors="replace")
        if error.response.status_code < 300:
            raise RemoteUnavailable(
                f"Ray at {transport.address}: GET {asked} opened no websocket: {quoted(body)}"
            ) from error
        location = error.response.headers.get("Location")
        raise transport.refused(error.response.status_code, body, f"GET {asked}", location) from error
    except (WebSocketException, OSError) as error:  # TimeoutError is an OSError: silence, or no handshake
        raise RemoteUnavailable(
            f"Ray at {transport.address}: the log tail of {submission_id} broke: {str(error) or type(error).__name__}"
        ) from error


async def _opened(transport: Transport, url: str) -> ClientConnection:
    """The websocket; opened once more where the credentials were refused and there are new ones."""
    shown = await transport.headers()
    try:
        return await _connection(transport, url, shown)
    except InvalidStatus as error:
        if error.response.status_code != 401 or (renewed := await transport.headers(renew=True)) == shown:
            raise
    return await _connection(transport, url, renewed)


async def _connection(transport: Transport, url: str, headers: Mapping[str, str]) -> ClientConnection:
    return await _Connect(
        url,
        additional_headers=headers,
        ssl=await transport.tls(),
        compression=None,
        ping_interval=None,
        max_size=None,  # one line is one message, however long
        open_timeout=transport.timeout_s,
        close_timeout=0.5,  # Ray's side does not answer a close either
        proxy=await transport.proxy() or (None if transport.is_loopback else True),
        logger=_WIRE,
    )


async def whole(transport: Transport, job: JobInfo) -> AsyncGenerator[str, None]:
    """The log as it is now, from its start, in pieces.

    Read as bytes from the driver's node; through ``…/logs``, which holds a whole log in memory
    three times over, only where that node is not known.

    :raises RemoteUnavailable: it cannot be read at the moment.
    """
    if job.driver_node_id is None:
        yield await _whole_as_json(transport, job.submission_id)
        return
    params: Mapping[str, str | int] = {
        "node_id": job.driver_node_id,
        "filename": _FILE.format(job.submission_id),
        "lines": -1,
        "timeout": _WHOLE_LOG_S,
    }
    # The same newlines as in Ray's own text: "\r\n" and "\r" become "\n".
    utf8 = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(errors="replace"), translate=True)
    async with transport.stream("/api/v0/logs/file", params) as response:
        if not response.is_success:
            await response.aread()
            if _NO_FILE in response.text:
                return
        transport.check(response)
        async for piece in response.aiter_bytes():
            yield utf8.decode(piece)
        yield utf8.decode(b"", final=True)


async def _whole_as_json(transport: Transport, submission_id: str) -> str:
    answer = decoded(await transport.get(jobs.job_path(submission_id, "/logs")))
    logs = answer.get("logs") if isinstance(answer, Mapping) else None
    if not isinstance(logs, str):
        raise RemoteUnavailable(f"the log of {submission_id}: the answer has none: {str(answer)[:200]}")
    return logs


async def read(transport: Transport, submission_id: str) -> str:
    """The whole log as it is now; empty where the job does not exist.

    :raises RemoteUnavailable: it cannot be read.
    """

    async def once() -> str:
        job = await jobs.info(transport, submission_id)
        return "" if job is None else "".join([text async for text in whole(transport, job)])

    return await transport.again(once)
