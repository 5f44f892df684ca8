"""The verdict tables, row by row (F40, F44)."""

from __future__ import annotations

from typing import Any

import pytest

from raytpu_ops.ray.states import (
    TERMINAL_JOB,
    DeploymentStatus,
    JobErrorType,
    JobInfo,
    JobStatus,
    ServeApplication,
    ServeDeployment,
    ServeStatus,
)
from raytpu_ops.ray.verdicts import FAILED_ROWS, Verdict, job_verdict, serve_verdict
from raytpu_ops.tpu.errors import FailureClass, Preempted, UserCodeFailed
from raytpu_ops.tpu.work import Event, dump_event

F = FailureClass
RESULT = Event(event="result", data={"loss": 0.1})


def failed(failure_class: FailureClass | None = None, message: str = "") -> Event:
    return Event(event="failed", failure_class=failure_class, message=message)


def job(status: JobStatus, **more: Any) -> JobInfo:
    return JobInfo("a-1", status, status_word=str(status), **more)


def verdict(info: JobInfo | None, **options: Any) -> Verdict:
    return job_verdict(info, submission_id="a-1", **options)


@pytest.mark.parametrize(
    ("status", "options", "outcome", "failure_class"),
    [
        (JobStatus.PENDING, {}, "running", None),
        (JobStatus.RUNNING, {}, "running", None),
        (JobStatus.UNKNOWN, {}, "running", None),
        (JobStatus.RUNNING, {"event": RESULT, "expect_result": True}, "running", None),
        (JobStatus.RUNNING, {"event": failed(F.PREEMPTED)}, "running", None),
        (JobStatus.RUNNING, {"slices_whole": False}, "running", None),
        (JobStatus.SUCCEEDED, {}, "succeeded", None),
        (JobStatus.SUCCEEDED, {"event": RESULT, "expect_result": True}, "succeeded", None),
        (JobStatus.SUCCEEDED, {"event": RESULT, "slices_whole": False}, "succeeded", None),
        (JobStatus.SUCCEEDED, {"expect_result": True}, "failed", F.USER_CODE_FAILED),
        (JobStatus.SUCCEEDED, {"event": failed(F.PREEMPTED)}, "failed", F.PREEMPTED),
        (JobStatus.SUCCEEDED, {"expect_result": True, "unread": "x"}, "failed", F.REMOTE_UNAVAILABLE),
        (JobStatus.SUCCEEDED, {"event": RESULT, "expect_result": True, "unread": "x"}, "succeeded", None),
        (JobStatus.SUCCEEDED, {"unread": "x"}, "succeeded", None),
        (JobStatus.STOPPED, {}, "failed", F.JOB_STOPPED),
        (JobStatus.STOPPED, {"event": RESULT, "expect_result": True}, "failed", F.JOB_STOPPED),
        (JobStatus.STOPPED, {"slices_whole": False}, "failed", F.JOB_STOPPED),
        (JobStatus.FAILED, {}, "failed", F.USER_CODE_FAILED),
        (JobStatus.FAILED, {"event": RESULT}, "failed", F.USER_CODE_FAILED),
        (JobStatus.FAILED, {"slices_whole": True}, "failed", F.USER_CODE_FAILED),
        (JobStatus.FAILED, {"slices_whole": False}, "failed", F.PREEMPTED),
        (JobStatus.FAILED, {"expect_result": True, "unread": "x"}, "failed", F.REMOTE_UNAVAILABLE),
        (JobStatus.FAILED, {"expect_result": True, "unread": "x", "slices_whole": False}, "failed", F.PREEMPTED),
        (JobStatus.FAILED, {"event": failed(F.MISCONFIGURED), "unread": "x"}, "failed", F.MISCONFIGURED),
        (JobStatus.FAILED, {"unread": "x"}, "failed", F.USER_CODE_FAILED),
        *((JobStatus.FAILED, {"event": failed(each)}, "failed", each) for each in F),
        (JobStatus.FAILED, {"event": failed(None)}, "failed", F.USER_CODE_FAILED),
        (JobStatus.FAILED, {"event": failed(F.USER_CODE_FAILED), "slices_whole": False}, "failed", F.PREEMPTED),
        (JobStatus.FAILED, {"event": failed(F.DEADLINE_EXCEEDED), "slices_whole": False}, "failed", F.PREEMPTED),
        (JobStatus.FAILED, {"event": failed(F.MISCONFIGURED), "slices_whole": False}, "failed", F.MISCONFIGURED),
    ],
)
def test_job_states(status, options, outcome, failure_class):
    found = verdict(job(status), **options)
    assert (found.outcome, found.failure_class) == (outcome, failure_class)
    assert found.is_final is (status in TERMINAL_JOB)
    assert found.message
    assert "\n" not in found.message


def test_every_job_state_has_a_verdict():
    for status in JobStatus:
        assert verdict(job(status)).outcome in ("running", "succeeded", "failed")


def test_a_job_that_ray_does_not_know_any_more_was_lost_with_its_head():
    """Never wait for ever for it (F22)."""
    found = verdict(None)
    assert (found.outcome, found.failure_class) == ("failed", F.PREEMPTED)
    assert "a-1" in found.message
    assert "head has restarted" in found.message


E = JobErrorType


@pytest.mark.parametrize(
    ("error_type", "message", "exit_code", "failure_class"),
    [
        (E.JOB_ENTRYPOINT_COMMAND_ERROR, "…\nModuleNotFoundError: No module named 'raytpu_ops'", 1, F.MISCONFIGURED),
        (E.JOB_ENTRYPOINT_COMMAND_ERROR, "/bin/sh: 1: python: not found", 127, F.MISCONFIGURED),
        (E.JOB_ENTRYPOINT_COMMAND_ERROR, "permission denied", 126, F.MISCONFIGURED),
        (E.JOB_ENTRYPOINT_COMMAND_ERROR, "…\nValueError: x", 1, F.USER_CODE_FAILED),
        (E.RUNTIME_ENV_SETUP_FAILURE, "runtime_env setup failed: no such package", None, F.MISCONFIGURED),
        (E.JOB_ENTRYPOINT_COMMAND_START_ERROR, "Traceback …", None, F.MISCONFIGURED),
        (E.JOB_SUPERVISOR_ACTOR_DIED, "Job supervisor actor died: the node died", None, F.PREEMPTED),
        (E.JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE, "could not be scheduled", None, F.PREEMPTED),
        (E.JOB_SUPERVISOR_ACTOR_START_FAILURE, "Unexpected: failed to get job supervisor.", None, F.PREEMPTED),
        (E.JOB_SUPERVISOR_ACTOR_START_FAILURE, "Failed to start supervisor actor a: 'bad'", None, F.MISCONFIGURED),
        (E.JOB_SUPERVISOR_ACTOR_START_TIMEOUT, "failed to start within 900 seconds", None, F.DEADLINE_EXCEEDED),
        (E.JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE, "Unexpected error occurred: x", None, F.REMOTE_UNAVAILABLE),
        (None, "Job supervisor actor died: x", None, F.PREEMPTED),
        (None, "Job supervisor actor could not be scheduled: x", None, F.PREEMPTED),
        (E.UNKNOWN, "Unexpected error occurred: failed to get job supervisor.", None, F.PREEMPTED),
        (None, "runtime_env setup failed: x", None, F.MISCONFIGURED),
        (E.UNKNOWN, "something new", None, F.USER_CODE_FAILED),
        (None, "", None, F.USER_CODE_FAILED),
    ],
)  # fmt: skip
def test_a_failure_without_a_word_of_the_driver(error_type, message, exit_code, failure_class):
    info = job(JobStatus.FAILED, error_type=error_type, message=message, driver_exit_code=exit_code)
    found = verdict(info)
    assert (found.outcome, found.failure_class) == ("failed", failure_class)
    assert "\n" not in found.message


def test_every_row_of_the_table_is_reached():
    reached = set()
    for row in FAILED_ROWS:
        exit_code = row.exit_codes[0] if row.exit_codes else 1
        info = job(JobStatus.FAILED, error_type=row.error_type, message=row.words, driver_exit_code=exit_code)
        reached.add(next(found for found in FAILED_ROWS if found.fits(info)))
    assert reached == set(FAILED_ROWS)


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (3, "has failed with exit code 3: ValueError: x;"),
        (-9, "(by SIGKILL: the head may be out of memory)"),
        (137, "(by SIGKILL: the head may be out of memory)"),
        (143, "(by SIGTERM)"),
        (0, "has failed: ValueError: x;"),
        (None, "has failed: ValueError: x;"),
    ],
)
def test_the_message_of_a_failure_carries_cause_exit_and_next_step(exit_code, words):
    text = (
        f"Job entrypoint command failed with exit code {exit_code}, last available logs:\nTraceback\n\nValueError: x\n"
    )
    error_type = JobErrorType.JOB_ENTRYPOINT_COMMAND_ERROR
    message = verdict(job(JobStatus.FAILED, message=text, error_type=error_type, driver_exit_code=exit_code)).message
    assert words in message
    assert "its traceback is in the log above" in message


def test_the_drivers_own_words_come_first():
    info = job(JobStatus.FAILED, message="…\nSystemExit: 1", error_type=JobErrorType.JOB_ENTRYPOINT_COMMAND_ERROR)
    assert verdict(info, event=failed(F.PREEMPTED, "worker 1 of s-0 died")).message == "worker 1 of s-0 died"
    lost = verdict(info, event=failed(F.USER_CODE_FAILED, "XlaRuntimeError: x"), slices_whole=False).message
    assert "lost hosts" in lost
    assert "XlaRuntimeError: x" in lost


def test_what_ray_quotes_of_the_drivers_own_words_counts_where_the_log_cannot_be_read():
    text = f"failed with exit code 1, last available logs:\nTraceback\n{dump_event(failed(F.PREEMPTED, 's-0 died'))}\n"
    info = job(JobStatus.FAILED, message=text, error_type=JobErrorType.JOB_ENTRYPOINT_COMMAND_ERROR)
    found = verdict(info, expect_result=True, unread="the end of its log cannot be read")
    assert (found.failure_class, found.message) == (F.PREEMPTED, "s-0 died")


def test_what_ray_says_of_a_driver_that_never_ran_counts_where_the_log_cannot_be_read():
    info = job(JobStatus.FAILED, message="no such package", error_type=JobErrorType.RUNTIME_ENV_SETUP_FAILURE)
    assert verdict(info, expect_result=True, unread="no agent").failure_class is F.MISCONFIGURED


def test_a_long_message_is_cut():
    assert len(verdict(job(JobStatus.FAILED, message="x" * 20_000)).message) < 1000


def test_a_failed_verdict_is_a_typed_error_and_no_other_is():
    assert isinstance(verdict(job(JobStatus.FAILED)).error(), UserCodeFailed)
    assert isinstance(verdict(None).error(), Preempted)
    assert verdict(job(JobStatus.RUNNING)).error() is None
    assert verdict(job(JobStatus.SUCCEEDED)).error() is None


# --- Serve ---


def application(status: ServeStatus, message: str = "", **more: Any) -> ServeApplication:
    return ServeApplication("digits", status, status_word=str(status), message=message, **more)


@pytest.mark.parametrize(
    ("status", "whole", "outcome", "failure_class"),
    [
        (ServeStatus.NOT_STARTED, None, "running", None),
        (ServeStatus.DEPLOYING, None, "running", None),
        (ServeStatus.DEPLOYING, True, "running", None),
        (ServeStatus.DEPLOYING, False, "failed", F.PREEMPTED),
        (ServeStatus.UNHEALTHY, None, "running", None),
        (ServeStatus.UNHEALTHY, False, "failed", F.PREEMPTED),
        (ServeStatus.UNKNOWN, None, "running", None),
        (ServeStatus.RUNNING, None, "succeeded", None),
        (ServeStatus.RUNNING, False, "succeeded", None),
        (ServeStatus.DEPLOY_FAILED, None, "failed", F.USER_CODE_FAILED),
        (ServeStatus.DEPLOY_FAILED, True, "failed", F.USER_CODE_FAILED),
        (ServeStatus.DEPLOY_FAILED, False, "failed", F.PREEMPTED),
        (ServeStatus.DELETING, None, "failed", F.JOB_STOPPED),
        (None, None, "failed", F.PREEMPTED),
    ],
)
def test_application_states(status, whole, outcome, failure_class):
    found = serve_verdict(None if status is None else application(status), name="digits", slices_whole=whole)
    assert (found.outcome, found.failure_class) == (outcome, failure_class)
    assert "digits" in found.message
    assert "\n" not in found.message


def test_every_application_state_has_a_verdict():
    for status in ServeStatus:
        assert serve_verdict(application(status), name="digits").outcome in ("running", "succeeded", "failed")


def test_a_failed_deployment_says_why_in_serves_words():
    text = "Deploying app 'digits' failed with exception:\nTraceback (most recent call last):\n  File x\nKeyError: 1\n"
    message = serve_verdict(application(ServeStatus.DEPLOY_FAILED, text), name="digits").message
    assert message == (
        "application digits cannot be deployed: DEPLOY_FAILED; "
        "Deploying app 'digits' failed with exception: … KeyError: 1"
    )


def test_a_waiting_application_says_what_its_deployments_wait_for():
    waiting = ServeDeployment("Model", DeploymentStatus.UPDATING, "1 replica waits for {'TPU': 4}")
    fine = ServeDeployment("Front", DeploymentStatus.HEALTHY, "all well")
    found = serve_verdict(application(ServeStatus.DEPLOYING, deployments=(waiting, fine)), name="digits")
    assert found.message == "application digits: DEPLOYING; Model UPDATING: 1 replica waits for {'TPU': 4}"
