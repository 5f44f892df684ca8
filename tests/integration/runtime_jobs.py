"""Jobs of the runtime on a leased local cluster, as the Airflow side submits them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytpu_ops.backends.local import faults
from raytpu_ops.ray.client import BlockingRayClient
from raytpu_ops.ray.states import JobStatus, JobSubmission
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
from tests.integration.local_fixtures import Leased, wait_until_ready
from tests.waiting import eventually

HERE = Path(__file__).parent
#: Where user code is found on the hosts.
PATHS = f"{HERE / 'on_hosts'}:{HERE.parent.parent / 'dags'}"
LIMIT_S = 300.0


@dataclass(frozen=True)
class Ended:
    """A job that is over."""

    status: JobStatus
    log: list[str]
    seconds: float

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


class Cluster:
    """The module's lease, as the Airflow side uses it."""

    def __init__(self, leased: Leased) -> None:
        self.leased = leased

    def client(self) -> BlockingRayClient:
        return BlockingRayClient(self.leased.backend.ray(self.leased.lease))

    def submit(self, work: TrainWork | FunctionWork | CommandWork) -> str:
        env = {WORK_VARIABLE: dump_work(work), "PYTHONPATH": PATHS}
        with self.client() as ray:
            return ray.submit_job(JobSubmission(f"test-{uuid.uuid4().hex}", ENTRYPOINT, {"env_vars": env}))

    def end_of(self, name: str, began: float) -> Ended:
        with self.client() as ray:

            def over() -> bool:
                job = ray.job(name)
                return job is not None and job.status.is_terminal

            eventually(over, f"{name} ends", limit_s=LIMIT_S)
            job = ray.job(name)
            assert job is not None
            return Ended(job.status, ray.job_logs(name).splitlines(), time.monotonic() - began)

    def run(self, work: TrainWork | FunctionWork | CommandWork) -> Ended:
        began = time.monotonic()
        ended = self.end_of(self.submit(work), began)
        self.nothing_is_held()
        return ended

    def run_until(self, work: TrainWork | FunctionWork, text: str, act: Callable[[str], Any]) -> Ended:
        """Run it, and act as soon as its log holds the text."""
        began = time.monotonic()
        name = self.submit(work)
        with self.client() as ray:
            eventually(lambda: text in ray.job_logs(name), f"{name} says {text!r}", limit_s=LIMIT_S)
        act(name)
        return self.end_of(name, began)

    def nothing_is_held(self) -> None:
        with self.client() as ray:
            eventually(lambda: not ray.holders(), f"nobody holds chips: {ray.holders()}", limit_s=60)

    def kill(self, slice_name: str, worker: int) -> None:
        faults.kill_host(self.leased.lease, slice_name, worker)

    def slices(self) -> list[str]:
        """Names of the slices that are there now."""
        report = asyncio.run(self.leased.backend.observe(self.leased.lease))
        return [item.name for item in report.slices if not item.broken]

    def put_right(self) -> None:
        """Replace what tests have broken."""
        backend, lease = self.leased.backend, self.leased.lease
        if asyncio.run(backend.observe(lease)).broken:
            lease = asyncio.run(backend.repair(lease))
            self.leased = Leased(backend, lease, self.leased.seconds)
        wait_until_ready(backend, lease)
