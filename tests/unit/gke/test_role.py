"""The custom role for node pools: with it alone the whole life of a lease works, and none of it is more than needed."""

from __future__ import annotations

from raytpu_ops.backends.google.roles import GKE, WORKLOAD_POLICY
from raytpu_ops.tpu.capacity import OnDemand, Reservation
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake.fake import CLUSTER, PROJECT, ZONE
from tests.google_fake.roles import Watch, role_file
from tests.unit.gke.conftest import ME
from tests.unit.gke.pool_world import World


async def test_the_role_is_what_the_life_of_a_lease_needs(world: World):
    google = world.google
    watch = Watch(google, GKE)
    backend = world.backend()

    # TPU7x has a policy of its own; another operation is in the way, and the first rung has too few machines.
    google.compute.add_reservation("r", "tpu7x-standard-4t", 8, zone=ZONE, project=PROJECT, in_use=8)
    google.container.occupy(CLUSTER, 60)
    plan = await world.plan(backend, [Reservation("r"), OnDemand()], SliceSpec.of("7x", "2x2x2"))
    lease = await backend.acquire(plan, ME, say=world.said.append)
    world.settle()
    await backend.observe(lease)
    assert await world.backend().find(ME) is not None
    assert len(await world.backend().list_leases()) == 1
    await world.released(lease)

    # v4 has a quota that can be read.
    await world.plan(backend, spec=SliceSpec.of("v4", "2x2x2"))

    assert watch.missing == set()
    assert watch.unused == set()
    assert world.left == {}


def test_the_file_is_what_the_plan_asks_for():
    found = role_file(GKE)
    assert sorted(found["includedPermissions"]) == sorted({*GKE.needed, *GKE.looks, *WORKLOAD_POLICY})
    assert found.keys() == {"title", "description", "stage", "includedPermissions"}
    assert len(found["title"]) <= 100
