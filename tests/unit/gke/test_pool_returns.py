"""Leases with node pools of their own: given back, found again, mended."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from google.cloud.container_v1 import NodePool

from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.flows.leases import take_back
from raytpu_ops.hooks.kubernetes import found_again
from raytpu_ops.tpu.capacity import FlexStart
from raytpu_ops.tpu.errors import CapacityUnavailable
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.naming import node_pool_name
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake.fake import CLUSTER, ZONE
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import AWAY, PODS, RAY_CLUSTERS, SECRETS, FakeKube
from tests.unit.gke.pool_world import LEASE_ID, POOLS, World


@pytest.fixture
async def lease(world: World) -> SliceLease:
    world.google.container.at_once = 5
    return await world.granted()


def path(name: str) -> str:
    return f"{CLUSTER}/nodePools/{name}"


# Given back


async def test_pods_are_told_to_go_and_pools_in_the_same_round(world: World, lease: SliceLease):
    released = await world.backend().release(lease)

    assert released.removed[0] == f"RayCluster ml/{LEASE_ID}"
    assert released.removed[-2:] == [f"node pool {name}" for name in POOLS]
    assert f"node pool {POOLS[0]} was told to go" in released.left
    assert {pool.status.name for pool in world.pools.values()} == {"STOPPING"}


async def test_a_pool_is_gone_when_google_says_not_found_and_not_before(world: World, lease: SliceLease):
    await world.released(lease)

    assert world.left == {}
    looked = [call for call in world.google.calls if call.method == "GetNodePool"]
    assert [call.status for call in looked[-2:]] == ["NOT_FOUND", "NOT_FOUND"]
    assert len(world.asked("DeleteNodePool")) == 2


async def test_what_a_list_leaves_out_is_looked_at_by_its_name(world: World, lease: SliceLease):
    """F07: and an answer that is none is not absence."""
    for name in POOLS:
        world.google.container.vanish(path(name))
    world.google.faults.internal("GetNodePool")

    released = await world.backend().release(lease)

    assert any(f"get node pool {POOLS[0]}: Internal error" in line for line in released.left)
    assert (await world.released(lease)) is not None


@pytest.mark.parametrize("call", ["get rayclusters", "list pods", ""])
async def test_money_is_in_the_pools_so_they_go_where_kubernetes_does_not_answer(
    world: World, lease: SliceLease, call: str
):
    world.kube.fails(call, AWAY, always=True)

    released = await world.backend().release(lease)

    assert {pool.status.name for pool in world.pools.values()} == {"STOPPING"}
    assert any("apiserver is shutting down" in line for line in released.left)


async def test_they_go_where_there_is_no_way_to_kubernetes_any_more(world: World, lease: SliceLease, tmp_path: Path):
    world.access = KubeconfigAccess(str(tmp_path / "none"))

    released = await world.backend().release(lease)

    assert {pool.status.name for pool in world.pools.values()} == {"STOPPING"}
    assert any("is no file on this machine" in line for line in released.left)


async def test_pods_go_where_google_does_not_answer(world: World, lease: SliceLease):
    world.google.faults.unavailable("container.*", times=None)

    released = await world.backend().release(lease)

    assert any("The service is currently unavailable" in line for line in released.left)
    assert world.record(lease.id)["metadata"]["deletionTimestamp"]


async def test_one_pool_that_cannot_be_deleted_does_not_keep_the_other(world: World, lease: SliceLease):
    world.google.faults.inject(
        "DeleteNodePool", "PERMISSION_DENIED", times=None, when=lambda call: call.resource.endswith(POOLS[0])
    )

    released = await world.backend().release(lease)

    assert any(f"delete node pool {POOLS[0]}" in line for line in released.left)
    assert world.pools[POOLS[1]].status.name == "STOPPING"


async def test_a_busy_cluster_is_told_by_the_operation_that_it_works_on(world: World, lease: SliceLease):
    """F04."""
    world.google.container.at_once = 1
    busy = world.google.container.occupy(CLUSTER, 60)

    released = await world.backend().release(lease)

    assert f"node pool {POOLS[0]} is RUNNING, and Google works on {busy} first" in released.left
    await world.released(lease)
    assert world.left == {}


async def test_a_policy_that_may_not_be_deleted_is_named_and_keeps_its_lease_in_sight(world: World):
    """F07, F32."""
    backend = world.backend()
    lease = await backend.acquire(await world.plan(backend, spec=SliceSpec.of("7x", "2x2x2")), ME)
    world.google.deny("compute.resourcePolicies.delete")
    while world.pools:
        await world.backend().release(lease)
        await world.sleep(10)

    left = (await world.backend().release(lease)).left

    assert any(f"delete workload policy {LEASE_ID}: " in line for line in left)
    assert list(world.left) == ["policies", "rayclusters"]
    world.google.allow()
    [found] = await world.backend().list_leases()
    await world.released(found)
    assert world.left == {}


async def test_strangers_pools_stay(world: World, lease: SliceLease):
    """F03."""
    world.google.container.vanish(path(POOLS[0]))
    world.google.container.put(CLUSTER, NodePool(name=POOLS[0], config={"labels": {"team": "b"}}))

    await world.released(lease)

    assert world.left == {"pools": [POOLS[0]]}


async def test_a_later_task_finds_the_pools_with_what_the_lease_says_alone(world: World, lease: SliceLease):
    told = found_again({}, lease.place)
    assert told["node_pools"] == f'{{"cluster":"{CLUSTER}"}}'

    assert (await world.backend(node_pools={}).find(ME)) == lease
    assert lease.place["zone"] == ZONE


# Found


async def test_a_lease_whose_raycluster_is_gone_is_found_by_its_pools(world: World, lease: SliceLease):
    """F09's sibling: pools that bill are taken by the reaper."""
    world.kube.forget(RAY_CLUSTERS, LEASE_ID)
    world.kube.forget(SECRETS, LEASE_ID)

    backend = world.backend()
    [found] = await backend.list_leases()
    assert (found.id, found.owner, found.spec) == (lease.id, ME, lease.spec)
    assert [one.id for one in await backend.list_leases(dag_id="digits")] == [lease.id]
    assert await backend.list_leases(dag_id="another") == []
    assert await backend.find(ME) == found
    assert await take_back(backend, ME)
    await world.released(found)
    assert world.left == {}


async def test_a_lease_that_is_seen_in_both_places_counts_once(world: World, lease: SliceLease):
    assert await world.backend().list_leases() == [lease]


async def test_a_record_that_somebody_copied_to_a_pool_of_their_own_is_no_lease(world: World, lease: SliceLease):
    copied = NodePool(name="copy", config={"metadata": dict(world.pools[POOLS[0]].config.metadata)})
    await world.released(lease)
    world.google.container.put(CLUSTER, copied)

    assert await world.backend().list_leases() == []


async def test_a_lease_that_was_left_half_made_expires_like_others(world: World):
    world.google.container.delays.create = 1e7
    backend = world.backend()

    def dies() -> None:
        raise KeyboardInterrupt

    world.meanwhile = dies
    with pytest.raises(KeyboardInterrupt):
        await backend.acquire(await world.plan(backend), ME)
    world.meanwhile = lambda: None

    [found] = await world.backend().list_leases()
    assert found.expires_at < world.now + timedelta(hours=13)


# Seen and mended


def broken(world: World, name: str, how: str) -> None:
    """A pool is lost, and with it the pods on its hosts."""
    if how == "gone":
        world.google.container.vanish(path(name))
    else:
        world.pools[name].status = NodePool.Status[how]
        world.pools[name].status_message = "it broke"
    lose_a_slice(world.kube)


def lose_a_slice(kube: FakeKube) -> None:
    """KubeRay has made the pods of slice 1 anew, and they wait."""
    for name, pod in list(kube.all(PODS).items()):
        if "slice-1" in name:
            pod["status"]["conditions"] = [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
            ]
            pod["status"]["phase"] = "Pending"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("gone", f"node pool {POOLS[1]} is gone"),
        ("ERROR", f"node pool {POOLS[1]} is ERROR: it broke"),
        ("STOPPING", f"node pool {POOLS[1]} is STOPPING: it broke"),
    ],
)
async def test_a_pool_that_is_lost_shows_in_words_and_breaks_one_slice(
    world: World, lease: SliceLease, how: str, said: str
):
    broken(world, POOLS[1], how)

    report = await world.backend().observe(lease)

    assert len(report.broken) == 1
    assert said in report.describe()


async def test_google_is_asked_only_while_something_is_missing_and_not_at_every_look(world: World, lease: SliceLease):
    backend = world.backend()
    lose_a_slice(world.kube)
    for _ in range(5):
        await backend.observe(lease)
    assert len(world.asked("ListNodePools")) == 1

    world.google.advance(11)
    await backend.observe(lease)
    assert len(world.asked("ListNodePools")) == 2


async def test_a_google_that_does_not_answer_takes_nothing_from_the_report(world: World, lease: SliceLease):
    """F07."""
    lose_a_slice(world.kube)
    world.google.faults.unavailable("container.*")

    report = await world.backend().observe(lease)

    assert report.broken == []
    assert "its node pools can't be seen: Google, list node pools" in report.describe()
    assert len(report.slices) == 2


@pytest.mark.parametrize("how", ["gone", "ERROR"])
async def test_a_lost_pool_is_deleted_and_then_made_anew_under_another_name(world: World, lease: SliceLease, how: str):
    """F12."""
    broken(world, POOLS[1], how)
    again = node_pool_name(ME, 1, 1)

    mended = await world.backend().repair(lease)

    assert mended.created["node pool"] == [POOLS[0], again]
    assert {name: pool.status.name for name, pool in world.pools.items()} == {POOLS[0]: "RUNNING", again: "RUNNING"}
    assert world.asked("DeleteNodePool", "CreateNodePool") == [
        *([] if how == "gone" else [f"DeleteNodePool {POOLS[1]}"]),
        f"CreateNodePool {again}",
    ]
    assert world.pools[again].config.labels[OWNER] == ME.digest
    assert await world.backend().find(ME) == mended
    await world.released(lease)  # by a task that only knows the lease as it was
    assert world.left == {}


async def test_a_pool_is_replaced_again_and_again_under_new_names(world: World, lease: SliceLease):
    for number in range(1, 4):
        name = node_pool_name(ME, 0, number - 1)
        broken(world, name, "gone")
        lease = await world.backend().repair(lease)
        assert lease.created["node pool"][0] == node_pool_name(ME, 0, number)


async def test_other_options_than_those_that_made_it_do_not_touch_the_pools_that_run(world: World, lease: SliceLease):
    """A connection that was changed meanwhile."""
    broken(world, POOLS[1], "gone")

    await world.backend(node_pools={"disk_size_gb": 500}).repair(lease)

    assert world.asked("DeleteNodePool") == []
    assert POOLS[0] in world.pools


async def test_a_replacement_that_can_not_be_had_says_so(world: World, lease: SliceLease):
    broken(world, POOLS[1], "gone")
    world.google.faults.stockout()

    with pytest.raises(CapacityUnavailable, match="does not have enough resources"):
        await world.backend().repair(lease)

    await world.released(lease)
    assert world.left == {}


async def test_a_mend_that_was_killed_is_finished_by_the_next(world: World, lease: SliceLease):
    broken(world, POOLS[1], "ERROR")

    def dies() -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        world.meanwhile = dies
        with pytest.raises(KeyboardInterrupt):
            await world.backend().repair(lease)
    world.meanwhile = lambda: None
    for _ in range(8):
        await world.sleep(30)
        lease = await world.backend().repair(lease)

    running = [name for name, pool in world.pools.items() if pool.status.name == "RUNNING"]
    assert sorted(running) == sorted(lease.created["node pool"]) == sorted(world.pools)


async def test_a_lease_with_nothing_lost_is_not_mended_at_google(world: World, lease: SliceLease):
    lose_a_slice(world.kube)
    assert await world.backend().repair(lease) == lease
    assert world.asked("CreateNodePool", "DeleteNodePool") == []


async def test_flex_start_pools_that_have_no_nodes_yet_are_not_lost(world: World):
    lease = await world.granted(FlexStart(3600))
    lose_a_slice(world.kube)
    report = await world.backend().observe(lease)
    assert report.broken == []


def secrets_in(value: Any) -> bool:
    return "ya29" in str(value)


async def test_no_token_is_in_lease_log_labels_or_record(world: World, lease: SliceLease):
    pools = [str(pool) for pool in world.pools.values()]
    assert not any(secrets_in(one) for one in [lease.to_xcom(), world.said, pools, world.record(lease.id)])


@pytest.mark.parametrize("reuse", [False, True])
async def test_a_backend_that_makes_no_pools_gives_those_of_a_lease_back(world: World, lease: SliceLease, reuse: bool):
    """A reaper, or a person with a kubeconfig, whose connection says nothing of node pools, or names some by now."""
    other = world.backend(node_pools={"reuse": ["team-1", "team-2"]}) if reuse else world.plain_backend()
    [found] = await other.list_leases()
    assert found.created == lease.created

    while (await other.release(found)).left:
        await world.sleep(10)

    assert world.left == {}


@pytest.mark.parametrize("names", [{"workload_policy": "ours"}, {"cluster": f"{CLUSTER}-2"}], ids=["policy", "cluster"])
async def test_what_the_reapers_connection_says_of_node_pools_is_none_of_the_leases(
    world: World, names: dict[str, Any]
):
    """F09: it knows where the lease's pools are, and that a workload policy was made for them."""
    world.google.add_cluster(f"{CLUSTER}-2")
    backend = world.backend()
    lease = await backend.acquire(await world.plan(backend, spec=SliceSpec.of("7x", "2x2x2")), ME)
    reaper = world.backend(node_pools=names)
    [found] = await reaper.list_leases()
    assert found.place == lease.place

    for _ in range(100):
        if not (await reaper.release(found)).left:
            break
        await world.sleep(10)

    assert world.left == {}
    assert world.google.node_pools() == {}


async def test_where_nobody_may_look_the_leases_pools_are_deleted_by_name(world: World, lease: SliceLease):
    """F32: and the RayCluster stays until somebody has seen that they are gone."""
    world.google.deny("container.clusters.get")

    released = await world.backend().release(lease)
    assert f"node pool {POOLS[1]} was told to go if it is there, and can't be looked at" in released.left
    assert any("list node pools of cluster tpus: Required" in line for line in released.left)
    await world.sleep(200)
    await world.backend().release(lease)
    assert list(world.left) == ["rayclusters", "secrets"]

    world.google.allow()
    await world.released(lease)
    assert world.left == {}


async def test_a_release_that_did_not_end_is_found_and_finished_by_who_knows_nothing_of_node_pools(world: World):
    """F09: the reaper's connection need not say what a DAG said."""
    lease = await world.granted()
    for _ in range(3):  # and then its worker dies
        await world.backend().release(lease)
        world.kube.settle()
    assert world.pools

    [found] = await world.plain_backend().list_leases()
    assert found.id == lease.id
    for _ in range(100):
        if not (await world.plain_backend().release(found)).left:
            break
        await world.sleep(10)
    assert world.left == {}
