"""The reaper takes what is over, keeps what may still be used, and tells what it could not give back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from raytpu_ops.backends.base import Released, Say, silent
from raytpu_ops.flows.reaping import Reaped, nobody_knows, reap
from raytpu_ops.tpu.errors import RemoteUnavailable
from raytpu_ops.tpu.lease import Owner, SliceLease
from tests.unit.flows.conftest import MemoryBackend

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@dataclass
class ManyLeases(MemoryBackend):
    """Leases whose release is scripted by id."""

    leases: dict[str, SliceLease] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)

    async def list_leases(self, say: Say = silent, /, **labels: str) -> list[SliceLease]:
        for line in self.unread:
            say(line)
        return list(self.leases.values())

    async def release(self, lease: SliceLease) -> Released:
        if lease.id in self.stuck:
            raise RemoteUnavailable("the API server is away")
        if lease.id in self.held:
            return Released(left=[f"{lease.id} is PROVISIONING"], held=timedelta(hours=2))
        del self.leases[lease.id]
        return Released(removed=[lease.id])


@pytest.fixture
def many(lease: SliceLease) -> ManyLeases:
    """Four leases that last another hour, and one that expired."""
    backend = ManyLeases("http://127.0.0.1:9")
    for name in ("runs", "over", "unknown", "late", "expired"):
        until = NOW if name == "expired" else NOW + timedelta(hours=1)
        owner = Owner(dag_id="d", run_id=name, task_id="provision")
        backend.leases[name] = lease.model_copy(
            update={"id": name, "owner": owner, "granted_at": NOW - timedelta(hours=1), "expires_at": until}
        )
    return backend


async def is_over(owner: Owner) -> bool | None:
    return {"runs": False, "over": True, "unknown": None, "late": True}[owner.run_id]


async def reaped(backend: ManyLeases, *, ask: Callable[[Owner], object] = is_over, **kwargs: bool) -> Reaped:
    by = datetime.now(UTC) + timedelta(milliseconds=50)
    return await reap(backend, ask, NOW, by=by, say=print, **kwargs)  # type: ignore[arg-type]


async def test_what_expired_and_what_served_a_run_that_is_over_goes(many: ManyLeases) -> None:
    """F09."""
    done = await reaped(many)

    assert set(many.leases) == {"runs", "unknown"}
    assert [line.partition(" ")[0] for line in done.released] == ["over", "late", "expired"]
    assert "its run is over" in done.released[0]
    assert "it expired at 2030-01-01 00:00:00 UTC" in done.released[2]
    assert ["its run goes on" in line for line in done.kept] == [True, False]
    assert "nobody can tell" in done.kept[1]
    assert done.left == []


async def test_what_google_does_not_let_go_of_yet_is_left_to_the_next_round(many: ManyLeases) -> None:
    """Others expire meanwhile, and a round begins only when the last one is over."""
    many.held = {"expired"}
    async with asyncio.timeout(30):
        done = await reaped(many)
    assert ["expired is PROVISIONING" in line for line in done.left] == [True]

    many.held.clear()
    assert (await reaped(many)).left == []
    assert "expired" not in many.leases


async def test_who_knows_no_airflow_takes_only_what_expired(many: ManyLeases) -> None:
    await reaped(many, ask=nobody_knows)

    assert set(many.leases) == {"runs", "over", "unknown", "late"}


async def test_a_dry_run_tells_the_same_and_takes_nothing(many: ManyLeases) -> None:
    told = await reaped(many, dry_run=True)

    assert len(many.leases) == 5
    assert told == await reaped(many)


async def test_one_that_is_stuck_does_not_keep_the_others_and_is_named(many: ManyLeases) -> None:
    many.stuck = {"over"}

    done = await reaped(many)

    assert set(many.leases) == {"runs", "unknown", "over"}
    assert len(done.left) == 1
    assert done.left[0].startswith("over: ")
    assert "the API server is away" in done.left[0]


@pytest.mark.parametrize("dry_run", [False, True])
async def test_what_cannot_be_read_is_left_and_keeps_no_other(many: ManyLeases, dry_run: bool) -> None:
    """Nobody can tell when it is over, so somebody has to look, and it bills until then."""
    many.unread = ["RayCluster ml/x can't be read: delete it"]

    done = await reaped(many, dry_run=dry_run)

    assert done.left == many.unread
    assert len(done.released) == 3
