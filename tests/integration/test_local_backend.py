"""The local backend with real Ray: labelled in time, adopted, broken, repaired, released without a trace."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import httpx
import psutil
import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.local import LocalBackend, addresses, faults, processes
from raytpu_ops.ray.states import JobStatus, JobSubmission, RayNode
from raytpu_ops.tpu import capacity
from raytpu_ops.tpu.errors import CapacityUnavailable
from raytpu_ops.tpu.spec import SliceSpec
from tests.integration.local_fixtures import (
    Leased,
    acquire,
    leased,
    observe,
    owner_of,
    private_root,
    wait_for_report,
    wait_until_ready,
)
from tests.killing import killed

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

log = logging.getLogger(__name__)

ONE_HOST = SliceSpec.of("v4", "2x2x1")
TWO_HOSTS = SliceSpec.of("v4", "2x2x2")


def nodes_of(made: Leased) -> list[RayNode]:
    async def run() -> list[RayNode]:
        async with made.backend.ray(made.lease) as ray:
            return await ray.nodes()

    return asyncio.run(run())


# --- leases of their own, before the module's is started


def test_killed_while_acquiring_then_again_there_is_one_cluster() -> None:
    """Killed once before anything ran and once right after everything was started, then acquired twice."""
    with private_root() as root:
        backend, owner = LocalBackend(root), owner_of("killed")
        plan = Plan(backend="local", spec=ONE_HOST, ladder=capacity.ladder(), lease_for=timedelta(hours=1))
        for steps in (3, 2):  # the record is written; the launch is planned, and launched
            killed(backend._cluster, plan, owner, steps=steps)
        lease = acquire(backend, owner, ONE_HOST)
        assert acquire(backend, owner, ONE_HOST) == lease
        try:
            wait_until_ready(backend, lease)
            nodes = nodes_of(Leased(backend, lease, 0))
            assert len(nodes) == 2
            assert all(node.alive for node in nodes)
            starts = [m for m in processes.marked(root) if "ray.scripts.scripts" in m.process.cmdline()]
            assert len(starts) == 2
        finally:
            assert asyncio.run(backend.release(lease)).left == []


def test_a_duplicate_worker_id_is_reported_with_both_hosts() -> None:
    with private_root() as root:
        faults.duplicate_worker_id(0, 1, root=root)
        backend = LocalBackend(root)
        lease = acquire(backend, owner_of("twins"), TWO_HOSTS)
        try:
            report = wait_for_report(backend, lease, "worker id 0 is claimed by")
            assert not report.ready
            for host in lease.created["host"]:
                assert host.partition(" at ")[2] in report.describe()
            again = asyncio.run(backend.repair(lease))
            assert again == lease, "a wrong label is not a broken slice: nothing is replaced by itself"
        finally:
            assert asyncio.run(backend.release(lease)).left == []


def test_no_capacity_leaves_nothing_and_the_next_try_is_granted() -> None:
    with private_root() as root:
        backend = LocalBackend(root)
        faults.no_capacity(root=root)
        with pytest.raises(CapacityUnavailable, match="no capacity"):
            acquire(backend, owner_of("stockout"), ONE_HOST)
        assert processes.marked(root) == []
        assert not root.exists()
        lease = acquire(backend, owner_of("stockout"), ONE_HOST)
        assert asyncio.run(backend.release(lease)).left == []  # half started: as complete as any other release


def test_hosts_that_share_one_address_start_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, where 127.0.0.1 is the only loopback address."""
    monkeypatch.setattr(addresses, "has_blocks", lambda: False)
    with private_root() as root, leased(root, "one-address", TWO_HOSTS) as made:
        log.info("head and 2 hosts one after another: %.1f s", made.seconds)
        nodes = nodes_of(made)
        assert len({node.address for node in nodes}) == 1
        assert sorted(node.worker_id for node in nodes if not node.is_head) == [0, 1]


# --- the module's lease: two slices of two hosts


def test_two_slices_are_whole_with_rays_own_labels(local_slices: Leased) -> None:
    log.info("head and 4 labelled hosts: %.1f s", local_slices.seconds)
    print(f"head and 4 labelled hosts: {local_slices.seconds:.1f} s")
    hosts = [node for node in nodes_of(local_slices) if not node.is_head]
    assert sorted((node.slice_name, node.worker_id) for node in hosts) == [
        (name, worker) for name in local_slices.lease.created["slice"] for worker in (0, 1)
    ]
    for node in hosts:
        assert node.chips == 4
        assert node.labels["ray.io/accelerator-type"] == "TPU-V4"
        assert node.labels["ray.io/tpu-pod-type"] == "v4-16"
        assert ("TPU-v4-16-head" in node.resources) == (node.worker_id == 0)
    report = observe(local_slices.backend, local_slices.lease)
    assert report.ready
    assert all(item.free for item in report.slices)


def test_every_process_below_a_host_carries_the_leases_marks(local_slices: Leased) -> None:
    root = local_slices.backend.root.path
    members = processes.marked(root)
    family = processes.with_descendants(member.process for member in members)
    assert {process.pid for process in family} - {member.process.pid for member in members} == set()
    assert len(members) > 20  # one head and four hosts, each with Ray's raylet, agents and monitors


def test_whoever_has_no_token_is_turned_away(local_slices: Leased) -> None:
    answer = httpx.get(f"{local_slices.lease.ray.address}/api/v0/nodes", timeout=30)
    assert answer.status_code in (401, 403)


def test_only_rays_token_guarded_ports_listen_beyond_loopback(local_slices: Leased) -> None:
    """Ray binds its gRPC servers to all interfaces unless a node is 127.0.0.1; nothing else may be there."""
    grpc = {"gcs_server", "raylet"}
    open_ports = []
    for member in processes.marked(local_slices.backend.root.path):
        for connection in member.process.net_connections("tcp"):
            outside = connection.status == psutil.CONN_LISTEN and connection.laddr.ip in ("0.0.0.0", "::")
            if outside and member.process.name() not in grpc:
                open_ports.append((member.process, connection.laddr.port))
    for process, port in open_ports:
        log.info("%s listens on port %s", process, port)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):  # gRPC, which speaks HTTP/2 alone
            httpx.get(f"http://127.0.0.1:{port}/", timeout=30)


def test_rays_own_ports_turn_away_whoever_has_no_token(local_slices: Leased) -> None:
    record = local_slices.backend._cluster.read(local_slices.lease.id)
    assert record is not None
    ask = f"""
import ray
from ray._raylet import GcsClient
try:
    print("let in", GcsClient(address="{record.head_address}:{record.gcs_port}").get_all_node_info(timeout=20))
except ray.exceptions.AuthenticationError:
    print("turned away")
"""
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "turned away"


def test_a_job_finds_python_the_package_and_no_secret(local_slices: Leased, monkeypatch: pytest.MonkeyPatch) -> None:
    check = "import os, json, raytpu_ops.tpu.work; print(json.dumps(dict(os.environ)))"
    submission = JobSubmission(submission_id="look-around", entrypoint=f"python -c '{check}'")

    async def run() -> tuple[JobStatus, str]:
        async with local_slices.backend.ray(local_slices.lease) as ray:
            await ray.submit_job(submission)
            while not (job := await ray.job("look-around")) or not job.status.is_terminal:  # noqa: ASYNC110 - remote
                await asyncio.sleep(0.5)
            return job.status, await ray.job_logs("look-around")

    status, output = asyncio.run(run())
    assert status is JobStatus.SUCCEEDED, output
    env = json.loads(output.strip().splitlines()[-1])
    assert env["JAX_PLATFORMS"] == "cpu"
    assert env[processes.MARK_LEASE] == local_slices.lease.id
    assert not [name for name in env if name.startswith("AIRFLOW")]


def test_a_dead_host_breaks_its_slice_and_a_repair_replaces_it_whole(local_slices: Leased) -> None:
    backend, lease = local_slices.backend, local_slices.lease
    struck = faults.kill_host(lease, 1, 1)
    report = observe(backend, lease)
    assert report.broken == [lease.created["slice"][1]]
    assert struck[0].partition(" at ")[2] in report.describe()
    begun = time.monotonic()
    repaired = asyncio.run(backend.repair(lease))
    assert repaired.created["slice"] == [lease.created["slice"][0], f"{lease.created['slice'][1]}-r1"]
    wait_until_ready(backend, repaired)
    log.info("a slice of 2 hosts repaired: %.1f s", time.monotonic() - begun)
    print(f"a slice of 2 hosts repaired: {time.monotonic() - begun:.1f} s")
    alive = {node.slice_name for node in nodes_of(local_slices) if node.alive and not node.is_head}
    assert alive == set(repaired.created["slice"])
    assert asyncio.run(backend.find(lease.owner)) == repaired


def test_a_preempted_slice_is_named_and_a_dead_head_is_fatal(local_slices: Leased) -> None:
    backend = local_slices.backend
    lease = asyncio.run(backend.find(local_slices.lease.owner))
    assert lease is not None
    faults.preempt_slice(lease, 0)
    assert observe(backend, lease).broken == [lease.created["slice"][0]]
    head = backend._cluster.read(lease.id)
    assert head is not None
    backend._cluster.kill(head, ["h"])
    fatal = observe(backend, lease).fatal
    assert fatal is not None
    assert "provision again" in fatal


def test_release_leaves_no_process_port_or_folder(local_slices: Leased) -> None:
    """Of a lease in the worst state: head and slice dead, orphans about. The fixture releases it a second time."""
    backend, lease = local_slices.backend, local_slices.lease
    pids = [member.process for member in processes.marked(backend.root.path)]
    begun = time.monotonic()
    released = asyncio.run(backend.release(lease))
    took = time.monotonic() - begun
    print(f"released: {took:.1f} s")
    assert released.left == []
    assert processes.marked(backend.root.path) == []
    assert not [process for process in pids if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not Path(lease.place["folder"]).exists()
    block = lease.created["head"][0].rpartition(".")[0] + "."
    held = [
        c.laddr
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.ip.startswith(block)
    ]
    assert held == []
    assert asyncio.run(backend.list_leases()) == []
