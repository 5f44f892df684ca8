"""What colour a real Airflow gives a run around a lease, whoever failed; the slices are played, so this is quick."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raytpu_ops.demo.airflow import AirflowInstance

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(900)]

LIMIT_S = 300.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the played leases lie."""
    yield tmp_path
    (tmp_path / "gate").touch()


def start(airflow: AirflowInstance, dag_id: str, folder: Path, **params: object) -> str:
    airflow.api.wait_for_dag(dag_id)
    airflow.api.unpause(dag_id)
    return airflow.api.trigger(dag_id, {"folder": str(folder), **params})


def states(airflow: AirflowInstance, dag_id: str, run_id: str) -> dict[str, str]:
    return {task["task_id"]: task["state"] for task in airflow.api.tasks(dag_id, run_id)}


def end(airflow: AirflowInstance, dag_id: str, run_id: str) -> tuple[str, dict[str, str]]:
    """The run's state and its tasks' states, once it is over."""
    state = airflow.api.wait_run(dag_id, run_id, deadline_s=LIMIT_S)["state"]
    return state, states(airflow, dag_id, run_id)


def leases(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.lease")]


@pytest.fixture(scope="module", autouse=True)
def beyond_its_timeout(
    airflow_instance: AirflowInstance, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str]]:
    """A run that goes on until its ``dagrun_timeout``: begun before all others, because that is a minute away."""
    folder = tmp_path_factory.mktemp("timeout")
    yield folder, start(airflow_instance, "outcome_timeout", folder, wait="first")
    (folder / "gate").touch()


def test_what_ends_without_a_hand(airflow_instance: AirflowInstance, tmp_path: Path) -> None:
    """One run each, side by side: good, the work fails, the release fails, the setup fails,
    the setup is killed when it has made everything, a branch skips the rest."""
    dag = "outcome"
    cases: dict[str, dict[str, object]] = {
        "good": {},
        "work": {"fail": "second"},
        "release": {"refuse": "release"},
        "setup": {"refuse": "provision"},
        "killed": {"refuse": "half way"},
        "branch": {"skip": True},
    }
    folders = {name: tmp_path / name for name in cases}
    for made in folders.values():
        made.mkdir()
    runs = {name: start(airflow_instance, dag, folders[name], **params) for name, params in cases.items()}

    ends = {name: end(airflow_instance, dag, run) for name, run in runs.items()}

    assert {name: state for name, (state, _) in ends.items()} == {
        "good": "success",
        "work": "failed",
        "release": "failed",
        "setup": "failed",
        "killed": "failed",
        "branch": "success",
    }
    assert {name: tasks["released"] for name, (_, tasks) in ends.items()} == {
        "good": "success",
        "work": "failed",
        "release": "failed",
        "setup": "failed",
        "killed": "failed",
        "branch": "success",
    }
    assert ends["branch"][1]["third"] == "skipped"
    assert [ends[name][1]["provision"] for name in ("setup", "killed")] == ["failed", "failed"]
    assert {name: len(leases(made)) for name, made in folders.items() if leases(made)} == {"release": 1}


@pytest.mark.parametrize(
    ("task_id", "params"),
    [("labelled", {"refuse": "labelled"}), ("first", {"wait": "first"})],
    ids=["in labelled", "in the body"],
)
def test_a_run_that_is_marked_failed_is_red_and_released(
    airflow_instance: AirflowInstance, folder: Path, task_id: str, params: dict[str, str]
) -> None:
    """Airflow keeps the run going for its teardown, and calls it green when only skipped leaves are left."""
    dag, api = "outcome", airflow_instance.api
    run = start(airflow_instance, dag, folder, **params)
    api.wait_task(dag, run, task_id, deadline_s=LIMIT_S, states=["running"])

    api.mark_run(dag, run, "failed")
    state, tasks = end(airflow_instance, dag, run)

    assert tasks["third"] == "skipped"
    assert (tasks[task_id], tasks["release"], tasks["released"]) == ("failed", "success", "failed")
    assert state == "failed"
    assert leases(folder) == []


def test_mapped_tasks_are_over_before_the_release_begins(airflow_instance: AirflowInstance, folder: Path) -> None:
    dag, api = "outcome_mapped", airflow_instance.api
    run = start(airflow_instance, dag, folder, wait="second")
    api.wait_task(dag, run, "each", map_index=0, deadline_s=LIMIT_S, states=["success"])
    api.wait_task(dag, run, "each", map_index=1, deadline_s=LIMIT_S, states=["running"])

    assert api.task(dag, run, "release")["state"] is None
    assert len(leases(folder)) == 1

    (folder / "gate").touch()
    assert end(airflow_instance, dag, run)[0] == "success"
    assert leases(folder) == []


def reap(airflow: AirflowInstance, folder: Path) -> dict[str, list[str]]:
    """What a run of the reaper released, kept and left."""
    run = start(airflow, "outcome_reap", folder)
    assert airflow.api.wait_run("outcome_reap", run, deadline_s=LIMIT_S)["state"] == "success"
    done: dict[str, list[str]] = airflow.api.xcom("outcome_reap", run, "reap")
    return done


def test_the_reaper_takes_what_a_run_beyond_its_timeout_left_and_keeps_what_is_in_use(
    airflow_instance: AirflowInstance, beyond_its_timeout: tuple[Path, str]
) -> None:
    """``dagrun_timeout`` skips the teardown too."""
    api = airflow_instance.api
    folder, run = beyond_its_timeout
    state, tasks = end(airflow_instance, "outcome_timeout", run)
    assert state == "failed"
    assert tasks["release"] == tasks["released"] == "skipped"
    left = leases(folder)
    goes_on = start(airflow_instance, "outcome", folder, wait="first")
    api.wait_task("outcome", goes_on, "first", deadline_s=LIMIT_S, states=["running"])

    done = reap(airflow_instance, folder)

    assert [line.partition(" ")[0] + ".lease" for line in done["released"]] == left
    assert len(done["kept"]) == len(leases(folder)) == 1
    assert "its run goes on" in done["kept"][0]

    (folder / "gate").touch()
    assert end(airflow_instance, "outcome", goes_on)[0] == "success"
    assert leases(folder) == []
