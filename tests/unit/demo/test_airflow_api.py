"""The API client against a server on loopback that answers as Airflow does, and worse."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from raytpu_ops.demo import airflow_api
from raytpu_ops.demo.airflow_api import AirflowApi
from raytpu_ops.tpu.errors import DeadlineExceeded, Misconfigured, RemoteUnavailable

Answer = tuple[int, Any]


class Server(ThreadingHTTPServer):
    """Answers from ``script``, which maps (method, path) to an answer or to a function of the query."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: dict[tuple[str, str], Answer | Callable[[dict[str, str]], Answer]] = {}
        self.seen: list[tuple[str, str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def answer(self) -> None:
        parts = urlsplit(self.path)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        path = parts.path.removeprefix("/api/v2")
        self.server.seen.append((self.command, path, body))
        found = self.server.script.get((self.command, path), (404, {"detail": "nothing here"}))
        code, value = found({k: v[0] for k, v in parse_qs(parts.query).items()}) if callable(found) else found
        if path == "/auth/token":
            code, value = 201, {"access_token": "t0ken"}
        elif self.headers.get("Authorization") != "Bearer t0ken" and path != "/monitor/health":
            code, value = 401, {"detail": "who are you?"}
        text = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PATCH = answer

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(airflow_api, "_PAUSES_S", (0.0,) * 3)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def api(server: Server) -> Iterator[AirflowApi]:
    api = AirflowApi(server.url, "admin", "s3cret")
    yield api
    api.close()


RUN = "/dags/d/dagRuns/r"


def test_names_are_escaped_in_paths(server: Server, api: AirflowApi):
    server.script["GET", "/dags/d/dagRuns/a%2Bb%3A1%2Fx"] = (200, {"state": "running"})
    assert api.run("d", "a+b:1/x")["state"] == "running"
    assert unquote("a%2Bb%3A1%2Fx") == "a+b:1/x"


def test_every_page_is_read(server: Server, api: AirflowApi):
    def page(query: dict[str, str]) -> Answer:
        start, size = int(query["offset"]), int(query["limit"])
        tasks = [{"task_id": f"t{n}"} for n in range(250)][start : start + size]
        return 200, {"task_instances": tasks, "total_entries": 250}

    server.script["GET", f"{RUN}/taskInstances"] = page
    assert [task["task_id"] for task in api.tasks("d", "r")] == [f"t{n}" for n in range(250)]


def test_a_log_is_read_to_its_end_over_continuation_tokens(server: Server, api: AirflowApi):
    def page(query: dict[str, str]) -> Answer:
        start = int(query.get("token", 0))
        lines = [{"event": f"line {n}"} for n in range(25)][start : start + 10]
        return 200, {"content": lines, "continuation_token": str(start + 10) if start < 20 else None}

    server.script["GET", f"{RUN}/taskInstances/t/logs/1"] = page
    assert api.log("d", "r", "t", 1) == [f"line {n}" for n in range(25)]


def test_a_log_that_still_grows_is_read_as_far_as_it_goes(server: Server, api: AirflowApi):
    def page(query: dict[str, str]) -> Answer:
        return 200, {"content": [] if "token" in query else ["a line"], "continuation_token": "more"}

    server.script["GET", f"{RUN}/taskInstances/t/logs/1"] = page
    assert api.log("d", "r", "t", 1) == ["a line"]


def test_tracebacks_are_in_the_last_lines(server: Server, api: AirflowApi):
    frame = {"filename": "x.py", "lineno": 3, "name": "f"}
    error = {"exc_type": "ValueError", "exc_value": "no", "frames": [frame]}
    server.script["GET", f"{RUN}/taskInstances/t"] = (200, {"state": "failed", "try_number": 2})
    content = [{"event": "before"}, {"event": "Task failed", "error_detail": [error]}]
    server.script["GET", f"{RUN}/taskInstances/t/logs/2"] = (200, {"content": content})
    assert api.last_log("d", "r", "t") == ["before", "Task failed", "  x.py:3 in f", "ValueError: no"]
    assert api.last_log("d", "r", "t", lines=1) == ["ValueError: no"]


def test_no_log_before_the_first_try(server: Server, api: AirflowApi):
    server.script["GET", f"{RUN}/taskInstances/t"] = (200, {"state": None, "try_number": 0})
    assert api.last_log("d", "r", "t") == []


def test_an_xcom_that_is_not_there_is_none_and_a_false_one_is_not(server: Server, api: AirflowApi):
    assert api.xcom("d", "r", "t") is None
    server.script["GET", f"{RUN}/taskInstances/t/xcomEntries/return_value"] = (200, {"value": 0})
    assert api.xcom("d", "r", "t") == 0


LOCKED: Answer = (500, {"detail": "database is locked"})


@pytest.mark.parametrize("method", ["GET", "PATCH"])
def test_what_is_the_same_when_done_twice_is_tried_again(server: Server, api: AirflowApi, method: str):
    answers = iter([LOCKED, (503, {}), (200, {"state": "running"})])
    server.script[method, RUN] = lambda query: next(answers)
    if method == "GET":
        assert api.run("d", "r")["state"] == "running"
    else:
        api.mark_run("d", "r", "failed")
    assert [asked for asked, _, _ in server.seen].count(method) == 3


def test_a_clear_is_not(server: Server, api: AirflowApi):
    server.script["POST", "/dags/d/clearTaskInstances"] = LOCKED
    with pytest.raises(RemoteUnavailable, match="500 to POST .*database is locked"):
        api.clear("d", "r", ["t"])
    assert [path for _, path, _ in server.seen].count("/dags/d/clearTaskInstances") == 1


@pytest.mark.parametrize("came_through", [False, True])
def test_a_run_is_started_once_whatever_becomes_of_an_answer(server: Server, api: AirflowApi, came_through: bool):
    then: Answer = (409, {"detail": "exists"}) if came_through else (200, {})
    answers = iter([LOCKED, (503, {}), then])
    server.script["POST", "/dags/d/dagRuns"] = lambda query: next(answers)
    run_id = api.trigger("d")
    asked = [body["dag_run_id"] for _, path, body in server.seen if path == "/dags/d/dagRuns"]
    assert asked == [run_id] * 3


def test_a_run_that_is_there_already_is_an_error(server: Server, api: AirflowApi):
    server.script["POST", "/dags/d/dagRuns"] = (409, {"detail": "r exists"})
    with pytest.raises(Misconfigured, match="409 to POST .*r exists"):
        api.trigger("d", run_id="r")


def test_a_refusal_says_what_was_asked(server: Server, api: AirflowApi):
    server.script["POST", "/dags/d/dagRuns"] = (422, {"detail": "epochs must be at least 1"})
    with pytest.raises(Misconfigured, match="422 to POST .*/dags/d/dagRuns: .*epochs must be at least 1"):
        api.trigger("d", {"epochs": 0})


def test_nobody_there_is_named_without_the_password():
    api = AirflowApi("http://127.0.0.1:1", "admin", "s3cret")
    assert api.health() == {}
    with pytest.raises(RemoteUnavailable, match="http://127.0.0.1:1 does not answer") as caught:
        api.run("d", "r")
    assert "s3cret" not in str(caught.value) + repr(api)
    api.close()


def test_health_needs_no_login(server: Server, api: AirflowApi):
    server.script["GET", "/monitor/health"] = (200, {"scheduler": {"status": "healthy"}})
    assert api.health()["scheduler"]["status"] == "healthy"
    assert [path for _, path, _ in server.seen] == ["/monitor/health"]


def test_a_wait_that_is_over_says_where_every_task_stands(server: Server, api: AirflowApi):
    server.script["GET", RUN] = (200, {"state": "running"})
    tasks = [{"task_id": "train", "state": "deferred"}]
    server.script["GET", f"{RUN}/taskInstances"] = (200, {"task_instances": tasks, "total_entries": 1})
    with pytest.raises(
        DeadlineExceeded, match="run r of d is running after 0 s, not failed or success: train deferred"
    ):
        api.wait_run("d", "r", deadline_s=0)


def test_a_dag_file_that_cannot_be_read_is_told_at_once(server: Server, api: AirflowApi):
    error = {"filename": "x.py", "stack_trace": "SyntaxError: invalid syntax"}
    server.script["GET", "/importErrors"] = (200, {"import_errors": [error], "total_entries": 1})
    with pytest.raises(Misconfigured, match=r"(?s)DAG d is not there.*x\.py.*SyntaxError"):
        api.wait_for_dag("d", deadline_s=600)
