"""Zones that lack what a rung asks for: the climb goes on in the others, and says so where none has it."""

from __future__ import annotations

import pytest

from raytpu_ops.tpu.capacity import Reservation, Spot
from raytpu_ops.tpu.errors import CapacityUnavailable, Misconfigured
from tests.google_fake.fake import PROJECT, ZONE
from tests.google_fake.refusals import Code, Refusal
from tests.unit.gke.pool_world import BOTH_ZONES, OTHER_ZONE, World, acquired

MACHINE = "ct4p-hightpu-4t"


async def test_a_reservation_is_found_in_the_zone_that_has_it(two_zones: World) -> None:
    """Reservations are zonal; the order of zones is the same for all rungs."""
    two_zones.google.compute.add_reservation("team-a", MACHINE, 4, zone=OTHER_ZONE, project=PROJECT)

    lease = await acquired(two_zones, [Reservation("team-a"), Spot()], node_pools=BOTH_ZONES)

    assert (lease.capacity["kind"], lease.place["zone"]) == ("reservation", OTHER_ZONE)
    [tried] = lease.attempts
    assert tried.startswith(f"reservation team-a in {ZONE}: ")
    assert "not found" in tried
    assert {pool.locations[0] for pool in two_zones.pools.values()} == {OTHER_ZONE}


def _without_the_machine(world: World, times: int | None) -> None:
    # keras-team/kinetic#305
    words = f'Invalid machine type "{MACHINE}" in zone "{ZONE}": GCE_NOT_FOUND'
    world.google.faults.inject("CreateNodePool", Refusal(Code.INVALID_ARGUMENT, words), times)


async def test_a_zone_without_the_machine_is_passed_over(two_zones: World) -> None:
    _without_the_machine(two_zones, 1)
    lease = await acquired(two_zones, node_pools=BOTH_ZONES)
    assert lease.place["zone"] == OTHER_ZONE
    assert len(lease.attempts) == 1


async def test_where_no_zone_has_it_trying_later_does_not_help(two_zones: World) -> None:
    _without_the_machine(two_zones, None)
    with pytest.raises(Misconfigured, match=r"no zone .* has what is asked for, 2 of 2 tries .*other zones"):
        await acquired(two_zones, node_pools=BOTH_ZONES)
    assert two_zones.left == {}


async def test_where_one_zone_has_it_but_is_full_later_may_help(two_zones: World) -> None:
    _without_the_machine(two_zones, 1)
    two_zones.google.faults.stockout(zone=OTHER_ZONE)
    with pytest.raises(CapacityUnavailable, match="2 of 2 tries failed"):
        await acquired(two_zones, node_pools=BOTH_ZONES)
    assert two_zones.left == {}
