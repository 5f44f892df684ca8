"""A real Airflow: its parts come up, are watched, die and come back; its API client sees all of it."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import psutil
import pytest

from raytpu_ops.demo import airflow
from raytpu_ops.demo.airflow import COMPONENTS, AirflowInstance
from raytpu_ops.demo.processes import with_children
from raytpu_ops.tpu.errors import DeadlineExceeded, Misconfigured

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(300)]

DAG = "instance_probe"
T = TypeVar("T")


def of_each(processes: list[psutil.Process], look: Callable[[psutil.Process], T]) -> list[T]:
    """What ``look`` finds at those that run: Airflow's workers end, and are zombies until their parent asks."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(look(process))
    return found


@pytest.fixture(scope="module")
def run(airflow_instance: AirflowInstance, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A run whose second task is deferred until the file is made."""
    path = tmp_path_factory.mktemp("probe") / "here"
    api = airflow_instance.api
    api.wait_for_dag(DAG)
    api.unpause(DAG)
    # A person's run id may hold anything that Airflow allows.
    run_id = api.trigger(DAG, {"lines": 2000, "path": str(path)}, run_id=f"a+b:c~{uuid4()}")
    yield run_id, path
    api.mark_run(DAG, run_id, "failed")


def test_every_component_is_a_process_of_its_own(airflow_instance: AirflowInstance):
    assert sorted(airflow_instance.pids) == sorted(COMPONENTS)
    assert {psutil.Process(pid).ppid() for pid in airflow_instance.pids.values()} == {psutil.Process().pid}


def test_every_process_below_it_carries_the_mark(airflow_instance: AirflowInstance):
    family = with_children(psutil.Process(pid) for pid in airflow_instance.pids.values())
    marks = of_each(family, lambda process: process.environ().get(airflow.MARK))
    assert set(marks) == {airflow_instance.mark}


def test_it_listens_on_loopback_alone(airflow_instance: AirflowInstance):
    connections = of_each(airflow_instance.processes(), lambda process: process.net_connections(kind="inet"))
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for connection in itertools.chain(*connections)
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", airflow_instance.port)}


def test_no_secret_is_in_an_environment_or_a_command_line(airflow_instance: AirflowInstance):
    shown = of_each(airflow_instance.processes(), lambda process: [*process.environ().values(), *process.cmdline()])
    assert shown
    assert not [text for text in itertools.chain(*shown) if airflow_instance.password in text]


def test_log_of_a_try_is_complete_and_in_order(airflow_instance: AirflowInstance, run: tuple[str, Path]):
    run_id, _ = run
    airflow_instance.api.wait_task(DAG, run_id, "talk", deadline_s=120, states={"success"})
    events = airflow_instance.api.log_events(DAG, run_id, "talk", 1)
    printed = [event["event"] for event in events if event.get("logger") == "task.stdout"]
    assert printed == [f"line {number}" for number in range(2000)]


def test_xcom_comes_back_as_it_was_pushed(airflow_instance: AirflowInstance, run: tuple[str, Path]):
    run_id, _ = run
    airflow_instance.api.wait_task(DAG, run_id, "talk", deadline_s=120, states={"success"})
    assert airflow_instance.api.xcom(DAG, run_id, "talk") == {"lines": 2000, "text": "grüße/+:%"}
    assert airflow_instance.api.xcom(DAG, run_id, "talk", "no such key") is None


def test_a_triggerer_that_is_killed_comes_back_and_goes_on(airflow_instance: AirflowInstance, run: tuple[str, Path]):
    run_id, path = run
    api = airflow_instance.api
    api.wait_task(DAG, run_id, "wait", deadline_s=60, states={"deferred"})
    before = airflow_instance.pids["triggerer"]
    airflow_instance.kill_component("triggerer")
    assert not psutil.pid_exists(before)
    assert "triggerer" not in airflow_instance.pids
    airflow_instance.start_component("triggerer")
    path.touch()
    # The dead one's triggers are taken over once its heartbeat is overdue.
    api.wait_task(DAG, run_id, "wait", deadline_s=120, states={"success"})
    assert api.xcom(DAG, run_id, "wait") == f"found {path}"


def test_clear_and_fail_and_clear_again(airflow_instance: AirflowInstance, run: tuple[str, Path]):
    run_id, path = run
    api = airflow_instance.api
    path.touch()
    failed = api.wait_task(DAG, run_id, "fail_unless_there", deadline_s=180, states={"failed"})
    assert failed["try_number"] == 1
    assert api.wait_run(DAG, run_id, deadline_s=60)["state"] == "failed"
    assert any("is not there" in line for line in api.last_log(DAG, run_id, "fail_unless_there"))
    path.with_name("here2").touch()
    assert api.clear(DAG, run_id, ["fail_unless_there"]) == ["fail_unless_there"]
    assert api.wait_run(DAG, run_id, deadline_s=60, states={"success"})
    assert api.task(DAG, run_id, "fail_unless_there")["try_number"] == 2
    api.mark_task(DAG, run_id, "talk", "failed")
    assert api.task(DAG, run_id, "talk")["state"] == "failed"


def test_a_dag_that_does_not_exist_is_named(airflow_instance: AirflowInstance):
    with pytest.raises((DeadlineExceeded, Misconfigured), match="no_such_dag"):
        airflow_instance.api.wait_for_dag("no_such_dag", deadline_s=1)


def test_a_component_that_ends_fails_the_start_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(airflow, "COMPONENTS", COMPONENTS[:1])  # the others would start and end with it
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        instance = AirflowInstance(tmp_path / "home", tmp_path, port=taken.getsockname()[1])
        with pytest.raises(Misconfigured, match=r"(?s)api-server in .* ended with .*address already in use"):
            instance.start()
    assert instance.pids == {}
    assert instance.processes() == []
