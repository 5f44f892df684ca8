"""Claims of follow_job: the true verdict, every line, and no chip held beyond a deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from raytpu_ops.ray.client import RayClient
from raytpu_ops.tpu.errors import Misconfigured, RemoteUnavailable
from raytpu_ops.tpu.work import Event, dump_event
from tests.unit.ray.fake_ray import GARBAGE, RESET, FakeJob, FakeRay, Tail, becomes, status
from tests.unit.ray.following import RESULT, STARTED, F, Following, ends, failed

# --- the verdict ---


@pytest.mark.parametrize(
    ("job", "ending"),
    [
        (FakeJob(status="SUCCEEDED", log=STARTED + RESULT), ("succeeded", None)),
        (FakeJob(status="SUCCEEDED", log=STARTED), ("failed", F.USER_CODE_FAILED)),
        (FakeJob(status="STOPPED", log=STARTED), ("failed", F.JOB_STOPPED)),
        (FakeJob(status="FAILED", log="boom\n", exit_code=1), ("failed", F.USER_CODE_FAILED)),
        (FakeJob(status="FAILED", log=failed(F.PREEMPTED, "gone")), ("failed", F.PREEMPTED)),
        (FakeJob("FAILED", driver_node_id=None, error_type="RUNTIME_ENV_SETUP_FAILURE"), ("failed", F.MISCONFIGURED)),
    ],
    ids=["succeeded", "no result", "stopped", "failed", "preempted", "never started"],
)  # fmt: skip
@pytest.mark.parametrize("late", [False, True], ids=["in time", "long after every deadline"])
async def test_a_job_that_is_over_before_the_first_look_gets_its_true_verdict(follow, ray, time, job, ending, late):
    """F33, F44, F45."""
    ray.jobs["a-1"] = job
    deadline = time.after(-3600) if late else time.after(600)
    outcome = await follow(starting_until=deadline, running=timedelta(seconds=1))
    assert ends(outcome) == ending
    assert ray.count("POST") == 0, "nothing is stopped that is over"


async def test_a_job_that_vanished_was_lost_with_its_head(follow, ray):
    """F22."""
    ray.jobs["a-1"] = FakeJob(status="RUNNING", log="x\n").at_each_look(*[becomes("RUNNING")] * 3, becomes("GONE"))
    outcome = await follow()
    assert ends(outcome) == ("failed", F.PREEMPTED)
    assert follow.lines == ["x"]


async def test_transient_errors_do_not_end_it(follow, ray):
    """One failed poll must not fail the task (F41)."""
    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED + "x\n")
    job.at_each_look(*[becomes("RUNNING")] * 5, becomes("SUCCEEDED", RESULT))
    ray.fails("GET /api/jobs/a-1", *[status(500), RESET, status(404), GARBAGE, status(429), status(503)] * 8)
    assert ends(await follow()) == ("succeeded", None)
    assert follow.lines == ["x"]


async def test_a_refused_token_ends_it_at_once(time):
    async with FakeRay(token="x") as ray, RayClient(ray.address) as client:
        with pytest.raises(Misconfigured, match="no token was sent"):
            await Following(ray, client, time)()


async def test_a_word_that_we_do_not_know_is_waited_on(follow, ray):
    job = FakeJob(status="SUSPENDED").at_each_look(*[becomes("SUSPENDED")] * 3, becomes("SUCCEEDED", RESULT))
    ray.jobs["a-1"] = job
    assert ends(await follow()) == ("succeeded", None)
    assert any("SUSPENDED" in line for line in follow.told)


# --- the log ---


async def test_lines_come_in_order_once_and_without_the_drivers_events(follow, ray):
    job = FakeJob(status="PENDING", further_tails=Tail(once=True))
    job.at_each_look(
        becomes("PENDING"),
        becomes("RUNNING", "setting up\n"),
        becomes("RUNNING", STARTED + "epoch 1\nepo"),
        becomes("RUNNING", "ch 2\n\n(worker) raytpu-event: no event, for a worker printed it\n"),
        becomes("RUNNING", "epoch 3\n" + RESULT),
        becomes("SUCCEEDED", "goodbye"),
    )
    ray.jobs["a-1"] = job
    outcome = await follow()
    assert follow.lines == [
        "setting up", "epoch 1", "epoch 2", "", "(worker) raytpu-event: no event, for a worker printed it",
        "epoch 3", "goodbye",
    ]  # fmt: skip
    assert outcome.result == {"accuracy": 0.97}
    assert outcome.lines_emitted == 8, "events count as lines of the file, empty lines do not"


async def test_every_line_is_out_before_the_verdict_however_late_it_was_written(follow, ray):
    log = "".join(f"line {number}\n" for number in range(3000))
    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED + log, tails=deque([Tail(upto=777)] * 50))
    job.at_each_look(
        *[becomes("RUNNING")] * 3, becomes("FAILED", "Traceback\n" + failed(F.USER_CODE_FAILED, "x") + "end")
    )
    outcome = await follow()
    assert follow.lines == [*[f"line {number}" for number in range(3000)], "Traceback", "end"]
    assert outcome.verdict.message == "x"


async def test_skipped_lines_are_read_but_not_emitted_again(follow, ray):
    """A triggerer restart: the same try goes on, and what the driver said before still counts."""
    ray.jobs["a-1"] = FakeJob(status="SUCCEEDED", log="a\n" + STARTED + "b\n" + RESULT + "c\n")
    first = await follow()
    assert first.lines_emitted == 5
    follow.lines.clear()
    again = await follow(skip_lines=3)
    assert (follow.lines, again.result, again.lines_emitted) == (["c"], {"accuracy": 0.97}, 5)
    follow.lines.clear()
    assert ends(await follow(skip_lines=5)) == ("succeeded", None)
    assert follow.lines == []


async def test_a_follower_that_takes_over_anywhere_loses_no_line_and_repeats_none(follow, ray):
    """Wherever the first one ended, and whatever empty lines and lines of the driver's own came before."""
    log = "a\n\n\n" + STARTED + "\nb\n\n\nc\n\nd\n" + RESULT + "e\n"
    ray.jobs["a-1"] = FakeJob(status="SUCCEEDED", log=log)
    positions: list[tuple[str, int]] = []
    await follow(on_position=lambda position: positions.append((follow.lines[-1], position)))
    full = [(line, position) for line, position in positions if line]
    assert [line for line, _ in full] == ["a", "b", "c", "d", "e"]
    for number, (_, position) in enumerate(full):
        follow.lines.clear()
        await follow(skip_lines=position)
        assert [line for line in follow.lines if line] == [line for line, _ in full[number + 1 :]]


@pytest.mark.parametrize(
    ("state", "last", "words"),
    [
        ("SUCCEEDED", RESULT, "a-1 has succeeded, but its result is not known"),
        ("FAILED", failed(F.DEADLINE_EXCEEDED, "slices busy"), "a-1 has failed: Job is failed.; why is not known"),
    ],
)
async def test_a_job_whose_last_line_cannot_be_read_is_not_blamed_on_its_code(follow, ray, state, last, words):
    """Ray's tail may lose just that line (F30); a retry adopts the job that succeeded, and reads it."""
    ray.jobs["a-1"] = FakeJob(status=state, log="a\n" + last, tails=deque([Tail(upto=2)]))
    ray.fails("GET /api/v0/logs/file", *[status(500, "node is dead")] * 99)
    outcome = await follow()
    assert ends(outcome) == ("failed", F.REMOTE_UNAVAILABLE)
    assert f"job {words}: the end of the log of a-1 cannot be read" in outcome.verdict.message
    assert "[raytpu] lines may be missing here: the end of the log of a-1 cannot be read" in follow.lines[-1]


@pytest.mark.parametrize(
    ("state", "ending"), [("SUCCEEDED", ("succeeded", None)), ("FAILED", ("failed", F.USER_CODE_FAILED))]
)
async def test_a_job_of_anybody_needs_no_last_line(follow, ray, state, ending):
    ray.jobs["a-1"] = FakeJob(status=state, log="a\nb\n", tails=deque([Tail(upto=2)]))
    ray.fails("GET /api/v0/logs/file", *[status(500, "node is dead")] * 99)
    assert ends(await follow(expect_result=False)) == ending
    assert "lines may be missing here" in follow.lines[-1]


async def test_an_emit_that_fails_ends_it(follow, ray):
    """Nobody would see the lines; the task must not go on as if."""
    ray.jobs["a-1"] = FakeJob(status="RUNNING", log="a\n")

    def broken(_: str) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await follow(emit=broken)


# --- deadlines ---


async def test_a_start_that_takes_too_long_is_stopped_and_names_who_holds_the_hosts(follow, ray, time):
    """Slice head free, another host busy (F46)."""
    ray.jobs |= {"a-1": FakeJob(status="RUNNING", log="waiting for a slice\n"), "b-1": FakeJob(status="RUNNING")}
    ray.rows["placement_groups"] = [
        {"name": "head", "state": "CREATED", "creator_job_id": "job-of-a-1",
         "bundles": [{"node_id": "b" * 56, "unit_resources": {"TPU-v4-16-head": 1}}]},
    ]  # fmt: skip
    ray.rows["actors"] = [
        {"class_name": "Idle", "name": "", "pid": 7, "state": "ALIVE", "job_id": "job-of-b-1", "node_id": "c" * 56,
         "required_resources": {"TPU": 4.0}},
    ]  # fmt: skip
    begun = time.now
    outcome = await follow(starting_until=time.after(120))
    assert ends(outcome) == ("failed", F.DEADLINE_EXCEEDED)
    message = outcome.verdict.message
    assert "job a-1: the starting deadline" in message
    assert "job a-1 is RUNNING: it does not run on every host yet" in message
    assert "busy: s-0 worker 1 at 127.0.0.3: 4 chips by actor Idle (pid 7) of job b-1; it was stopped" in message
    assert "head" not in message, "what it holds itself keeps nobody waiting"
    assert ray.jobs["a-1"].status == "STOPPED"
    assert 120 <= (time.now - begun).total_seconds() <= 130
    assert follow.lines == ["waiting for a slice"]


async def test_a_start_that_takes_too_long_says_what_ray_said(follow, ray, time):
    ray.jobs["a-1"] = FakeJob(status="PENDING", message="It may be waiting for the runtime environment to be set up.")
    outcome = await follow(starting_until=time.after(60))
    assert "PENDING: It may be waiting for the runtime environment" in outcome.verdict.message


async def test_who_holds_the_hosts_is_left_out_where_ray_does_not_say(follow, ray, time):
    ray.jobs["a-1"] = FakeJob(status="RUNNING")
    ray.fails("GET /api/v0/actors", *[status(500)] * 99)
    outcome = await follow(starting_until=time.after(60))
    assert "who holds the hosts cannot be said" in outcome.verdict.message


async def test_the_running_deadline_counts_from_the_start_of_the_work(follow, ray, time):
    """A long start must not eat into the run (F10)."""
    job = ray.jobs["a-1"] = FakeJob(status="PENDING")
    job.at_each_look(*[becomes("PENDING")] * 13, becomes("RUNNING", STARTED))
    begun = time.now
    outcome = await follow(starting_until=time.after(600), running=timedelta(seconds=3600), poll_s=30)
    assert ends(outcome) == ("failed", F.DEADLINE_EXCEEDED)
    assert "the running deadline" in outcome.verdict.message
    assert "it was stopped" in outcome.verdict.message
    assert 3990 <= (time.now - begun).total_seconds() <= 4990
    assert "busy" not in outcome.verdict.message


async def test_a_follower_that_comes_late_gives_the_work_no_more_time(follow, ray, time):
    ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED)
    time.now += timedelta(hours=5)
    outcome = await follow(starting_until=time.after(-3600), running=timedelta(seconds=600))
    assert ends(outcome) == ("failed", F.DEADLINE_EXCEEDED)
    assert "the running deadline 2026-11-30 16:10:00Z" in outcome.verdict.message


async def test_the_driver_may_say_when_the_work_began(follow, ray, time):
    at = dump_event(Event(event="started", data={"at": time.now.isoformat()})) + "\n"
    ray.jobs["a-1"] = FakeJob(status="RUNNING", log=at)
    time.now += timedelta(seconds=300)
    outcome = await follow(starting_until=time.after(600), running=timedelta(seconds=600))
    assert "the running deadline 2026-11-30 12:10:00Z" in outcome.verdict.message


async def test_the_running_deadline_may_be_an_instant(follow, ray, time):
    ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED)
    outcome = await follow(running=time.after(90))
    assert "the running deadline 2026-11-30 12:01:30Z" in outcome.verdict.message


async def test_a_start_that_the_tail_did_not_bring_in_time_counts(follow, ray, time):
    """The state is looked at before a time-out is declared, and so is the log (F33)."""
    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log="a\n" + STARTED, tails=deque([Tail(upto=0, end="hang")]))
    job.at_each_look(*[becomes("RUNNING")] * 100, becomes("SUCCEEDED", RESULT))
    outcome = await follow(starting_until=time.after(60))
    assert ends(outcome) == ("succeeded", None)
    assert follow.lines == ["a"]
    assert ray.jobs["a-1"].stops == 0


async def test_a_start_that_could_be_read_before_the_log_broke_off_counts(follow, ray, time, client, monkeypatch):
    whole = client.rest_of_logs

    async def broken_off(*_: object) -> AsyncIterator[str]:
        monkeypatch.setattr(client, "rest_of_logs", whole)
        yield STARTED.strip()
        raise RemoteUnavailable("the node's agent is away")

    monkeypatch.setattr(client, "rest_of_logs", broken_off)
    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED, tails=deque([Tail(upto=0, end="hang")]))
    job.at_each_look(*[becomes("RUNNING")] * 20, becomes("SUCCEEDED", RESULT))
    assert ends(await follow(starting_until=time.after(-3600))) == ("succeeded", None)
    assert job.stops == 0


async def test_a_job_whose_log_cannot_be_read_when_a_triggerer_comes_back_is_not_stopped(follow, ray, time):
    """It started hours ago and says so in its log, whose agent is away for a while (F33)."""
    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log="a\n" + STARTED, further_tails=Tail(upto=0))
    job.at_each_look(*[becomes("RUNNING")] * 200, becomes("SUCCEEDED", RESULT))
    ray.fails("GET /api/v0/logs/file", *[status(500, "no agent")] * 20)
    assert ends(await follow(starting_until=time.after(-3600))) == ("succeeded", None)
    assert follow.lines == ["a"]
    assert job.stops == 0


async def test_a_ray_that_is_away_when_a_triggerer_comes_back_has_a_while_to_answer(follow, ray, time):
    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED, tails=deque([Tail(upto=0, end="hang")]))
    job.at_each_look(*[becomes("RUNNING")] * 20, becomes("SUCCEEDED", RESULT))
    ray.fails("GET /api/jobs/a-1", *[RESET] * 60)
    assert ends(await follow(starting_until=time.after(-3600))) == ("succeeded", None)
    assert job.stops == 0


async def test_a_job_whose_log_stays_unreadable_is_stopped_in_the_end(follow, ray, time):
    """Nobody knows whether it ever started, and its chips bill."""
    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED, further_tails=Tail(upto=0))
    ray.fails("GET /api/v0/logs/file", *[status(500, "no agent")] * 10**5)
    begun = time.now
    outcome = await follow(starting_until=time.after(60), poll_s=20)
    assert ends(outcome) == ("failed", F.DEADLINE_EXCEEDED)
    assert 660 <= (time.now - begun).total_seconds() <= 700
    assert job.status == "STOPPED"


async def test_a_job_that_ends_while_it_is_being_stopped_keeps_its_own_end(follow, ray, time):
    ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED, when_stopped=becomes("SUCCEEDED", RESULT))
    outcome = await follow(running=timedelta(seconds=60))
    assert ends(outcome) == ("succeeded", None)
    assert outcome.result == {"accuracy": 0.97}
    assert ray.jobs["a-1"].stops == 1


async def test_a_job_that_cannot_be_stopped_is_reported_as_such(follow, ray, time):
    """A pending job ignores a stop (F29); only the end of its lease ends it."""
    ray.jobs["a-1"] = FakeJob(status="PENDING", stops_needed=10**6)
    outcome = await follow(starting_until=time.after(60))
    assert ends(outcome) == ("failed", F.DEADLINE_EXCEEDED)
    assert "it could not be stopped: job a-1: the stopping deadline" in outcome.verdict.message
    assert "releasing its lease ends it" in outcome.verdict.message


async def test_a_job_of_anybody_counts_as_started_once_it_runs(follow, ray, time):
    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log="hello\n")
    job.at_each_look(*[becomes("RUNNING")] * 60, becomes("SUCCEEDED"))
    outcome = await follow(starting_until=time.after(60), expect_result=False, poll_s=20)
    assert ends(outcome) == ("succeeded", None)
    assert outcome.result is None


# --- leaving ---


async def test_a_follower_that_is_cancelled_leaves_the_job_alone_and_nothing_behind(follow, ray):
    """A triggerer restart is no kill (F31); leaked tasks fail every test here."""
    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED + "a\n")
    task = asyncio.create_task(follow())
    while not follow.lines:  # noqa: ASYNC110 - emit is a plain function
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert job.stops == 0


async def test_two_followers_of_the_same_job_end_alike(ray, client, time):
    """The same trigger runs in two triggerers (F34)."""
    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log=STARTED + "a\n")
    job.at_each_look(*[becomes("RUNNING")] * 30, becomes("SUCCEEDED", RESULT))
    one, two = Following(ray, client, time), Following(ray, client, time)
    outcomes = await asyncio.gather(one(), two())
    assert outcomes[0] == outcomes[1]
    assert one.lines == two.lines == ["a"]


async def test_progress_is_told_once_for_each_state(follow, ray):
    def until_told(job: FakeJob) -> None:
        if "job a-1 is RUNNING" in follow.told:
            becomes("SUCCEEDED", RESULT)(job)
        else:
            job.steps.appendleft(until_told)

    ray.jobs["a-1"] = FakeJob(status="PENDING", message="Job has not started yet.").at_each_look(
        *[becomes("PENDING")] * 9,
        *[becomes("RUNNING", message="")] * 9,
        becomes("RUNNING", STARTED),
        until_told,
    )
    await follow(starting_until=follow.time.after(36_000))
    assert follow.told == [
        "job a-1 is PENDING: Job has not started yet.",
        "job a-1 is RUNNING: it does not run on every host yet",
        "job a-1 is RUNNING",
    ]
