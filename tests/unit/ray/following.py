"""Calls follow_job with what most tests of it have in common."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

from raytpu_ops.ray.client import RayClient
from raytpu_ops.ray.follow import JobOutcome, follow_job
from raytpu_ops.tpu.errors import FailureClass
from raytpu_ops.tpu.work import Event, dump_event
from tests.unit.ray.fake_ray import HEAD, FakeRay, node_row

STARTED = dump_event(Event(event="started")) + "\n"
RESULT = dump_event(Event(event="result", data={"accuracy": 0.97})) + "\n"
F = FailureClass


def failed(failure_class: FailureClass, message: str) -> str:
    return dump_event(Event(event="failed", failure_class=failure_class, message=message)) + "\n"


class Time:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def after(self, seconds: float) -> datetime:
        return self.now + timedelta(seconds=seconds)

    async def sleep(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        await asyncio.sleep(0.001)  # the played Ray on the same loop goes on


class Following:
    """Calls follow_job with what most tests have in common."""

    def __init__(self, ray: FakeRay, client: RayClient, time: Time) -> None:
        self.ray, self.client, self.time = ray, client, time
        self.lines: list[str] = []
        self.told: list[str] = []
        ray.rows["nodes"] = [
            node_row(HEAD, "127.0.0.1", head=True),
            node_row("b" * 56, "127.0.0.2", slice_name="s-0", worker_id=0, chips=4),
            node_row("c" * 56, "127.0.0.3", slice_name="s-0", worker_id=1, chips=4),
        ]

    async def __call__(self, **options: Any) -> JobOutcome:
        options = {
            "starting_until": self.time.after(600),
            "running": timedelta(hours=24),
            "emit": self.lines.append,
            "on_progress": self.told.append,
            "poll_s": 2.0,
            "clock": self.time,
            "sleep": self.time.sleep,
            **options,
        }
        return await asyncio.wait_for(follow_job(self.client, "a-1", **options), 60)


def ends(outcome: JobOutcome) -> tuple[str, FailureClass | None]:
    return outcome.verdict.outcome, outcome.verdict.failure_class
