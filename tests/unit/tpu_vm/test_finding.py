"""Leases are found from the objects at Google alone, in whichever zone and whatever is left of them."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from google.cloud import tpu_v2

from raytpu_ops.backends.base import Patience
from raytpu_ops.backends.tpu_vm.record import OWNER, RECORD
from raytpu_ops.tpu.capacity import Queued, Spot
from raytpu_ops.tpu.errors import DeadlineExceeded, InvalidSpec, Misconfigured
from tests.google_fake import GoogleFake
from tests.google_fake.fake import PROJECT, ZONE
from tests.unit.tpu_vm.conftest import ME, NAME, OTHER, ZONES, Make, full, nothing_left, planned, until

PARENT = f"projects/{PROJECT}/locations/{ZONE}"


async def test_every_lease_is_found_from_the_objects_alone(google: GoogleFake, make: Make):
    leases = [
        await make().acquire(planned(Spot()), ME.model_copy(update={"task_id": task, "run_id": run}))
        for task, run in (("a", "r1"), ("b", "r1"), ("a", "r2"))
    ]
    by_id = {lease.id: lease for lease in leases}
    assert {lease.id: lease for lease in await make().list_leases()} == by_id
    assert [one.id for one in await make().list_leases(task_id="b")] == [leases[1].id]
    assert {one.id for one in await make().list_leases(dag_id="digits", run_id="r1")} == {leases[0].id, leases[1].id}
    assert await make().list_leases(dag_id="other") == []
    assert await make().find(leases[2].owner) == leases[2]
    assert await make().find(ME) is None
    with pytest.raises(InvalidSpec, match="narrowed by owner"):
        await make().list_leases(owner="x")


@pytest.mark.parametrize("zones", [[ZONE], []], ids=["other zones", "no zones"])
async def test_leases_are_found_in_whichever_zones_their_task_named(google: GoogleFake, make: Make, zones: list[str]):
    """F09: a DAG's zones are in its `backend_options`, and whoever cleans up has only the connection."""
    lease = await make(zones=[OTHER]).acquire(planned(), ME)
    assert await make(zones=zones).list_leases() == [lease]
    await make(zones=zones).release(lease)
    google.advance(300)
    assert nothing_left(google)


async def test_what_an_owner_has_in_another_zone_is_hidden_by_nothing(google: GoogleFake, make: Make):
    """F09: of a task that was cleared with other zones; each is a lease, and who looks for its own finds the last."""
    older, newer = [await make(zones=[zone]).acquire(planned(), ME) for zone in ZONES]
    backend = make(zones=[])
    assert older.id == newer.id
    assert sorted(await backend.list_leases(), key=lambda one: one.granted_at) == [older, newer]
    assert await make().find(ME) == await make(zones=ZONES[::-1]).find(ME) == newer
    await backend.release(older)
    google.advance(300)
    assert await backend.list_leases() == [newer]
    del google.tpu.queued[full(OTHER)]
    [left] = await backend.list_leases()
    await backend.release(left)
    google.advance(300)
    assert nothing_left(google)


async def test_what_is_granted_anew_elsewhere_is_found_by_who_has_only_the_lease(google: GoogleFake, make: Make):
    lease = await make().acquire(planned(Spot()), ME)
    google.tpu.preempt(f"{PARENT}/nodes/{lease.created['slice'][0]}")
    google.advance(60)
    google.faults.stockout(zone=ZONE, times=None)
    anew = await make(zones=[]).repair(lease)
    assert anew.created["queued resource"] == [f"{OTHER}/{NAME}"]
    assert not (await make(zones=[]).observe(anew)).broken
    assert (await make(zones=[]).observe(lease)).lost
    assert await make(zones=[]).find(ME) == anew
    await make(zones=[]).release(lease)
    google.advance(300)
    assert nothing_left(google)


async def test_a_zone_that_is_away_keeps_no_other_from_being_seen(
    google: GoogleFake, make: Make, caplog: pytest.LogCaptureFixture
):
    """F07: Google lists the others and names the one; where somebody named it, that is told like what is left."""
    lease = await make().acquire(planned(), ME)
    google.tpu.away.add(OTHER)
    assert await make(zones=[ZONE]).list_leases() == [lease]
    assert f"Google does not answer for {OTHER}: leases there are not seen" in caplog.text
    told: list[str] = []
    assert await make(zones=ZONES).list_leases(told.append) == [lease]
    assert told == [f"Google does not answer for {OTHER}: leases there are not seen"]
    backend = make(zones=[])
    backend.patience = Patience(timedelta(seconds=1))
    with pytest.raises(DeadlineExceeded, match=f"no answer from .*{OTHER}"):
        await backend.find(ME)


async def test_what_cannot_be_read_is_told_and_found_by_nobody(google: GoogleFake, make: Make):
    """It bills all the same: a release that found nothing would end well."""
    await make().acquire(planned(), ME)
    resource = google.queued_resources()[full()]
    for node in (resource.tpu.node_spec[0].node, *google.nodes().values()):
        node.metadata[RECORD] = "{}"
    told: list[str] = []
    assert await make().list_leases(told.append) == []
    assert len(told) == 1
    assert f"queued-resources delete {NAME} --zone {ZONE}" in told[0]
    for zones in (ZONES, []):
        with pytest.raises(Misconfigured, match="can't be read"):
            await make(zones=zones).find(ME)
    del google.tpu.queued[full()]
    told.clear()
    assert await make().list_leases(told.append) == []
    assert len(told) == 2
    assert all("tpu-vm delete" in line for line in told)


async def test_what_a_cleared_task_left_in_a_queue_is_found_and_expires(google: GoogleFake, make: Make):
    """F09."""
    google.tpu.delays.queue = float("inf")
    plan = planned(Queued(timedelta(days=9)), queued=timedelta(hours=4))
    task = asyncio.create_task(make().acquire(plan, ME))
    await until(google.queued_resources)
    task.cancel()
    await asyncio.wait([task])
    begun = google.tpu.clock.now()
    (found,) = await make().list_leases()
    assert found.owner == ME
    # A place in the queue does not use up the time of the lease.
    assert timedelta(hours=15) < found.expires_at - begun < timedelta(hours=16, minutes=1)
    assert (await make().release(found)).left
    google.advance(300)
    assert nothing_left(google)


async def test_a_lease_does_not_begin_before_it_is_granted(google: GoogleFake, make: Make):
    google.tpu.delays.queue = 3600
    begun = google.clock.now()
    lease = await make().acquire(planned(Queued(timedelta(days=2)), queued=timedelta(hours=2)), ME)
    assert lease.granted_at - begun > timedelta(hours=1)
    assert lease.expires_at - lease.granted_at == timedelta(hours=12)


async def test_nodes_whose_queued_resource_is_gone_are_a_lease_still(google: GoogleFake, make: Make):
    """F09."""
    lease = await make().acquire(planned(), ME)
    del google.tpu.queued[full()]
    for find in (make().find(ME), make().list_leases()):
        found = await find
        (one,) = found if isinstance(found, list) else [found]
        assert one is not None
        assert one.id == lease.id
    released = await make().release(lease)
    assert len([line for line in released.removed if line.startswith("node ")]) == 2
    google.advance(300)
    assert nothing_left(google)


async def test_strangers_are_no_leases(google: GoogleFake, make: Make):
    await make().acquire(planned(), ME)
    resource = tpu_v2.QueuedResource(google.queued_resources()[full()])
    resource.tpu.node_spec[0].multislice_params.node_id_prefix = "copy"
    google.tpu.put(full(name="copy"), resource)
    del resource.tpu.node_spec[0].node.labels[OWNER]
    resource.tpu.node_spec[0].multislice_params.node_id_prefix = "plain"
    google.tpu.put(full(name="plain"), resource)
    assert [one.id for one in await make().list_leases()] == [NAME]
