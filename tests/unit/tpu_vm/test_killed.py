"""A process that dies between any two calls leaves what the next one adopts, or gives back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from raytpu_ops.backends.tpu_vm.api import TpuApi
from raytpu_ops.tpu.capacity import OnDemand, Spot
from tests.google_fake import GoogleFake
from tests.google_fake.tpu_queue import Delays
from tests.unit.tpu_vm.conftest import ME, Make, nothing_left, planned

#: A ladder whose first step fails, so that all of the way is gone: up, down, up.
PLAN = planned([Spot(), OnDemand()])
CALLS = ("queued_resource", "create", "delete", "nodes", "node", "delete_node")


class Dies(BaseException):
    """The process is gone: no handler of ours runs any more."""


class Points:
    """Counts the moments before and after each call, and dies at one of them.

    :param monkeypatch: changes the calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dies_at = -1
        self.passed = 0
        for name in CALLS:
            monkeypatch.setattr(TpuApi, name, self._counted(getattr(TpuApi, name)))

    def _counted(self, call: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def counted(*args: object) -> object:
            self._point()
            answer = await call(*args)
            self._point()
            return answer

        return counted

    def _point(self) -> None:
        self.passed += 1
        if self.passed - 1 == self.dies_at:
            raise Dies

    def begin(self, dies_at: int) -> None:
        """Count from now on."""
        self.passed, self.dies_at = 0, dies_at


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch, google: GoogleFake) -> Points:
    google.tpu.delays = Delays(accept=1, wait=1, queue=4, provision=9, delete=9)
    return Points(monkeypatch)


async def given_back(google: GoogleFake, make: Make) -> None:
    """Nothing is left after the reaper was there."""
    while leases := await make().list_leases():
        for lease in leases:
            await make().release(lease)
        google.advance(10)
    assert nothing_left(google)


async def test_killed_on_the_way_up(google: GoogleFake, make: Make, points: Points):
    """After each of them the next process ends where this one would have, and nothing was there twice."""
    at = 0
    while True:
        google.faults.clear()
        google.faults.stockout(times=1)
        made = len(google.tpu.made)
        points.begin(at)
        try:
            await make().acquire(PLAN, ME)
        except Dies:
            points.begin(-1)
            assert len(google.queued_resources()) <= 1
            await make().acquire(PLAN, ME)
        else:
            break
        assert len(google.queued_resources()) == 1
        assert len(google.tpu.made) - made <= 2
        points.begin(-1)
        await given_back(google, make)
        at += 1
    assert at > 20


async def test_killed_on_the_way_down(google: GoogleFake, make: Make, points: Points):
    at = 0
    while True:
        points.begin(-1)
        lease = await make().acquire(PLAN, ME)
        points.begin(at)
        try:
            await make().release(lease)
        except Dies:
            points.begin(-1)
            await given_back(google, make)
        else:
            break
        at += 1
    assert at > 5
    points.begin(-1)
    await given_back(google, make)


async def test_killed_in_the_roll_back(google: GoogleFake, make: Make, points: Points):
    """A setup that failed has no teardown: what its roll-back did not reach is found by its label."""
    at = 0
    while True:
        google.faults.clear()
        google.faults.stockout(times=None)
        points.begin(at)
        task = asyncio.ensure_future(make().acquire(PLAN, ME))
        await asyncio.wait([task])
        points.begin(-1)
        if not isinstance(task.exception(), Dies):
            break
        await given_back(google, make)
        at += 7  # all of them would be many times the same
    assert at > 60
    assert nothing_left(google)
