"""The local backend with real Ray: acquired through every mishap, labelled, closed to strangers."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import httpx
import psutil
import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.local import LocalBackend, addresses, faults, processes
from raytpu_ops.ray.states import JobStatus, JobSubmission
from raytpu_ops.tpu import capacity
from raytpu_ops.tpu.errors import CapacityUnavailable
from raytpu_ops.tpu.spec import SliceSpec
from tests.integration.local_fixtures import (
    Leased,
    Standing,
    acquire,
    leased,
    nodes_of,
    observe,
    owner_of,
    private_root,
    wait_for_report,
)
from tests.killing import killed

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

log = logging.getLogger(__name__)

ONE_HOST = SliceSpec.of("v4", "2x2x1")
TWO_HOSTS = SliceSpec.of("v4", "2x2x2")


# --- leases of their own


@pytest.fixture(scope="module")
def survivor() -> Iterator[Leased]:
    """Killed once before anything ran and once right after everything was started, then acquired twice.

    One of its hosts shows the worker id of the other.
    """
    with private_root() as root:
        faults.duplicate_worker_id(0, 1, root=root)
        backend, owner = LocalBackend(root), owner_of("killed")
        plan = Plan(backend="local", spec=TWO_HOSTS, ladder=capacity.ladder(), lease_for=timedelta(hours=1))
        for steps in (3, 2):  # the record is written; the launch is planned, and launched
            killed(backend._cluster, plan, owner, steps=steps)
        lease = acquire(backend, owner, TWO_HOSTS)
        try:
            assert acquire(backend, owner, TWO_HOSTS) == lease
            yield Leased(backend, lease, 0)
        finally:
            assert asyncio.run(backend.release(lease)).left == []


def test_a_duplicate_worker_id_is_reported_with_both_hosts(survivor: Leased) -> None:
    backend, lease = survivor.backend, survivor.lease
    report = wait_for_report(backend, lease, "worker id 0 is claimed by")
    assert not report.ready
    for host in lease.created["host"]:
        assert host.partition(" at ")[2] in report.describe()
    again = asyncio.run(backend.repair(lease))
    assert again == lease, "a wrong label is not a broken slice: nothing is replaced by itself"


def test_killed_while_acquiring_then_again_there_is_one_cluster(survivor: Leased) -> None:
    wait_for_report(survivor.backend, survivor.lease, "worker id 0 is claimed by")  # so all are there
    nodes = nodes_of(survivor.backend, survivor.lease)
    assert len(nodes) == 3
    assert all(node.alive for node in nodes)
    starts = [m for m in processes.marked(survivor.backend.root.path) if "ray.scripts.scripts" in m.process.cmdline()]
    assert len(starts) == 3


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
        nodes = nodes_of(made.backend, made.lease)
        assert len({node.address for node in nodes}) == 1
        assert sorted(node.worker_id for node in nodes if not node.is_head) == [0, 1]


# --- the session's lease: two slices of two hosts, whole; what happens to it later is in test_runtime_losses.py


@pytest.fixture(scope="module")
def whole(two_slices: Standing) -> Standing:
    two_slices.whole()
    return two_slices


def test_two_slices_are_whole_with_rays_own_labels(whole: Standing) -> None:
    print(f"head and 4 labelled hosts: {whole.seconds:.1f} s")
    hosts = [node for node in nodes_of(whole.backend, whole.lease) if not node.is_head]
    assert sorted((node.slice_name, node.worker_id) for node in hosts) == [
        (name, worker) for name in whole.lease.created["slice"] for worker in (0, 1)
    ]
    for node in hosts:
        assert node.chips == 4
        assert node.labels["ray.io/accelerator-type"] == "TPU-V4"
        assert node.labels["ray.io/tpu-pod-type"] == "v4-16"
        assert ("TPU-v4-16-head" in node.resources) == (node.worker_id == 0)
    report = observe(whole.backend, whole.lease)
    assert report.ready
    assert all(item.free for item in report.slices)


def test_every_process_below_a_host_carries_the_leases_marks(whole: Standing) -> None:
    root = whole.backend.root.path
    members = processes.marked(root)
    family = processes.with_descendants(member.process for member in members)
    assert {process.pid for process in family} - {member.process.pid for member in members} == set()
    assert len(members) > 20  # one head and four hosts, each with Ray's raylet, agents and monitors


def test_whoever_has_no_token_is_turned_away(whole: Standing) -> None:
    answer = httpx.get(f"{whole.lease.ray.address}/api/v0/nodes", timeout=30)
    assert answer.status_code in (401, 403)


def test_only_rays_token_guarded_ports_listen_beyond_loopback(whole: Standing) -> None:
    """Ray binds its gRPC servers to all interfaces unless a node is 127.0.0.1; nothing else may be there."""
    grpc = {"gcs_server", "raylet"}
    open_ports = []
    for member in processes.marked(whole.backend.root.path):
        for connection in member.process.net_connections("tcp"):
            outside = connection.status == psutil.CONN_LISTEN and connection.laddr.ip in ("0.0.0.0", "::")
            if outside and member.process.name() not in grpc:
                open_ports.append((member.process, connection.laddr.port))
    for process, port in open_ports:
        log.info("%s listens on port %s", process, port)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):  # gRPC, which speaks HTTP/2 alone
            httpx.get(f"http://127.0.0.1:{port}/", timeout=30)


def test_rays_own_ports_turn_away_whoever_has_no_token(whole: Standing) -> None:
    record = whole.backend._cluster.read(whole.lease.id)
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


def test_a_job_finds_python_the_package_and_no_secret(whole: Standing) -> None:
    check = "import os, json, raytpu_ops.tpu.work; print(json.dumps(dict(os.environ)))"
    submission = JobSubmission(submission_id="look-around", entrypoint=f"python -c '{check}'")

    async def run() -> tuple[JobStatus, str]:
        async with whole.backend.ray(whole.lease) as ray:
            await ray.submit_job(submission)
            while not (job := await ray.job("look-around")) or not job.status.is_terminal:  # noqa: ASYNC110 - remote
                await asyncio.sleep(0.5)
            return job.status, await ray.job_logs("look-around")

    status, output = asyncio.run(run())
    assert status is JobStatus.SUCCEEDED, output
    env = json.loads(output.strip().splitlines()[-1])
    assert env["JAX_PLATFORMS"] == "cpu"
    assert env[processes.MARK_LEASE] == whole.lease.id
    assert not [name for name in env if name.startswith("AIRFLOW")]
