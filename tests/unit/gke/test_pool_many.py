"""Node pools come and go one after the other, so the time that they have grows with their number."""

from __future__ import annotations

from datetime import timedelta

from raytpu_ops.tpu.capacity import OnDemand, Spot
from raytpu_ops.tpu.deadlines import Deadlines
from raytpu_ops.tpu.spec import SliceSpec
from tests.unit.gke.conftest import ME
from tests.unit.gke.pool_world import World

MANY = SliceSpec.of("v6e", "2x2", num_slices=10)
USUAL = Deadlines()


async def test_many_slices_are_granted_and_released_in_the_time_that_they_have_by_default(world: World):
    """Each in as long as GKE takes, one after the other."""
    delays = world.google.container.delays
    delays.create = delays.delete = 200
    backend, began = world.backend(), world.now

    lease = await backend.acquire(await world.plan(backend, spec=MANY), ME)
    assert world.now - began > USUAL.provisioning

    began, released = world.now, await backend.release(lease)
    by = began + USUAL.releasing + released.held
    while released.left:
        await world.sleep(30)
        released = await backend.release(lease)
    assert world.left == {}
    assert began + USUAL.releasing < world.now < by


async def test_a_plan_says_how_much_time_they_have_and_what_is_short(world: World):
    plan = await world.plan(world.backend(), [Spot(within=600), OnDemand()], MANY)

    more = timedelta(minutes=4) * 9
    assert (plan.deadlines.provisioning, plan.deadlines.releasing) == (
        USUAL.provisioning + more,
        USUAL.releasing + more,
    )
    [time] = [note for note in plan.notes if "one after the other, each" in note]
    assert "provisioning has 1:06:00, releasing 0:51:00, where deadlines says nothing else" in time
    assert "spot: within 0:10:00 is short for 10 node pools one after the other" in plan.notes


async def test_one_slice_or_pools_of_somebody_elses_have_the_usual_time(world: World):
    one = await world.plan(world.backend(), spec=SliceSpec.of("v6e", "4x4"))
    plain = await world.plain_backend().plan(MANY, [OnDemand()], lease_for=timedelta(hours=1))

    assert one.deadlines == plain.deadlines == USUAL
    assert not any("one after the other" in note for note in (*one.notes, *plain.notes))
