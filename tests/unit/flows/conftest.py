"""A lease in memory whose Ray is the played dashboard of ``tests/unit/ray``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from raytpu_ops.backends.base import Plan, Released, Say, silent
from raytpu_ops.ray.client import RayClient
from raytpu_ops.tpu.deadlines import Deadlines, Schedule
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.readiness import Readiness, SliceReport
from raytpu_ops.tpu.spec import SliceSpec
from tests.unit.ray.fake_ray import FakeRay

SPEC = SliceSpec.of("v4", "2x2x2")
WHOLE = Readiness(slices=[SliceReport(name="s0", hosts_wanted=2)], head_alive=True)
WAITING = Readiness(slices=[SliceReport(name="s0", hosts_wanted=2, missing=["host 1 is not there"])], head_alive=True)
BROKEN = Readiness(
    slices=[SliceReport(name="s0", hosts_wanted=2, missing=["host 1 is dead"], broken=True)], head_alive=True
)
AWAY = Readiness(slices=[SliceReport(name="s0", hosts_wanted=2)], headless=True, problems=["head pod waits for a node"])
LOST = Readiness(slices=[SliceReport(name="s0", hosts_wanted=2)], fatal="the Ray head is dead")


def schedule(*, ago: float = 0, **seconds: float) -> Schedule:
    """A schedule that began some seconds ago; phases that are not named take their defaults."""
    return Schedule(begun=datetime.now(UTC) - timedelta(seconds=ago), deadlines=Deadlines.of(seconds))


#: A schedule whose slices should have been whole a second ago.
TOO_LATE = {"ago": 31, "labelled": 30}


@dataclass
class MemoryBackend:
    """A backend whose observations are scripted: one after the other, the last one for ever."""

    address: str
    reports: list[Readiness] = field(default_factory=lambda: [WHOLE])
    releases: list[Released] = field(default_factory=lambda: [Released(removed=["all"])])
    repaired: int = 0
    name: str = "memory"
    acquires_in_task: bool = True
    ships_runtime: bool = False

    async def plan(
        self, spec: SliceSpec, ladder: Sequence[Any], *, lease_for: timedelta, owner: Owner | None = None
    ) -> Plan:
        return Plan(backend=self.name, spec=spec, ladder=list(ladder), lease_for=lease_for)

    async def acquire(self, plan: Plan, owner: Owner, *, say: Say = silent) -> SliceLease:
        raise NotImplementedError

    async def find(self, owner: Owner) -> SliceLease | None:
        raise NotImplementedError

    async def observe(self, lease: SliceLease) -> Readiness:
        return self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]

    async def repair(self, lease: SliceLease, *, say: Say = silent) -> SliceLease:
        self.repaired += 1
        return lease.model_copy(update={"created": {"slice": [f"s0-r{self.repaired}"]}})

    async def release(self, lease: SliceLease) -> Released:
        return self.releases.pop(0) if len(self.releases) > 1 else self.releases[0]

    async def list_leases(self, say: Say = silent, /, **labels: str) -> list[SliceLease]:
        return []

    def ray(self, lease: SliceLease) -> RayClient:
        return RayClient(self.address, timeout_s=5)

    def serve_credentials(self, lease: SliceLease) -> None:
        return None


@pytest.fixture
async def ray() -> AsyncIterator[FakeRay]:
    async with FakeRay() as fake:
        yield fake


@pytest.fixture
def backend(ray: FakeRay) -> MemoryBackend:
    return MemoryBackend(ray.address)


@pytest.fixture
def lease(ray: FakeRay) -> SliceLease:
    now = datetime.now(UTC)
    return SliceLease(
        id="d-provision-1",
        owner=Owner(dag_id="d", run_id="r", task_id="provision"),
        backend="memory",
        spec=SPEC,
        ray=RayEndpoint(address=ray.address, serve_address="http://127.0.0.1:9"),
        granted_at=now,
        expires_at=now + timedelta(hours=1),
    )
