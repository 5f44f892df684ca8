"""A cluster whose interpreter has no raytpu_ops: jobs and applications bring it along."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from raytpu_ops.flows.jobs import Attempt, JobRequest, run_job
from raytpu_ops.flows.packages import runtime_env_with
from raytpu_ops.flows.serving import ServeRequest, run_serve
from raytpu_ops.ray.client import RayClient
from raytpu_ops.ray.http import serve_client
from raytpu_ops.ray.readiness import slices_report
from raytpu_ops.ray.states import JobStatus, JobSubmission
from raytpu_ops.tpu.deadlines import Deadlines, Schedule
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.tpu.work import ENTRYPOINT, FunctionWork, dump_work
from raytpu_ops.waits import Done, Pending, Wait, wait_async
from tests.integration.ray_head import ADDRESS, SLICE, RayHead, free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]

CODE = str(Path(__file__).parent / "on_bare")
SPEC = SliceSpec.of("v4", "2x2x1")
#: There are no chips here.
ENV = {"env_vars": {"JAX_PLATFORMS": "cpu"}}


class OneHead:
    """As much of a backend as the flows need."""

    ships_runtime = True

    def __init__(self, head: RayHead) -> None:
        self.head = head

    def ray(self, _: SliceLease) -> RayClient:
        return RayClient(self.head.address, token=self.head.token)

    async def observe(self, lease: SliceLease) -> Readiness:
        async with self.ray(lease) as client:
            return slices_report(SPEC, [SLICE], await client.nodes())


@pytest.fixture(scope="module")
def backend(head: RayHead) -> Any:
    return OneHead(head)


@pytest.fixture(scope="module")
def lease(backend: OneHead) -> SliceLease:
    now = datetime.now(UTC)
    (port,) = free_ports(1)
    return SliceLease(
        id="bare",
        owner=Owner(dag_id="d", run_id="r", task_id="provision"),
        backend="local",
        spec=SPEC,
        ray=RayEndpoint(address=backend.head.address, serve_address=f"http://{ADDRESS}:{port}"),
        granted_at=now,
        expires_at=now + timedelta(hours=1),
    )


def schedule() -> Schedule:
    return Schedule.start(Deadlines.of({"labelled": 120, "starting": 180, "running": 180}))


async def sent(backend: Any, lease: SliceLease) -> dict[str, Any]:
    return await runtime_env_with(backend, lease, ENV, CODE, schedule=schedule(), say=print)


async def test_there_is_no_raytpu_ops_on_this_cluster(backend, lease):
    """Else the other tests would prove nothing."""
    async with backend.ray(lease) as client:
        asked: Wait[str, str] = Wait("the head", Done, deadline=datetime.now(UTC) + timedelta(minutes=2))
        await wait_async(lambda: client.submit_job(JobSubmission("bare", ENTRYPOINT)), asked)
        over: Wait[Any, Any] = Wait(
            "job bare",
            lambda job: Done(job) if job.status.is_terminal else Pending(job.status_word),
            deadline=datetime.now(UTC) + timedelta(minutes=2),
        )
        job = await wait_async(lambda: client.job("bare"), over)
        assert job.status is JobStatus.FAILED
        assert "No module named 'raytpu_ops'" in await client.job_logs("bare")


async def test_a_job_brings_it_to_the_driver_and_to_every_host(backend, lease):
    work = FunctionWork.of(function="where:ours", spec=SPEC, env={}, start_timeout_s=120)
    request = JobRequest(
        attempt=Attempt(owner=lease.owner, epoch=0, number=0),
        work=dump_work(work),
        runtime_env=await sent(backend, lease),
        schedule=schedule(),
        poll_s=0.5,
    )
    lines: list[str] = []
    result = await run_job(backend, lease, request, emit=lines.append, say=lines.append)
    [host] = result["hosts"]
    assert "/py_modules_files/" in host["value"]["file"]
    assert any("asked on a host" in line for line in lines)


async def test_an_application_brings_it_to_its_replicas(backend, lease):
    request = ServeRequest(
        name="where",
        app="where:app",
        route_prefix="/where",
        runtime_env=await sent(backend, lease),
        schedule=schedule(),
    )
    await run_serve(backend, lease, request, say=print)

    def ask() -> Any:
        with serve_client(str(lease.ray.serve_address)) as client:
            return client.post("/where", json={}).raise_for_status().json()

    assert "/py_modules_files/" in (await asyncio.to_thread(ask))["file"]
