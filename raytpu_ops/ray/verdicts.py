"""What a remote state means to us: one table for jobs, one for applications, read by every path.

Both ways of running, blocking and deferred, ask here and nowhere else (F40, F44). All five job
states and all six application states have a row; a word that is in no table is neither success nor
failure, and the deadline decides.

A failure is classed by what caused it, because retries know why: lost hosts may be worth many
tries, a bug none. The order of what is believed: a slice that lost hosts, then the driver's own
words, then Ray's error type, then Ray's message.

Not here: deadlines, waiting, logs (``follow.py``).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import Literal

from raytpu_ops.ray.states import DeploymentStatus, JobErrorType, JobInfo, JobStatus, ServeApplication, ServeStatus
from raytpu_ops.tpu.errors import FailureClass, RayTpuError, error_for
from raytpu_ops.tpu.work import Event, parse_event

#: Characters of a foreign message that a verdict carries; the whole of it is in the job's log.
_QUOTED = 500


@dataclass(frozen=True)
class Verdict:
    """What a state means.

    :param outcome: ``running`` while the end is open.
    :param failure_class: why it failed; None unless it did.
    :param message: one line: object, state, next step.
    """

    outcome: Literal["running", "succeeded", "failed"]
    failure_class: FailureClass | None = None
    message: str = ""

    @property
    def is_final(self) -> bool:
        """It will not change any more."""
        return self.outcome != "running"

    def error(self) -> RayTpuError | None:
        """The typed error of a failure; None for anything else."""
        return None if self.failure_class is None else error_for(self.failure_class, self.message)


@dataclass(frozen=True)
class FailedRow:
    """One row of the table for a job that is FAILED without a word of its driver.

    :param error_type: Ray's error type; None matches any, and versions that send none.
    :param words: what the message contains, in any case; empty matches any.
    :param failure_class: what it means.
    :param advice: the next step.
    :param exit_codes: exit codes of the driver; empty matches any.
    """

    error_type: JobErrorType | None
    words: str
    failure_class: FailureClass
    advice: str
    exit_codes: tuple[int, ...] = ()

    def fits(self, job: JobInfo) -> bool:
        """The row speaks of that job."""
        return (
            self.error_type in (None, job.error_type)
            and self.words in job.message.lower().replace("'", "")
            and (not self.exit_codes or job.driver_exit_code in self.exit_codes)
        )


_TRACEBACK = "its traceback is in the log above"
_LOST = "a retry runs on replaced slices"
#: What is said where slices do not stand any more; their report says which hosts.
HOSTS_LOST = "a slice has lost hosts, or Ray its head"
_ENVIRONMENT = "see its runtime_env: working_dir, pip and env_vars must be right for the cluster"

#: Read from the top; the first row that fits counts. Texts: ray/dashboard/modules/job/job_manager.py.
FAILED_ROWS: tuple[FailedRow, ...] = (
    FailedRow(
        JobErrorType.JOB_ENTRYPOINT_COMMAND_ERROR,
        "no module named raytpu_ops",
        FailureClass.MISCONFIGURED,
        "raytpu-ops must be installed in the cluster's image, in the Python that `python` names there",
    ),
    FailedRow(
        JobErrorType.JOB_ENTRYPOINT_COMMAND_ERROR,
        "",
        FailureClass.MISCONFIGURED,
        "its command is not on the PATH with which Ray's head was started",
        exit_codes=(126, 127),  # a shell's words for "cannot be run" and "not found"
    ),
    FailedRow(JobErrorType.JOB_ENTRYPOINT_COMMAND_ERROR, "", FailureClass.USER_CODE_FAILED, _TRACEBACK),
    FailedRow(JobErrorType.RUNTIME_ENV_SETUP_FAILURE, "", FailureClass.MISCONFIGURED, _ENVIRONMENT),
    FailedRow(
        JobErrorType.JOB_ENTRYPOINT_COMMAND_START_ERROR,
        "",
        FailureClass.MISCONFIGURED,
        "its command could not be started on the head",
    ),
    FailedRow(JobErrorType.JOB_SUPERVISOR_ACTOR_DIED, "", FailureClass.PREEMPTED, _LOST),
    # Ray gives its supervisor no other node than the head, so this means that the head has gone.
    FailedRow(JobErrorType.JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE, "", FailureClass.PREEMPTED, _LOST),
    # What a head says about a job that it took over from its predecessor.
    FailedRow(
        JobErrorType.JOB_SUPERVISOR_ACTOR_START_FAILURE, "failed to get job supervisor", FailureClass.PREEMPTED, _LOST
    ),
    FailedRow(JobErrorType.JOB_SUPERVISOR_ACTOR_START_FAILURE, "", FailureClass.MISCONFIGURED, _ENVIRONMENT),
    FailedRow(
        JobErrorType.JOB_SUPERVISOR_ACTOR_START_TIMEOUT,
        "",
        FailureClass.DEADLINE_EXCEEDED,
        "Ray's own limit for its start is RAY_JOB_START_TIMEOUT_SECONDS on the head; the resources that its driver "
        "asks for may not be free",
    ),
    FailedRow(JobErrorType.JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE, "", FailureClass.REMOTE_UNAVAILABLE, "try again"),
    # Older versions of Ray, and new words, come without an error type that we know.
    FailedRow(None, "job supervisor actor died", FailureClass.PREEMPTED, _LOST),
    FailedRow(None, "job supervisor actor could not be scheduled", FailureClass.PREEMPTED, _LOST),
    FailedRow(None, "failed to get job supervisor", FailureClass.PREEMPTED, _LOST),
    FailedRow(None, "runtime_env setup failed", FailureClass.MISCONFIGURED, _ENVIRONMENT),
    FailedRow(None, "", FailureClass.USER_CODE_FAILED, _TRACEBACK),
)


def job_verdict(
    job: JobInfo | None,
    *,
    submission_id: str,
    event: Event | None = None,
    expect_result: bool = False,
    slices_whole: bool | None = None,
    unread: str | None = None,
) -> Verdict:
    """What the state of a job means.

    :param job: the job as Ray shows it; None where Ray says that it does not exist.
    :param submission_id: its id, for messages.
    :param event: the last ``result`` or ``failed`` line of its driver, None where there was none.
    :param expect_result: the driver is ours, so a success without a ``result`` line is none.
    :param slices_whole: whether its slices still have their head and every host; None where nobody looked.
    :param unread: why the end of its log, where that line would be, could not be read; None where it was.
    """
    name = f"job {submission_id}"
    unsaid = unread if expect_result and event is None else None
    if job is None:
        return _failed(
            FailureClass.PREEMPTED,
            f"{name} is not known to Ray any more: the head has restarted and lost it; a retry submits it again",
        )
    if job.status is JobStatus.STOPPED:
        return _failed(FailureClass.JOB_STOPPED, f"{name} was stopped from outside; clear the task to run it again")
    if job.status is JobStatus.SUCCEEDED:
        return _succeeded_job(name, event, expect_result, unsaid)
    if job.status is JobStatus.FAILED:
        return _failed_job(name, job, event or _quoted_event(job), slices_whole, unsaid)
    return Verdict("running", message=f"{name} is {job.status_word or job.status}")


def _succeeded_job(name: str, event: Event | None, expect_result: bool, unsaid: str | None) -> Verdict:
    if event is not None and event.event == "failed":
        return _failed(event.failure_class or FailureClass.USER_CODE_FAILED, event.message or f"{name} failed")
    if unsaid:
        return _failed(
            FailureClass.REMOTE_UNAVAILABLE,
            f"{name} has succeeded, but its result is not known: {unsaid}; a retry runs nothing again, it reads it",
        )
    if expect_result and event is None:
        # Our driver prints its result last, so something ended the process before: exit code 0 in
        # the user's code. That is no success: nobody knows what was done.
        return _failed(
            FailureClass.USER_CODE_FAILED,
            f"{name} ended with exit code 0 and without a result: something in the code that it ran ended the "
            "process; take sys.exit() and os._exit() out of it",
        )
    return Verdict("succeeded", message=f"{name} has succeeded")


def _failed_job(name: str, job: JobInfo, event: Event | None, slices_whole: bool | None, unsaid: str | None) -> Verdict:
    if event is not None and event.event == "failed":
        failure_class = event.failure_class or FailureClass.USER_CODE_FAILED
        message = event.message or f"{name} failed"
    else:
        row = _failed_row(job)
        if unsaid and row.failure_class is FailureClass.USER_CODE_FAILED:
            # What Ray says of any driver that fails; ours had a class of its own to say.
            advice = f"why is not known: {unsaid}; a retry runs it again"
            row = replace(row, failure_class=FailureClass.REMOTE_UNAVAILABLE, advice=advice)
        failure_class, message = row.failure_class, f"{name} has failed{_exit_words(job)}: {_quoted(job)}; {row.advice}"
    if slices_whole is False and failure_class in _MAY_BE_LOST_HOSTS:
        # A host that dies shows in the code on the others as whatever error comes first (F13).
        return _failed(FailureClass.PREEMPTED, f"{name}: {HOSTS_LOST}, {_LOST}; what it said: {message}")
    return _failed(failure_class, message)


#: Classes that are put down to lost hosts where hosts were lost.
_MAY_BE_LOST_HOSTS = frozenset(
    {FailureClass.USER_CODE_FAILED, FailureClass.DEADLINE_EXCEEDED, FailureClass.REMOTE_UNAVAILABLE}
)


def _failed_row(job: JobInfo) -> FailedRow:
    return next(row for row in FAILED_ROWS if row.fits(job))  # the last row fits everything


def _quoted_event(job: JobInfo) -> Event | None:
    """The driver's ``failed`` line where Ray's message quotes it: the last lines of the log stand there."""
    events = (parse_event(line) for line in reversed(job.message.splitlines()))
    return next((event for event in events if event is not None and event.event == "failed"), None)


def _exit_words(job: JobInfo) -> str:
    code = job.driver_exit_code
    if code is None or code == 0:
        return ""
    # A shell stands between Ray and the driver: a signal shows as itself or as 128 more.
    number = -code if code < 0 else code - 128
    if number not in set(signal.Signals):
        return f" with exit code {code}"
    by = f"by {signal.Signals(number).name}"
    return f" ({by}: the head may be out of memory)" if number == signal.SIGKILL else f" ({by})"


def _quoted(job: JobInfo) -> str:
    """The message as one line: where it quotes the log, the log's last line."""
    lines = [line.strip() for line in job.message.splitlines() if line.strip()]
    if not lines:
        return "Ray gives no reason"
    line = lines[-1] if job.error_type is JobErrorType.JOB_ENTRYPOINT_COMMAND_ERROR else " ".join(lines)
    return line if len(line) <= _QUOTED else f"{line[:_QUOTED]}…"


def serve_verdict(application: ServeApplication | None, *, name: str, slices_whole: bool | None = None) -> Verdict:
    """What the state of an application means to somebody who waits until it answers.

    :param application: as Serve shows it; None where Serve has no such application.
    :param name: its name, for messages.
    :param slices_whole: whether its slices still have their head and every host; None where nobody looked.
    """
    what = f"application {name}"
    if application is None:
        return _failed(
            FailureClass.PREEMPTED,
            f"{what} is not known to Serve: its head has restarted, or another deployment has taken it away; "
            "a retry deploys it again",
        )
    status = application.status
    if status is ServeStatus.RUNNING:
        return Verdict("succeeded", message=f"{what} is running")
    if status is ServeStatus.DELETING:
        return _failed(FailureClass.JOB_STOPPED, f"{what} is being deleted; clear the task to deploy it again")
    why = serve_words(application)
    if slices_whole is False:
        return _failed(FailureClass.PREEMPTED, f"{what}: {HOSTS_LOST}, {_LOST}; {why}")
    if status is ServeStatus.DEPLOY_FAILED:
        return _failed(FailureClass.USER_CODE_FAILED, f"{what} cannot be deployed: {why}")
    # NOT_STARTED and DEPLOYING go on; Serve heals what is UNHEALTHY by itself, or not: the deadline decides.
    return Verdict("running", message=f"{what}: {why}")


def serve_words(application: ServeApplication) -> str:
    """State and reasons of an application in one line, its deployments' reasons included."""
    said = [application.status_word or str(application.status)]
    if application.message.strip():
        said.append(_last_words(application.message))
    said += [
        f"{deployment.name} {deployment.status}: {_last_words(deployment.message)}"
        for deployment in application.deployments
        if deployment.status is not DeploymentStatus.HEALTHY and deployment.message.strip()
    ]
    return "; ".join(dict.fromkeys(said))


def _last_words(message: str) -> str:
    """A foreign message as one line; of a traceback the head and the last line, where the cause stands."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    line = f"{lines[0]} … {lines[-1]}" if "Traceback" in message and len(lines) > 2 else " ".join(lines)
    return line if len(line) <= _QUOTED else f"{line[:_QUOTED]}…"


def _failed(failure_class: FailureClass, message: str) -> Verdict:
    return Verdict("failed", failure_class, message)
