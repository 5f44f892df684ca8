"""A played dashboard, a client for it, and time that passes without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from raytpu_ops.ray.client import RayClient
from tests.unit.ray.fake_ray import FakeRay


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


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
async def ray() -> AsyncIterator[FakeRay]:
    async with FakeRay() as fake:
        yield fake


@pytest.fixture
async def client(ray: FakeRay) -> AsyncIterator[RayClient]:
    async def no_pause(_: float) -> None:
        await asyncio.sleep(0.001)

    async with RayClient(ray.address, timeout_s=5, sleep=no_pause) as client:
        yield client
