"""The backend against the fake Google, on a clock that passes while the backend sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.google.roles import TPU_VM
from raytpu_ops.backends.tpu_vm import TpuVmBackend
from raytpu_ops.tpu.capacity import ladder
from raytpu_ops.tpu.deadlines import Deadlines
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.naming import lease_id
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake import GoogleFake
from tests.google_fake.access import FakeAccess
from tests.google_fake.fake import PROJECT, ZONE
from tests.google_fake.roles import Watch

ME = Owner(dag_id="digits", run_id="manual__2026-11-30", task_id="provision")
OTHER = "europe-west4-b"
ZONES = [ZONE, OTHER]
SPEC = SliceSpec.of("v4", "2x2x2", num_slices=2)

NAME = lease_id(ME)

Make = Callable[..., TpuVmBackend]


@pytest.fixture
def google() -> Iterator[GoogleFake]:
    """Everybody has the rights of our role and no others."""
    with GoogleFake() as fake:
        Watch(fake, TPU_VM)
        yield fake


@pytest.fixture(autouse=True)
def asked_of_ray(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Request]:
    """What Ray is asked; it never answers, for the addresses of the fake's nodes lead nowhere."""
    asked: list[httpx.Request] = []
    really = httpx.AsyncHTTPTransport.handle_async_request

    async def refuse(self: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        if not request.url.host.startswith("10."):
            return await really(self, request)
        asked.append(request)
        raise httpx.ConnectError("connection refused", request=request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", refuse)
    return asked


@pytest.fixture
def make(google: GoogleFake) -> Make:
    """Makes backends, each as in a process of its own."""

    def made(**options: Any) -> TpuVmBackend:
        options = {"zones": ZONES, "sleep": google.clock.sleep, **options}
        return TpuVmBackend(FakeAccess(google), clock=google.clock.now, **options)

    return made


@pytest.fixture
def backend(make: Make) -> TpuVmBackend:
    return make()


def full(zone: str = ZONE, name: str = NAME) -> str:
    """Google's name of a queued resource."""
    return f"projects/{PROJECT}/locations/{zone}/queuedResources/{name}"


def state(google: GoogleFake, zone: str = ZONE) -> str:
    """Of the one that is ours."""
    return str(google.queued_resources()[full(zone)].state.state.name)


def nothing_left(google: GoogleFake) -> bool:
    """Nothing of anybody's."""
    return not google.queued_resources() and not google.nodes()


def planned(capacity: object = None, spec: SliceSpec = SPEC, **deadlines: timedelta) -> Plan:
    """A plan as the operator makes it."""
    return Plan(
        backend="tpu_vm",
        spec=spec,
        ladder=ladder(capacity),
        lease_for=timedelta(hours=12),
        deadlines=Deadlines.of(deadlines),
    )


async def until(there: Callable[[], object]) -> None:
    """Let others go on until something is there."""
    async with asyncio.timeout(30):
        while not there():  # noqa: ASYNC110  the fake lives in other threads and sets no event of this loop
            await asyncio.sleep(0)
