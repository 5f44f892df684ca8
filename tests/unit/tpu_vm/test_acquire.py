"""Granting a lease: made once, adopted ever after, up the ladder where it fails, and taken back at its end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
from google.cloud import tpu_v2

from raytpu_ops.backends.tpu_vm import TpuVmBackend
from raytpu_ops.backends.tpu_vm.granted import judged
from raytpu_ops.backends.tpu_vm.record import OWNER, RECORD, TOKEN
from raytpu_ops.tpu.capacity import OnDemand, Queued, Spot
from raytpu_ops.tpu.errors import CapacityUnavailable, Misconfigured, Preempted, RayTpuError
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake import GoogleFake
from tests.google_fake.fake import PROJECT, ZONE
from tests.google_fake.gate import Call
from tests.unit.tpu_vm.conftest import ME, NAME, OTHER, SPEC, Make, full, nothing_left, planned, state, until
from tests.unit.tpu_vm.test_health import QUEUED

# Made, and adopted


async def test_one_queued_resource_is_made_that_says_whose_it_is(google: GoogleFake, backend: TpuVmBackend):
    said: list[str] = []
    lease = await backend.acquire(planned(Spot()), ME, say=said.append)

    assert list(google.queued_resources()) == [full()]
    made = google.queued_resources()[full()]
    assert "spot" in made
    assert made.state.state.name == "ACTIVE"
    (spec,) = made.tpu.node_spec
    assert spec.multislice_params.node_count == 2
    for node in (spec.node, *google.nodes().values()):
        assert node.labels[OWNER] == ME.digest
        assert node.labels["raytpu-dag"] == "digits"
        assert RECORD in node.metadata
    assert lease.owner == ME
    assert lease.spec == SPEC
    assert lease.capacity["kind"] == "spot"
    assert lease.created["queued resource"] == [f"{ZONE}/{NAME}"]
    assert [name.rpartition("/")[2] for name in google.nodes()] == lease.created["slice"]
    first = google.nodes()[f"projects/{PROJECT}/locations/{ZONE}/nodes/{lease.created['slice'][0]}"]
    address = first.network_endpoints[0].ip_address
    assert lease.ray.address == f"http://{address}:8265"
    assert lease.ray.serve_address == f"http://{address}:8000"
    assert lease.ray.serve_listens == f"{address}:8000"
    assert lease.granted_at == first.create_time
    assert lease.expires_at == lease.granted_at + timedelta(hours=12)
    assert lease.place["zones"] == f"{ZONE},{OTHER}"
    assert SliceLease.from_xcom(lease.to_xcom()) == lease
    assert any("WAITING_FOR_RESOURCES" in line for line in said)


async def test_a_second_call_adopts_and_makes_nothing(google: GoogleFake, make: Make):
    lease = await make().acquire(planned(), ME)
    again = await make().acquire(planned(), ME)

    assert again == lease
    assert google.tpu.made == [full()]


async def test_mapped_tasks_have_one_each(google: GoogleFake, backend: TpuVmBackend):
    each = [ME.model_copy(update={"map_index": index}) for index in range(3)]
    leases = await asyncio.gather(*(backend.acquire(planned(), one) for one in each))
    assert google.queued_resources().keys() == {full(name=lease.id) for lease in leases}


async def test_two_calls_at_once_make_one(google: GoogleFake, make: Make):
    """F34: one trigger in two triggerers."""
    one, other = await asyncio.gather(make().acquire(planned(), ME), make().acquire(planned(), ME))
    assert one == other
    assert google.tpu.made == [full()]


async def test_one_slice_has_a_node_of_its_own_name(google: GoogleFake, backend: TpuVmBackend):
    lease = await backend.acquire(planned(spec=SliceSpec.of("v5e", "2x2")), ME)
    assert [name.rpartition("/")[2] for name in google.nodes()] == lease.created["slice"]
    assert lease.created["slice"][0].startswith(f"{NAME}-")


async def test_a_create_whose_answer_is_lost_is_adopted(google: GoogleFake, backend: TpuVmBackend):
    """F02: looked for before it is made again."""
    google.faults.lost("CreateQueuedResource")
    await backend.acquire(planned(), ME)
    assert google.tpu.made == [full()]
    assert len(google.asked("CreateQueuedResource")) == 1


async def test_one_that_google_does_not_show_yet_is_not_made_twice(google: GoogleFake, backend: TpuVmBackend):
    """F02, F03: what was made a moment ago may be there to those who make and not to those who look."""

    def just_made(call: Call) -> bool:
        return call.resource in google.queued_resources()

    google.faults.inject("GetQueuedResource", "NOT_FOUND", 2, when=just_made)
    await backend.acquire(planned(), ME)
    assert google.tpu.made == [full()]
    assert [call.status for call in google.asked("CreateQueuedResource")] == ["OK"]


async def test_what_somebody_else_has_under_our_name_is_left_alone(google: GoogleFake, backend: TpuVmBackend):
    """F03."""
    await backend.acquire(planned(), ME)
    resource = google.queued_resources()[full()]
    resource.tpu.node_spec[0].node.labels[OWNER] = "somebody"
    with pytest.raises(Misconfigured, match=f"queued resource {NAME} in {ZONE} exists and is not digits/.*delete"):
        await backend.acquire(planned(), ME)
    assert state(google) == "ACTIVE"


async def test_another_spec_or_ladder_is_refused_and_nothing_is_touched(google: GoogleFake, backend: TpuVmBackend):
    """F03."""
    await backend.acquire(planned(), ME)
    for other in (planned(spec=SliceSpec.of("v4", "2x2x2")), planned([OnDemand(), Spot()])):
        with pytest.raises(Misconfigured, match="with another spec, ladder or other options"):
            await backend.acquire(other, ME)
    assert state(google) == "ACTIVE"


async def test_one_that_is_being_deleted_is_waited_for(google: GoogleFake, backend: TpuVmBackend):
    """F08."""
    lease = await backend.acquire(planned(), ME)
    await backend.release(lease)
    assert state(google) == "DELETING"
    again = await backend.acquire(planned(), ME)
    assert google.tpu.made == [full(), full()]
    assert not set(again.created["slice"]) & set(lease.created["slice"])


# Preempted


async def test_a_suspended_one_is_deleted_before_it_is_replaced_under_other_names(
    google: GoogleFake, backend: TpuVmBackend
):
    """F11, F12."""
    lease = await backend.acquire(planned(Spot()), ME)
    node = next(iter(google.nodes()))
    google.tpu.preempt(node)
    google.advance(600)
    assert state(google) == "SUSPENDED"
    assert node in google.nodes()

    again = await backend.acquire(planned(Spot()), ME)

    assert state(google) == "ACTIVE"
    assert node not in google.nodes()
    assert not set(again.created["slice"]) & set(lease.created["slice"])
    assert len(google.nodes()) == 2


@pytest.mark.parametrize("gone", ["preempted", "deleted"])
async def test_one_that_google_calls_active_still_is_replaced_as_well(google: GoogleFake, make: Make, gone: str):
    """F12: its node is preempted or gone, and the ladder has one rung."""
    one_zone = make(zones=[ZONE])
    lease = await one_zone.acquire(planned(Spot()), ME)
    node = f"projects/{PROJECT}/locations/{ZONE}/nodes/{lease.created['slice'][1]}"
    if gone == "preempted":
        google.tpu.set_node(node, tpu_v2.Node.State.PREEMPTED)
    else:
        del google.tpu.nodes[node]
    assert state(google) == "ACTIVE"

    again = await make(zones=[ZONE]).acquire(planned(Spot()), ME)

    assert not set(again.created["slice"]) & set(lease.created["slice"])
    assert again.attempts == []
    assert len(google.nodes()) == 2


async def test_one_that_is_taken_back_before_it_is_whole_is_the_next_steps_turn(google: GoogleFake, make: Make):
    backend = make()
    google.tpu.delays.provision = 3600
    plan = planned([Spot(), OnDemand()], provisioning=timedelta(hours=2))
    task = asyncio.create_task(backend.acquire(plan, ME))
    await until(google.nodes)
    google.tpu.preempt(next(iter(google.nodes())))
    google.tpu.delays.provision = 60
    lease = await task
    assert "before" in lease.attempts[0]
    assert lease.created["queued resource"] == [f"{OTHER}/{NAME}"]


@pytest.mark.parametrize("goes_in_s", [0, 45])
async def test_one_that_somebody_deletes_meanwhile_is_not_made_again(google: GoogleFake, make: Make, goes_in_s: float):
    """Seen on its way out, or not seen any more at all."""
    google.tpu.delays.queue, google.tpu.delays.delete = float("inf"), goes_in_s
    task = asyncio.create_task(make().acquire(planned(Queued(timedelta(days=30)), queued=timedelta(days=20)), ME))
    await until(google.queued_resources)
    other = make()
    found = await other.find(ME)
    assert found is not None
    assert found.ray.address.endswith(".invalid:8265")
    await other.release(found)
    with pytest.raises(Preempted, match="by somebody else while it was waited for"):
        await task
    assert nothing_left(google)
    assert len(google.tpu.made) == 1


@pytest.mark.parametrize("word", ["SUSPENDING", "SUSPENDED"])
def test_one_that_is_suspended_before_it_is_whole_is_a_refusal(word: str):
    """F12: it never comes back by itself, so nobody waits for it until the deadline."""
    with pytest.raises(CapacityUnavailable, match=f"is {word}: Google took the slices back before they were whole"):
        judged(replace(QUEUED, state=word), [])


async def test_one_that_is_active_is_granted_when_every_node_is_ready(google: GoogleFake, make: Make):
    """F06: the word for the whole is not taken for all of its parts; here Google mends one of them."""
    lease = await make().acquire(planned(), ME)
    node = f"projects/{PROJECT}/locations/{ZONE}/nodes/{lease.created['slice'][1]}"
    google.tpu.set_node(node, tpu_v2.Node.State.REPAIRING)
    ready = google.clock.now() + timedelta(minutes=5)
    google.clock.after(300, lambda: google.tpu.set_node(node, tpu_v2.Node.State.READY))

    again = await make().acquire(planned(), ME)

    assert state(google) == "ACTIVE"
    assert google.clock.now() >= ready
    assert again.created == lease.created


# Rolled back


async def test_without_the_right_to_look_nothing_is_made(google: GoogleFake, backend: TpuVmBackend):
    """F32."""
    google.deny("tpu.nodes.get")
    with pytest.raises(Misconfigured, match="tpu.nodes.get"):
        await backend.acquire(planned(), ME)
    assert google.tpu.made == []


async def test_what_cannot_be_looked_at_any_more_is_deleted_all_the_same(google: GoogleFake, backend: TpuVmBackend):
    """F32: allowed to make it, and then not to look at it."""
    plan = planned(releasing=timedelta(minutes=3))
    task = asyncio.create_task(backend.acquire(plan, ME))
    await until(google.queued_resources)
    google.deny("tpu.nodes.get")
    with pytest.raises(Misconfigured, match=rf"{NAME} in {ZONE} may be left: .*label {OWNER}={ME.digest}"):
        await task
    google.advance(120)
    assert nothing_left(google)


async def test_what_may_not_be_deleted_is_named(google: GoogleFake, backend: TpuVmBackend):
    """F32."""
    google.deny("tpu.nodes.delete")
    google.faults.stockout(times=None)
    with pytest.raises(Misconfigured) as caught:
        await backend.acquire(planned(), ME)
    assert f"queued resource {NAME} in {ZONE} may be left" in str(caught.value)
    assert f"{OWNER}={ME.digest}" in str(caught.value)
    google.allow()
    (found,) = await backend.list_leases()
    released = await backend.release(found)
    assert released.removed == [f"queued resource {NAME} in {ZONE}"]


async def test_a_cancelled_one_is_left_and_adopted(google: GoogleFake, make: Make):
    google.tpu.delays.queue = 3600
    plan = planned(Queued(timedelta(hours=6)))
    task = asyncio.create_task(make().acquire(plan, ME))
    await until(google.queued_resources)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert google.asked("DeleteQueuedResource") == []
    await make().acquire(plan, ME)
    assert google.tpu.made == [full()]


# Google is away


@pytest.mark.parametrize("method", ["GetQueuedResource", "CreateQueuedResource", "GetNode"])
@pytest.mark.parametrize("fault", ["unavailable", "internal", "lost", "cut", "too_many"])
async def test_what_passes_does_not_end_the_wait(google: GoogleFake, backend: TpuVmBackend, method: str, fault: str):
    """F05, F07, F28."""
    name = f"tpu.{method}" if fault == "too_many" else method
    getattr(google.faults, fault)(name, 3)
    await backend.acquire(planned(), ME)
    assert google.tpu.made == [full()]
    assert state(google) == "ACTIVE"


async def test_a_google_that_is_away_while_it_is_waited_for_is_no_absence(google: GoogleFake, backend: TpuVmBackend):
    """F07: nothing is asked for again, and nobody counts as having deleted it."""
    google.faults.inject("GetQueuedResource", "UNAVAILABLE", 3, when=lambda call: bool(google.queued_resources()))
    await backend.acquire(planned(), ME)
    assert len(google.asked("CreateQueuedResource")) == 1


async def test_a_token_that_expires_is_renewed_and_the_wait_goes_on(google: GoogleFake, backend: TpuVmBackend):
    """F38."""
    google.tpu.delays.queue = 3600
    task = asyncio.create_task(backend.acquire(planned(Queued(timedelta(days=2)), queued=timedelta(hours=2)), ME))
    await until(google.queued_resources)
    google.expire_tokens()
    await task
    assert any(call.status == "UNAUTHENTICATED" for call in google.calls)
    assert google.tpu.made == [full()]


async def test_an_absent_google_is_not_an_absent_lease(google: GoogleFake, backend: TpuVmBackend):
    """F07."""
    lease = await backend.acquire(planned(), ME)
    google.faults.internal("*Queued*", None)
    released = await backend.release(lease)
    assert f"queued resource {NAME} in {ZONE} may be left" in " ".join(released.left)
    with pytest.raises(RayTpuError):
        await backend.find(ME)


# No secret


async def test_the_token_is_in_the_metadata_and_nowhere_else(google: GoogleFake, backend: TpuVmBackend):
    said: list[str] = []
    lease = await backend.acquire(planned(), ME, say=said.append)
    (spec,) = google.queued_resources()[full()].tpu.node_spec
    token = spec.node.metadata[TOKEN]
    assert len(token) > 40
    told = [str(said), str(lease.to_xcom()), repr(backend), str(spec.node.labels), spec.node.metadata["startup-script"]]
    assert not any(token in text for text in told)
    assert token not in spec.node.metadata[RECORD]
    assert await backend._read_token(lease) == token
    async with backend._api() as api:
        assert token not in repr(await api.queued_resource(ZONE, NAME))
