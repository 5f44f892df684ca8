"""What runs on the Ray cluster, with real Ray, JAX and orbax: two slices of two hosts that this machine plays.

The driver runs as it does for an operator, as a Ray job with the work in its environment. Most of a
job's time is processes that start one after the other, so jobs of one slice are submitted together.
What happens when hosts die is in ``test_runtime_losses.py``.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from raytpu_ops.ray.states import JobStatus, JobSubmission
from raytpu_ops.tpu.errors import FailureClass
from raytpu_ops.tpu.work import CommandWork, FunctionWork, TrainWork
from tests.integration.runtime_fixtures import BOTH, LIMIT_S, ONE, Cluster, Ended, Trained
from tests.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _whole(cluster: Cluster) -> None:
    cluster.standing.whole()


@pytest.fixture(autouse=True)
def _free(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """A test leaves no chip held, but for jobs that another test looks at."""
    yield
    if not {"together", "trainings"} & set(request.fixturenames):
        cluster.nothing_is_held()


def assert_every_line_once(ended: Ended, ranks: range) -> None:
    assert ended.count(r"\bline \d{4} of \d") == {
        **{f"line {number:04d} of {rank}": 1 for rank in ranks for number in range(500)},
        **{f"line {number:04d} of {rank}": 2 for rank in ranks for number in range(0, 500, 100)},
    }
    assert ended.count(r"error line \d{4} of \d") == {
        f"error line {number:04d} of {rank}": 1 for rank in ranks for number in range(0, 500, 100)
    }
    assert ended.count(r"last words of \d") == {f"last words of {rank}": 1 for rank in ranks}
    assert "raytpu-end-of-log" not in "\n".join(ended.log)


def test_training_runs_on_every_host_of_both_slices(trained: Trained) -> None:
    ended, result = trained.ended, trained.ended.result
    workers = result["workers"]
    assert [worker["rank"] for worker in workers] == [0, 1, 2, 3]
    assert len(result["slices"]) == 2
    places = {(worker["slice"], worker["worker_id"]) for worker in workers}
    assert places == {(name, worker_id) for name in result["slices"] for worker_id in (0, 1)}
    for worker in workers:
        assert worker["megascale"] == {
            "MEGASCALE_COORDINATOR_ADDRESS": workers[0]["ip"],
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_PORT": "8081",
            "MEGASCALE_SLICE_ID": str(result["slices"].index(worker["slice"])),
        }
        assert (worker["process_index"], worker["process_count"], worker["devices"]) == (worker["rank"], 4, 4)
    assert result["step"] == 8
    assert [entry["step"] for entry in result["history"]] == list(range(1, 9))
    assert result["metrics"]["loss"] < result["history"][0]["loss"]
    assert result["checkpoint"] == f"{trained.storage}/digits/checkpoints/8"
    assert Path(result["checkpoint"]).is_dir()
    assert ended.count(r"epoch \d: loss") == {f"epoch {epoch}: loss": 4 for epoch in range(1, 9)}
    assert ended.events[0].data["workers"] == workers


def test_a_run_that_must_not_resume_begins_from_the_start(trained: Trained) -> None:
    assert trained.before == ["99"]
    assert trained.ended.result["resumed_from_step"] is None
    assert trained.steps() == ["7", "8"]


def test_a_function_runs_on_every_host_and_every_line_arrives_once(cluster: Cluster) -> None:
    work = FunctionWork.of(
        spec=BOTH, function="cases:look_around", args=["it's $HOME; rm -rf"], env={"GREETING": "it's; rm -rf"}
    )
    ended = cluster.run(work)
    hosts = ended.result["hosts"]
    values = [host["value"] for host in hosts]
    assert [(host["slice"], host["worker_id"]) for host in hosts] == [
        (name, worker_id) for name in ended.result["slices"] for worker_id in (0, 1)
    ]
    assert [value["name"] for value in values] == [f"{host['slice']} worker {host['worker_id']}" for host in hosts]
    assert [value["slice_index"] for value in values] == [0, 0, 1, 1]
    assert [value["megascale"]["MEGASCALE_SLICE_ID"] for value in values] == ["0", "0", "1", "1"]
    assert {value["megascale"]["MEGASCALE_COORDINATOR_ADDRESS"] for value in values} == {hosts[0]["ip"]}
    assert [value["ranks"] for value in values] == [[0, 1, 2, 3]] * 4
    assert {(value["argument"], value["greeting"]) for value in values} == {("it's $HOME; rm -rf", "it's; rm -rf")}
    assert_every_line_once(ended, range(4))


# --- jobs of one slice, two of them at a time


@pytest.fixture(scope="module")
def together(cluster: Cluster) -> dict[str, str]:
    works = {
        "echo": CommandWork.of(spec=ONE, argv=["echo", "one; two", "$HOME"]),
        "exit 3": CommandWork.of(spec=ONE, argv=["sh", "-c", "echo to the log; exit 3"]),
        "raise": FunctionWork.of(spec=ONE, function="cases:raise_on_one", args=[1]),
        "exit": FunctionWork.of(spec=ONE, function="cases:exit_on_one", args=[1]),
        "nowhere": FunctionWork.of(spec=ONE, function="nowhere:at_all"),
    }
    return {name: cluster.submit(work) for name, work in works.items()}


def test_a_command_runs_without_a_shell(cluster: Cluster, together: dict[str, str]) -> None:
    ended = cluster.end_of(together["echo"])
    assert [host["exit_code"] for host in ended.result["hosts"]] == [0, 0]
    assert ended.count(r"one; two \$HOME") == {"one; two $HOME": 2}


def test_a_command_that_fails_is_named_with_its_exit_code(cluster: Cluster, together: dict[str, str]) -> None:
    failure = cluster.end_of(together["exit 3"]).failure
    assert failure.failure_class is FailureClass.USER_CODE_FAILED
    assert "sh exited with 3" in failure.message


def test_a_function_that_raises_ends_the_others_and_shows_its_traceback(
    cluster: Cluster, together: dict[str, str]
) -> None:
    """The other sleeps for longer than anybody here waits."""
    ended = cluster.end_of(together["raise"])
    assert ended.failure.failure_class is FailureClass.USER_CODE_FAILED
    assert re.search(r"raised on \S+ worker 1.*: LookupError: nothing to be found", ended.failure.message)
    assert any("in raise_on_one" in line for line in ended.log)


def test_a_process_that_exits_by_itself_is_no_preemption(cluster: Cluster, together: dict[str, str]) -> None:
    failure = cluster.end_of(together["exit"]).failure
    assert failure.failure_class is FailureClass.USER_CODE_FAILED
    assert re.search(r"died on \S+ worker 1, while every host lives on", failure.message)


def test_user_code_that_is_not_there_is_named(cluster: Cluster, together: dict[str, str]) -> None:
    """Everything else that can be wrong with its name is in the unit tests of ``targets.py``."""
    failure = cluster.end_of(together["nowhere"]).failure
    assert failure.failure_class is FailureClass.USER_CODE_FAILED
    assert "there is no module 'nowhere' on the host" in failure.message


@pytest.fixture(scope="module")
def trainings(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    storage = str(tmp_path_factory.mktemp("storage"))
    works = {
        "raises": TrainWork.of(
            spec=ONE, train_loop="cases:lines_then_raise", config={"raises": 1}, storage=storage, run_name="raises"
        ),
        "plain": TrainWork.of(spec=ONE, train_loop="cases:plain_loop", storage=storage, run_name="plain"),
    }
    return {name: cluster.submit(work) for name, work in works.items()}


def test_a_loop_that_raises_loses_no_line(cluster: Cluster, trainings: dict[str, str]) -> None:
    ended = cluster.end_of(trainings["raises"])
    assert ended.failure.failure_class is FailureClass.USER_CODE_FAILED
    assert re.search(r"raised on \S+ worker \d: ArithmeticError: a bug in the loop", ended.failure.message)
    assert any("in lines_then_raise" in line for line in ended.log)
    assert_every_line_once(ended, range(2))


def test_a_plain_loop_is_welcome_too(cluster: Cluster, trainings: dict[str, str]) -> None:
    result = cluster.end_of(trainings["plain"]).result
    assert result["returned"] == {"devices": 2}
    assert (result["metrics"], result["checkpoint"], result["step"]) == ({}, None, None)
    assert [worker["megascale"] for worker in result["workers"]] == [{}, {}]


# --- who holds what


@pytest.fixture
def blocker(cluster: Cluster) -> Iterator[str]:
    """Somebody else's job that holds worker 1 of one slice and leaves worker 0 free."""
    slice_name = cluster.standing.whole_slices()[0]
    hold = (
        "import ray, time; ray.init(); "
        "group = ray.util.placement_group([{'TPU': 4}], name='somebody', bundle_label_selector="
        f"[{{'ray.io/tpu-slice-name': '{slice_name}', 'ray.io/tpu-worker-id': '1'}}]); "
        "ray.get(group.ready()); print('holding', flush=True); time.sleep(600)"
    )
    name = f"blocker-{uuid.uuid4().hex}"
    with cluster.client() as ray:
        ray.submit_job(JobSubmission(name, f'python -c "{hold}"'))
        eventually(lambda: "holding" in ray.job_logs(name), "the blocker holds its host", limit_s=LIMIT_S)
        yield f"{slice_name} worker 1"
        ray.stop_until_terminal(name, datetime.now(UTC) + timedelta(seconds=60))


def test_a_busy_host_is_named_at_the_deadline(cluster: Cluster, tmp_path: Path, blocker: str) -> None:
    """A slice whose head is free while another host is busy never becomes ready, for a function nor in training."""
    waiting = [
        cluster.submit(FunctionWork.of(spec=BOTH, function="cases:wait", start_timeout_s=10)),
        cluster.submit(
            TrainWork.of(
                spec=BOTH, train_loop="cases:plain_loop", storage=str(tmp_path), run_name="late", start_timeout_s=20
            )
        ),
    ]
    for name in waiting:
        failure = cluster.end_of(name).failure
        assert failure.failure_class is FailureClass.DEADLINE_EXCEEDED
        assert f"{blocker} (" in failure.message
        assert "is busy: 4 chips by placement group somebody of job blocker-" in failure.message
    with cluster.client() as ray:
        eventually(lambda: len(ray.holders()) == 1, "only the blocker holds chips", limit_s=60)


def test_a_job_that_is_stopped_gives_its_slice_back(cluster: Cluster) -> None:
    def stop(name: str) -> None:
        with cluster.client() as ray:
            ray.stop_until_terminal(name, datetime.now(UTC) + timedelta(seconds=120))

    ended = cluster.run_until(FunctionWork.of(spec=ONE, function="cases:wait"), '"started"', stop)
    assert ended.status is JobStatus.STOPPED
    cluster.nothing_is_held()
