"""Jobs of the runtime on the session's local cluster, as the Airflow side submits them."""

from __future__ import annotations

import collections
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raytpu_ops.backends.local import faults
from raytpu_ops.ray.client import BlockingRayClient
from raytpu_ops.ray.states import JobStatus, JobSubmission
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.tpu.work import (
    ENTRYPOINT,
    WORK_VARIABLE,
    CommandWork,
    Event,
    FunctionWork,
    TrainWork,
    dump_work,
    parse_event,
)
from tests.integration.local_fixtures import Standing
from tests.waiting import eventually

HERE = Path(__file__).parent
#: Where user code is found on the hosts.
PATHS = f"{HERE / 'on_hosts'}:{HERE.parent.parent / 'dags'}"
LIMIT_S = 300.0
#: All of the cluster, and half of it: jobs that take one slice run two at a time.
BOTH = SliceSpec.of("v4", "2x2x2", num_slices=2)
ONE = SliceSpec.of("v4", "2x2x2")


@dataclass(frozen=True)
class Ended:
    """A job that is over."""

    status: JobStatus
    log: list[str]

    @property
    def events(self) -> list[Event]:
        return [event for line in self.log if (event := parse_event(line)) is not None]

    @property
    def result(self) -> dict[str, Any]:
        assert self.status is JobStatus.SUCCEEDED, "\n".join(self.log[-80:])
        assert [event.event for event in self.events] == ["started", "result"]
        return self.events[-1].data

    @property
    def failure(self) -> Event:
        assert self.status is JobStatus.FAILED, "\n".join(self.log[-80:])
        assert self.events[-1].event == "failed", "\n".join(self.log[-80:])
        return self.events[-1]

    def count(self, pattern: str) -> collections.Counter[str]:
        """What matches in the log, and how often."""
        return collections.Counter(match.group(0) for line in self.log for match in re.finditer(pattern, line))


class Cluster:
    """The session's lease, as the Airflow side uses it."""

    def __init__(self, standing: Standing) -> None:
        self.standing = standing

    def client(self) -> BlockingRayClient:
        return BlockingRayClient(self.standing.backend.ray(self.standing.lease))

    def submit(self, work: TrainWork | FunctionWork | CommandWork) -> str:
        env = {WORK_VARIABLE: dump_work(work), "PYTHONPATH": PATHS}
        with self.client() as ray:
            return ray.submit_job(JobSubmission(f"test-{uuid.uuid4().hex}", ENTRYPOINT, {"env_vars": env}))

    def end_of(self, name: str) -> Ended:
        with self.client() as ray:

            def over() -> bool:
                job = ray.job(name)
                return job is not None and job.status.is_terminal

            eventually(over, f"{name} ends", limit_s=LIMIT_S)
            job = ray.job(name)
            assert job is not None
            return Ended(job.status, ray.job_logs(name).splitlines())

    def run(self, work: TrainWork | FunctionWork | CommandWork) -> Ended:
        """Run it to its end; it has the cluster for itself, and holds nothing afterwards."""
        ended = self.end_of(self.submit(work))
        self.nothing_is_held()
        return ended

    def run_until(self, work: TrainWork | FunctionWork, text: str, act: Callable[[str], Any]) -> Ended:
        """Run it, and act as soon as its log holds the text."""
        name = self.submit(work)
        with self.client() as ray:
            eventually(lambda: text in ray.job_logs(name), f"{name} says {text!r}", limit_s=LIMIT_S)
        act(name)
        return self.end_of(name)

    def slices_of(self, name: str) -> list[str]:
        """Names of the slices that a job runs on, as it said when it started."""
        with self.client() as ray:
            events = [parse_event(line) for line in ray.job_logs(name).splitlines()]
        (started,) = [event for event in events if event is not None and event.event == "started"]
        hosts = started.data["workers"] if "workers" in started.data else started.data["hosts"]
        return sorted({host["slice"] for host in hosts})

    def nothing_is_held(self) -> None:
        with self.client() as ray:
            eventually(lambda: not ray.holders(), f"nobody holds chips: {ray.holders()}", limit_s=60)

    def kill(self, slice_name: str, worker: int) -> None:
        faults.kill_host(self.standing.lease, slice_name, worker)


@pytest.fixture(scope="session")
def cluster(two_slices: Standing) -> Cluster:
    """Two slices of two hosts; a test that needs both whole says so: ``cluster.standing.whole()``."""
    return Cluster(two_slices)


@dataclass(frozen=True)
class Trained:
    """A training run over both slices, and where its checkpoints are.

    :param before: steps that were in that place when it began.
    """

    ended: Ended
    storage: Path
    before: list[str]

    def steps(self) -> list[str]:
        return steps_in(self.storage, "digits")


def steps_in(storage: Path, run_name: str) -> list[str]:
    """Everything in the folder of a run's checkpoints."""
    return sorted(path.name for path in (storage / run_name / "checkpoints").iterdir())


@pytest.fixture(scope="session")
def trained(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The digits, trained once for all tests that look at the run or serve its model: it costs most of a minute.

    It must not resume, and an older checkpoint is in its way.
    """
    import numpy as np

    from raytpu_ops.runtime.checkpoints import make_manager

    storage = tmp_path_factory.mktemp("storage")
    with make_manager(str(storage / "digits" / "checkpoints"), 2) as older:
        import orbax.checkpoint as ocp

        older.save(99, args=ocp.args.StandardSave({"count": np.zeros(())}))
    before = steps_in(storage, "digits")
    cluster.standing.whole()
    work = TrainWork.of(
        spec=BOTH,
        train_loop="digits.train:loop",
        config={"epochs": 8},
        storage=str(storage),
        run_name="digits",
        resume=False,
    )
    return Trained(cluster.run(work), storage, before)
