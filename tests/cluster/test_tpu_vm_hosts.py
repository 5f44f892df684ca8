"""Real Ray on played TPU VMs: the startup script brings it up, keeps it up, and keeps its token to itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="Google's clients are part of the extra `dev`")

import httpx
import psutil
import pytest_asyncio

from raytpu_ops.backends.tpu_vm import TpuVmBackend
from raytpu_ops.flows.leases import give_back, wait_whole
from raytpu_ops.ray.client import RayClient
from raytpu_ops.ray.credentials import BearerToken
from raytpu_ops.tpu.capacity import Spot
from raytpu_ops.tpu.deadlines import Schedule
from raytpu_ops.tpu.errors import RayTpuError
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.tpu.spec import SliceSpec
from tests.cluster.own_head import DASHBOARD_PORT, GCS_PORT, own_head
from tests.cluster.vm_leases import backend, quick
from tests.google_fake import Clock, GoogleFake, zone
from tests.google_fake.fake import PROJECT, ZONE
from tests.google_fake.vms import BootsVms
from tests.session import SESSION_DIR
from tests.unit.tpu_vm.conftest import SPEC, planned

if why := zone.missing():
    pytest.skip(why, allow_module_level=True)

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

OWNER = Owner(dag_id="cluster", run_id="manual__1", task_id="vms")
#: What only a hang takes.
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def google() -> Iterator[GoogleFake]:
    with GoogleFake(clock=Clock(speed=20)) as fake:
        quick(fake)
        yield fake


@pytest.fixture(scope="module")
def vms(google: GoogleFake) -> BootsVms:
    return google.boots_vms()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lease(google: GoogleFake, vms: BootsVms) -> AsyncIterator[SliceLease]:
    """Two slices of two VMs, whole."""
    found = await backend(google).acquire(planned(Spot()), OWNER)
    try:
        await wait_whole(backend(google), found, schedule=Schedule.start(), say=print)
        yield found
    finally:
        if await backend(google).find(OWNER) is not None:
            by = Schedule.start().deadlines.at("releasing")  # type: ignore[arg-type]
            await give_back(backend(google), found, by=by, say=print, poll_s=0.5)
        assert not google.queued_resources()
        assert not any(vms.status().values())


def full(node: str) -> str:
    return f"projects/{PROJECT}/locations/{ZONE}/nodes/{node}"


async def seen(backend: TpuVmBackend, lease: SliceLease, wanted: Callable[[Readiness], object], what: str) -> Readiness:
    """Look until something is to be seen."""
    ends = time.monotonic() + LIMIT_S
    while True:
        report = await backend.observe(lease)
        if wanted(report):
            return report
        assert time.monotonic() < ends, f"{what}: {report.fatal or report.describe()}"
        await asyncio.sleep(1)


async def test_hosts_join_a_head_that_the_user_started_and_leave_it_when_they_are_released(
    google: GoogleFake, vms: BootsVms
):
    """With its token, which nobody joins without. The first test of this module: there is no other lease yet."""
    folder, token = SESSION_DIR / "own", "the-token-of-the-users-own-head"
    folder.mkdir()
    dashboard = f"http://{vms.machine}:{DASHBOARD_PORT}"
    own = backend(google, ray_head=f"{vms.machine}:{GCS_PORT}", dashboard_url=dashboard, ray_token=token)
    owner = OWNER.model_copy(update={"task_id": "own"})

    with own_head(vms.machine, token, folder):
        granted = await own.acquire(planned(Spot(), SliceSpec.of("v4", "2x2x2")), owner)
        try:
            lease, report = await wait_whole(own, granted, schedule=Schedule.start(), say=print)
            assert (lease.ray.address, report.ready) == (dashboard, True)
            [one] = report.slices
            assert [host.worker_id for host in one.hosts] == [0, 1]
            assert vms.machine not in [host.address for host in one.hosts]
            async with RayClient(dashboard, credentials=BearerToken("another")) as stranger:
                with pytest.raises(RayTpuError, match="is not the cluster's"):
                    await stranger.nodes()
        finally:
            by = Schedule.start().deadlines.at("releasing")  # type: ignore[arg-type]
            await give_back(own, granted, by=by, say=print, poll_s=0.5)
        assert not google.queued_resources()
        assert not any(vms.status().values())
        async with RayClient(dashboard, credentials=BearerToken(token)) as ray:
            [head] = [node for node in await ray.nodes() if node.is_head]
        assert head.alive


async def test_ray_labels_every_host_from_the_metadata_server(google: GoogleFake, vms: BootsVms, lease: SliceLease):
    report = await backend(google).observe(lease)
    assert report.ready
    assert [one.name for one in report.slices] == lease.created["slice"]
    for one in report.slices:
        assert [host.worker_id for host in one.hosts] == [0, 1]
        assert all(host.chips == host.chips_free == SPEC.shape.chips_per_host for host in one.hosts)
    assert f"http://{report.slices[0].hosts[0].address}:8265" == lease.ray.address


async def test_the_token_is_asked_for_and_is_in_no_argument_and_no_output(
    google: GoogleFake, vms: BootsVms, lease: SliceLease
):
    token = await backend(google)._read_token(lease)
    assert token is not None
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{lease.ray.address}/api/jobs/")).status_code == 401
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert any("ray" in line and "--node-ip-address" in line for line in lines)
    assert not any(token in line for line in lines)
    for node in lease.created["slice"]:
        for worker in (0, 1):
            assert vms.log(full(node), worker)
            assert token not in vms.log(full(node), worker)
            mode = _file(vms, full(node), worker).strip()
            assert mode == "600 root"


def _file(vms: BootsVms, node: str, worker: int) -> str:
    return vms.run(node, worker, "stat", "--format", "%a %U", "/run/raytpu/token")


async def test_a_vm_that_restarts_joins_again(google: GoogleFake, vms: BootsVms, lease: SliceLease):
    own = backend(google)
    node = full(lease.created["slice"][1])
    await asyncio.to_thread(vms.kill, node, 1)
    report = await seen(own, lease, lambda report: report.broken, "the slice is broken")
    assert report.fatal is None
    await asyncio.to_thread(vms.restart, node, 1)
    assert await own.repair(lease) == lease
    lease_again, report = await wait_whole(own, lease, schedule=Schedule.start(), say=print)
    assert (lease_again, report.ready) == (lease, True)


async def test_a_ray_that_dies_on_its_vm_is_started_again(google: GoogleFake, vms: BootsVms, lease: SliceLease):
    own = backend(google)
    node = full(lease.created["slice"][1])
    before = vms.log(node, 0).count("starts Ray")
    await asyncio.to_thread(vms.run, node, 0, "pkill", "-KILL", "raylet")
    await seen(own, lease, lambda report: not report.ready, "it is seen")
    await seen(own, lease, lambda report: report.ready, "it is back")
    assert vms.log(node, 0).count("starts Ray") == before + 1


async def test_a_head_that_restarts_gets_its_hosts_back(google: GoogleFake, vms: BootsVms, lease: SliceLease):
    own = backend(google)
    node = full(lease.created["slice"][0])
    await asyncio.to_thread(vms.kill, node, 0)
    await seen(own, lease, lambda report: not report.head_alive, "the head is gone")
    await asyncio.to_thread(vms.restart, node, 0)
    await seen(own, lease, lambda report: report.ready, "all are back")


async def test_a_preempted_slice_is_asked_for_anew_and_comes_whole(
    google: GoogleFake, vms: BootsVms, lease: SliceLease
):
    """F12, F13: with other names, after the old one is gone. The last test of this module: it takes the lease away."""
    own = backend(google)
    await asyncio.to_thread(google.tpu.preempt, full(lease.created["slice"][0]))
    report = await seen(own, lease, lambda report: report.broken, "it is broken")
    assert not report.fatal

    again = await own.repair(lease)

    assert not set(again.created["slice"]) & set(lease.created["slice"])
    assert len(google.queued_resources()) == 1
    await wait_whole(own, again, schedule=Schedule.start(), say=print)
