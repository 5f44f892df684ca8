"""The client against a real Ray head: what unit tests play, Ray itself must say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from raytpu_ops.ray.client import BlockingRayClient, RayClient
from raytpu_ops.ray.follow import JobOutcome, follow_job, follow_serve
from raytpu_ops.ray.readiness import slices_report
from raytpu_ops.ray.states import JobErrorType, JobStatus, JobSubmission, ServeStatus
from raytpu_ops.tpu.errors import DeadlineExceeded, FailureClass, Misconfigured, UserCodeFailed
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.waits import Done, Wait, wait_async
from tests.integration.ray_head import ADDRESS, CPUS, SLICE, RayHead, free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]

HERE = Path(__file__).parent
CODE = HERE / "on_head"


def soon(seconds: float = 120) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


@pytest.fixture
async def client(head: RayHead) -> AsyncIterator[RayClient]:
    async with RayClient(head.address, token=head.token) as client:
        yield client


@pytest.fixture(scope="module")
def code(head: RayHead) -> str:
    """URI of the package with the programs that these tests run."""
    with BlockingRayClient(RayClient(head.address, token=head.token)) as client:
        return client.upload_package(CODE)


async def submit(client: RayClient, submission: JobSubmission) -> str:
    """Submit, on a machine that may be so busy that Ray's agent is still starting."""
    decider: Wait[str, str] = Wait("the head", Done, deadline=soon())
    return await wait_async(lambda: client.submit_job(submission), decider)


async def run(client: RayClient, name: str, command: str, code: str, **options: Any) -> tuple[JobOutcome, list[str]]:
    """Submit a program and follow it to its end."""
    runtime_env = options.pop("runtime_env", {"working_dir": code})
    await submit(client, JobSubmission(name, command, runtime_env=runtime_env))
    lines: list[str] = []
    options = {"starting_until": soon(), "running": timedelta(seconds=120), "expect_result": False, **options}
    return await follow_job(client, name, emit=lines.append, poll_s=0.5, **options), lines


async def running(client: RayClient, name: str, word: str = "") -> None:
    """Wait until the job runs and has printed that."""
    until = soon(60)
    while True:
        job = await client.job(name)
        assert job is not None
        if job.status is JobStatus.RUNNING and word in await client.job_logs(name):
            return
        assert not job.status.is_terminal, f"{job}: {await client.job_logs(name)}"
        assert datetime.now(UTC) < until, f"{job}: {await client.job_logs(name)}"
        await asyncio.sleep(0.2)


# --- the cluster ---


async def test_version_nodes_and_labels(client):
    version = await client.version()
    assert version.ray_version.count(".") == 2
    assert version.session_name is not None
    assert version.session_name.startswith("session_")
    (node,) = await client.nodes()
    assert (node.is_head, node.alive, node.address) == (True, True, ADDRESS)
    assert (node.slice_name, node.worker_id, node.chips) == (SLICE, 0, 4)
    report = slices_report(SliceSpec.of("v4", "2x2x1"), None, [node])
    assert report.ready, report.describe()
    assert not slices_report(SliceSpec.of("v4", "2x2x2"), [SLICE], [node]).ready


@pytest.mark.parametrize("token", [None, "0" * 64], ids=["none", "wrong"])
async def test_a_refused_token_says_so(head, token):
    async with RayClient(head.address, token=token) as client:
        with pytest.raises(Misconfigured, match="authorization"):
            await client.version()
        with pytest.raises(Misconfigured, match="authorization"):
            await anext(client.follow_logs("x"))


async def test_behind_a_proxy_that_keeps_authorization_the_other_header_carries_the_token(head):
    async with RayClient(head.address, token=head.token, auth_header="x-ray-authorization") as client:
        assert (await client.version()).ray_version


# --- jobs and logs ---


async def test_a_job_is_submitted_once_and_its_two_thousand_lines_come_once(client, code):
    outcome, lines = await run(client, "lines", "python lines.py 2000 0", code)
    assert outcome.verdict.outcome == "succeeded"
    assert [line for line in lines if line.startswith("line ")] == [f"line {number}" for number in range(2000)]
    assert lines[-1] == "last line without newline"
    again = JobSubmission("lines", "python lines.py 2000 0", runtime_env={"working_dir": code})
    assert await client.submit_job(again) == "lines"
    assert sum(job.submission_id == "lines" for job in await client.jobs()) == 1
    with pytest.raises(Misconfigured, match="another entrypoint"):
        await client.submit_job(JobSubmission("lines", "python else.py"))
    late = await follow_job(client, "lines", starting_until=soon(-60), running=timedelta(1), emit=lines.append)
    assert late.verdict.failure_class is FailureClass.USER_CODE_FAILED, "no result line, and that is its own verdict"


async def test_lines_come_while_a_job_runs_until_it_is_stopped(client, code):
    await submit(client, JobSubmission("slow", "python lines.py 9999 0.2", runtime_env={"working_dir": code}))
    lines = client.follow_logs("slow")
    while not (await anext(lines)).startswith("line "):
        pass
    job = await client.job("slow")
    assert job is not None
    assert job.status is JobStatus.RUNNING
    job = await client.stop_until_terminal("slow", soon())
    assert job is not None
    assert job.status is JobStatus.STOPPED
    numbers = [int(line.split()[1]) for line in [line async for line in lines] if line.startswith("line ")]
    assert numbers == list(range(1, len(numbers) + 1))
    outcome = await follow_job(client, "slow", starting_until=soon(), running=timedelta(1), emit=lambda _: None)
    assert outcome.verdict.failure_class is FailureClass.JOB_STOPPED


async def test_a_tail_that_is_cut_again_and_again_loses_and_doubles_nothing(head, code):
    async with cut_tails(head.address, after=9000) as (address, cuts), RayClient(address, token=head.token) as client:
        outcome, lines = await run(client, "cut", "python lines.py 2000 0.002", code)
    assert outcome.verdict.outcome == "succeeded"
    assert [line for line in lines if line.startswith("line ")] == [f"line {number}" for number in range(2000)]
    assert cuts


@asynccontextmanager
async def cut_tails(address: str, *, after: int) -> AsyncIterator[tuple[str, list[int]]]:
    """A proxy before Ray that cuts each log tail after so many bytes, twice as many the next time."""
    far = urlsplit(address)
    cuts: list[int] = []
    pumps: set[asyncio.Task[None]] = set()

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, limit: float) -> None:
        sent = 0
        try:
            while sent < limit and (piece := await source.read(1024)):
                target.write(piece)
                await target.drain()
                sent += len(piece)
        except ConnectionError:
            pass  # the other direction has ended it
        finally:
            target.transport.abort() if sent >= limit else target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begin = await reader.read(4096)
        limit = float("inf")
        if b"/logs/tail" in begin.split(b"\r\n", 1)[0]:
            limit = after * 2 ** len(cuts)
            cuts.append(len(cuts))
        there, out = await asyncio.open_connection(far.hostname, far.port)
        out.write(begin)
        for task in (pump(reader, out, float("inf")), pump(there, writer, limit)):
            pumps.add(asyncio.create_task(task))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", cuts
    finally:
        server.close()
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def test_a_log_that_is_not_utf8_and_has_carriage_returns_comes_whole(client, code):
    _, lines = await run(client, "bytes", "python odd_bytes.py", code)
    assert [line for line in lines if line][-5:] == ["start", "bad \ufffd\ufffd bytes", "10%", "20%", "end"]


async def test_the_uploaded_folder_is_what_runs(client, code, tmp_path):
    (tmp_path / "main.py").write_text("import helper; print('it says', helper.WORD)\n")
    (tmp_path / "helper.py").write_text("WORD = 'hello'\n")
    (tmp_path / ".rayignore").write_text("secret.txt\n")
    (tmp_path / "secret.txt").write_text("x")
    uri = await client.upload_package(tmp_path)
    assert await client.upload_package(tmp_path) == uri
    outcome, lines = await run(client, "folder", "python main.py; ls", uri)
    assert outcome.verdict.outcome == "succeeded"
    assert "it says hello" in lines
    assert "helper.py" in lines
    assert "secret.txt" not in lines


async def test_user_code_that_raises_is_classed_as_such_and_its_traceback_is_in_the_log(client, code):
    outcome, lines = await run(client, "raises", "python raises.py", code)
    assert outcome.verdict.failure_class is FailureClass.USER_CODE_FAILED
    # What else Ray says depends on how much of the log it had by then.
    assert "job raises has failed with exit code 1" in outcome.verdict.message
    assert "Traceback (most recent call last):" in lines


async def test_a_command_that_is_not_there(client, code):
    words = {
        "no-such-program": "with exit code 127",
        "python -m raytpu_ops_that_is_not_there": "with exit code 1: ",
    }
    ends = await asyncio.gather(*(run(client, f"absent-{len(command)}", command, code) for command in words))
    for (outcome, _), word in zip(ends, words.values(), strict=True):
        assert word in outcome.verdict.message
        assert outcome.verdict.failure_class is FailureClass.MISCONFIGURED


async def test_a_package_that_is_not_there_is_misconfigured(client, code):
    missing = {"working_dir": "gcs://_ray_pkg_0123456789abcdef.zip"}
    outcome, _ = await run(client, "no-package", "python lines.py 1 0", code, runtime_env=missing)
    assert outcome.verdict.failure_class is FailureClass.MISCONFIGURED, outcome.verdict.message
    job = await client.job("no-package")
    assert job is not None
    assert job.error_type is JobErrorType.RUNTIME_ENV_SETUP_FAILURE


# --- stops and deadlines ---


async def test_a_pending_job_is_stopped_once_it_can_be(client, code):
    """Ray answers true to the stop of a pending job and does nothing (F29)."""
    everything = {"entrypoint_num_cpus": CPUS, "runtime_env": {"working_dir": code}}
    await submit(client, JobSubmission("first", "python lines.py 9999 0.2", **everything))
    await running(client, "first", "line 1")
    await submit(client, JobSubmission("second", "python lines.py 9999 0.2", **everything))
    with pytest.raises(DeadlineExceeded, match="job second: the stopping deadline .* still PENDING"):
        await client.stop_until_terminal("second", soon(4))
    first, second = await asyncio.gather(
        client.stop_until_terminal("first", soon()), client.stop_until_terminal("second", soon())
    )
    assert first is not None
    assert second is not None
    assert (first.status, second.status) == (JobStatus.STOPPED, JobStatus.STOPPED)


async def test_a_start_that_takes_too_long_names_who_holds_the_chips(client, code):
    """F46, as far as one host can show it."""
    await submit(client, JobSubmission("holder", "python hold_chips.py 2", runtime_env={"working_dir": code}))
    await running(client, "holder", "held")
    outcome, lines = await run(
        client, "waiter", "python hold_chips.py 4", code, starting_until=soon(10), expect_result=True
    )
    assert outcome.verdict.failure_class is FailureClass.DEADLINE_EXCEEDED
    message = outcome.verdict.message
    assert f"busy: {SLICE} worker 0 at {ADDRESS}: 2 chips by actor Holder 'holder' (pid" in message
    assert "of job holder" in message
    assert "it was stopped" in message
    assert "held" not in lines
    node = (await client.nodes())[0]
    report = slices_report(SliceSpec.of("v4", "2x2x1"), [SLICE], [node], await client.holders(), await client.usage())
    assert report.ready
    assert not report.slices[0].free
    assert report.slices[0].hosts[0].chips_free == 2
    await client.stop_until_terminal("holder", soon())


async def test_a_supervisor_that_dies_means_preempted(head, client, code):
    await submit(client, JobSubmission("orphan", "python lines.py 9999 0.2", runtime_env={"working_dir": code}))
    await running(client, "orphan", "line 1")
    head.find("ray::JobSupervisor").kill()
    lines: list[str] = []
    outcome = await follow_job(client, "orphan", starting_until=soon(), running=timedelta(1), emit=lines.append)
    assert outcome.verdict.failure_class is FailureClass.PREEMPTED, outcome.verdict.message


# --- Serve ---


async def test_applications_are_deployed_beside_each_other_and_taken_away_one_by_one(client, code):
    (port,) = free_ports(1)
    listen = {"host": ADDRESS, "port": port}

    def app(name: str, builder: str) -> dict[str, Any]:
        return {
            "name": name,
            "import_path": f"apps:{builder}",
            "route_prefix": f"/{name}",
            "args": {"word": f"I am {name}"},
            "runtime_env": {"working_dir": code},
        }

    async def ask(name: str) -> str:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            return (await http.get(f"http://{ADDRESS}:{port}/{name}")).text

    await client.deploy(app("one", "build"), http_options=listen)
    one = await follow_serve(client, "one", until=soon(), poll_s=0.5)
    assert (one.status, dict(one.deployments[0].replicas)) == (ServeStatus.RUNNING, {"RUNNING": 1})
    await client.deploy(app("two", "build"))
    await follow_serve(client, "two", until=soon(), poll_s=0.5)
    assert (await ask("one"), await ask("two")) == ("I am one", "I am two")

    await client.deploy(app("bad", "fails"))
    with pytest.raises(UserCodeFailed, match="bad cannot be deployed: DEPLOY_FAILED.*the builder does not like this"):
        await follow_serve(client, "bad", until=soon(), poll_s=0.5)
    with pytest.raises(Misconfigured, match="400"):
        await client.deploy({**app("odd", "build"), "import_path": "nothing"})

    assert await client.delete_application("one") is True
    until = soon(60)
    while "one" in await client.serve_applications():
        assert datetime.now(UTC) < until
        await asyncio.sleep(0.3)
    assert await ask("two") == "I am two"
    assert await client.delete_application("one") is False


# --- the head itself; what was uploaded is lost with it, so this comes last ---


async def test_a_head_that_is_replaced_has_lost_the_job(head, client):
    """The status must not stay RUNNING for ever (F22)."""
    await submit(client, JobSubmission("lost", "sleep 1000"))
    await running(client, "lost")
    following = asyncio.create_task(
        follow_job(
            client, "lost", starting_until=soon(), running=timedelta(1), emit=lambda _: None, expect_result=False,
            poll_s=0.5,
        )
    )  # fmt: skip
    await asyncio.to_thread(head.kill)
    await asyncio.to_thread(head.start)
    outcome = await asyncio.wait_for(following, 60)
    assert outcome.verdict.failure_class is FailureClass.PREEMPTED
    assert "not known to Ray any more" in outcome.verdict.message
