"""Claims of follow_job where hosts are lost: no run hangs for a day, and the class says why."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import pytest

from raytpu_ops.tpu.errors import RemoteUnavailable
from raytpu_ops.tpu.work import Event, dump_event
from tests.unit.ray.fake_ray import RESET, FakeJob, becomes, node_row
from tests.unit.ray.following import RESULT, STARTED, F, ends, failed


async def whole(_: object) -> bool:
    return True


async def broken(_: object) -> bool:
    return False


async def test_a_run_that_hangs_because_a_slice_lost_hosts_is_stopped_as_preempted(follow, ray, time):
    """It would hang until the running deadline, a day from now (F13, F20)."""
    ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED)
    begun = time.now
    outcome = await follow(slices_whole=broken)
    assert ends(outcome) == ("failed", F.PREEMPTED)
    assert "a slice has lost hosts, or Ray its head; a retry runs on replaced slices" in outcome.verdict.message
    assert outcome.verdict.message.endswith("it was stopped")
    assert 60 <= (time.now - begun).total_seconds() <= 90
    assert ray.jobs["a-1"].status == "STOPPED"


def started_on(kind: str, *names: str) -> str:
    hosts = [{"slice": name, "worker_id": worker} for name in names for worker in (0, 1)]
    return dump_event(Event(event="started", data={kind: hosts})) + "\n"


@pytest.mark.parametrize("kind", ["workers", "hosts"])
async def test_a_slice_that_the_job_is_not_on_may_break(follow, ray, kind):
    """It goes on, and what its code raises meanwhile is its code's fault (F13 is about its own slices)."""
    asked: list[list[str]] = []

    async def two_is_broken(slices: Collection[str]) -> bool:
        asked.append(sorted(slices))
        return "s-2" not in slices

    def run(*on: str) -> FakeJob:
        job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log=started_on(kind, *on))
        return job.at_each_look(*[becomes("RUNNING")] * 100, becomes("FAILED", failed(F.USER_CODE_FAILED, "KeyError")))

    job = run("s-0", "s-1")
    assert ends(await follow(slices_whole=two_is_broken)) == ("failed", F.USER_CODE_FAILED)
    assert job.stops == 0
    assert asked[-1] == ["s-0", "s-1"]
    job = run("s-0", "s-2")
    assert ends(await follow(slices_whole=two_is_broken)) == ("failed", F.PREEMPTED)
    assert job.status == "STOPPED"


@pytest.mark.parametrize("data", [{}, {"workers": 3}, {"hosts": ["s-0", {"slice": 0}, {}]}])
async def test_a_job_that_does_not_say_where_it_runs_may_be_anywhere(follow, ray, data):
    asked: list[list[str]] = []

    async def broken(slices: Collection[str]) -> bool:
        asked.append(sorted(slices))
        return False

    ray.jobs["a-1"] = FakeJob(status="RUNNING", log=dump_event(Event(event="started", data=data)) + "\n")
    assert ends(await follow(slices_whole=broken)) == ("failed", F.PREEMPTED)
    assert asked[-1] == []


async def test_the_driver_gets_a_while_to_say_by_itself_what_befell_it(follow, ray):
    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED)
    job.at_each_look(*[becomes("RUNNING")] * 20, becomes("FAILED", failed(F.PREEMPTED, "worker 1 of s-0 died")))
    outcome = await follow(slices_whole=broken)
    assert ends(outcome) == ("failed", F.PREEMPTED)
    assert outcome.verdict.message == "worker 1 of s-0 died"
    assert job.stops == 0


async def test_a_blip_is_no_loss(follow, ray):
    answers = iter([True, False, False, True, False, True])

    async def blinking(_: object) -> bool:
        return next(answers, True)

    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED)
    job.at_each_look(*[becomes("RUNNING")] * 40, becomes("SUCCEEDED", RESULT))
    assert ends(await follow(slices_whole=blinking, poll_s=10)) == ("succeeded", None)


async def test_user_code_that_fails_on_a_broken_slice_is_preempted_and_on_a_whole_one_is_not(follow, ray):
    for answer, failure_class in ((broken, F.PREEMPTED), (whole, F.USER_CODE_FAILED)):
        ray.jobs["a-1"] = FakeJob(status="FAILED", log=STARTED + failed(F.USER_CODE_FAILED, "XlaRuntimeError"))
        assert ends(await follow(slices_whole=answer)) == ("failed", failure_class)


async def test_a_start_that_takes_too_long_on_a_broken_slice_is_preempted(follow, ray, time):
    """F20."""
    ray.jobs["a-1"] = FakeJob(status="RUNNING")
    outcome = await follow(starting_until=time.after(30), slices_whole=broken)
    assert ends(outcome) == ("failed", F.PREEMPTED)
    assert "the starting deadline" in outcome.verdict.message


async def test_a_job_whose_drivers_host_has_died_is_not_believed_to_run(follow, ray, time):
    """The head was replaced and the state stays RUNNING (F22)."""
    ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED, driver_node_id="d" * 56)
    ray.rows["nodes"].append(node_row("d" * 56, "127.0.0.9", head=True, state="DEAD"))
    outcome = await follow()
    assert ends(outcome) == ("failed", F.PREEMPTED)
    assert "the host at 127.0.0.9 on which its driver ran has died" in outcome.verdict.message


async def test_a_head_that_is_gone_for_good_ends_it_long_before_the_deadline(follow, ray, time):
    ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED)
    ray.fails("GET", *[RESET] * 10**6)
    ray.fails("POST", *[RESET] * 10**6)
    begun = time.now
    outcome = await follow(slices_whole=broken)
    assert ends(outcome) == ("failed", F.PREEMPTED)
    assert "it could not be stopped" in outcome.verdict.message
    assert (time.now - begun).total_seconds() < 600


async def test_a_head_that_is_back_within_the_grace_and_knows_the_job_ends_nothing(follow, ray, time):
    begun = time.now

    async def back(_: object) -> bool:
        if time.now < begun + timedelta(seconds=20) or time.now > begun + timedelta(seconds=65):
            return True
        ray.fails("GET", RESET)
        return False

    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED)
    job.at_each_look(*[becomes("RUNNING")] * 100, becomes("SUCCEEDED", RESULT))
    assert ends(await follow(slices_whole=back)) == ("succeeded", None)
    assert (time.now - begun).total_seconds() > 65


async def test_slices_that_nobody_can_judge_are_not_lost(follow, ray):
    async def unknown(_: object) -> bool:
        raise RemoteUnavailable("x")

    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED)
    job.at_each_look(*[becomes("RUNNING")] * 100, becomes("SUCCEEDED", RESULT))
    assert ends(await follow(slices_whole=unknown)) == ("succeeded", None)
