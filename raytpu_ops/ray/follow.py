"""Follow a job or an application to its end: log, deadlines, lost hosts, and one verdict.

A job's log and its state are watched side by side. Whatever ends the watch, the rest of the log is
read before the verdict is given, and the verdict comes from ``verdicts.py`` alone. At a deadline
the state is looked at once more, then the job is stopped.

Not here: submitting and deploying.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from raytpu_ops.ray.client import RayClient
from raytpu_ops.ray.health import Health, Lost
from raytpu_ops.ray.logs import LogCursor
from raytpu_ops.ray.readiness import busy_hosts
from raytpu_ops.ray.states import JobInfo, JobStatus, ServeApplication, ServeStatus
from raytpu_ops.ray.verdicts import HOSTS_LOST, Verdict, job_verdict, serve_verdict
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.errors import DeadlineExceeded, FailureClass, Preempted, RemoteUnavailable
from raytpu_ops.tpu.work import Event, parse_event
from raytpu_ops.waits import Done, Pending, Wait, utc_now, wait_async

Clock = Callable[[], datetime]
Sleep = Callable[[float], Awaitable[None]]
Say = Callable[[str], None]

#: How long a job may take to end after a stop; Ray gives a driver a few seconds to end by itself.
STOP_WITHIN = timedelta(seconds=60)
#: How long a job that may have started goes on past its starting deadline while its log cannot be read.
UNREAD_WITHIN = timedelta(minutes=10)
#: In how many looks in a row an application must be missing before it counts as gone: Serve's
#: controller shows nothing while it restarts.
ABSENT_LOOKS = 3


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended.

    :param verdict: succeeded or failed, never running.
    :param result: data of the driver's result line, None where there was none.
    :param lines_emitted: the position in the log: its lines, not counting empty ones, the skipped ones
        included. A later call passes it as ``skip_lines``.
    """

    verdict: Verdict
    result: dict[str, Any] | None
    lines_emitted: int


async def follow_job(
    client: RayClient,
    submission_id: str,
    *,
    starting_until: datetime,
    running: datetime | timedelta,
    emit: Say,
    expect_result: bool = True,
    on_progress: Say | None = None,
    on_position: Callable[[int], None] | None = None,
    slices_whole: Callable[[Collection[str]], Awaitable[bool]] | None = None,
    skip_lines: int = 0,
    poll_s: float = 2.0,
    clock: Clock = utc_now,
    sleep: Sleep = asyncio.sleep,
) -> JobOutcome:
    """Follow a submitted job until it is over, whatever way it ends.

    :param starting_until: the instant, UTC, until which it must run on every host.
    :param running: how long it may then run; counted from its ``started`` line, so that a follower who
        comes late counts the same. Or the instant, UTC, at which that is over.
    :param emit: takes every line of the log, in order and once, but not the driver's event lines.
    :param expect_result: the driver is ours: it says when it has started, and its result. Any other
        job counts as started once Ray calls it running.
    :param on_progress: takes a line whenever the state changes.
    :param on_position: told after each line that was emitted what to pass as ``skip_lines`` to go on behind it.
    :param slices_whole: whether slices of these names, on which the job says that it runs, still have their head
        and every host. While it has not said so there are none, and it may come to run on any.
    :param skip_lines: ``lines_emitted`` of an earlier call: lines before it are read, not emitted.
    :param poll_s: seconds between two looks at the state.
    :return: the outcome; a failure is a verdict, not an exception.
    :raises Misconfigured: Ray cannot be asked: the token, the address.
    """
    slices: set[str] = set()
    follower = _JobFollower(
        client=client,
        name=submission_id,
        starting_until=starting_until,
        running=running,
        emit=emit,
        expect_result=expect_result,
        on_position=on_position,
        skip_lines=skip_lines,
        slices=slices,
        health=Health(client, functools.partial(slices_whole, slices) if slices_whole else None, clock=clock),
        clock=clock,
        sleep=sleep,
    )
    follower.wait = Wait(
        f"job {submission_id}",
        follower.judge,
        deadline=starting_until,
        phase=Phase.STARTING,
        poll_s=poll_s,
        max_backoff_s=30.0,
        on_progress=on_progress,
        clock=clock,
    )
    return await follower.follow()


@dataclass
class _JobFollower:
    """One job's watch; lives for one call of :func:`follow_job`, whose parameters it has."""

    client: RayClient
    name: str
    starting_until: datetime
    running: datetime | timedelta
    emit: Say
    expect_result: bool
    on_position: Callable[[int], None] | None
    skip_lines: int
    slices: set[str]
    health: Health
    clock: Clock
    sleep: Sleep
    wait: Wait[JobInfo | None, JobInfo | None] = field(init=False)
    cursor: LogCursor = field(default_factory=LogCursor)
    started: Event | None = None
    ended: Event | None = None
    unread: str | None = None
    put_off: bool = False
    log_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self) -> JobOutcome:
        verdict: Verdict | None = None
        while True:
            try:
                job = await self._watch()
                break
            except (DeadlineExceeded, Lost) as error:
                if isinstance(error, DeadlineExceeded) and await self._may_have_started():
                    continue
                job, verdict = await self._stopped(error)
                break
        await self._read_rest(job)
        if verdict is None:
            verdict = await self._verdict(job)
        result = self.ended.data if self.ended is not None and self.ended.event == "result" else None
        return JobOutcome(verdict, result, self.cursor.position)

    async def _watch(self) -> JobInfo | None:
        """State and log side by side, until the state is final."""
        reading = asyncio.create_task(self._read_log(), name=f"log of {self.name}")
        try:
            return await wait_async(lambda: self._look(reading), self.wait, sleep=self._nap)
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            _raise_foreign(reading)

    async def _look(self, reading: asyncio.Task[None]) -> JobInfo | None:
        _raise_foreign(reading)
        lost = await self.health.check()
        try:
            job = await self.client.job(self.name)
        except RemoteUnavailable as error:
            if lost:
                raise Lost(lost) from error
            raise
        if job is not None and not job.status.is_terminal:
            self.health.driver_node_id = job.driver_node_id
            if lost:
                raise Lost(lost)
        return job

    def judge(self, job: JobInfo | None) -> Pending | Done[JobInfo | None]:
        """The judge of :attr:`wait`: over, or not yet; it also sees that the next phase has begun."""
        if job is None or job.status.is_terminal:
            return Done(job)
        if self.wait.phase == Phase.STARTING and self._has_started(job):
            self.wait.enter(Phase.RUNNING, self._running_until())
        words = f"job {self.name} is {job.status_word}"
        if self.wait.phase == Phase.STARTING:
            reason = job.message if job.status is JobStatus.PENDING else "it does not run on every host yet"
            words = f"{words}: {reason}" if reason else words
        return Pending(words)

    def _has_started(self, job: JobInfo) -> bool:
        return self.started is not None or (not self.expect_result and job.status is JobStatus.RUNNING)

    def _running_until(self) -> datetime:
        if isinstance(self.running, datetime):
            return self.running
        # However late one comes to follow it, it had started by its starting deadline.
        said = _instant(self.started.data.get("at")) if self.started is not None else None
        return min(said or self.clock(), self.starting_until) + self.running

    async def _read_log(self) -> None:
        try:
            async for line in self.client.follow_logs(self.name, cursor=self.cursor):
                self._take(line)
        finally:
            self.log_over.set()

    def _take(self, line: str) -> None:
        event = parse_event(line)
        if event is None:
            if self.cursor.position > self.skip_lines:
                self.emit(line)
                if self.on_position is not None:
                    self.on_position(self.cursor.position)
        elif event.event == "started":
            self.started = self.started or event
            self.slices.update(event.slices)
        else:
            self.ended = event

    async def _nap(self, seconds: float) -> None:
        """Pause, but not longer than the log goes on: its end is the end of the job."""
        naps = [asyncio.ensure_future(self.sleep(seconds)), asyncio.ensure_future(self.log_over.wait())]
        try:
            await asyncio.wait(naps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for nap in naps:
                nap.cancel()
            await asyncio.gather(*naps, return_exceptions=True)
        self.log_over.clear()

    async def _may_have_started(self) -> bool:
        """Whether the log says that it has started, where the tail had not brought that in time (F33).

        A log that cannot be read says nothing: whoever comes back after hours may meet an agent that is
        away, and the job gets :data:`UNREAD_WITHIN`, once.
        """
        if self.wait.phase != Phase.STARTING or not self.expect_result:
            return False
        job: JobInfo | None = None
        try:
            job = await self.client.job(self.name)
            if job is not None:
                async for line in self.client.rest_of_logs(job, self.cursor):
                    self._take(line)
        except RemoteUnavailable:
            if self.started is None and not self.put_off and (job is None or job.status is JobStatus.RUNNING):
                self.put_off = True
                self.wait.enter(Phase.STARTING, self.clock() + UNREAD_WITHIN)
                return True
        return self.started is not None

    async def _read_rest(self, job: JobInfo | None) -> None:
        if job is None:
            return
        try:
            async for line in self.client.rest_of_logs(job, self.cursor):
                self._take(line)
        except RemoteUnavailable as error:
            self.unread = str(error)
            self.emit(f"[raytpu] lines may be missing here: {error}")

    async def _verdict(self, job: JobInfo | None) -> Verdict:
        failed = job is not None and job.status is JobStatus.FAILED
        return job_verdict(
            job,
            submission_id=self.name,
            event=self.ended,
            expect_result=self.expect_result,
            slices_whole=await self.health.whole() if failed else None,
            unread=self.unread,
        )

    async def _stopped(self, error: DeadlineExceeded | Lost) -> tuple[JobInfo | None, Verdict | None]:
        """Stop a job that outlived its deadline or its hosts; its own end, where that came first, counts."""
        failure_class, message = await self._reason(error)
        job: JobInfo | None = None
        try:
            job = await self.client.stop_until_terminal(
                self.name, self.clock() + STOP_WITHIN, clock=self.clock, sleep=self.sleep
            )
            if job is None or job.status is not JobStatus.STOPPED:
                return job, None
            message = f"{message}; it was stopped"
        except (DeadlineExceeded, RemoteUnavailable) as unstopped:
            message = f"{message}; it could not be stopped: {unstopped}"
        return job, Verdict("failed", failure_class, message)

    async def _reason(self, error: DeadlineExceeded | Lost) -> tuple[FailureClass, str]:
        if isinstance(error, Lost):
            return FailureClass.PREEMPTED, f"job {self.name}: {error}; a retry runs on replaced slices"
        if await self.health.whole() is False:
            # A run that lost a host hangs in whatever it waits for (F20): that is not its own slowness.
            return FailureClass.PREEMPTED, f"{error}; {HOSTS_LOST}, a retry runs on replaced slices"
        busy = await _busy_words(self.client, besides=self.name) if self.wait.phase == Phase.STARTING else ""
        return FailureClass.DEADLINE_EXCEEDED, f"{error}{busy}"


def _raise_foreign(reading: asyncio.Task[None]) -> None:
    """The error of a log reader that is not Ray's: the caller's ``emit`` failed, nobody sees the lines."""
    if reading.done() and not reading.cancelled():
        error = reading.exception()
        if error is not None and not isinstance(error, RemoteUnavailable):
            raise error


async def _busy_words(client: RayClient, *, besides: str | None) -> str:
    """Who holds the hosts that something waits for (F46), as the tail of a message."""
    try:
        nodes, holders = await asyncio.gather(client.nodes(), client.holders())
    except RemoteUnavailable as error:
        return f"; who holds the hosts cannot be said: {error}"
    busy = busy_hosts(nodes, holders, besides=besides)
    return f"; busy: {'; '.join(busy)}" if busy else ""


def _instant(text: object) -> datetime | None:
    if not isinstance(text, str):
        return None
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        return None
    return instant if instant.tzinfo is not None else None


async def follow_serve(
    client: RayClient,
    name: str,
    *,
    until: datetime,
    on_progress: Say | None = None,
    slices_whole: Callable[[], Awaitable[bool]] | None = None,
    poll_s: float = 2.0,
    clock: Clock = utc_now,
    sleep: Sleep = asyncio.sleep,
) -> ServeApplication:
    """Wait until a deployed application runs.

    :param until: the instant, UTC, until which it must.
    :param on_progress: takes a line whenever the state changes.
    :param slices_whole: whether its slices still have their head and every host.
    :param poll_s: seconds between two looks.
    :return: the application as it runs.
    :raises UserCodeFailed: it cannot be deployed, in Serve's words.
    :raises Preempted: its slices lost hosts, or Serve forgot it.
    :raises JobStopped: somebody deletes it.
    :raises DeadlineExceeded: naming its state and who holds the hosts. It stays deployed.
    """
    health = Health(client, slices_whole, clock=clock)
    absent = 0

    async def look() -> tuple[ServeApplication | None, bool | None]:
        lost = await health.check()
        if lost:
            raise Preempted(f"application {name}: {lost}; a retry runs on replaced slices")
        application = (await client.serve_applications()).get(name)
        failed = application is not None and application.status is ServeStatus.DEPLOY_FAILED
        return application, await health.whole() if failed else None

    def judge(seen: tuple[ServeApplication | None, bool | None]) -> Pending | Done[ServeApplication]:
        nonlocal absent
        application, whole = seen
        absent = absent + 1 if application is None else 0
        if 0 < absent < ABSENT_LOOKS:
            return Pending(f"application {name} is not to be seen")
        verdict = serve_verdict(application, name=name, slices_whole=whole)
        error = verdict.error()
        if error is not None:
            raise error
        if application is not None and verdict.outcome == "succeeded":
            return Done(application)
        return Pending(verdict.message)

    decider = Wait(
        f"application {name}",
        judge,
        deadline=until,
        phase=Phase.STARTING,
        poll_s=poll_s,
        max_backoff_s=30.0,
        on_progress=on_progress,
        clock=clock,
    )
    try:
        return await wait_async(look, decider, sleep=sleep)
    except DeadlineExceeded as error:
        if await health.whole() is False:
            raise Preempted(f"{error}; {HOSTS_LOST}, a retry runs on replaced slices") from error
        raise DeadlineExceeded(f"{error}{await _busy_words(client, besides=None)}") from error
