"""Chips are paid for from when node pools run: that pods will have no room is told before, where it can be told."""

from __future__ import annotations

from typing import Any

import pytest
from google.cloud.container_v1 import NodePool

from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured
from tests.google_fake.fake import CLUSTER, ZONE
from tests.unit.gke.pool_world import World


async def noted(world: World, **options: Any) -> list[str]:
    """Notes of a plan about the head."""
    return [note for note in (await world.plan(world.backend(**options))).notes if "head" in note]


def pool(name: str, machine_type: str = "e2-standard-4", *, nodes: int = 1, **more: Any) -> NodePool:
    config = {"machine_type": machine_type, **more.pop("config", {})}
    fields = {"status": "RUNNING", "locations": [ZONE], **more}
    return NodePool(name=name, config=config, initial_node_count=nodes, **fields)


def tainted(effect: str) -> dict[str, Any]:
    return {"taints": [{"key": "team", "value": "a", "effect": effect}]}


# Hosts


@pytest.mark.parametrize(
    "options",
    [
        {"host": {"cpu": "300", "memory": "32Gi"}},
        {"host_template": {"spec": {"containers": [{"name": "ray-worker", "resources": {"requests": {"cpu": 300}}}]}}},
        {
            "host_template": {
                "spec": {"containers": [{"name": "eats", "image": "i", "resources": {"limits": {"cpu": "292"}}}]}
            }
        },
    ],
    ids=["option", "template", "sidecar"],
)
async def test_hosts_that_ask_for_more_than_their_machine_has_are_refused(world: World, options: dict[str, Any]):
    with pytest.raises(
        Misconfigured, match=r"a host's pod asks for 300 CPUs, it has 240, .* ct4p-hightpu-4t has no room"
    ):
        await world.plan(world.backend(**options))


@pytest.mark.parametrize("amount", ["lots", "8GiB", ""])
async def test_what_is_no_amount_is_refused(world: World, amount: str):
    main = {"name": "ray-worker", "resources": {"requests": {"memory": amount}}}
    with pytest.raises(InvalidSpec, match=f"container 'ray-worker' asks for '{amount}': must be an amount"):
        await world.plan(world.backend(host_template={"spec": {"containers": [main]}}))


# The head


async def test_a_head_that_some_pool_has_room_for_is_no_matter_for_words(world: World):
    assert await noted(world) == []


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ([], "no node pool of the cluster has room for it. If nothing else brings a node"),
        ([pool("small", "e2-medium")], "small is of e2-medium: 2 CPUs, it has 2 and 8 GiB, it has 4 GiB. If"),
        ([pool("chips", "ct4p-hightpu-4t")], "chips has TPUs. If"),
        ([pool("kept", config=tainted("NO_SCHEDULE"))], "kept has the taint team. If"),
        ([pool("broken", status="ERROR"), pool("empty", nodes=0)], ": broken is ERROR; empty has no nodes. If"),
    ],
    ids=["none", "small", "TPUs", "tainted", "broken"],
)
async def test_a_head_that_no_pool_has_room_for_is_a_note(world: World, pools: list[NodePool], said: str):
    world.google.container.came_with = tuple(pools)

    [note] = await noted(world)

    assert note.startswith("the head asks for 2 CPUs and 8 GiB, and no node pool of the cluster has room for it")
    assert said in note


@pytest.mark.parametrize(
    "other",
    [
        pool("from-zero", nodes=0, autoscaling={"enabled": True, "max_node_count": 3}),
        pool("better-left-alone", config=tainted("PREFER_NO_SCHEDULE")),
        pool("of-a-size-that-google-does-not-tell", "x9-standard-4"),
    ],
    ids=lambda one: one.name,
)
async def test_one_pool_that_may_have_room_is_enough(world: World, other: NodePool):
    world.google.container.came_with = (pool("small", "e2-medium"), other)

    assert await noted(world) == []


async def test_where_gke_makes_pools_for_pods_it_makes_one_for_the_head(world: World):
    world.google.container.came_with = ()
    world.google.container.provisions_itself = True

    assert await noted(world) == []


async def test_a_head_of_the_users_own_places_is_not_judged(world: World):
    world.google.container.came_with = ()

    assert await noted(world, head_template={"spec": {"nodeSelector": {"team": "a"}}}) == []


async def test_a_smaller_head_fits_on_smaller_machines(world: World):
    world.google.container.came_with = (pool("small", "e2-medium"),)

    assert await noted(world, head={"cpu": "1", "memory": "2Gi"}) == []


async def test_what_can_not_be_looked_at_is_a_note(world: World):
    """F07: a Google that does not answer has not said that there is no such pool."""
    world.google.container.came_with = (pool("small", "e2-medium"),)
    world.google.faults.unavailable("GetCluster")

    [note] = await noted(world)

    assert note.startswith("whether there is a node for the head was not checked: Google, get cluster ")


async def test_pools_that_somebody_named_bring_no_such_note(world: World):
    """Nothing is made that would be paid for meanwhile."""
    world.google.container.came_with = ()
    placement = {"type_": "COMPACT", "tpu_topology": "2x2x2"}
    for name in ("team-1", "team-2"):
        config = {"machine_type": "ct4p-hightpu-4t", "labels": {"team": "a"}}
        theirs = NodePool(name=name, initial_node_count=2, config=config, placement_policy=placement)
        world.google.container.put(CLUSTER, theirs)

    assert await noted(world, node_pools={"reuse": ["team-1", "team-2"]}) == []
