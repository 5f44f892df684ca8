"""A played dashboard, a client for it, and time that passes without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from raytpu_ops.ray.client import RayClient
from tests.unit.ray.fake_ray import FakeRay
from tests.unit.ray.following import Following, Time


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

    async with RayClient(ray.address, timeout_s=20, sleep=no_pause) as client:
        yield client


@pytest.fixture
def follow(ray: FakeRay, client: RayClient, time: Time) -> Following:
    return Following(ray, client, time)
