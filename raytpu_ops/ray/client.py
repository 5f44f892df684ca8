"""What this package asks of a Ray cluster, over the dashboard's HTTP alone.

:class:`RayClient` is for coroutines, :class:`BlockingRayClient` for code without an event loop.
Each method is one line into the module that knows its subject: ``cluster``, ``jobs``, ``logs``,
``packages``, ``serving``. Requests that fail for a reason that passes are sent again for seconds;
hours of waiting are ``waits.py``'s and ``follow.py``'s.

Not here: ray itself. The Airflow side never imports it, so both sides' versions move apart.
Importing this module brings httpx and websockets: import it inside functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from raytpu_ops.ray import cluster, jobs, logs, packages, serving
from raytpu_ops.ray.credentials import AuthHeader, BearerToken, Credentials
from raytpu_ops.ray.logs import LogCursor
from raytpu_ops.ray.states import (
    ChipUsage,
    Holder,
    JobInfo,
    JobSubmission,
    RayNode,
    RayVersion,
    ServeApplication,
)
from raytpu_ops.ray.transport import Transport
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.waits import utc_now

Answer = TypeVar("Answer")


class RayClient:
    """A Ray cluster's dashboard; use it as an async context manager.

    Every method raises :class:`~raytpu_ops.tpu.errors.RemoteUnavailable` while Ray does not answer, and
    :class:`~raytpu_ops.tpu.errors.Misconfigured` where asking again cannot help.

    :param address: base URL of the dashboard, ``http://host:port``.
    :param credentials: prove who asks, and say whom to trust.
    :param token: short for credentials that are Ray's token alone; it appears in no log, message or ``repr``.
    :param auth_header: the header that carries the token: ``x-ray-authorization`` behind a proxy that
        keeps ``authorization`` for itself.
    :param timeout_s: seconds until one request counts as unanswered.
    :param transport: an httpx transport that takes the network's place in tests.
    :param sleep: pauses between attempts, seconds.
    :raises InvalidSpec: for an address that is none, or a token that no header can carry.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials | None = None,
        token: str | None = None,
        auth_header: AuthHeader = "authorization",
        timeout_s: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if token is not None:
            if credentials is not None:
                raise InvalidSpec("Ray's token was given twice: as credentials and as token; leave one out")
            credentials = BearerToken(token, auth_header)
        self._transport = Transport(
            address, credentials=credentials, timeout_s=timeout_s, transport=transport, sleep=sleep
        )

    def __repr__(self) -> str:
        return f"RayClient({self.address!r})"

    @property
    def address(self) -> str:
        """Base URL of the dashboard."""
        return self._transport.address

    async def __aenter__(self) -> Self:
        await self._transport.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._transport.close()

    async def version(self) -> RayVersion:
        """What runs there, and the head's session."""
        return await cluster.version(self._transport)

    async def nodes(self) -> list[RayNode]:
        """Every node that Ray remembers, with labels and resources; the dead ones too."""
        return await cluster.nodes(self._transport)

    async def holders(self) -> list[Holder]:
        """Who holds chips, on which node, in words."""
        return await cluster.holders(self._transport)

    async def usage(self) -> dict[str, ChipUsage]:
        """Chips in use by node id, some seconds old; empty where no monitor runs on the head."""
        return await cluster.usage(self._transport)

    async def submit_job(self, submission: JobSubmission) -> str:
        """Submit the job, or adopt the one that has its id already.

        :return: the submission id.
        :raises Misconfigured: another job has that id, or Ray refuses the request.
        """
        return await jobs.submit(self._transport, submission)

    async def job(self, submission_id: str) -> JobInfo | None:
        """The job; None only where Ray says that it does not exist."""
        return await jobs.info(self._transport, submission_id)

    async def jobs(self) -> list[JobInfo]:
        """Every job that Ray knows; a driver that nobody submitted has an empty submission id."""
        return await jobs.listed(self._transport)

    async def stop_job(self, submission_id: str) -> bool:
        """Ask the job to stop; True means asked, not stopped. See :meth:`stop_until_terminal`."""
        return await jobs.stop(self._transport, submission_id)

    async def stop_until_terminal(
        self,
        submission_id: str,
        deadline: datetime,
        *,
        clock: Callable[[], datetime] = utc_now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> JobInfo | None:
        """Stop the job, again and again, until it is over.

        :param deadline: the instant, UTC, at which to give up.
        :param clock: the time, UTC.
        :param sleep: takes seconds.
        :return: the job as it ended, None where it does not exist.
        :raises DeadlineExceeded: it is not over; only the end of its lease ends it now.
        """
        return await jobs.stop_until_terminal(self._transport, submission_id, deadline, clock=clock, sleep=sleep)

    async def job_logs(self, submission_id: str) -> str:
        """The whole log as it is now; empty where the job does not exist."""
        return await logs.read(self._transport, submission_id)

    def follow_logs(
        self, submission_id: str, *, skip: int = 0, cursor: LogCursor | None = None
    ) -> AsyncGenerator[str, None]:
        """Every line of the log, without its newline, in order and once, until the job is over.

        :param skip: lines, not counting empty ones, that the caller has already.
        :param cursor: takes the place of ``skip`` for a caller who goes on with :meth:`rest_of_logs`.
        """
        return logs.follow(self._transport, submission_id, cursor or LogCursor(skip))

    def rest_of_logs(self, job: JobInfo, cursor: LogCursor) -> AsyncGenerator[str, None]:
        """What the log holds beyond the cursor now: once the job is over all of it, its last line included.

        :param cursor: what the caller has already; it moves along.
        :raises RemoteUnavailable: it cannot be read.
        """
        return logs.rest(self._transport, job, cursor)

    async def upload_package(self, path: str | Path, *, excludes: Sequence[str] = ()) -> str:
        """Upload a folder or ``.zip`` unless the cluster has it; ``.gitignore`` and ``.rayignore`` hold.

        :param excludes: further patterns in the syntax of ``.gitignore``.
        :return: ``gcs://…``, for ``working_dir`` or ``py_modules`` of a runtime environment.
        :raises InvalidSpec: it does not exist, is empty, or too large.
        """
        return await packages.upload(self._transport, path, excludes=excludes)

    async def upload_runtime(self) -> str:
        """Upload what of this package runs on a cluster, for an image that lacks it.

        :return: ``gcs://…``, for ``py_modules`` of a runtime environment.
        """
        return await packages.upload_runtime(self._transport)

    async def serve_applications(self) -> dict[str, ServeApplication]:
        """Every Serve application by its name; empty where Serve does not run."""
        return await serving.applications(self._transport)

    async def deploy(
        self,
        application: Mapping[str, Any],
        *,
        http_options: Mapping[str, Any] | None = None,
        proxy_location: str | None = None,
    ) -> None:
        """Deploy a Serve application beside those that are there.

        :param application: ``name``, ``import_path`` and what else Serve's REST API takes.
        :param http_options: ``host`` and ``port`` of the proxy, loopback if left out; only the
            deployment that starts Serve can choose.
        :param proxy_location: ``HeadOnly`` if left out; only the deployment that starts Serve can choose.
        :raises Misconfigured: Serve refuses it.
        """
        await serving.deploy(self._transport, application, http_options=http_options, proxy_location=proxy_location)

    async def delete_application(self, name: str) -> bool:
        """Take a Serve application away; the others stay. False where there was none."""
        return await serving.delete(self._transport, name)


class BlockingRayClient:
    """The same for code without an event loop: a ``@task`` of one's own, a command line.

    :param client: what it speaks through. Use this one as a context manager, the other one not at all.
    """

    def __init__(self, client: RayClient) -> None:
        self._client = client
        self._runner: asyncio.Runner | None = None

    def __repr__(self) -> str:
        return f"BlockingRayClient({self._client!r})"

    @property
    def address(self) -> str:
        """Base URL of the dashboard."""
        return self._client.address

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        self._run(self._client.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run(self._client.__aexit__(kind, error, trace))
        finally:
            runner, self._runner = self._runner, None
            if runner is not None:
                runner.close()

    def _run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        if self._runner is None:
            work.close()
            raise RuntimeError(f"{self!r} is not open: use `with client:`")
        return self._runner.run(work)

    def version(self) -> RayVersion:
        """See :meth:`RayClient.version`."""
        return self._run(self._client.version())

    def nodes(self) -> list[RayNode]:
        """See :meth:`RayClient.nodes`."""
        return self._run(self._client.nodes())

    def holders(self) -> list[Holder]:
        """See :meth:`RayClient.holders`."""
        return self._run(self._client.holders())

    def usage(self) -> dict[str, ChipUsage]:
        """See :meth:`RayClient.usage`."""
        return self._run(self._client.usage())

    def submit_job(self, submission: JobSubmission) -> str:
        """See :meth:`RayClient.submit_job`."""
        return self._run(self._client.submit_job(submission))

    def job(self, submission_id: str) -> JobInfo | None:
        """See :meth:`RayClient.job`."""
        return self._run(self._client.job(submission_id))

    def jobs(self) -> list[JobInfo]:
        """See :meth:`RayClient.jobs`."""
        return self._run(self._client.jobs())

    def stop_job(self, submission_id: str) -> bool:
        """See :meth:`RayClient.stop_job`."""
        return self._run(self._client.stop_job(submission_id))

    def stop_until_terminal(self, submission_id: str, deadline: datetime) -> JobInfo | None:
        """See :meth:`RayClient.stop_until_terminal`."""
        return self._run(self._client.stop_until_terminal(submission_id, deadline))

    def job_logs(self, submission_id: str) -> str:
        """See :meth:`RayClient.job_logs`."""
        return self._run(self._client.job_logs(submission_id))

    def follow_logs(self, submission_id: str, *, skip: int = 0) -> Iterator[str]:
        """See :meth:`RayClient.follow_logs`."""
        lines = self._client.follow_logs(submission_id, skip=skip)

        async def following() -> str | None:
            return await anext(lines, None)

        try:
            while (line := self._run(following())) is not None:
                yield line
        finally:
            self._run(lines.aclose())

    def upload_package(self, path: str | Path, *, excludes: Sequence[str] = ()) -> str:
        """See :meth:`RayClient.upload_package`."""
        return self._run(self._client.upload_package(path, excludes=excludes))

    def upload_runtime(self) -> str:
        """See :meth:`RayClient.upload_runtime`."""
        return self._run(self._client.upload_runtime())

    def serve_applications(self) -> dict[str, ServeApplication]:
        """See :meth:`RayClient.serve_applications`."""
        return self._run(self._client.serve_applications())

    def deploy(
        self,
        application: Mapping[str, Any],
        *,
        http_options: Mapping[str, Any] | None = None,
        proxy_location: str | None = None,
    ) -> None:
        """See :meth:`RayClient.deploy`."""
        self._run(self._client.deploy(application, http_options=http_options, proxy_location=proxy_location))

    def delete_application(self, name: str) -> bool:
        """See :meth:`RayClient.delete_application`."""
        return self._run(self._client.delete_application(name))
