"""Nodes that Google grants late, and nodes that it takes back: which deadline counts, and as what its end does."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from raytpu_ops.flows.leases import wait_whole
from raytpu_ops.tpu.capacity import FlexStart, OnDemand, Spot
from raytpu_ops.tpu.deadlines import Phase, Schedule
from raytpu_ops.tpu.errors import CapacityUnavailable
from tests.google_fake.fake import CLUSTER
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import PODS
from tests.unit.gke.pool_queue import QUEUED, acquired
from tests.unit.gke.pool_world import LEASE_ID, POOLS, World
from tests.unit.gke.test_pool_returns import lose_a_slice

WITHIN = timedelta(minutes=50)
FLEX = FlexStart(timedelta(hours=3), within=WITHIN)
#: Both are granted so long after the climb began: pools come first, side by side.
GRANTED = timedelta(minutes=49)


def hosts(world: World) -> dict[str, Any]:
    """Pods of hosts, by name."""
    return {name: pod for name, pod in world.kube.all(PODS).items() if "host" in name}


def scheduled(pod: dict[str, Any], placed: bool, since: datetime) -> None:
    """What the scheduler says of a pod."""
    pod["status"]["conditions"] = [
        {
            "type": "PodScheduled",
            "status": "True" if placed else "False",
            "message": "" if placed else "0/3 nodes are available",
            "lastTransitionTime": f"{since:%Y-%m-%dT%H:%M:%SZ}",
        }
    ]


def late(world: World, first: Callable[[str], bool], rest_s: float) -> list[datetime]:
    """Google grants in the last minute; then the nodes of these hosts are there, and the others' so much later.

    :return: when it granted, once it has.
    """
    world.google.container.delays.scale_up = (GRANTED - timedelta(seconds=200)).total_seconds()
    granted: list[datetime] = []

    def goes_on() -> None:
        if world.nodes(LEASE_ID) and not granted:
            granted.append(world.now)
        for name, pod in hosts(world).items():
            is_late = not first(name)
            scheduled(pod, not is_late or (world.now - granted[0]).total_seconds() >= rest_s, granted[0])

    world.meanwhile = goes_on
    return granted


@pytest.mark.parametrize(
    ("rung", "first"),
    # A request says when it is granted; of flex-start nodes nobody says it, but the first of each slice that is there.
    [(QUEUED, "none"), (FLEX, "host-0")],
    ids=["queued", "flex"],
)
async def test_what_is_granted_in_the_last_minute_has_the_time_of_a_start_up(world: World, rung: Any, first: str):
    """F10."""
    began = world.now
    granted = late(world, lambda name: first in name, 180)

    lease = await acquired(world, [rung, OnDemand()])

    assert GRANTED - timedelta(minutes=1) < granted[0] - began < WITHIN
    assert world.now - began > WITHIN
    assert lease.capacity["kind"] == rung.kind
    assert lease.attempts == []
    assert len(world.google.container.made) == len(POOLS)


async def test_a_reaper_leaves_alone_what_comes_up_after_a_long_queue(world: World):
    backend = world.backend()
    plan = (await world.plan(backend, FLEX)).model_copy(update={"lease_for": timedelta(minutes=1)})
    began = world.now
    late(world, lambda name: "host-0" in name, 180)
    goes_on, expires = world.meanwhile, set()

    def looks() -> None:
        goes_on()
        record = world.record(LEASE_ID)["metadata"]["annotations"]["raytpu-lease"]
        expires.add(record.split('"expires_at":"')[1][:19])

    world.google.container.at_once = 5
    world.meanwhile = looks
    await backend.acquire(plan, ME)

    assert world.now - began > WITHIN + plan.lease_for
    assert min(expires) > f"{world.now:%Y-%m-%dT%H:%M:%S}"


@pytest.mark.parametrize("rung", [QUEUED, FLEX], ids=["queued", "flex"])
async def test_nodes_that_are_granted_and_never_come_end_the_rung_by_that_phase(world: World, rung: Any):
    began = world.now
    late(world, lambda name: rung is FLEX and "host-0" in name, 1e6)
    world.queue.booked = timedelta(days=1)

    lease = await acquired(world, [rung, OnDemand()], provisioning=timedelta(minutes=20))

    [tried] = lease.attempts
    assert "the provisioning deadline" in tried
    assert timedelta() <= world.now - began - GRANTED - timedelta(minutes=20) < timedelta(minutes=20)


async def test_a_slice_that_still_waits_for_google_is_not_granted(world: World):
    """Another one that is there does not give it more time."""
    began = world.now
    late(world, lambda name: "slice-0" in name, 180)

    lease = await acquired(world, [FLEX, OnDemand()])

    [tried] = lease.attempts
    assert "the queued deadline" in tried
    assert "2 of 4 hosts are there" in tried
    assert world.now - began > WITHIN


async def test_hosts_that_come_anew_again_and_again_put_the_deadline_off_no_more(world: World):
    """F10, F12: the first hosts of all slices are others at each look, for hours, and the rest never comes."""
    began = world.now
    granted = late(world, lambda name: "host-0" in name, 1e6)
    goes_on = world.meanwhile

    def anew() -> None:
        goes_on()
        if granted and world.now - granted[0] < timedelta(hours=3):
            for name, pod in hosts(world).items():
                if "host-0" in name:
                    scheduled(pod, True, world.now)

    world.meanwhile = anew
    lease = await acquired(world, [FLEX, OnDemand()], provisioning=timedelta(minutes=20))

    [tried] = lease.attempts
    assert "the provisioning deadline" in tried
    assert timedelta() <= world.now - began - GRANTED - timedelta(minutes=20) < timedelta(minutes=20)


# Nodes that are taken back


@pytest.mark.parametrize("rung", [Spot(), FLEX], ids=["spot", "flex"])
async def test_a_pool_that_was_emptied_is_waited_for_and_its_not_coming_back_is_a_lack_of_capacity(
    world: World, rung: Any
):
    """F12: GKE fills it again when it has chips. A retry that knows why comes more than once."""
    lease = await acquired(world, rung)
    pools = sorted(world.pools)
    world.google.container.preempt(f"{CLUSTER}/nodePools/{POOLS[1]}")
    lose_a_slice(world.kube)
    world.google.calls.clear()
    short = Schedule.start({"queued": 0.2, "provisioning": 0.2, "labelled": 0.2})

    with pytest.raises(CapacityUnavailable, match="waits for a node: 0/3 nodes; .*were taken back, and none came in"):
        await wait_whole(world.backend(), lease, schedule=short, say=world.said.append, poll_s=0.01)

    assert sorted(world.pools) == pools
    assert world.asked("DeleteNodePool", "CreateNodePool") == []
    for pod in hosts(world).values():
        scheduled(pod, True, world.now)
    report = await world.backend().observe(lease)
    assert not report.taken_back
    assert report.phase is Phase.LABELLED
