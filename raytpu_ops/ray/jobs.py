"""Jobs of Ray's dashboard: submit once, look, stop until it is over.

Not here: their logs (``logs.py``) and what a state means (``verdicts.py``). Every function is safe
to call again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote

from raytpu_ops.ray.states import JobErrorType, JobInfo, JobStatus, JobSubmission, instant
from raytpu_ops.ray.transport import Transport, decoded
from raytpu_ops.tpu.errors import Misconfigured, RemoteUnavailable
from raytpu_ops.waits import Done, Pending, Wait, utc_now, wait_async

#: In Ray's 404 for a job, a package or an application; a proxy's 404 says something else.
DOES_NOT_EXIST = "does not exist"
#: In Ray's refusal of an id that it has already (F23).
_ALREADY_EXISTS = "already exists"
#: Seconds between two stops of the same job: a stop of a pending one is lost (F29).
_STOP_AGAIN_S = 5.0


def job_path(submission_id: str, rest: str = "") -> str:
    """The path of a job in the REST API."""
    return f"/api/jobs/{quote(submission_id, safe='')}{rest}"


async def submit(transport: Transport, submission: JobSubmission) -> str:
    """Submit the job, or adopt it where it exists already.

    The id is known ahead, so after a time-out one looks before one sends again, and the same
    submission never runs twice (F23).

    :return: its submission id.
    :raises Misconfigured: the id belongs to a job with another entrypoint, or Ray refuses the request.
    :raises RemoteUnavailable: Ray does not answer; whether it took the job shows on the next call.
    """

    async def once() -> str:
        there = await _look(transport, submission.submission_id)
        if there is None:
            response = await transport.bare("POST", "/api/jobs/", json=_request(submission))
            if response.is_success:
                return submission.submission_id
            if _ALREADY_EXISTS not in response.text:
                transport.check(response)
            there = await _look(transport, submission.submission_id)
        if there is not None and there.entrypoint not in ("", submission.entrypoint):
            raise Misconfigured(
                f"job {submission.submission_id} exists with another entrypoint ({there.entrypoint!r}): "
                "the id is taken; delete that job or submit under another id"
            )
        return submission.submission_id

    return await transport.again(once)


def _request(submission: JobSubmission) -> dict[str, Any]:
    optional: dict[str, Any] = {
        "runtime_env": dict(submission.runtime_env),
        "metadata": dict(submission.metadata),
        "entrypoint_num_cpus": submission.entrypoint_num_cpus,
        "entrypoint_resources": dict(submission.entrypoint_resources),
        "entrypoint_label_selector": dict(submission.entrypoint_label_selector),
    }
    # Left out where empty: Ray takes even an empty selector for a wish to leave the head.
    return {
        "submission_id": submission.submission_id,
        "entrypoint": submission.entrypoint,
        **{key: value for key, value in optional.items() if value},
    }


async def info(transport: Transport, submission_id: str) -> JobInfo | None:
    """The job; None only where Ray itself says that it does not exist (F07's kind)."""
    return await transport.again(lambda: _look(transport, submission_id))


async def _look(transport: Transport, submission_id: str) -> JobInfo | None:
    response = await transport.bare("GET", job_path(submission_id))
    if response.status_code == 404 and DOES_NOT_EXIST in response.text:
        return None
    transport.check(response)
    return job_of(decoded(response), submission_id)


async def listed(transport: Transport) -> list[JobInfo]:
    """Every job that Ray knows; a driver that nobody submitted has an empty submission id."""
    rows = await transport.json("/api/jobs/")
    if not isinstance(rows, list):
        raise RemoteUnavailable(f"GET /api/jobs/: a list was expected, got {type(rows).__name__}")
    return [job_of(row) for row in rows]


def job_of(row: object, submission_id: str = "") -> JobInfo:
    """A job from Ray's JSON.

    :raises RemoteUnavailable: when it has no status: an answer of somebody else.
    """
    if not isinstance(row, Mapping) or not isinstance(row.get("status"), str):
        raise RemoteUnavailable(f"job {submission_id}: the answer has no status: {str(row)[:200]}")
    word = row["status"]
    error_type = row.get("error_type")
    exit_code = row.get("driver_exit_code")
    return JobInfo(
        submission_id=row.get("submission_id") or submission_id,
        status=JobStatus.of(word),
        status_word=word,
        message=row.get("message") or "",
        error_type=JobErrorType.of(error_type) if error_type else None,
        entrypoint=row.get("entrypoint") or "",
        metadata=dict(row.get("metadata") or {}),
        job_id=row.get("job_id"),
        started_at=instant(row.get("start_time")),
        ended_at=instant(row.get("end_time")),
        driver_exit_code=exit_code if isinstance(exit_code, int) else None,
        driver_node_id=row.get("driver_node_id"),
    )


async def stop(transport: Transport, submission_id: str) -> bool:
    """Ask the job to stop. True is Ray's word for "asked", not for "stopped".

    :return: False where there is no such job or nothing of it runs.
    """
    return await transport.again(lambda: _stop(transport, submission_id))


async def _stop(transport: Transport, submission_id: str) -> bool:
    response = await transport.bare("POST", job_path(submission_id, "/stop"))
    if response.status_code == 404 and DOES_NOT_EXIST in response.text:
        return False
    transport.check(response)
    answer = decoded(response)
    return isinstance(answer, Mapping) and answer.get("stopped") is True


async def stop_until_terminal(
    transport: Transport,
    submission_id: str,
    deadline: datetime,
    *,
    poll_s: float = 1.0,
    clock: Callable[[], datetime] = utc_now,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> JobInfo | None:
    """Stop the job, look, and stop it again until it is over (F29).

    :param deadline: the instant, UTC, at which to give up.
    :return: the job as it ended; None where it does not exist.
    :raises DeadlineExceeded: it is not over yet; only the end of its cluster's lease ends it now.
    """
    asked: datetime | None = None

    async def look() -> JobInfo | None:
        nonlocal asked
        job = await _look(transport, submission_id)
        if job is None or job.status.is_terminal:
            return job
        if asked is None or (clock() - asked).total_seconds() >= _STOP_AGAIN_S:
            await _stop(transport, submission_id)
            asked = clock()
        return job

    def judge(job: JobInfo | None) -> Pending | Done[JobInfo | None]:
        if job is None or job.status.is_terminal:
            return Done(job)
        return Pending(f"still {job.status_word} after a stop; releasing its lease ends it")

    decider = Wait(f"job {submission_id}", judge, deadline=deadline, phase="stopping", poll_s=poll_s, clock=clock)
    return await wait_async(look, decider, sleep=sleep)
