"""A plan that says whose the lease will be looks for what has its names already, and makes nothing."""

from __future__ import annotations

from datetime import timedelta

import pytest
from google.cloud.container_v1 import NodePool

from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.tpu.capacity import OnDemand
from raytpu_ops.tpu.errors import Misconfigured
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake.fake import CLUSTER, PROJECT
from tests.unit.gke.conftest import ME
from tests.unit.gke.pool_world import LEASE_ID, POOLS, World
from tests.unit.gke.seen import SPEC


async def planned_for_me(world: World, spec: SliceSpec = SPEC) -> list[str]:
    """Names of a plan that says whose it is; nothing is made by it."""
    plan = await world.backend().plan(spec, [OnDemand()], lease_for=timedelta(hours=1), owner=ME)
    assert world.left.keys() <= {"pools", "policies"}
    return plan.names


async def test_a_strangers_pool_of_that_name_is_met_by_the_plan(world: World):
    """F03: by a DAG's author before the DAG runs. The owner's own pool is no stranger's."""
    world.google.container.put(CLUSTER, NodePool(name=POOLS[0], config={"labels": {OWNER: ME.digest}}))
    assert len(await planned_for_me(world)) == 2

    world.google.container.put(CLUSTER, NodePool(name=POOLS[1], config={"labels": {OWNER: "b" * 16}}))
    with pytest.raises(Misconfigured, match=f"node pool {POOLS[1]} exists and was not made for {ME.key}"):
        await planned_for_me(world)

    assert sorted(world.pools) == POOLS
    assert (await world.plan(world.backend())).names == []  # where nobody says whose it is, none is looked for


async def test_a_strangers_workload_policy_of_that_name_is_met_by_the_plan(world: World):
    """F03."""
    spec = SliceSpec.of("7x", "2x2x2")
    assert len(await planned_for_me(world, spec)) == 2

    world.google.compute.put_policy(LEASE_ID, "2x2x2", region="us-central2", project=PROJECT)
    with pytest.raises(Misconfigured, match=f"resource policy {LEASE_ID} in us-central2 exists and was not made for"):
        await planned_for_me(world, spec)


async def test_pools_that_can_not_be_listed_are_a_note_of_the_plan(world: World):
    """F07: nobody says that there is a stranger's."""
    world.google.faults.unavailable("ListNodePools")

    plan = await world.backend().plan(SPEC, [OnDemand()], lease_for=timedelta(hours=1), owner=ME)

    assert any(note.startswith("the cluster's node pools were not looked at: Google, list ") for note in plan.notes)
