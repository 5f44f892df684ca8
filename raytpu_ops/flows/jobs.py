"""A job on a lease: adopted where it exists, else submitted to whole slices, then followed to its end.

A submission's id is known before it is submitted and says whose it is: owner, epoch and attempt.
A retry of Airflow stays in its epoch and adopts; a clear by a person begins a new epoch, whose
first step stops what the older ones left running. A failed attempt is never adopted: the retry
makes the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from raytpu_ops.backends.base import Backend, Say
from raytpu_ops.flows.leases import reach, wait_whole
from raytpu_ops.ray.client import RayClient
from raytpu_ops.ray.follow import follow_job
from raytpu_ops.ray.states import JobInfo, JobStatus, JobSubmission
from raytpu_ops.tpu.deadlines import Schedule
from raytpu_ops.tpu.errors import Preempted, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.naming import submission_id, submission_prefix
from raytpu_ops.tpu.work import ENTRYPOINT, WORK_VARIABLE, load_work

#: How long a stop may take before the flow goes on; Ray gives a driver a few seconds to end by itself.
STOP_WITHIN = timedelta(seconds=60)


class Attempt(BaseModel):
    """The submission that one try of a task carries.

    :param owner: the task that submits.
    :param epoch: rises when a person clears the task, stays over retries.
    :param number: rises with each submission of the epoch that failed.
    :param session: the Ray head that it belongs to; another head knows nothing of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    owner: Owner
    epoch: int = Field(ge=0)
    number: int = Field(ge=0)
    session: str | None = None

    @property
    def submission_id(self) -> str:
        """The id of the Ray job."""
        return submission_id(self.owner, self.epoch, self.number)


class JobRequest(BaseModel):
    """Everything about a job that travels from the task to the trigger, as plain JSON.

    :param attempt: the submission.
    :param work: the work's JSON, as ``tpu/work.py`` wrote it.
    :param runtime_env: Ray's runtime environment; the work joins its ``env_vars``.
    :param schedule: how long it may take until the slices are whole, until the work runs on every host
        of them, and until it is done.
    :param poll_s: seconds between two looks at the job.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    attempt: Attempt
    work: str
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    schedule: Schedule
    poll_s: float = Field(default=2.0, gt=0)

    def submission(self, lease: SliceLease) -> JobSubmission:
        """What is submitted to Ray."""
        env_vars = {**self.runtime_env.get("env_vars", {}), WORK_VARIABLE: self.work}
        return JobSubmission(
            submission_id=self.attempt.submission_id,
            entrypoint=ENTRYPOINT,
            runtime_env={**self.runtime_env, "env_vars": env_vars},
            metadata={"raytpu-owner": self.attempt.owner.key, "raytpu-lease": lease.id},
        )


async def begin(
    backend: Backend, lease: SliceLease, owner: Owner, epoch: int, *, schedule: Schedule, say: Say
) -> Attempt:
    """What a try does first: stop what older epochs left running, then see which submission is its own.

    :param schedule: how long Ray may take to answer.
    :return: a submission that runs or has succeeded, to be adopted, else the first free one.
    :raises Preempted: the lease's head is gone for good.
    """

    async def look() -> Attempt:
        await _stop_older_epochs(client, owner, epoch, say)
        session = (await client.version()).session_name
        number = 0
        while (job := await client.job(submission_id(owner, epoch, number))) is not None:
            if job.status not in (JobStatus.FAILED, JobStatus.STOPPED):
                break
            number += 1
        return Attempt(owner=owner, epoch=epoch, number=number, session=session)

    async with backend.ray(lease) as client:
        return await reach(backend, lease, look, schedule=schedule, say=say)


async def _stop_older_epochs(client: RayClient, owner: Owner, epoch: int, say: Say) -> None:
    """What an older epoch left running holds the slices, and nobody waits for it any more."""
    current = submission_prefix(owner, epoch)
    for name in await _under_way(client, submission_prefix(owner)):
        if not name.startswith(current):
            say(f"Stopping {name}: the task was cleared since")
            await client.stop_until_terminal(name, datetime.now(UTC) + STOP_WITHIN)


async def _under_way(client: RayClient, prefix: str) -> list[str]:
    """Submissions that begin so and are not over."""
    jobs = await client.jobs()
    return [job.submission_id for job in jobs if job.submission_id.startswith(prefix) and not job.status.is_terminal]


async def run_job(
    backend: Backend,
    lease: SliceLease,
    request: JobRequest,
    *,
    emit: Callable[[str], None],
    say: Say,
    on_position: Callable[[int], None] | None = None,
    skip_lines: int = 0,
) -> dict[str, Any]:
    """Carry the submission to its end: adopt it where it is there, else submit it to whole slices.

    :param emit: takes every line that the job prints, once, in order.
    :param say: takes lines about the job.
    :param on_position: told after each line what to pass as ``skip_lines`` to go on behind it.
    :param skip_lines: how far an earlier run of this flow has come.
    :return: the job's result with ``submission_id``, ``lease_id`` and ``dashboard`` (the lease's, as it is now)
        added, as plain JSON.
    :raises RayTpuError: the verdict's own class: user code, preemption, a deadline, a stop.
    """
    name, schedule = request.attempt.submission_id, request.schedule
    slices_wanted = load_work(request.work).spec.num_slices

    async def stands(slices: Collection[str]) -> bool:
        return (await backend.observe(lease)).stands_under(slices, slices_wanted)

    async def submit() -> JobInfo | None:
        await client.submit_job(request.submission(lease))
        return await client.job(name)

    async with backend.ray(lease) as client:
        # A triggerer that takes over has as long as the first one had, for hours later the job may run all the same.
        now = Schedule.start(schedule.deadlines)
        job = await reach(backend, lease, lambda: _submitted(client, request.attempt), schedule=now, say=say)
    if job is None:
        lease, _ = await wait_whole(backend, lease, schedule=schedule, say=say)
    async with backend.ray(lease) as client:  # whose slices may be others by now, elsewhere
        if job is None:
            now = Schedule.start(schedule.deadlines)  # the slices may have been waited for until a moment ago
            job = await reach(backend, lease, submit, schedule=now, say=say)
            say(f"Submitted {name} on lease {lease.id}: {lease.spec}")
        else:
            say(f"Adopted {name}: it is {job.status_word} already")
        began = (job.started_at if job else None) or datetime.now(UTC)
        outcome = await follow_job(
            client,
            name,
            starting_until=began + schedule.deadlines.starting,
            running=schedule.deadlines.running,
            emit=emit,
            on_progress=say,
            slices_whole=stands,
            on_position=on_position,
            skip_lines=skip_lines,
            poll_s=request.poll_s,
        )
    if (error := outcome.verdict.error()) is not None:
        raise error
    return {**(outcome.result or {}), "submission_id": name, "lease_id": lease.id, "dashboard": lease.ray.address}


async def _submitted(client: RayClient, attempt: Attempt) -> JobInfo | None:
    """The job of that attempt, None where it was not submitted yet.

    :raises Preempted: another head answers: whatever ran on the old one is gone.
    """
    session = (await client.version()).session_name
    if None not in (session, attempt.session) and session != attempt.session:
        raise Preempted(
            f"job {attempt.submission_id}: the Ray head was replaced ({attempt.session} is now {session}), its jobs "
            "are gone; the task's retry submits it again"
        )
    return await client.job(attempt.submission_id)


async def stop_epoch(
    backend: Backend, lease: SliceLease, request: JobRequest, *, within: timedelta = STOP_WITHIN
) -> list[str]:
    """Stop what this owner has under way in this epoch; safe to call twice.

    :param within: how long it may take.
    :return: what came of each job, in words; empty where nothing ran or its cluster is gone.
    :raises RemoteUnavailable: the cluster is there and does not answer.
    """
    current = submission_prefix(request.attempt.owner, request.attempt.epoch)
    stopped = []
    try:
        async with backend.ray(lease) as client:
            for name in await _under_way(client, current):
                end = await client.stop_until_terminal(name, datetime.now(UTC) + within)
                stopped.append(f"{name}: {end.status_word if end else 'gone'}")
    except RemoteUnavailable:
        if not (await backend.observe(lease)).lost:
            raise
    return stopped
