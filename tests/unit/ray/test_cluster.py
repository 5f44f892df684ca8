"""Claims of cluster.py: nodes as Ray shows them, and who holds chips, named."""

from __future__ import annotations

import pytest

from raytpu_ops.ray.states import ChipUsage, RayNode
from raytpu_ops.tpu.errors import RemoteUnavailable
from tests.unit.ray.fake_ray import HEAD, FakeJob, node_row, status


def group(name: str, *bundles: tuple[str, dict[str, float]], state: str = "CREATED", job: str = "job-of-a-1"):
    return {
        "placement_group_id": "8f41baf96c1bf32849549aeb513902000000",
        "name": name,
        "creator_job_id": job,
        "state": state,
        "bundles": [{"node_id": node, "unit_resources": resources} for node, resources in bundles],
    }


async def test_version_and_session(client):
    version = await client.version()
    assert (version.ray_version, version.session_name) == ("2.60.0", "session_1")


async def test_another_server_is_not_taken_for_ray(ray, client):
    ray.fails("GET /api/version", *[status(200, '{"version": "nginx"}')] * 9)
    with pytest.raises(RemoteUnavailable, match="no Ray dashboard"):
        await client.version()


async def test_nodes_with_labels_and_chips_the_dead_too(ray, client):
    ray.rows["nodes"] = [
        node_row(HEAD, "127.0.0.1", head=True),
        node_row("b" * 56, "127.0.0.2", slice_name="s-0", worker_id=1, chips=4),
        node_row("c" * 56, "127.0.0.3", slice_name="s-0", worker_id=0, chips=4, state="DEAD"),
    ]
    head, host, dead = await client.nodes()
    assert (head.is_head, head.alive, head.chips, head.slice_name, head.worker_id) == (True, True, 0, None, None)
    assert (host.slice_name, host.worker_id, host.chips, host.address) == ("s-0", 1, 4, "127.0.0.2")
    assert (dead.alive, dead.state_message) == (False, "the host went away")


async def test_a_cluster_of_more_than_a_hundred_nodes_is_seen_whole(ray, client):
    """Ray's list API answers 100 rows unless asked for more."""
    ray.rows["nodes"] = [node_row(f"{number:056}", f"10.0.{number // 250}.{number % 250}") for number in range(1600)]
    assert len(await client.nodes()) == 1600


@pytest.mark.parametrize("word", ["", "x", "-1", "1.0", "²", "١"])
def test_a_worker_id_that_is_no_number_is_none(word):
    assert RayNode("n", "a", True, labels={"ray.io/tpu-worker-id": word}).worker_id is None


@pytest.mark.parametrize(
    "text",
    ['{"result": false, "msg": "GCS is down", "data": {}}', "[]", '{"data": {"result": {"result": [1]}}}'],
)
async def test_rows_that_are_none_are_transient(ray, client, text):
    ray.fails("GET /api/v0/nodes", *[status(200, text)] * 9)
    with pytest.raises(RemoteUnavailable, match="no rows in the answer"):
        await client.nodes()


async def test_a_placement_group_is_named_with_its_job(ray, client):
    ray.jobs["a-1"] = FakeJob()
    ray.rows["placement_groups"] = [group("train", ("n1", {"TPU": 4.0, "CPU": 1}), ("n2", {"TPU": 4.0}))]
    held = await client.holders()
    assert [(one.node_id, one.chips, one.who, one.job) for one in held] == [
        ("n1", 4.0, "placement group train of job a-1", "a-1"),
        ("n2", 4.0, "placement group train of job a-1", "a-1"),
    ]


async def test_a_group_that_waits_or_is_gone_holds_nothing(ray, client):
    ray.rows["placement_groups"] = [
        group("waits", ("", {"TPU": 4.0}), state="PENDING"),
        group("gone", ("n1", {"TPU": 4.0}), state="REMOVED"),
        group("moves", ("n1", {"TPU": 4.0}), ("", {"TPU": 4.0}), state="RESCHEDULING"),
        group("no chips", ("n1", {"CPU": 4.0})),
    ]
    assert [(one.node_id, one.who.split(" of")[0]) for one in await client.holders()] == [
        ("n1", "placement group moves")
    ]


async def test_a_dropped_handle_that_still_reserves_a_slice_is_named(ray, client):
    """slice_placement_group holds the head resource until it is shut down (ray#63101)."""
    ray.rows["placement_groups"] = [group("", ("n1", {"TPU-v4-16-head": 1.0}), job="02000000")]
    (held,) = await client.holders()
    assert (held.chips, held.job) == (0.0, None)
    assert held.who == "placement group 8f41baf96c1b (no name) of Ray job 02000000 (reserves the slice)"


async def test_actors_and_tasks_outside_of_groups_are_named(ray, client):
    ray.jobs["a-1"] = FakeJob()
    actor = {"class_name": "Trainer", "name": "t", "pid": 7, "state": "ALIVE", "job_id": "job-of-a-1", "node_id": "n1"}
    task = {"name": "step", "worker_pid": 8, "state": "RUNNING", "job_id": "job-of-a-1", "node_id": "n2"}
    chips = {"required_resources": {"TPU": 2.0}}
    ray.rows["actors"] = [
        actor | chips,
        actor | chips | {"state": "DEAD"},
        actor | chips | {"placement_group_id": "x"},
        actor | {"required_resources": {}},
    ]
    ray.rows["tasks"] = [
        task | chips,
        task | chips | {"state": "FINISHED"},
        task | chips | {"placement_group_id": "x"},
        task | chips | {"actor_id": "y"},
    ]
    assert [(one.node_id, one.chips, one.who) for one in await client.holders()] == [
        ("n1", 2.0, "actor Trainer 't' (pid 7) of job a-1"),
        ("n2", 2.0, "task step (pid 8) of job a-1"),
    ]


async def test_usage_is_by_node_and_only_of_chips(ray, client):
    ray.usage = {"n1": {"TPU": [3.0, 4.0], "CPU": [0.0, 1.0]}, "n2": {"CPU": [0.0, 1.0]}}
    assert await client.usage() == {"n1": ChipUsage(3.0, 4.0)}


async def test_usage_is_empty_where_no_monitor_runs(client):
    assert await client.usage() == {}
