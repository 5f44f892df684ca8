"""The custom role for TPU VMs: with it alone the whole life of a lease works, and none of it is more than needed."""

from __future__ import annotations

from datetime import timedelta

from raytpu_ops.backends.google.roles import TPU_VM
from raytpu_ops.tpu.capacity import OnDemand, Reservation
from tests.google_fake import GoogleFake
from tests.google_fake.fake import PROJECT, ZONE
from tests.google_fake.refusals import Code, Refusal
from tests.google_fake.roles import Watch, role_file
from tests.unit.tpu_vm.conftest import ME, SPEC, Make, planned


async def test_the_role_is_what_the_life_of_a_lease_needs(google: GoogleFake, make: Make):
    watch = Watch(google, TPU_VM)
    google.compute.add_reservation("r", "ct4p-hightpu-4t", 8, zone=ZONE, project=PROJECT)
    rungs = [Reservation("r"), OnDemand()]
    google.faults.late(Refusal(Code.RESOURCE_EXHAUSTED, "Quota exceeded."))

    await make().plan(SPEC, rungs, lease_for=timedelta(hours=1))
    lease = await make().acquire(planned(rungs), ME)
    await make().observe(lease)
    assert await make().find(ME) is not None
    assert len(await make().list_leases()) == 1
    # A node that outlives its queued resource is deleted by itself.
    name = next(iter(google.nodes()))
    google.tpu.queued.clear()
    assert name in google.nodes()
    for _ in range(20):
        if not (await make().release(lease)).left:
            break
        google.advance(60)

    assert watch.missing == set()
    assert watch.unused == set()
    assert google.nodes() == {}


def test_the_file_is_what_the_plan_asks_for():
    found = role_file(TPU_VM)
    assert sorted(found["includedPermissions"]) == sorted({*TPU_VM.needed, *TPU_VM.looks})
    assert found.keys() == {"title", "description", "stage", "includedPermissions"}
    assert len(found["title"]) <= 100
