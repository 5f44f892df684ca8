"""How replicas answer: requests reach every host in one order, what is broken says so, HTTP says it in status codes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request

from raytpu_ops.runtime import place, replicas
from raytpu_ops.runtime.cluster import Host
from raytpu_ops.runtime.place import CurrentHost
from raytpu_ops.runtime.replicas import ModelOnHost, ReplicaSettings, SliceReplica
from raytpu_ops.runtime.reserve import Reservation, ReservedHost
from raytpu_ops.tpu.spec import SliceSpec

SPEC = SliceSpec.of("v4", "2x2x2")


class Model:
    """What the tests serve."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def __call__(self, request: Any) -> Any:
        if request == "raise":
            raise RuntimeError("no")
        return {"sum": sum(request["numbers"]) + self.offset}


class Worker:
    """Stands in for Ray's handle of the actor on a host."""

    def __init__(self, order: list[tuple[int, Any]], rank: int) -> None:
        self.rank = rank
        self.order = order
        self.calls: list[concurrent.futures.Future[Any]] = []
        self.ask = self.ping = self

    def remote(self, *args: Any) -> Worker:
        self.order.append((self.rank, args[0] if args else "ping"))
        self.calls.append(concurrent.futures.Future())
        return self

    def future(self) -> concurrent.futures.Future[Any]:
        return self.calls[-1]


def settings(**options: Any) -> ReplicaSettings:
    return ReplicaSettings(
        **{
            "model": f"{__name__}:Model",
            "init_args": [],
            "init_kwargs": {},
            "spec": SPEC,
            "start_timeout_s": 10.0,
            "request_timeout_s": 10.0,
            **options,
        }
    )


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[SliceReplica]:
    """A replica whose two hosts are stood in for; ``order`` is what reached them, in order."""
    made = SliceReplica.__new__(SliceReplica)
    replicas._Answering.__init__(made, settings())
    made.order = []  # type: ignore[attr-defined]
    made._workers = [Worker(made.order, rank) for rank in range(2)]  # type: ignore[attr-defined]
    made._hosts = [CurrentHost(rank, 2, "s0", 0, 1, rank, f"127.0.0.{rank + 2}") for rank in range(2)]
    hosts = [Host(f"n{h.rank}", h.address, 1, "s0", h.worker_id, "v4-16", 4, alive=True) for h in made._hosts]
    made._reservation = Reservation(places=[ReservedHost(host, 0, None, n) for n, host in enumerate(hosts)])
    monkeypatch.setattr(replicas, "lost_hosts", lambda _hosts: [])
    yield made
    made._workers, made._reservation = [], None  # nothing of Ray's for its end to release


def answer(replica: SliceReplica, number: int, *values: Any) -> None:
    for worker, value in zip(replica._workers, values, strict=True):
        call = worker.calls[number]
        call.set_exception(value) if isinstance(value, Exception) else call.set_result(value)


async def asked(replica: SliceReplica, count: int) -> None:
    while len(replica.order) < count:  # type: ignore[attr-defined]  # noqa: ASYNC110 - nothing announces a call
        await asyncio.sleep(0.001)


async def test_requests_reach_every_host_in_one_order(replica: SliceReplica) -> None:
    tasks = [asyncio.create_task(replica.ask(number)) for number in range(5)]
    await asked(replica, 10)
    assert replica.order == [(rank, number) for number in range(5) for rank in range(2)]  # type: ignore[attr-defined]
    for number in reversed(range(5)):
        answer(replica, number, {"answer": number}, {"answer": "of the other host"})
    assert await asyncio.gather(*tasks) == [0, 1, 2, 3, 4]


async def test_a_lost_host_breaks_the_replica_for_all_that_follow(replica: SliceReplica) -> None:
    task = asyncio.create_task(replica.ask(1))
    await asked(replica, 2)
    replica._workers[1].calls[0].set_exception(ConnectionError("gone"))  # the other one hangs in a collective
    with pytest.raises(RuntimeError, match=r"a host of s0 is lost \(ConnectionError\)"):
        await task
    with pytest.raises(RuntimeError, match="a host of s0 is lost"):
        await replica.ask(2)
    with pytest.raises(RuntimeError, match="a host of s0 is lost"):
        await replica.check_health()
    assert len(replica.order) == 2, "no host is asked any more"  # type: ignore[attr-defined]


async def test_hosts_that_part_ways_break_the_replica(replica: SliceReplica) -> None:
    task = asyncio.create_task(replica.ask(1))
    await asked(replica, 2)
    answer(replica, 0, {"answer": 1}, {"error": "RuntimeError: only here"})
    assert await task == 1
    with pytest.raises(RuntimeError, match="out of step"):
        await replica.check_health()


async def test_a_model_that_raises_everywhere_leaves_the_replica_well(replica: SliceReplica) -> None:
    task = asyncio.create_task(replica.ask(1))
    await asked(replica, 2)
    answer(replica, 0, {"error": "RuntimeError: no"}, {"error": "RuntimeError: no"})
    with pytest.raises(RuntimeError, match="RuntimeError: no"):
        await task
    await healthy(replica)


async def healthy(replica: SliceReplica) -> None:
    before = len(replica.order)  # type: ignore[attr-defined]
    health = asyncio.create_task(replica.check_health())
    await asked(replica, before + 2)
    for worker in replica._workers:
        worker.calls[-1].set_result(None)
    await health


async def test_the_health_check_names_the_lost_host(replica: SliceReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    await healthy(replica)
    monkeypatch.setattr(replicas, "lost_hosts", lambda hosts: hosts[1:])
    with pytest.raises(RuntimeError, match=r"lost s0 worker 1 \(127.0.0.3\)"):
        await replica.check_health()


async def test_a_host_that_does_not_answer_a_ping_is_unhealthy(
    replica: SliceReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_PING_S", 0.05)
    with pytest.raises(RuntimeError, match="a worker of s0 does not answer"):
        await replica.check_health()


async def test_a_long_queue_is_healthy_while_answers_come_and_not_when_they_stop(replica: SliceReplica) -> None:
    tasks = [asyncio.create_task(replica.ask(number)) for number in range(2)]
    await asked(replica, 4)
    replica._asked_at = dict.fromkeys(replica._asked_at, time.monotonic() - 60)
    replica._answered_at = time.monotonic()
    await replica.check_health()
    replica._answered_at = time.monotonic() - 30
    with pytest.raises(RuntimeError, match="no request has been answered for 10 s"):
        await replica.check_health()
    for number in range(2):
        answer(replica, number, {"answer": 0}, {"answer": 0})
    await asyncio.gather(*tasks)


def http(method: str, body: bytes = b"") -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": method, "headers": [], "path": "/", "query_string": b""}, receive)


async def test_get_says_who_answers(replica: SliceReplica) -> None:
    response = await replica(http("GET"))
    assert json.loads(response.body)["hosts"] == [
        {"slice": "s0", "worker_id": rank, "ip": f"127.0.0.{rank + 2}"} for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("answers", "status", "body"),
    [
        ({"answer": {"x": 1}}, 200, {"x": 1}),
        ({"error": "ValueError: rows", "client": True}, 400, {"error": "ValueError: rows"}),
        ({"error": "RuntimeError: no", "client": False}, 500, {"error": "RuntimeError: no"}),
        (ConnectionError("gone"), 503, {"error": "a host of s0 is lost (ConnectionError)"}),
    ],
)
async def test_post_asks_the_model(replica: SliceReplica, answers: Any, status: int, body: Any) -> None:
    task = asyncio.create_task(replica(http("POST", b'{"numbers": [1]}')))
    await asked(replica, 2)
    answer(replica, 0, answers, answers)
    response = await task
    assert (response.status_code, json.loads(response.body)) == (status, body)


@pytest.mark.parametrize(("method", "body", "status"), [("POST", b"{", 400), ("PUT", b"{}", 405)])
async def test_what_is_no_question_reaches_no_host(
    replica: SliceReplica, method: str, body: bytes, status: int
) -> None:
    assert (await replica(http(method, body))).status_code == status
    assert replica.order == []  # type: ignore[attr-defined]


def test_a_model_on_a_host_answers_and_tells_its_errors_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_current", None)
    model = ModelOnHost()
    model.start(settings(init_kwargs={"offset": 5}), CurrentHost(0, 1, "s0", 0, 1, 0, "127.0.0.2"), None)
    assert place.current_host().name == "s0 worker 0"
    assert model.ask({"numbers": [1, 2]}) == {"answer": {"sum": 8}}
    assert model.ask({"wrong": 1}) == {"error": "KeyError: 'numbers'", "client": True}
    assert model.ask("raise") == {"error": "RuntimeError: no", "client": False}
