"""Claims of logs.py: every line once and in order, whatever the tail does (F30)."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytpu_ops.ray import logs
from raytpu_ops.ray.client import RayClient
from raytpu_ops.ray.logs import LogCursor
from raytpu_ops.tpu.errors import Misconfigured, RemoteUnavailable
from tests.unit.ray.fake_ray import GARBAGE, RESET, FakeJob, FakeRay, Tail, becomes, status

LINES = [f"line {number}" for number in range(200)]
LOG = "\n".join(LINES) + "\n"


async def everything(client: RayClient, name: str = "a-1", **options) -> list[str]:
    return [line async for line in client.follow_logs(name, **options)]


# --- the cursor ---


@settings(deadline=None)  # how fast a machine is says nothing
@given(
    lines=st.lists(st.text(alphabet="ab \r\x0c\x85", max_size=3), max_size=12),
    ends=st.booleans(),
    reads=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=5),
)
def test_however_often_the_log_is_read_again_each_line_comes_once(lines, ends, reads):
    """Any number of broken reads from the start, cut anywhere, then a whole one."""
    text = "\n".join(lines) + ("\n" if ends and lines else "")
    cursor, seen = LogCursor(), []
    for upto, size in [*reads, (len(text), 7)]:
        cursor.restart()
        for start in range(0, min(upto, len(text)), size):
            seen += cursor.feed(text[start : min(start + size, upto)])
    seen += cursor.finish()
    wanted = text.split("\n")
    assert seen == (wanted[:-1] if wanted[-1] == "" else wanted)


def test_an_empty_line_that_only_the_tail_has_does_not_shift_the_count():
    """A carriage return and its newline, written apart, come as two newlines from Ray's tail."""
    cursor = LogCursor()
    assert list(cursor.feed("a\n\nb\n")) == ["a", "", "b"]
    cursor.restart()
    assert list(cursor.feed("a\nb\nc\n")) == ["c"]


def test_a_line_is_whole_or_waited_for():
    cursor = LogCursor()
    assert list(cursor.feed("ha")) == []
    assert list(cursor.feed("lf\nan")) == ["half"]
    assert list(cursor.finish()) == ["an"]
    assert list(cursor.finish()) == []


def test_a_cursor_can_begin_further_down():
    cursor = LogCursor(skip=2)
    assert list(cursor.feed("a\n\nb\nc\n\nd\n")) == ["c", "", "d"]
    assert cursor.position == 4


# --- following ---


async def test_a_finished_job_s_log_comes_whole(ray, client):
    ray.jobs["a-1"] = FakeJob(status="SUCCEEDED", log=LOG + "last line without newline")
    assert await everything(client) == [*LINES, "last line without newline"]


async def test_lines_come_while_they_are_written(ray, client):
    job = ray.jobs["a-1"] = FakeJob(status="RUNNING", log="first\n")
    lines = client.follow_logs("a-1")
    assert await anext(lines) == "first"
    job.log += "second\nthi"
    assert await anext(lines) == "second"
    job.log += "rd\n"
    assert await anext(lines) == "third"
    await lines.aclose()


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_a_tail_that_ends_while_the_job_runs_is_opened_again(ray, client, end):
    job = FakeJob(status="RUNNING", log=LOG, further_tails=Tail(once=True))
    job.tails = deque(Tail(upto=upto, end=end) for upto in (0, 5, 500, 501, 1300, 0, 7))
    job.at_each_look(*[becomes("RUNNING")] * 8, becomes("SUCCEEDED", "the end\n"))
    ray.jobs["a-1"] = job
    assert await everything(client) == [*LINES, "the end"]
    assert job.tail_connections >= 8


async def test_the_last_lines_that_the_tail_loses_are_read_at_the_end(ray, client):
    job = FakeJob(status="RUNNING", log=LOG, tails=deque([Tail(upto=900)] * 99))
    job.at_each_look(becomes("FAILED", "Traceback\nValueError: x"))
    ray.jobs["a-1"] = job
    assert (await everything(client))[-3:] == ["line 199", "Traceback", "ValueError: x"]


async def test_the_end_of_a_log_is_asked_for_until_it_comes(ray, client):
    ray.jobs["a-1"] = FakeJob(status="SUCCEEDED", log=LOG, tails=deque([Tail(upto=10)]))
    ray.fails("GET /api/v0/logs/file", status(500), RESET, status(429))
    assert await everything(client) == LINES


async def test_an_end_that_never_comes_is_an_error_that_says_so(ray, client):
    ray.jobs["a-1"] = FakeJob(status="SUCCEEDED", log=LOG, tails=deque([Tail(upto=10)]))
    ray.fails("GET /api/v0/logs/file", *[status(500)] * 99)
    with pytest.raises(RemoteUnavailable, match="the end of the log of a-1 cannot be read"):
        await everything(client)


async def test_a_log_that_is_not_utf8_comes_nevertheless(ray, client):
    """Ray's tail ends without a line there and its …/logs answers 500; the bytes are still to be had."""
    log = b"start\nbad \xff\xfe bytes\nend\n".decode("utf-8", "surrogateescape")
    job = FakeJob(status="RUNNING", log=log, undecodable=True)
    ray.jobs["a-1"] = job.at_each_look(*[becomes("RUNNING")] * 3, becomes("SUCCEEDED", "more\n"))
    assert await everything(client) == ["start", "bad \ufffd\ufffd bytes", "end", "more"]
    assert await client.job_logs("a-1") == "start\nbad \ufffd\ufffd bytes\nend\nmore\n"


async def test_carriage_returns_neither_lose_nor_double_a_line(ray, client):
    """The bytes have what the tail shows as one newline or two."""
    log = "10%\r20%\r30%\r\ndone\r\nmore\n"
    job = FakeJob(status="RUNNING", log=log, further_tails=Tail(once=True))
    job.tails = deque([Tail(upto=14, extra_newlines=True), Tail(upto=20, extra_newlines=True), Tail(upto=3)])
    ray.jobs["a-1"] = job.at_each_look(*[becomes("RUNNING")] * 4, becomes("SUCCEEDED", "end"))
    assert [line for line in await everything(client) if line] == ["10%", "20%", "30%", "done", "more", "end"]


async def test_following_goes_on_while_ray_does_not_answer(ray, client):
    job = FakeJob(status="RUNNING", log=LOG, tails=deque([Tail(upto=400, end="reset")]))
    job.further_tails = Tail(once=True)
    ray.jobs["a-1"] = job
    lines = client.follow_logs("a-1")
    seen = [await anext(lines)]
    ray.fails("GET /api/jobs/a-1", *[status(503), RESET, GARBAGE, status(404), status(500)] * 6)
    job.at_each_look(becomes("SUCCEEDED", "end\n"))
    seen += [line async for line in lines]
    assert seen == [*LINES, "end"]


async def test_a_job_that_waits_has_no_lines_yet(ray, client):
    job = FakeJob(status="PENDING", further_tails=Tail(once=True))
    ray.jobs["a-1"] = job.at_each_look(*[becomes("PENDING")] * 4, becomes("RUNNING", "a\n"), becomes("SUCCEEDED", "b"))
    assert await everything(client) == ["a", "b"]


async def test_a_job_that_vanishes_ends_its_log(ray, client):
    job = FakeJob(status="RUNNING", log="a\n", tails=deque([Tail(upto=2)]))
    ray.jobs["a-1"] = job.at_each_look(becomes("GONE"))
    assert await everything(client) == ["a"]
    assert await everything(client, "nobody") == []


async def test_skipped_lines_do_not_come_again(ray, client):
    ray.jobs["a-1"] = FakeJob(status="SUCCEEDED", log=LOG)
    assert await everything(client, skip=150) == LINES[150:]


async def test_a_job_without_a_log_has_none(ray, client):
    ray.jobs["a-1"] = FakeJob(status="FAILED", driver_node_id=None)
    ray.jobs["b-1"] = FakeJob(status="FAILED")
    assert await everything(client, "a-1") == await everything(client, "b-1") == []
    assert await client.job_logs("a-1") == await client.job_logs("nobody") == ""


async def test_one_line_may_be_very_long(ray, client):
    log = "x" * 3_000_000 + "\nshort\n"
    ray.jobs["a-1"] = FakeJob(status="SUCCEEDED", log=log, tails=deque([Tail(upto=100)]))
    first, second = await everything(client)
    assert (len(first), second) == (3_000_000, "short")


async def test_a_silent_tail_is_given_up(ray, client):
    """A connection can be dead without a sign."""
    ray.jobs["a-1"] = FakeJob(status="RUNNING", log="a\n", tails=deque([Tail(upto=2, end="hang")]))
    pieces = logs.tail(client._transport, "a-1", silence_s=1.5)
    assert await anext(pieces) == "a\n"
    with pytest.raises(RemoteUnavailable, match="the log tail of a-1 broke: TimeoutError"):
        await anext(pieces)


async def test_the_tail_offers_no_compression_sends_no_ping_and_carries_the_token():
    """Ray's dashboard passes an offer of compression on and cannot read what comes back."""
    async with FakeRay(token="t0ken") as ray, RayClient(ray.address, token="t0ken") as client:
        ray.jobs["a-1"] = FakeJob(status="SUCCEEDED", log="a\n")
        assert await everything(client) == ["a"]
        tail = next(request for request in ray.seen if request.path.endswith("/tail"))
        assert "sec-websocket-extensions" not in tail.headers
        assert tail.headers["authorization"] == "Bearer t0ken"
        assert "origin" not in tail.headers, "Ray would take us for a browser"


async def test_the_tail_follows_no_redirect(ray, client):
    ray.fails("GET /api/jobs/a-1/logs/tail", status(302))
    with pytest.raises(Misconfigured, match=r"redirect to 'http://elsewhere.invalid/'"):
        await anext(logs.tail(client._transport, "a-1"))


@pytest.mark.parametrize("fault", [GARBAGE, status(400), status(403), status(426), status(302), status(501)])
async def test_where_no_websocket_comes_through_the_lines_come_nevertheless(ray, client, fault):
    job = FakeJob(status="RUNNING", log="a\n").at_each_look(
        becomes("RUNNING"), becomes("RUNNING", "b\n"), becomes("RUNNING", "c\nd"), becomes("SUCCEEDED", "\ne")
    )
    ray.jobs["a-1"] = job
    ray.fails("GET /api/jobs/a-1/logs/tail", *[fault] * 99)
    assert await everything(client) == ["a", "b", "c", "d", "e"]


async def test_leaving_early_leaves_nothing_open(ray, client):
    ray.jobs["a-1"] = FakeJob(status="RUNNING", log=LOG)
    lines = client.follow_logs("a-1")
    assert await anext(lines) == "line 0"
    await lines.aclose()
    task = asyncio.create_task(everything(client))
    while ray.jobs["a-1"].tail_connections < 2:  # noqa: ASYNC110 - the played Ray has no event for it
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
