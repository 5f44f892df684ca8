"""A job on a lease: one submission whatever happens to the tasks around it."""

from __future__ import annotations

from typing import Any

import pytest

from raytpu_ops.flows.jobs import Attempt, JobRequest, begin, run_job, stop_epoch
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.errors import DeadlineExceeded, JobStopped, Preempted, UserCodeFailed
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.naming import submission_id
from raytpu_ops.tpu.readiness import HostReport, Readiness, SliceReport
from raytpu_ops.tpu.work import WORK_VARIABLE, Event, FunctionWork, dump_event, dump_work
from tests.unit.flows.conftest import AWAY, BROKEN, LOST, SPEC, WAITING, WHOLE, schedule
from tests.unit.ray.fake_ray import HEAD, RESET, FakeJob, becomes, node_row

ME = Owner(dag_id="d", run_id="r", task_id="train")
WORK = dump_work(FunctionWork.of(function="m:f", spec=SPEC))
STARTED = dump_event(Event(event="started")) + "\n"
RESULT = dump_event(Event(event="result", data={"metrics": {"loss": 0.5}})) + "\n"


def request(number: int = 0, epoch: int = 1, session: str | None = "session_1", **changes: Any) -> JobRequest:
    values: dict[str, Any] = {
        "attempt": Attempt(owner=ME, epoch=epoch, number=number, session=session),
        "work": WORK,
        # The played jobs started long ago.
        "schedule": schedule(starting=300 * 86400, running=300 * 86400),
        "poll_s": 0.01,
    }
    return JobRequest(**{**values, **changes})


class Told:
    """What a flow emits and says."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.words: list[str] = []

    @property
    def sinks(self) -> dict[str, Any]:
        return {"emit": self.lines.append, "say": self.words.append}


def name(number: int = 0, epoch: int = 1) -> str:
    return submission_id(ME, epoch, number)


async def start(ray, backend, lease, epoch=1):
    return await begin(backend, lease, ME, epoch, schedule=schedule(), say=lambda _: None)


class Scripted(dict[str, FakeJob]):
    """Jobs that go these steps once they are submitted."""

    def __init__(self, *steps: Any) -> None:
        super().__init__()
        self.steps = steps

    def __setitem__(self, key: str, job: FakeJob) -> None:
        super().__setitem__(key, job.at_each_look(*self.steps))


async def test_a_first_try_takes_the_first_number(ray, backend, lease):
    assert await start(ray, backend, lease) == Attempt(owner=ME, epoch=1, number=0, session="session_1")


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "SUCCEEDED", "A_NEW_WORD"])
async def test_a_retry_adopts_what_runs_or_has_succeeded(ray, backend, lease, state):
    ray.jobs[name(0)] = FakeJob(status="FAILED")
    ray.jobs[name(1)] = FakeJob(status=state)

    assert (await start(ray, backend, lease)).number == 1


@pytest.mark.parametrize("state", ["FAILED", "STOPPED"])
async def test_a_retry_never_adopts_what_failed(ray, backend, lease, state):
    ray.jobs[name(0)] = FakeJob(status=state)

    assert (await start(ray, backend, lease)).number == 1


async def test_a_clear_stops_the_older_epochs_job_and_begins_anew(ray, backend, lease):
    ray.jobs[name(0, epoch=1)] = FakeJob(status="RUNNING")
    ray.jobs["somebody-else-e1-a0"] = FakeJob(status="RUNNING")

    attempt = await start(ray, backend, lease, epoch=3)

    assert (attempt.epoch, attempt.number) == (3, 0)
    assert ray.jobs[name(0, epoch=1)].status == "STOPPED"
    assert ray.jobs["somebody-else-e1-a0"].status == "RUNNING"


async def test_a_lease_whose_head_is_gone_is_preempted_at_once(ray, backend, lease):
    backend.address = "http://127.0.0.1:1"
    backend.reports = [LOST]

    with pytest.raises(Preempted, match="the Ray head is dead. Clear the task that provisioned it"):
        await start(ray, backend, lease)


async def test_slices_that_are_gone_with_their_head_are_preempted_at_once_and_the_retry_replaces_them(
    ray, backend, lease
):
    """Nobody waits until a head comes back that is no more."""
    backend.address = "http://127.0.0.1:1"
    backend.reports = [Readiness(slices=[SliceReport(name="s0", hosts_wanted=2, broken=True)], problems=["all gone"])]

    with pytest.raises(Preempted, match="all gone.*A retry of this task replaces its slices"):
        await start(ray, backend, lease)
    assert await stop_epoch(backend, lease, request()) == []


async def test_a_head_that_starts_again_is_waited_for(ray, backend, lease):
    """Whoever comes while it does so loses no try by it."""
    backend.reports = [AWAY, AWAY, WHOLE]
    ray.fails("GET /api/version", RESET, RESET)

    assert (await start(ray, backend, lease)).number == 0


async def test_a_head_that_stays_away_is_preempted_long_before_the_deadline(ray, backend, lease, monkeypatch):
    """The retry waits without a worker slot until there is a head again."""
    monkeypatch.setattr("raytpu_ops.flows.leases.GRACE_S", 0.5)
    backend.address = "http://127.0.0.1:1"
    backend.reports = [AWAY]

    with pytest.raises(Preempted, match="head pod waits for a node. A retry of this task waits for another head"):
        await start(ray, backend, lease)


async def test_a_kill_on_a_cluster_without_a_head_is_done(backend, lease):
    backend.address = "http://127.0.0.1:1"
    backend.reports = [AWAY]

    assert await stop_epoch(backend, lease, request()) == []


async def test_a_job_is_submitted_once_with_its_work_in_the_environment(ray, backend, lease):
    ray.jobs = Scripted(becomes("SUCCEEDED", STARTED + "hi\n" + RESULT))
    told = Told()

    result = await run_job(backend, lease, request(runtime_env={"pip": ["x"]}), **told.sinks)

    assert result == {
        "metrics": {"loss": 0.5},
        "submission_id": name(),
        "lease_id": lease.id,
        "dashboard": lease.ray.address,
    }
    assert told.lines == ["hi"]
    assert ray.count("POST /api/jobs/") == 1
    assert ray.jobs[name()].entrypoint == "python -m raytpu_ops.runtime"
    assert ray.jobs[name()].metadata == {"raytpu-owner": "d/r/train", "raytpu-lease": lease.id}
    submitted = request(runtime_env={"pip": ["x"], "env_vars": {"A": "1"}}).submission(lease)
    assert submitted.runtime_env == {"pip": ["x"], "env_vars": {"A": "1", WORK_VARIABLE: WORK}}


async def test_a_job_that_is_there_is_followed_and_not_submitted_again(ray, backend, lease):
    ray.jobs[name()] = FakeJob(status="RUNNING", log=STARTED + "one\n").at_each_look(
        becomes("RUNNING"), becomes("SUCCEEDED", "two\n" + RESULT)
    )
    told = Told()

    await run_job(backend, lease, request(), **told.sinks)

    assert told.lines == ["one", "two"]
    assert ray.count("POST /api/jobs/") == 0


async def test_a_triggerer_that_takes_over_hours_later_bears_a_head_that_does_not_answer_at_first(ray, backend, lease):
    """F33: the slices had to be whole long ago, and they were."""
    ray.jobs[name()] = FakeJob(status="RUNNING", log=STARTED).at_each_look(becomes("SUCCEEDED", RESULT))
    ray.fails("GET /api/version", *[RESET] * 14)

    result = await run_job(backend, lease, request(schedule=schedule(ago=86400, running=300 * 86400)), **Told().sinks)

    assert result["metrics"] == {"loss": 0.5}


async def test_a_head_that_does_not_answer_at_once_to_slices_that_were_waited_for_is_asked_again(ray, backend, lease):
    ray.jobs = Scripted(becomes("SUCCEEDED", STARTED + RESULT))
    ray.fails("POST /api/jobs/", *[RESET] * 14)
    late = schedule(ago=86400, queued=2 * 86400, running=300 * 86400)

    await run_job(backend, lease, request(schedule=late), **Told().sinks)

    assert list(ray.jobs) == [name()]


async def test_a_job_that_was_over_before_the_first_look_gets_its_true_verdict(ray, backend, lease):
    """F45, and a triggerer that comes back after the job's end does not submit it again."""
    failed = dump_event(Event(event="failed", failure_class="UserCodeFailed", message="ValueError: no"))
    ray.jobs[name()] = FakeJob(status="FAILED", log=f"Traceback\nValueError: no\n{failed}\n")
    told = Told()

    with pytest.raises(UserCodeFailed, match="ValueError: no"):
        await run_job(backend, lease, request(), **told.sinks)

    assert told.lines == ["Traceback", "ValueError: no"]
    assert ray.count("POST /api/jobs/") == 0


async def test_a_stopped_job_is_not_green(ray, backend, lease):
    ray.jobs[name()] = FakeJob(status="STOPPED")

    with pytest.raises(JobStopped, match=name()):
        await run_job(backend, lease, request(), **Told().sinks)


async def test_lines_that_an_earlier_run_emitted_are_not_emitted_again(ray, backend, lease):
    ray.jobs[name()] = FakeJob(status="SUCCEEDED", log="one\ntwo\nthree\n" + RESULT)
    told = Told()

    await run_job(backend, lease, request(), skip_lines=2, **told.sinks)

    assert told.lines == ["three"]


def two_slices(**changes: Any) -> Readiness:
    """Both whole, but for what has become of the second one since."""
    hosts = [HostReport(node_id=f"n{n}", address="", worker_id=n, chips=4, chips_free=0) for n in (0, 1)]
    second = SliceReport(**{"name": "s1", "hosts_wanted": 2, "hosts": hosts, **changes})
    return Readiness(slices=[SliceReport(name="s0", hosts_wanted=2, hosts=hosts), second], head_alive=True)


PREEMPTED = two_slices(hosts=[], missing=["worker 0 has died", "worker 1 has died"], broken=True)
MADE_ANEW = two_slices(hosts=[], missing=["pod 0 waits for a node"]).model_copy(update={"phase": Phase.PROVISIONING})


@pytest.mark.parametrize("lost", [PREEMPTED, MADE_ANEW], ids=["preempted", "made anew by KubeRay"])
@pytest.mark.parametrize(
    ("where", "error"),
    [(["s0"], UserCodeFailed), ([], UserCodeFailed), (["s1"], Preempted), (["s0", "s1"], Preempted)],
    ids=["beside it", "nowhere yet", "on it", "on both"],
)
async def test_a_slice_that_is_lost_stops_only_what_runs_on_it(ray, backend, lease, monkeypatch, lost, where, error):
    """A mapped sweep, or a job beside others: it needs as many slices as it asked for, and has those that it names."""
    monkeypatch.setattr("raytpu_ops.ray.health.GRACE_S", 0.0)
    monkeypatch.setattr("raytpu_ops.ray.health.CHECK_EVERY_S", 0.0)
    ray.rows["nodes"] = [node_row(HEAD, "127.0.0.1", head=True)]
    started = dump_event(Event(event="started", data={"hosts": [{"slice": name} for name in where]})) + "\n"
    bug = dump_event(Event(event="failed", failure_class="UserCodeFailed", message="KeyError")) + "\n"
    job = ray.jobs[name()] = FakeJob(status="RUNNING", log=started if where else "")
    if error is UserCodeFailed:
        job.at_each_look(*[becomes("RUNNING")] * 20, becomes("FAILED", bug))
    backend.reports = [lost]
    work = dump_work(FunctionWork.of(function="m:f", spec=SPEC.model_copy(update={"num_slices": max(1, len(where))})))

    with pytest.raises(error):
        await run_job(backend, lease, request(work=work), **Told().sinks)

    assert job.stops == (error is Preempted)


async def test_a_job_goes_on_while_whoever_runs_its_slices_is_silent(ray, backend, lease, monkeypatch):
    monkeypatch.setattr("raytpu_ops.ray.health.GRACE_S", 0.0)
    monkeypatch.setattr("raytpu_ops.ray.health.CHECK_EVERY_S", 0.0)
    ray.rows["nodes"] = [node_row(HEAD, "127.0.0.1", head=True)]
    started = dump_event(Event(event="started", data={"hosts": [{"slice": "s0"}]})) + "\n"
    job = ray.jobs[name()] = FakeJob(status="RUNNING", log=started)
    job.at_each_look(*[becomes("RUNNING")] * 20, becomes("SUCCEEDED", RESULT))
    backend.reports = [Readiness(problems=["the API server does not answer"])]

    result = await run_job(backend, lease, request(), **Told().sinks)

    assert (result["metrics"], job.stops) == ({"loss": 0.5}, 0)


async def test_a_job_that_lacks_slices_before_it_has_any_is_stopped(ray, backend, lease, monkeypatch):
    """It asked for both, and waits for hosts that are gone."""
    monkeypatch.setattr("raytpu_ops.ray.health.GRACE_S", 0.0)
    ray.rows["nodes"] = [node_row(HEAD, "127.0.0.1", head=True)]
    job = ray.jobs[name()] = FakeJob(status="RUNNING")
    backend.reports = [PREEMPTED]
    work = dump_work(FunctionWork.of(function="m:f", spec=SPEC.model_copy(update={"num_slices": 2})))

    with pytest.raises(Preempted):
        await run_job(backend, lease, request(work=work), **Told().sinks)

    assert job.stops == 1


async def test_a_broken_slice_is_replaced_before_the_job_is_submitted(ray, backend, lease):
    backend.reports = [BROKEN, WAITING, WHOLE]
    ray.jobs = Scripted(becomes("SUCCEEDED", STARTED + RESULT))
    told = Told()

    await run_job(backend, lease, request(), **told.sinks)

    assert backend.repaired == 1
    assert any("Replacing s0" in word and "host 1 is dead" in word for word in told.words)


async def test_slices_that_keep_breaking_end_the_wait(ray, backend, lease):
    backend.reports = [BROKEN]

    with pytest.raises(Preempted, match="replaced 3 times and broke again"):
        await run_job(backend, lease, request(), **Told().sinks)

    assert ray.jobs == {}


async def test_slices_that_do_not_get_whole_in_time_name_what_is_missing(ray, backend, lease):
    backend.reports = [WAITING]

    with pytest.raises(DeadlineExceeded, match="host 1 is not there"):
        await run_job(backend, lease, request(schedule=schedule(labelled=0.1)), **Told().sinks)


async def test_another_head_means_that_the_job_is_gone(ray, backend, lease):
    """F22: never wait for a job that the new head does not know, never submit it silently again."""
    with pytest.raises(Preempted, match="the Ray head was replaced"):
        await run_job(backend, lease, request(session="session_0"), **Told().sinks)

    assert ray.jobs == {}


async def test_a_kill_stops_this_epochs_jobs_only(ray, backend, lease):
    ray.jobs[name(0)] = FakeJob(status="FAILED")
    ray.jobs[name(1)] = FakeJob(status="RUNNING")
    ray.jobs[name(0, epoch=2)] = FakeJob(status="RUNNING")

    stopped = await stop_epoch(backend, lease, request(1))

    assert stopped == [f"{name(1)}: STOPPED"]
    assert ray.jobs[name(0, epoch=2)].status == "RUNNING"
    assert await stop_epoch(backend, lease, request(1)) == []


async def test_a_kill_on_a_cluster_that_is_gone_is_done(ray, backend, lease):
    backend.address = "http://127.0.0.1:1"
    backend.reports = [LOST]

    assert await stop_epoch(backend, lease, request()) == []
