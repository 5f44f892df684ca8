"""Claims of jobs: submitted once, absent only when Ray says so, stopped until it is over."""

from __future__ import annotations

import pytest

from raytpu_ops.ray.states import JobErrorType, JobStatus, JobSubmission
from raytpu_ops.tpu.errors import DeadlineExceeded, Misconfigured, RemoteUnavailable
from tests.unit.ray.fake_ray import RESET, WRAPPED, FakeJob, becomes, status

JOB = JobSubmission("a-1", "python -m raytpu_ops.runtime", metadata={"who": "me"})


async def test_a_job_is_submitted_with_what_was_asked_for(ray, client):
    assert await client.submit_job(JOB) == "a-1"
    assert ray.jobs["a-1"].metadata == {"who": "me"}
    assert ray.jobs["a-1"].entrypoint == JOB.entrypoint


async def test_the_same_submission_twice_is_one_job(ray, client):
    assert await client.submit_job(JOB) == await client.submit_job(JOB) == "a-1"
    assert ray.count("POST /api/jobs/") == 1


async def test_a_job_that_appears_between_the_look_and_the_submission_is_adopted(ray, client):
    """Two tries race: Ray answers 500 around 'already exists'."""
    text = (
        f"RuntimeError: {WRAPPED}ValueError: Job with submission_id a-1 already exists. Please use a different one.\n."
    )
    ray.fails("POST /api/jobs/", status(500, text))
    ray.jobs["a-1"] = FakeJob()
    ray.fails("GET /api/jobs/a-1", status(404, "Job a-1 does not exist"))
    assert await client.submit_job(JOB) == "a-1"
    assert ray.count("POST /api/jobs/") == 1


@pytest.mark.parametrize("fault", [RESET, status(500, "No available agent to submit job, please try again later.")])
async def test_a_submission_without_an_answer_is_looked_for_before_it_is_sent_again(ray, client, fault):
    ray.fails("POST /api/jobs/", fault, fault)
    assert await client.submit_job(JOB) == "a-1"
    order = [request for request in ray.requests if "/api/jobs/" in request]
    assert order == ["GET /api/jobs/a-1", "POST /api/jobs/"] * 3


async def test_a_submission_whose_answer_was_lost_is_adopted(ray, client):
    """Ray took it, the answer never came (F23)."""

    async def take_and_reset(request):
        ray.jobs["a-1"] = FakeJob()
        request.transport.abort()

    handler, ray._fault = ray._fault, lambda request, fault: take_and_reset(request)
    ray.fails("POST /api/jobs/", RESET)
    assert await client.submit_job(JOB) == "a-1"
    ray._fault = handler
    assert ray.count("POST /api/jobs/") == 1


async def test_an_id_that_belongs_to_another_job_is_not_adopted(ray, client):
    ray.jobs["a-1"] = FakeJob(entrypoint="python other.py")
    with pytest.raises(Misconfigured, match=r"a-1 exists with another entrypoint .'python other.py'"):
        await client.submit_job(JOB)


async def test_a_request_that_ray_refuses_is_not_sent_again(ray, client):
    ray.fails("POST /api/jobs/", *[status(500, f"RuntimeError: {WRAPPED}ValueError: bad label selector\n.")] * 9)
    with pytest.raises(Misconfigured, match="bad label selector"):
        await client.submit_job(JOB)
    assert ray.count("POST /api/jobs/") == 1


async def test_only_rays_own_word_makes_a_job_absent(ray, client):
    """F07."""
    assert await client.job("nobody") is None
    ray.jobs["a-1"] = FakeJob(status="RUNNING")
    ray.fails("GET /api/jobs/a-1", status(404, "404 page not found"), status(404, 'services "ray-head" not found'))
    job = await client.job("a-1")
    assert job is not None
    assert job.status is JobStatus.RUNNING


async def test_a_proxys_404_that_stays_is_an_error_not_absence(ray, client):
    ray.fails("GET /api/jobs/a-1", *[status(404, "404 page not found")] * 99)
    with pytest.raises(RemoteUnavailable, match="404 page not found"):
        await client.job("a-1")


async def test_ids_are_quoted_in_the_path(ray, client):
    assert await client.job("../../api/version?x=1") is None
    assert ray.seen[-1].raw_path == "/api/jobs/..%2F..%2Fapi%2Fversion%3Fx%3D1"


async def test_what_ray_says_of_a_job_arrives_as_types(ray, client):
    ray.jobs["a-1"] = FakeJob(
        status="FAILED", message="boom", error_type="JOB_ENTRYPOINT_COMMAND_ERROR", exit_code=3, metadata={"a": "b"}
    )
    job = await client.job("a-1")
    assert job is not None
    assert (job.status, job.error_type, job.driver_exit_code) == (
        JobStatus.FAILED,
        JobErrorType.JOB_ENTRYPOINT_COMMAND_ERROR,
        3,
    )
    assert (job.message, dict(job.metadata), job.submission_id) == ("boom", {"a": "b"}, "a-1")
    assert job.started_at is not None
    assert job.started_at.isoformat() == "2026-11-30T03:44:48.563000+00:00"


@pytest.mark.parametrize("word", ["SUSPENDED", "succeeded", ""])
async def test_a_word_that_we_do_not_know_stays_unknown_and_is_kept(ray, client, word):
    ray.jobs["a-1"] = FakeJob(status=word)
    job = await client.job("a-1")
    assert job is not None
    assert (job.status, job.status_word, job.status.is_terminal) == (JobStatus.UNKNOWN, word, False)


async def test_every_job_is_listed_and_drivers_have_no_submission_id(ray, client):
    ray.jobs = {"a-1": FakeJob(status="RUNNING"), "b-1": FakeJob(status="FAILED")}
    assert [job.submission_id for job in await client.jobs()] == ["a-1", "b-1", ""]


@pytest.mark.parametrize("text", ['{"hello": 1}', "[]", "null", '"RUNNING"', '{"status": 7}'])
async def test_an_answer_without_a_status_is_somebody_elses(ray, client, text):
    ray.fails("GET /api/jobs/a-1", *[status(200, text)] * 9)
    with pytest.raises(RemoteUnavailable, match="job a-1: the answer has no status"):
        await client.job("a-1")


@pytest.mark.parametrize("text", ['{"jobs": []}', "null", "[1]"])
async def test_a_list_of_jobs_that_is_none_is_an_error(ray, client, text):
    ray.fails("GET /api/jobs/", *[status(200, text)] * 9)
    with pytest.raises(RemoteUnavailable):
        await client.jobs()


async def test_stop_says_whether_there_was_something_to_stop(ray, client):
    ray.jobs["a-1"] = FakeJob(status="RUNNING")
    assert await client.stop_job("a-1") is True
    assert await client.stop_job("nobody") is False


async def test_a_stop_that_does_nothing_is_repeated_until_the_job_is_over(ray, client, time):
    """Ray answers true to the stop of a pending job and does nothing (F29)."""
    ray.jobs["a-1"] = FakeJob(status="PENDING", stops_needed=3)
    job = await client.stop_until_terminal("a-1", time.after(120), clock=time, sleep=time.sleep)
    assert job is not None
    assert (job.status, ray.jobs["a-1"].stops) == (JobStatus.STOPPED, 3)


async def test_a_job_that_cannot_be_stopped_is_named_at_the_deadline(ray, client, time):
    ray.jobs["a-1"] = FakeJob(status="PENDING", stops_needed=10**6)
    with pytest.raises(DeadlineExceeded, match=r"job a-1: the stopping deadline .* still PENDING after a stop"):
        await client.stop_until_terminal("a-1", time.after(60), clock=time, sleep=time.sleep)
    assert 10 <= ray.jobs["a-1"].stops <= 13, "asked again every five seconds, not at each look"


async def test_stopping_survives_errors(ray, client, time):
    ray.jobs["a-1"] = FakeJob(status="RUNNING", stops_needed=2)
    ray.fails("POST /api/jobs/a-1/stop", status(500), RESET, status(503))
    ray.fails("GET /api/jobs/a-1", RESET, status(500))
    job = await client.stop_until_terminal("a-1", time.after(300), clock=time, sleep=time.sleep)
    assert job is not None
    assert job.status is JobStatus.STOPPED


async def test_a_job_that_is_over_is_not_stopped_again(ray, client, time):
    ray.jobs["a-1"] = FakeJob(status="SUCCEEDED")
    job = await client.stop_until_terminal("a-1", time.after(1), clock=time, sleep=time.sleep)
    assert job is not None
    assert (job.status, ray.count("POST")) == (JobStatus.SUCCEEDED, 0)


async def test_stopping_a_job_that_vanishes_ends(ray, client, time):
    ray.jobs["a-1"] = FakeJob(status="RUNNING", stops_needed=9).at_each_look(becomes("RUNNING"), becomes("GONE"))
    assert await client.stop_until_terminal("a-1", time.after(60), clock=time, sleep=time.sleep) is None
