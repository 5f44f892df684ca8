"""What the demo and the tests ask of Airflow's REST API (v2), synchronously, on loopback.

Not a client for a deployment: one user, one page size. Tried again is what is the same when it is done twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import uuid4

from raytpu_ops.tpu.errors import DeadlineExceeded, Misconfigured, RemoteUnavailable

if TYPE_CHECKING:
    import httpx

#: States that a task instance does not leave by itself.
FINAL_TASK_STATES = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
FINAL_RUN_STATES = frozenset({"success", "failed"})
_PAGE = 100
#: Seconds before each further try of a request that is the same when it is done twice: a busy machine fails one, or
#: SQLite, which does not let everybody wait who wants to write after somebody else.
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)


class AirflowApi:
    """A synchronous client.

    :param url: base URL of the API server.
    :param username: user of the SimpleAuthManager.
    :param password: that user's password.
    :param timeout_s: seconds for one request.
    """

    def __init__(self, url: str, username: str, password: str, *, timeout_s: float = 60) -> None:
        self._url = url
        self._login = {"username": username, "password": password}
        self._timeout_s = timeout_s
        self._client: httpx.Client | None = None
        self._authorised = False
        self._warm = False

    def __repr__(self) -> str:
        return f"AirflowApi({self._url!r})"

    def close(self) -> None:
        """Close the connections; the next request opens them again."""
        if self._client is not None:
            self._client.close()
        self._client = None
        self._authorised = False
        self._warm = False

    # -- the instance

    def health(self) -> dict[str, Any]:
        """The answer of ``/api/v2/monitor/health``; empty while the API server does not answer."""
        import httpx

        try:
            answer = self._http().get("/api/v2/monitor/health", timeout=5)
        except httpx.TransportError:
            return {}
        return dict(answer.json()) if answer.is_success else {}

    def warm_up(self) -> None:
        """Have the API server build, once, what it builds at the first request of a task."""
        if self._warm:
            return
        _refuse_errors(self._try("GET", "/execution/health", None, None))
        self._warm = True

    def import_errors(self) -> dict[str, str]:
        """DAG file to its traceback, for each file that could not be read."""
        return {e["filename"]: e["stack_trace"] for e in self._pages("/importErrors", "import_errors")}

    # -- DAGs and runs

    def wait_for_dag(self, dag_id: str, *, deadline_s: float = 60) -> dict[str, Any]:
        """The DAG, as soon as the DAG processor has read it.

        :raises Misconfigured: a DAG file could not be read; its traceback is in the message.
        :raises DeadlineExceeded: there is no such DAG.
        """
        until = time.monotonic() + deadline_s
        while (dag := self._get_or_none(f"/dags/{_part(dag_id)}")) is None:
            if errors := self.import_errors():
                told = "\n".join(f"{name}:\n{trace}" for name, trace in errors.items())
                raise Misconfigured(f"DAG {dag_id} is not there and DAG files could not be read\n{told}")
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"DAG {dag_id} is not there after {deadline_s:.0f} s; is its file in the folder?"
                )
            time.sleep(0.25)
        return dag

    def unpause(self, dag_id: str) -> None:
        """Let the DAG's runs be scheduled."""
        self._json("PATCH", f"/dags/{_part(dag_id)}", {"is_paused": False})

    def trigger(
        self,
        dag_id: str,
        conf: dict[str, Any] | None = None,
        *,
        run_id: str | None = None,
        logical_date: str | None = None,
    ) -> str:
        """Start a run, once, whatever becomes of an answer; the run's id.

        :param conf: values of the DAG's params.
        :param run_id: the run's id; one is made up when there is none.
        :param logical_date: ISO 8601; runs without one have no ``ds``.
        """
        run_id = run_id or f"manual__{uuid4()}"
        body = {"conf": conf or {}, "dag_run_id": run_id, "logical_date": logical_date}
        path = f"/dags/{_part(dag_id)}/dagRuns"
        try:
            answer = self._send("POST", path, body)
            _refuse_errors(answer)
        except RemoteUnavailable:
            answer = self._send_again("POST", path, body)
            # The first one came through, without an answer.
            if answer.status_code != HTTPStatus.CONFLICT:
                _refuse_errors(answer)
        return run_id

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """The run as Airflow shows it; its ``state`` is the word that counts."""
        return self._json("GET", self._run_path(dag_id, run_id))

    def mark_run(self, dag_id: str, run_id: str, state: str) -> None:
        """Set the run to ``success`` or ``failed``, as a person does in the UI."""
        self._json("PATCH", self._run_path(dag_id, run_id), {"state": state})

    def wait_run(
        self, dag_id: str, run_id: str, *, deadline_s: float, states: Iterable[str] = FINAL_RUN_STATES
    ) -> dict[str, Any]:
        """Wait until the run is in one of ``states``; the run.

        :raises DeadlineExceeded: with the state of every task.
        """
        return self._wait(
            lambda: self.run(dag_id, run_id),
            frozenset(states),
            deadline_s,
            f"run {run_id} of {dag_id}",
            lambda: ", ".join(f"{t['task_id']} {t['state']}" for t in self.tasks(dag_id, run_id)),
        )

    # -- task instances

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """Every task instance of the run, mapped ones each."""
        return self._pages(f"{self._run_path(dag_id, run_id)}/taskInstances", "task_instances")

    def task(self, dag_id: str, run_id: str, task_id: str, *, map_index: int = -1) -> dict[str, Any]:
        """One task instance: ``state``, ``try_number``, ``pid``, ``trigger`` and the rest."""
        return self._json("GET", self._task_path(dag_id, run_id, task_id, map_index))

    def wait_task(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        *,
        deadline_s: float,
        states: Iterable[str] = FINAL_TASK_STATES,
        map_index: int = -1,
    ) -> dict[str, Any]:
        """Wait until the task instance is in one of ``states``; the task instance.

        :raises DeadlineExceeded: with the last lines of its log.
        """
        return self._wait(
            lambda: self.task(dag_id, run_id, task_id, map_index=map_index),
            frozenset(states),
            deadline_s,
            f"task {task_id} of run {run_id}",
            lambda: "\n".join(self.last_log(dag_id, run_id, task_id, map_index=map_index)),
        )

    def mark_task(self, dag_id: str, run_id: str, task_id: str, state: str, *, map_index: int = -1) -> None:
        """Set the task instance to ``success``, ``failed`` or ``skipped``, as a person does in the UI."""
        self._json("PATCH", self._task_path(dag_id, run_id, task_id, map_index), {"new_state": state})

    def clear(
        self,
        dag_id: str,
        run_id: str,
        task_ids: Sequence[str],
        *,
        downstream: bool = False,
        only_failed: bool = False,
    ) -> list[str]:
        """Clear tasks of a run, as a person does in the UI; the task ids that were cleared."""
        body = {
            "dag_run_id": run_id,
            "task_ids": list(task_ids),
            "include_downstream": downstream,
            "only_failed": only_failed,
            "dry_run": False,
        }
        answer = self._json("POST", f"/dags/{_part(dag_id)}/clearTaskInstances", body)
        return [task["task_id"] for task in answer["task_instances"]]

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", *, map_index: int = -1) -> Any:
        """The value of an XCom; None where there is none."""
        path = f"{self._run_path(dag_id, run_id)}/taskInstances/{_part(task_id)}/xcomEntries/{_part(key)}"
        entry = self._get_or_none(path, {"map_index": map_index, "deserialize": "true"})
        return None if entry is None else entry["value"]

    def log_events(
        self, dag_id: str, run_id: str, task_id: str, try_number: int, *, map_index: int = -1
    ) -> list[dict[str, Any]]:
        """A try's whole log as structured events (``event``, ``level``, ``logger``, …), in order."""
        path = f"{self._run_path(dag_id, run_id)}/taskInstances/{_part(task_id)}/logs/{try_number}"
        params: dict[str, Any] = {"map_index": map_index, "full_content": "true"}
        events: list[dict[str, Any]] = []
        while True:
            page = self._json("GET", path, params=params)
            content = [event if isinstance(event, dict) else {"event": event} for event in page["content"]]
            events += content
            token = page.get("continuation_token")
            # A running try always has a token; no more lines with one means that this is all so far.
            if not token or not content:
                return events
            params = {"map_index": map_index, "token": token}

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int, *, map_index: int = -1) -> list[str]:
        """A try's whole log, the messages alone, in order."""
        events = self.log_events(dag_id, run_id, task_id, try_number, map_index=map_index)
        return [str(event.get("event", "")) for event in events]

    def last_log(self, dag_id: str, run_id: str, task_id: str, *, lines: int = 40, map_index: int = -1) -> list[str]:
        """The last lines of the task's latest try, tracebacks included; empty where it never started."""
        tries = self.task(dag_id, run_id, task_id, map_index=map_index)["try_number"]
        if not tries:
            return []
        out: list[str] = []
        for event in self.log_events(dag_id, run_id, task_id, tries, map_index=map_index):
            out.append(str(event.get("event", "")))
            for error in event.get("error_detail") or ():
                out += [f"  {frame['filename']}:{frame['lineno']} in {frame['name']}" for frame in error["frames"]]
                out.append(f"{error['exc_type']}: {error['exc_value']}")
        return out[-lines:]

    # -- the wire

    def _run_path(self, dag_id: str, run_id: str) -> str:
        return f"/dags/{_part(dag_id)}/dagRuns/{_part(run_id)}"

    def _task_path(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> str:
        tail = "" if map_index < 0 else f"/{map_index}"
        return f"{self._run_path(dag_id, run_id)}/taskInstances/{_part(task_id)}{tail}"

    def _wait(
        self,
        look: Callable[[], dict[str, Any]],
        states: frozenset[str],
        deadline_s: float,
        what: str,
        explain: Callable[[], str],
    ) -> dict[str, Any]:
        until = time.monotonic() + deadline_s
        while (seen := look())["state"] not in states:
            if time.monotonic() > until:
                wanted = " or ".join(sorted(states))
                raise DeadlineExceeded(f"{what} is {seen['state']} after {deadline_s:.0f} s, not {wanted}: {explain()}")
            time.sleep(0.25)
        return seen

    def _http(self) -> httpx.Client:
        import httpx

        if self._client is None:
            self._client = httpx.Client(base_url=self._url, timeout=self._timeout_s, trust_env=False)
        return self._client

    def _send(self, method: str, path: str, body: Any = None, params: dict[str, Any] | None = None) -> httpx.Response:
        if not self._authorised:
            answer = self._try("POST", "/auth/token", self._login, None)
            _refuse_errors(answer)
            self._http().headers["Authorization"] = f"Bearer {answer.json()['access_token']}"
            self._authorised = True
        if method == "POST":
            return self._try(method, f"/api/v2{path}", body, params)
        return self._send_again(method, path, body, params)

    def _send_again(
        self, method: str, path: str, body: Any = None, params: dict[str, Any] | None = None
    ) -> httpx.Response:
        for pause_s in _PAUSES_S:
            try:
                answer = self._try(method, f"/api/v2{path}", body, params)
                if answer.status_code < 500:
                    return answer
            except RemoteUnavailable:
                pass  # the last one below says it
            time.sleep(pause_s)
        return self._try(method, f"/api/v2{path}", body, params)

    def _try(self, method: str, path: str, body: Any, params: dict[str, Any] | None) -> httpx.Response:
        import httpx

        try:
            return self._http().request(method, path, json=body, params=params)
        except httpx.TransportError as error:
            raise RemoteUnavailable(f"Airflow's API at {self._url} does not answer: {error!r}") from error

    def _json(self, method: str, path: str, body: Any = None, params: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = self._send(method, path, body, params)
        _refuse_errors(answer)
        return dict(answer.json())

    def _get_or_none(self, path: str, params: dict[str, Any] | None = None) -> dict[str, Any] | None:
        answer = self._send("GET", path, params=params)
        if answer.status_code == 404:
            return None
        _refuse_errors(answer)
        return dict(answer.json())

    def _pages(self, path: str, key: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        while True:
            page = self._json("GET", path, params={"limit": _PAGE, "offset": len(items)})
            items += page[key]
            if len(items) >= page["total_entries"] or not page[key]:
                return items


def _part(value: str) -> str:
    """One part of a path; run ids hold colons, plus signs and, if a person wants, slashes."""
    return quote(value, safe="")


def _refuse_errors(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    where = f"{answer.request.method} {answer.request.url.path}"
    kind = RemoteUnavailable if answer.status_code >= 500 else Misconfigured
    raise kind(f"Airflow answered {answer.status_code} to {where}: {answer.text[:500]}")
