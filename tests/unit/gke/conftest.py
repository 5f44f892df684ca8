"""An API server on loopback, a way to it, and time that passes without waiting."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.tpu.capacity import OnDemand
from raytpu_ops.tpu.lease import Owner, SliceLease
from tests.unit.gke.fake_kube import NAMESPACE, FakeKube, Serving, kubeconfig
from tests.unit.gke.seen import SPEC, START

if TYPE_CHECKING:
    from tests.unit.gke.pool_killer import Killer
    from tests.unit.gke.pool_world import World

ME = Owner(dag_id="digits", run_id="manual__2026-11-30", task_id="provision")


class Time:
    """A clock that moves only when somebody sleeps.

    :ivar meanwhile: called at each pause: what goes on elsewhere.
    """

    def __init__(self) -> None:
        self.now = START
        self.pauses = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self) -> datetime:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    async def sleep(self, seconds: float) -> None:
        self.pauses += 1
        self.passes(seconds)
        self.meanwhile()
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the machine's certificates takes longer than most of these tests, and none needs them."""
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
    monkeypatch.setenv("SSL_CERT_DIR", os.devnull)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
async def kube(time: Time) -> AsyncIterator[FakeKube]:
    async with Serving(FakeKube(time)) as served:
        yield served


@pytest.fixture
def access(kube: FakeKube, tmp_path: Path) -> KubeconfigAccess:
    return KubeconfigAccess(str(kubeconfig(tmp_path / "kubeconfig", kube.address)))


@pytest.fixture
def make(access: KubeconfigAccess, time: Time) -> Callable[..., GkeBackend]:
    """Makes a backend with these options, as another process would."""

    def made(**options: Any) -> GkeBackend:
        return GkeBackend(access, clock=time, sleep=time.sleep, **{"namespace": NAMESPACE, **options})

    return made


@pytest.fixture
def backend(make: Callable[..., GkeBackend]) -> GkeBackend:
    return make()


@pytest.fixture
def plan(backend: GkeBackend) -> Plan:
    return asyncio.run(backend.plan(SPEC, [OnDemand()], lease_for=timedelta(hours=12)))


@pytest.fixture
async def lease(kube: FakeKube, backend: GkeBackend, plan: Plan) -> SliceLease:
    """A lease that was granted; of what was asked for it nothing is counted."""
    granted = await backend.acquire(plan, ME)
    kube.calls.clear()
    return granted


@pytest.fixture
async def api(access: KubeconfigAccess) -> AsyncIterator[KubeApi]:
    async with KubeApi(access, NAMESPACE, timeout_s=20) as opened:
        yield opened


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    """Ends whoever makes the n-th call to Kubernetes or Google."""
    from tests.unit.gke.pool_killer import Killer

    return Killer(monkeypatch)


@pytest.fixture
async def world(_no_authorities: None, kube: FakeKube, access: KubeconfigAccess) -> AsyncIterator[World]:
    """A Kubernetes and a Google that share one clock; there, everybody has the rights of our role and no others."""
    from raytpu_ops.backends.google.roles import GKE
    from tests.google_fake import GoogleFake
    from tests.google_fake.roles import Watch
    from tests.unit.gke.pool_world import World

    with GoogleFake() as google:
        Watch(google, GKE)
        yield World(kube, google, access)


@pytest.fixture
def two_zones(world: World) -> World:
    """One whose cluster is in two zones."""
    from tests.unit.gke.pool_world import BOTH_ZONES

    [cluster] = world.google.container.clusters.values()
    cluster.zones = tuple(BOTH_ZONES["zones"])
    return world
