"""Hosts die under what runs on them: under training, a served model, a function; in the end the head dies too.

What one test has broken is left to the next, because every repair starts hosts: each test says how many
whole slices it needs.
"""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from raytpu_ops.backends.local import faults, processes
from raytpu_ops.ray.states import ServeStatus
from raytpu_ops.tpu.errors import FailureClass
from raytpu_ops.tpu.work import FunctionWork, TrainWork
from tests.integration.local_fixtures import nodes_of, observe
from tests.integration.runtime_fixtures import BOTH, LIMIT_S, ONE, PATHS, Cluster, Trained, steps_in
from tests.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def counting(storage: Path, steps: int) -> TrainWork:
    return TrainWork.of(
        spec=ONE, train_loop="cases:count", config={"steps": steps}, storage=str(storage), run_name="counting"
    )


def test_a_host_that_dies_in_training_is_a_preemption_and_the_retry_resumes(cluster: Cluster, tmp_path: Path) -> None:
    """On the slice that is left, and from the last whole checkpoint, although a save was cut off."""
    cluster.standing.whole()
    victims: list[str] = []

    def strike(name: str) -> None:
        victims.extend(cluster.slices_of(name))
        cluster.kill(victims[0], 0)

    failure = cluster.run_until(counting(tmp_path, steps=100_000), "step 3", strike).failure
    (victim,) = victims
    assert failure.failure_class is FailureClass.PREEMPTED
    assert f"{victim} worker 0" in failure.message
    cluster.nothing_is_held()

    saved = max(int(step) for step in steps_in(tmp_path, "counting") if step.isdigit())
    torn = tmp_path / "counting" / "checkpoints" / f"{saved + 1}.orbax-checkpoint-tmp"
    (torn / "default.orbax-checkpoint-tmp").mkdir(parents=True, exist_ok=True)
    (torn / "default.orbax-checkpoint-tmp" / "_METADATA").write_text("half")
    result = cluster.run(counting(tmp_path, steps=saved + 2)).result
    assert result["resumed_from_step"] == saved
    assert [(entry["step"], entry["count"]) for entry in result["history"]] == [
        (saved + 1, saved + 1),
        (saved + 2, saved + 2),
    ]
    assert victim not in result["slices"]
    assert steps_in(tmp_path, "counting") == sorted([str(saved + 1), str(saved + 2)])


def test_a_dead_host_breaks_its_slice_and_a_repair_replaces_it_whole(cluster: Cluster) -> None:
    standing, backend = cluster.standing, cluster.standing.backend
    lease = standing.whole(1)
    slices: list[str] = lease.created["slice"]
    broken = (observe(backend, lease).broken or slices)[0]
    struck = faults.kill_host(lease, broken, 0)  # dead already, after the test before
    report = observe(backend, lease)
    assert report.broken == [broken]
    assert struck[0].partition(" at ")[2] in report.describe()
    repaired = asyncio.run(backend.repair(lease))
    changed = [(old, new) for old, new in zip(slices, repaired.created["slice"], strict=True) if old != new]
    [(old, fresh)] = changed
    assert old == broken
    assert re.fullmatch(re.escape(re.sub(r"-r\d+$", "", broken)) + r"-r\d+", fresh)
    eventually(lambda: observe(backend, repaired).ready, "the fresh slice is whole", limit_s=LIMIT_S)
    alive = {node.slice_name for node in nodes_of(backend, lease) if node.alive and not node.is_head}
    assert alive == set(repaired.created["slice"])
    assert asyncio.run(backend.find(lease.owner)) == repaired


class Served:
    """The digits behind HTTP."""

    def __init__(self, cluster: Cluster, checkpoint: str) -> None:
        address = cluster.standing.lease.ray.serve_address
        assert address is not None
        self.cluster = cluster
        self.url = f"{address}/digits"
        url = httpx.URL(address)
        config = {
            "name": "digits",
            "import_path": "raytpu_ops.runtime.serve:build",
            "route_prefix": "/digits",
            "args": {
                "app": "digits.serve:app",
                "args": {"checkpoint": checkpoint},
                "slice": BOTH.model_dump(mode="json"),
            },
            "runtime_env": {"env_vars": {"PYTHONPATH": PATHS}},
        }
        with cluster.client() as ray:
            ray.deploy(config, http_options={"host": url.host, "port": url.port}, proxy_location="HeadOnly")

    def running(self) -> bool:
        with self.cluster.client() as ray:
            application = ray.serve_applications().get("digits")
        assert application is None or application.status is not ServeStatus.DEPLOY_FAILED, application
        return application is not None and application.status is ServeStatus.RUNNING

    def ask(self, body: Any) -> httpx.Response:
        return httpx.post(self.url, json=body, timeout=LIMIT_S)

    def who(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(self.url, timeout=LIMIT_S).json()
        return answer


def test_a_model_is_served_from_all_hosts_of_a_slice_and_survives_one(trained: Trained, cluster: Cluster) -> None:
    from digits.data import held_out

    cluster.standing.whole()
    served = Served(cluster, trained.ended.result["checkpoint"])
    try:
        eventually(served.running, "the application runs", limit_s=LIMIT_S)
        who = served.who()
        assert [(host["slice"], host["worker_id"]) for host in who["hosts"]] == [(who["slice"], 0), (who["slice"], 1)]
        images, expected = held_out()
        found = served.ask({"images": images.tolist()}).json()["digits"]
        assert sum(a == b for a, b in zip(found, expected.tolist(), strict=True)) > 0.95 * len(expected)
        answers = ask_at_once(served, images.tolist(), 20)
        assert answers == found[:20], "concurrent questions reach every host in the same order"
        refused = served.ask({"images": [[1, 2]]})
        assert refused.status_code == 400
        assert "rows of 64 numbers" in refused.json()["error"]

        cluster.kill(who["slice"], 1)  # not the host that JAX's coordinator is on
        eventually(lambda: served.who()["slice"] != who["slice"], "another slice answers", limit_s=LIMIT_S)
        eventually(served.running, "the application runs again", limit_s=LIMIT_S)
        assert served.ask({"images": images.tolist()}).json()["digits"] == found
    finally:
        with cluster.client() as ray:
            ray.delete_application("digits")
    cluster.nothing_is_held()


def ask_at_once(served: Served, images: list[Any], count: int) -> list[int]:
    """Each image in a request of its own, all of them at once."""
    answers: dict[int, int] = {}

    def ask(number: int) -> None:
        answers[number] = served.ask({"images": [images[number]]}).json()["digits"][0]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(count)]


def test_a_host_that_dies_under_a_function_is_a_preemption(cluster: Cluster) -> None:
    cluster.standing.whole(1)
    victims: list[str] = []

    def strike(name: str) -> None:
        victims.extend(cluster.slices_of(name))
        cluster.kill(victims[0], 1)

    failure = cluster.run_until(FunctionWork.of(spec=ONE, function="cases:wait"), '"started"', strike).failure
    assert failure.failure_class is FailureClass.PREEMPTED
    assert f"{victims[0]} worker 1" in failure.message


# --- the end of the lease


def test_a_preempted_slice_is_named_and_with_a_dead_head_all_are_broken(cluster: Cluster) -> None:
    backend, lease = cluster.standing.backend, cluster.standing.whole(0)
    name = lease.created["slice"][0]
    struck = faults.preempt_slice(lease, 0)
    report = observe(backend, lease)
    assert name in report.broken
    assert [host for host in struck if host.partition(" at ")[2] not in report.describe()] == []
    assert [m for m in processes.marked(backend.root.path) if m.marks.get(processes.MARK_SLICE) == name] == []
    record = backend._cluster.read(lease.id)
    assert record is not None
    backend._cluster.kill(record, ["h"])
    report = observe(backend, lease)
    assert report.broken == lease.created["slice"]
    assert f"the Ray head at {record.head_address} is dead" in report.describe()


def test_release_leaves_no_process_port_or_folder(cluster: Cluster) -> None:
    """Of a lease in the worst state: head and slices dead, orphans about. The fixture releases it a second time."""
    backend, lease = cluster.standing.backend, cluster.standing.lease
    pids = [member.process for member in processes.marked(backend.root.path)]
    released = asyncio.run(backend.release(lease))
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
