"""Claims of follow_serve: running means running, a failure comes in Serve's words, waiting has an end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raytpu_ops.ray.follow import follow_serve
from raytpu_ops.ray.states import ServeApplication, ServeStatus
from raytpu_ops.tpu.errors import DeadlineExceeded, JobStopped, Preempted, UserCodeFailed
from tests.unit.ray.fake_ray import HEAD, RESET, application_row, node_row, status


@pytest.fixture
def follow(ray, client, time):
    told: list[str] = []

    async def run(**options: Any) -> ServeApplication:
        options = {"until": time.after(600), "clock": time, "sleep": time.sleep, "on_progress": told.append, **options}
        return await asyncio.wait_for(follow_serve(client, "digits", **options), 60)

    run.told = told
    ray.rows["nodes"] = [node_row(HEAD, "127.0.0.1", head=True)]
    return run


def shows(state: str, message: str = ""):
    def step(serve: dict[str, Any]) -> None:
        serve["applications"]["digits"] = application_row("digits", state, message, config={"name": "digits"})

    return step


async def test_an_application_is_waited_for_until_it_runs(follow, ray):
    ray.serve_steps.extend([shows("NOT_STARTED"), shows("DEPLOYING"), shows("DEPLOYING"), shows("RUNNING")])
    assert (await follow()).status is ServeStatus.RUNNING
    assert follow.told == ["application digits: NOT_STARTED", "application digits: DEPLOYING"]


async def test_a_failed_deployment_is_user_code_that_failed_in_serves_words(follow, ray):
    ray.serve_steps.extend([shows("DEPLOYING"), shows("DEPLOY_FAILED", "Traceback\n…\nImportError: no module digits")])
    with pytest.raises(UserCodeFailed, match="ImportError: no module digits"):
        await follow()


async def test_a_failed_deployment_on_a_broken_slice_is_preempted(follow, ray):
    async def broken() -> bool:
        return False

    ray.serve_steps.append(shows("DEPLOY_FAILED", "replica died"))
    with pytest.raises(Preempted, match="lost hosts.*replica died"):
        await follow(slices_whole=broken)


async def test_a_deployment_that_hangs_on_a_broken_slice_is_preempted_before_the_deadline(follow, ray, time):
    async def broken() -> bool:
        return False

    shows("DEPLOYING")(ray.serve)
    begun = time.now
    with pytest.raises(Preempted, match="application digits: a slice has lost hosts"):
        await follow(until=time.after(36_000), slices_whole=broken)
    assert (time.now - begun).total_seconds() < 120


async def test_an_unhealthy_application_is_healed_by_serve_or_the_deadline_comes(follow, ray):
    ray.serve_steps.extend([shows("UNHEALTHY", "replica died"), shows("UNHEALTHY"), shows("RUNNING")])
    assert (await follow()).status is ServeStatus.RUNNING


async def test_the_deadline_names_state_reasons_and_who_holds_the_hosts(follow, ray, time):
    ray.rows["nodes"].append(node_row("b" * 56, "127.0.0.2", slice_name="s-0", worker_id=0, chips=4))
    ray.rows["tasks"] = [
        {"name": "idle", "worker_pid": 8, "state": "RUNNING", "job_id": "05", "node_id": "b" * 56,
         "required_resources": {"TPU": 4.0}}
    ]  # fmt: skip
    shows("DEPLOYING", "waiting for a slice")(ray.serve)
    with pytest.raises(DeadlineExceeded) as caught:
        await follow(until=time.after(60))
    message = str(caught.value)
    assert "application digits: the starting deadline" in message
    assert "DEPLOYING; waiting for a slice" in message
    assert "busy: s-0 worker 0 at 127.0.0.2: 4 chips by task idle (pid 8) of Ray job 05" in message


async def test_an_application_that_runs_counts_however_late_the_first_look_comes(follow, ray, time):
    shows("RUNNING")(ray.serve)
    assert (await follow(until=time.after(-3600))).status is ServeStatus.RUNNING


async def test_transient_errors_do_not_end_it(follow, ray):
    ray.serve_steps.extend([shows("DEPLOYING")] * 3 + [shows("RUNNING")])
    ray.fails("GET /api/serve", *[status(503), RESET, status(500)] * 6)
    assert (await follow()).status is ServeStatus.RUNNING


async def test_an_application_that_is_gone_is_an_error_but_one_empty_look_is_none(follow, ray):
    def hides(serve: dict[str, Any]) -> None:
        serve["applications"].clear()

    ray.serve_steps.extend([shows("DEPLOYING"), hides, hides, shows("DEPLOYING"), hides, shows("RUNNING")])
    assert (await follow()).status is ServeStatus.RUNNING
    ray.serve_steps.extend([shows("DEPLOYING"), hides])
    with pytest.raises(Preempted, match="digits is not known to Serve"):
        await follow()


async def test_an_application_that_somebody_deletes_is_not_waited_for(follow, ray):
    shows("DELETING")(ray.serve)
    with pytest.raises(JobStopped, match="digits is being deleted"):
        await follow()


async def test_a_state_that_we_do_not_know_is_waited_on(follow, ray):
    ray.serve_steps.extend([shows("PAUSED"), shows("RUNNING")])
    assert (await follow()).status is ServeStatus.RUNNING
    assert follow.told == ["application digits: PAUSED"]
