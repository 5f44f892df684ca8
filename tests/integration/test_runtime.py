"""What runs on the Ray cluster, with real Ray, JAX and orbax: two slices of two hosts that this machine plays.

The driver runs as it does for an operator, as a Ray job with the work in its environment. Tests that
kill a host come last, each puts the slice back.
"""

from __future__ import annotations

import collections
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from raytpu_ops.ray.states import JobStatus, JobSubmission, ServeStatus
from raytpu_ops.tpu.errors import FailureClass
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.tpu.work import (
    CommandWork,
    FunctionWork,
    TrainWork,
)
from tests.integration.local_fixtures import leased, private_root
from tests.integration.runtime_jobs import LIMIT_S, PATHS, Cluster, Ended
from tests.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

BOTH = SliceSpec.of("v4", "2x2x2", num_slices=2)
ONE = SliceSpec.of("v4", "2x2x2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # A name that no other session uses: addresses follow from it.
    with private_root() as root, leased(root, f"runtime-{os.getpid()}", BOTH) as made:
        yield Cluster(made)


@pytest.fixture(autouse=True)
def _free(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.nothing_is_held()
    cluster.put_right()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


def digits(storage: Path, name: str, epochs: int, **more: Any) -> TrainWork:
    return TrainWork.of(
        spec=BOTH,
        train_loop="digits.train:loop",
        config={"epochs": epochs},
        storage=str(storage),
        run_name=name,
        **more,
    )


def lines_of(ended: Ended, pattern: str) -> collections.Counter[str]:
    return collections.Counter(match.group(0) for line in ended.log for match in re.finditer(pattern, line))


def assert_every_line_once(ended: Ended, ranks: range) -> None:
    assert lines_of(ended, r"\bline \d{4} of \d") == {
        **{f"line {number:04d} of {rank}": 1 for rank in ranks for number in range(500)},
        **{f"line {number:04d} of {rank}": 2 for rank in ranks for number in range(0, 500, 100)},
    }
    assert lines_of(ended, r"error line \d{4} of \d") == {
        f"error line {number:04d} of {rank}": 1 for rank in ranks for number in range(0, 500, 100)
    }
    assert lines_of(ended, r"last words of \d") == {f"last words of {rank}": 1 for rank in ranks}
    assert "raytpu-end-of-log" not in "\n".join(ended.log)


def test_training_runs_on_every_host_of_both_slices(cluster: Cluster, storage: Path) -> None:
    ended = cluster.run(digits(storage, "first", epochs=3))
    print(f"training over both slices: {ended.seconds:.1f} s")
    result = ended.result
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
    assert result["step"] == 3
    assert [entry["step"] for entry in result["history"]] == [1, 2, 3]
    assert result["metrics"]["loss"] < result["history"][0]["loss"]
    assert result["checkpoint"] == f"{storage}/first/checkpoints/3"
    assert Path(result["checkpoint"]).is_dir()
    assert result["resumed_from_step"] is None
    assert lines_of(ended, r"epoch \d: loss") == {f"epoch {epoch}: loss": 4 for epoch in (1, 2, 3)}
    assert ended.events[0].data["workers"] == workers


def test_a_retry_goes_on_from_the_last_whole_checkpoint(cluster: Cluster, storage: Path) -> None:
    """Also when the try before was killed in the middle of a save."""
    torn = storage / "first" / "checkpoints" / "4.orbax-checkpoint-tmp"
    (torn / "default.orbax-checkpoint-tmp").mkdir(parents=True)
    (torn / "default.orbax-checkpoint-tmp" / "_METADATA").write_text("half")
    result = cluster.run(digits(storage, "first", epochs=5)).result
    assert result["resumed_from_step"] == 3
    assert [entry["step"] for entry in result["history"]] == [4, 5]
    assert sorted(path.name for path in (storage / "first" / "checkpoints").iterdir()) == ["4", "5"]


def test_a_run_that_must_not_resume_begins_from_the_start(cluster: Cluster, storage: Path) -> None:
    result = cluster.run(digits(storage, "first", epochs=1, resume=False)).result
    assert result["resumed_from_step"] is None
    assert [path.name for path in (storage / "first" / "checkpoints").iterdir()] == ["1"]


def test_a_function_runs_on_every_host_and_every_line_arrives_once(cluster: Cluster) -> None:
    work = FunctionWork.of(
        spec=BOTH, function="cases:look_around", args=["it's $HOME; rm -rf"], env={"GREETING": "it's; rm -rf"}
    )
    ended = cluster.run(work)
    print(f"a function over both slices: {ended.seconds:.1f} s")
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


def test_a_command_runs_without_a_shell(cluster: Cluster) -> None:
    ended = cluster.run(CommandWork.of(spec=ONE, argv=["echo", "one; two", "$HOME"]))
    assert [host["exit_code"] for host in ended.result["hosts"]] == [0, 0]
    assert lines_of(ended, r"one; two \$HOME") == {"one; two $HOME": 2}


def test_a_command_that_fails_is_named_with_its_exit_code(cluster: Cluster) -> None:
    failure = cluster.run(CommandWork.of(spec=ONE, argv=["sh", "-c", "echo to the log; exit 3"])).failure
    assert failure.failure_class is FailureClass.USER_CODE_FAILED
    assert "sh exited with 3" in failure.message


def test_a_function_that_raises_ends_the_others_and_shows_its_traceback(cluster: Cluster) -> None:
    work = FunctionWork.of(spec=BOTH, function="cases:raise_on_one", args=[2])
    ended = cluster.run(work)
    assert ended.failure.failure_class is FailureClass.USER_CODE_FAILED
    assert re.search(r"raised on \S+ worker 0.*: LookupError: nothing to be found", ended.failure.message)
    assert any("in raise_on_one" in line for line in ended.log)
    assert ended.seconds < 120, "the hosts that slept were not waited for"


def test_a_process_that_exits_by_itself_is_no_preemption(cluster: Cluster) -> None:
    failure = cluster.run(FunctionWork.of(spec=ONE, function="cases:exit_on_one", args=[1])).failure
    assert failure.failure_class is FailureClass.USER_CODE_FAILED
    assert re.search(r"died on \S+ worker 1, while every host lives on", failure.message)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nowhere:at_all", "there is no module 'nowhere' on the host"),
        ("cases:no_such", "'cases:no_such' does not exist"),
        ("cases:LINES", "is a int, it must be callable"),
    ],
)
def test_user_code_that_is_not_there(cluster: Cluster, function: str, message: str) -> None:
    failure = cluster.run(FunctionWork.of(spec=ONE, function=function)).failure
    assert failure.failure_class is FailureClass.USER_CODE_FAILED
    assert message in failure.message


def test_a_loop_that_raises_loses_no_line(cluster: Cluster, storage: Path) -> None:
    work = TrainWork.of(
        spec=BOTH, train_loop="cases:lines_then_raise", config={"raises": 2}, storage=str(storage), run_name="raises"
    )
    ended = cluster.run(work)
    assert ended.failure.failure_class is FailureClass.USER_CODE_FAILED
    assert re.search(r"raised on \S+ worker \d: ArithmeticError: a bug in the loop", ended.failure.message)
    assert any("in lines_then_raise" in line for line in ended.log)
    assert_every_line_once(ended, range(4))


def test_a_plain_loop_is_welcome_too(cluster: Cluster, storage: Path) -> None:
    work = TrainWork.of(spec=ONE, train_loop="cases:plain_loop", storage=str(storage), run_name="plain")
    result = cluster.run(work).result
    assert result["returned"] == {"devices": 2}
    assert (result["metrics"], result["checkpoint"], result["step"]) == ({}, None, None)
    assert [worker["megascale"] for worker in result["workers"]] == [{}, {}]


@pytest.fixture
def blocker(cluster: Cluster) -> Iterator[str]:
    """Somebody else's job that holds worker 1 of one slice and leaves worker 0 free."""
    slice_name = cluster.slices()[0]
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


@pytest.mark.parametrize("kind", ["function", "train"])
def test_a_busy_host_is_named_at_the_deadline(cluster: Cluster, storage: Path, blocker: str, kind: str) -> None:
    """A slice whose head is free while another host is busy never becomes ready."""
    work: FunctionWork | TrainWork
    if kind == "function":
        work = FunctionWork.of(spec=BOTH, function="cases:wait", start_timeout_s=10)
    else:
        work = TrainWork.of(
            spec=BOTH, train_loop="cases:plain_loop", storage=str(storage), run_name="late", start_timeout_s=20
        )
    began = time.monotonic()
    failure = cluster.end_of(cluster.submit(work), began).failure
    assert failure.failure_class is FailureClass.DEADLINE_EXCEEDED
    assert f"{blocker} (" in failure.message
    assert "is busy: 4 chips by placement group somebody of job blocker-" in failure.message
    with cluster.client() as ray:
        eventually(lambda: len(ray.holders()) == 1, "only the blocker holds chips", limit_s=60)


def test_a_job_that_is_stopped_gives_its_slices_back(cluster: Cluster) -> None:
    def stop(name: str) -> None:
        with cluster.client() as ray:
            ray.stop_until_terminal(name, datetime.now(UTC) + timedelta(seconds=120))

    ended = cluster.run_until(FunctionWork.of(spec=BOTH, function="cases:wait"), '"started"', stop)
    assert ended.status is JobStatus.STOPPED
    cluster.nothing_is_held()


def test_a_host_that_dies_in_training_is_a_preemption_and_the_retry_resumes(cluster: Cluster, storage: Path) -> None:
    victim = cluster.slices()[1]
    ended = cluster.run_until(digits(storage, "killed", epochs=100_000), "epoch 3", lambda _: cluster.kill(victim, 0))
    assert ended.failure.failure_class is FailureClass.PREEMPTED
    assert f"{victim} worker 0" in ended.failure.message
    cluster.nothing_is_held()
    cluster.put_right()
    saved = max(int(path.name) for path in (storage / "killed" / "checkpoints").iterdir() if path.name.isdigit())
    result = cluster.run(digits(storage, "killed", epochs=saved + 1)).result
    assert result["resumed_from_step"] == saved
    assert victim not in result["slices"]


def test_a_host_that_dies_under_a_function_is_a_preemption(cluster: Cluster) -> None:
    victim = cluster.slices()[0]
    work = FunctionWork.of(spec=BOTH, function="cases:wait")
    failure = cluster.run_until(work, '"started"', lambda _: cluster.kill(victim, 1)).failure
    assert failure.failure_class is FailureClass.PREEMPTED
    assert f"{victim} worker 1" in failure.message


class Served:
    """The digits behind HTTP."""

    def __init__(self, cluster: Cluster, checkpoint: str) -> None:
        address = cluster.leased.lease.ray.serve_address
        assert address is not None
        self.cluster = cluster
        self.url = f"{address}/digits"
        url = httpx.URL(address)
        config = {
            "name": "digits",
            "import_path": "raytpu_ops.runtime.serve:build",
            "route_prefix": "/digits",
            "args": {
                "app": "digits.serve:app",
                "args": {"checkpoint": checkpoint},
                "slice": BOTH.model_dump(mode="json"),
            },
            "runtime_env": {"env_vars": {"PYTHONPATH": PATHS}},
        }
        with cluster.client() as ray:
            ray.deploy(config, http_options={"host": url.host, "port": url.port}, proxy_location="HeadOnly")

    def running(self) -> bool:
        with self.cluster.client() as ray:
            application = ray.serve_applications().get("digits")
        assert application is None or application.status is not ServeStatus.DEPLOY_FAILED, application
        return application is not None and application.status is ServeStatus.RUNNING

    def ask(self, body: Any) -> httpx.Response:
        return httpx.post(self.url, json=body, timeout=LIMIT_S)

    def who(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(self.url, timeout=LIMIT_S).json()
        return answer


def test_a_model_is_served_from_all_hosts_of_a_slice_and_survives_one(cluster: Cluster, storage: Path) -> None:
    from digits.data import held_out

    checkpoint = cluster.run(digits(storage, "served", epochs=8)).result["checkpoint"]
    began = time.monotonic()
    served = Served(cluster, checkpoint)
    try:
        eventually(served.running, "the application runs", limit_s=LIMIT_S)
        print(f"serve deployed: {time.monotonic() - began:.1f} s")
        who = served.who()
        assert [(host["slice"], host["worker_id"]) for host in who["hosts"]] == [(who["slice"], 0), (who["slice"], 1)]
        images, expected = held_out()
        assert served.ask({"images": images.tolist()}).json()["digits"] != []
        found = served.ask({"images": images.tolist()}).json()["digits"]
        assert sum(a == b for a, b in zip(found, expected.tolist(), strict=True)) > 0.95 * len(expected)
        answers = ask_at_once(served, images.tolist(), 20)
        assert answers == found[:20], "concurrent questions reach every host in the same order"
        refused = served.ask({"images": [[1, 2]]})
        assert refused.status_code == 400
        assert "rows of 64 numbers" in refused.json()["error"]

        cluster.kill(who["slice"], 1)  # not the host that JAX's coordinator is on
        eventually(lambda: served.who()["slice"] != who["slice"], "another slice answers", limit_s=LIMIT_S)
        eventually(served.running, "the application runs again", limit_s=LIMIT_S)
        assert served.ask({"images": images.tolist()}).json()["digits"] == found
    finally:
        with cluster.client() as ray:
            ray.delete_application("digits")


def ask_at_once(served: Served, images: list[Any], count: int) -> list[int]:
    """Each image in a request of its own, all of them at once."""
    answers: dict[int, int] = {}

    def ask(number: int) -> None:
        answers[number] = served.ask({"images": [images[number]]}).json()["digits"][0]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(count)]
