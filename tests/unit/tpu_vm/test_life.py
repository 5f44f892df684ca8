"""After it is granted: looked at, found again, given back."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import httpx
import pytest

from raytpu_ops.backends.base import Backend, backend_names, make_backend
from raytpu_ops.backends.tpu_vm import TpuVmBackend
from raytpu_ops.backends.tpu_vm.backend import BACK_WITHIN, GOOD_FOR
from raytpu_ops.backends.tpu_vm.leases import _endpoint
from raytpu_ops.backends.tpu_vm.objects import NodeView
from raytpu_ops.backends.tpu_vm.record import OWNER, TOKEN
from raytpu_ops.backends.tpu_vm.settling import SETTLES_WITHIN
from raytpu_ops.hooks.ray_tpu import RayTpuHook
from raytpu_ops.tpu.capacity import FlexStart, Queued, Spot, ladder
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, Preempted, RemoteUnavailable
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake import GoogleFake
from tests.google_fake.access import FakeAccess
from tests.google_fake.fake import PROJECT, ZONE
from tests.unit.tpu_vm.conftest import ME, NAME, OTHER, SPEC, ZONES, Make, full, nothing_left, planned
from tests.unit.tpu_vm.test_health import RECORD

PARENT = f"projects/{PROJECT}/locations/{ZONE}"


# Looked at


async def test_vms_without_ray_are_not_ready_and_google_is_asked_now_and_then(google: GoogleFake, make: Make):
    backend = make()
    lease = await backend.acquire(planned(), ME)
    report = await backend.observe(lease)
    assert (report.phase, report.head_alive, report.fatal) == (Phase.LABELLED, False, None)
    assert "Ray does not answer" in report.describe()

    before = len(google.calls)
    for _ in range(5):
        await backend.observe(lease)
    assert len(google.calls) <= before + 3 + 2
    google.advance(GOOD_FOR.total_seconds() + 1)
    google.tpu.preempt(f"{PARENT}/nodes/{lease.created['slice'][1]}")
    report = await backend.observe(lease)
    assert "Google took the slices back" in report.describe()
    assert report.lost
    assert report.fatal is None


async def test_a_google_that_is_away_is_no_verdict(google: GoogleFake, make: Make):
    """F07."""
    lease = await make().acquire(planned(), ME)
    google.faults.unavailable(times=None, method="tpu.*")
    backend = make()
    report = await backend.observe(lease)
    assert report.fatal is None
    assert not report.ready
    first = report.since
    google.advance(30)
    assert (await backend.observe(lease)).since == first


async def test_a_lease_that_is_gone_is_lost(google: GoogleFake, make: Make):
    lease = await make().acquire(planned(), ME)
    await make().release(lease)
    google.advance(300)
    report = await make().observe(lease)
    assert report.lost
    assert "does not exist any more" in report.describe()


async def test_what_google_takes_back_is_asked_for_anew_by_a_repair(google: GoogleFake, make: Make):
    """F12, F13: Google replaces no node of a queued resource, so all come anew; also further up the ladder."""
    lease = await make().acquire(planned([Spot(), Queued(timedelta(hours=5))]), ME)
    lease = lease.model_copy(update={"conn_id": "ray_tpu_default"})
    assert await make().repair(lease) == lease
    google.tpu.preempt(f"{PARENT}/nodes/{lease.created['slice'][0]}")
    google.advance(60)
    google.faults.stockout(times=2)
    told: list[str] = []
    anew = await make().repair(lease, say=told.append)

    assert anew.id == lease.id
    assert anew.conn_id == "ray_tpu_default"
    assert anew.capacity["kind"] == "queued"
    assert not set(anew.created["slice"]) & set(lease.created["slice"])
    assert any("deleting what is left, to begin again" in line for line in told)
    assert len(google.queued_resources()) == 1
    assert sorted(name.rpartition("/")[2] for name in google.nodes()) == anew.created["slice"]


def creates(google: GoogleFake) -> int:
    """How often a queued resource was asked for."""
    return sum(call.method == "CreateQueuedResource" for call in google.calls)


async def test_a_task_that_holds_the_older_lease_is_led_to_the_one_that_a_repair_brought(
    google: GoogleFake, make: Make
):
    """What ran on the older one is lost, in whichever zone the newer one is; both are given back by either."""
    lease = await make().acquire(planned(Spot()), ME)
    google.tpu.preempt(f"{PARENT}/nodes/{lease.created['slice'][0]}")
    google.advance(60)
    google.faults.stockout(times=1)
    anew = await make().repair(lease)
    assert anew.created["queued resource"] == [f"{OTHER}/{NAME}"]

    report = await make().observe(lease)
    assert report.lost
    assert not report.stands
    assert not (await make().observe(anew)).broken
    asked = creates(google)
    assert await make().repair(lease) == anew
    assert creates(google) == asked
    hook = RayTpuHook(backend="tpu_vm")
    hook.backend = make()
    assert await asyncio.to_thread(hook.current, lease.to_xcom()) == anew
    await make().release(lease)
    google.advance(300)
    assert nothing_left(google)


async def test_two_tasks_that_repair_at_once_get_the_same_slices(google: GoogleFake, make: Make):
    lease = await make().acquire(planned(Spot()), ME)
    google.tpu.preempt(f"{PARENT}/nodes/{lease.created['slice'][0]}")
    google.advance(60)
    one, other = await asyncio.gather(make().repair(lease), make().repair(lease))
    assert one == other
    assert len(google.queued_resources()) == 1


async def test_a_task_that_knows_only_the_zones_asks_anew_with_the_options_of_the_one_that_provisioned(
    google: GoogleFake, make: Make
):
    account = "trainer@some-project.iam.gserviceaccount.com"
    lease = await make(service_account=account).acquire(planned(Spot()), ME)
    google.tpu.preempt(f"{PARENT}/nodes/{lease.created['slice'][0]}")
    google.advance(60)

    anew = await make().repair(lease)

    assert anew.created["slice"] != lease.created["slice"]
    [resource] = google.queued_resources().values()
    assert resource.tpu.node_spec[0].node.service_account.email == account


async def test_a_repair_waits_as_long_as_the_task_that_provisioned_would(google: GoogleFake, make: Make):
    """F10: deadlines of one's own hold for slices in the place of those that are lost, too."""
    lease = await make().acquire(planned(Spot(), provisioning=timedelta(hours=2)), ME)
    google.tpu.preempt(f"{PARENT}/nodes/{lease.created['slice'][0]}")
    google.advance(60)
    google.tpu.delays.queue = 3600

    anew = await make().repair(lease)

    assert anew.created["slice"] != lease.created["slice"]
    assert anew.attempts == []


async def test_a_repair_leaves_the_lease_its_end(google: GoogleFake, make: Make):
    """F09: slices that are granted anew, once or twice, last no longer than those that were lost would have."""
    first = lease = await make().acquire(planned(Spot()), ME)
    for _ in range(2):
        google.advance(3600)
        [zone, _] = lease.created["queued resource"][0].split("/")
        google.tpu.preempt(f"projects/{PROJECT}/locations/{zone}/nodes/{lease.created['slice'][0]}")
        google.advance(60)
        google.faults.stockout(times=1)
        anew = await make().repair(lease)
        assert anew.granted_at > lease.granted_at
        assert anew.expires_at == first.expires_at
        assert await make().find(ME) == anew
        lease = anew


async def test_slices_that_are_granted_anew_after_the_leases_end_have_expired(google: GoogleFake, make: Make):
    """F09: the reaper takes them."""
    lease = await make().acquire(planned(Spot()), ME)
    google.tpu.preempt(f"{PARENT}/nodes/{lease.created['slice'][0]}")
    google.advance(timedelta(hours=13).total_seconds())
    anew = await make().repair(lease)
    assert anew.expires_at == anew.granted_at


async def test_nothing_is_asked_for_anew_while_somebody_gives_the_lease_back(google: GoogleFake, make: Make):
    lease = await make().acquire(planned(Spot()), ME)
    google.tpu.preempt(f"{PARENT}/nodes/{lease.created['slice'][0]}")
    google.advance(60)
    late = make()
    assert (await late.observe(lease)).lost  # what it saw is good for some seconds
    await make().release(lease)

    with pytest.raises(Preempted, match="was deleted by somebody else while it was waited for"):
        await late.repair(lease)
    google.advance(300)
    assert nothing_left(google)


async def test_a_lease_that_was_released_is_never_granted_again_by_a_repair(google: GoogleFake, make: Make):
    lease = await make().acquire(planned(Spot()), ME)
    await make().release(lease)
    google.advance(300)
    with pytest.raises(Preempted, match="Clear the task that provisioned it"):
        await make().repair(lease)
    assert nothing_left(google)


async def test_a_ray_that_stays_dead_is_preempted_in_the_end(
    google: GoogleFake, make: Make, monkeypatch: pytest.MonkeyPatch
):
    from raytpu_ops.tpu.readiness import Readiness, SliceReport

    backend = make()
    lease = await backend.acquire(planned(), ME)
    # Of a head whose host is dead the dashboard may still answer: that is no sign from Google.
    dead = Readiness(slices=[SliceReport(name="a", hosts_wanted=2, broken=True)])

    async def observe(lease: SliceLease) -> Readiness:
        return dead

    monkeypatch.setattr(backend, "observe", observe)
    before = google.clock.now()
    with pytest.raises(Preempted, match="Ray did not come back on its VMs"):
        await backend.repair(lease)
    assert BACK_WITHIN <= google.clock.now() - before < BACK_WITHIN + timedelta(minutes=1)


# Ray


async def test_ray_is_asked_with_the_token_of_the_metadata(
    google: GoogleFake, make: Make, asked_of_ray: list[httpx.Request]
):
    lease = await make().acquire(planned(), ME)
    async with make().ray(lease) as ray:
        with pytest.raises(RemoteUnavailable):
            await ray.version()
    token = google.queued_resources()[full()].tpu.node_spec[0].node.metadata[TOKEN]
    assert {request.headers["authorization"] for request in asked_of_ray} == {f"Bearer {token}"}
    assert {request.url.host for request in asked_of_ray} == {lease.ray.address.split("/")[2].split(":")[0]}


async def test_a_new_lease_of_the_same_name_has_another_token(google: GoogleFake, make: Make):
    backend = make()
    tokens = []
    for _ in range(2):
        lease = await backend.acquire(planned(), ME)
        tokens.append(await backend._read_token(lease))
        await backend.release(lease)
        google.advance(300)
    assert len(set(tokens)) == 2
    assert await backend._read_token(lease) is None


def test_the_head_is_reached_at_its_public_address_where_somebody_says_so():
    node = NodeView(ZONE, "a-0", "READY", "HEALTHY", ME.digest, None, "a", "10.0.0.2", "203.0.113.7", None)
    for external, host in ((False, "10.0.0.2"), (True, "203.0.113.7")):
        found = _endpoint("a", ZONE, RECORD.model_copy(update={"external": external}), node)
        assert found.address == f"http://{host}:8265"
        assert found.serve_address == f"http://{host}:8000"
        # A public address is translated on the way: the VM itself has the other one.
        assert found.serve_listens == "10.0.0.2:8000"


async def test_many_slices_are_one_question(google: GoogleFake, make: Make):
    lease = await make().acquire(planned(spec=SliceSpec.of("v4", "2x2x1", num_slices=6)), ME)
    assert len(lease.created["slice"]) == 6
    assert google.asked("GetNode") == []
    assert (await make().observe(lease)).phase is Phase.LABELLED
    assert google.asked("GetNode") == []


# Given back


async def test_release_is_over_when_google_says_so(google: GoogleFake, make: Make):
    lease = await make().acquire(planned(), ME)
    backend = make()
    first = await backend.release(lease)
    assert first.removed == [f"queued resource {NAME} in {ZONE}"]
    assert f"queued resource {NAME} in {ZONE} is being deleted" in first.left
    assert any("is DELETING" in line for line in first.left)
    second = await backend.release(lease)
    assert second.removed == []
    assert second.left
    google.advance(300)
    assert (await backend.release(lease)).left == []
    assert len(google.asked("DeleteQueuedResource")) == 1
    assert google.asked("DeleteNode") == []


async def test_release_looks_into_every_zone(google: GoogleFake, make: Make):
    lease = await make().acquire(planned(), ME)
    other = make(zones=[OTHER])
    await other.acquire(planned(), ME)
    await make().release(lease)
    google.advance(300)
    assert nothing_left(google)


async def test_another_owners_is_left(google: GoogleFake, make: Make):
    mine = await make().acquire(planned(), ME)
    await make().acquire(planned(), ME.model_copy(update={"task_id": "other"}))
    await make().release(mine)
    google.advance(300)
    assert len(google.queued_resources()) == 1
    assert len(google.nodes()) == 2


async def test_what_somebody_else_has_under_the_leases_name_is_left(google: GoogleFake, make: Make):
    """F03."""
    lease = await make().acquire(planned(), ME)
    google.queued_resources()[full()].tpu.node_spec[0].node.labels[OWNER] = "somebody"
    for node in google.nodes().values():
        node.labels[OWNER] = "somebody"

    backend = make()
    assert (await backend.release(lease)).removed == []
    google.advance(SETTLES_WITHIN.total_seconds())
    released = await backend.release(lease)

    assert (released.removed, released.left) == ([], [])
    assert list(google.queued_resources()) == [full()]


async def test_a_zone_that_does_not_answer_does_not_keep_the_other(google: GoogleFake, make: Make):
    lease = await make().acquire(planned(), ME)
    google.faults.inject("*", "UNAVAILABLE", None, when=lambda call: OTHER in call.resource)
    released = await make().release(lease)
    google.advance(300)
    assert nothing_left(google)
    assert any(OTHER in line and "may be left" in line for line in released.left)


async def test_told_to_go_by_two_at_once(google: GoogleFake, make: Make):
    """F04."""
    lease = await make().acquire(planned(), ME)
    both = await asyncio.gather(make().release(lease), make().release(lease))
    assert not any("may be left" in line for one in both for line in one.left)


# Planned


async def test_a_plan_touches_nothing_and_says_what_it_would_make(google: GoogleFake, make: Make):
    plan = await make(price_per_chip_hour=2).plan(SPEC, ladder(Spot()), lease_for=timedelta(hours=2))
    assert google.tpu.made == []
    assert plan.creates[0] == "1 queued resource with tpu-ubuntu2204-base"
    assert "4 VMs, 4 chips each" in plan.creates[1]
    assert any("64.00 at 2 each" in note for note in plan.notes)


async def test_a_plan_refuses_what_cloud_tpu_does_not_have(google: GoogleFake, make: Make):
    with pytest.raises(InvalidSpec, match="use backend 'gke'"):
        await make().plan(SliceSpec.of("7x", "2x2x1"), ladder(), lease_for=timedelta(hours=2))
    with pytest.raises(InvalidSpec, match=r"capacity\[0\]: .*no flex-start"):
        await make().plan(SPEC, ladder(FlexStart(timedelta(hours=2))), lease_for=timedelta(hours=2))


async def test_a_plan_names_the_rights_that_are_missing(google: GoogleFake, make: Make):
    google.deny("tpu.nodes.create")
    with pytest.raises(Misconfigured, match="lacks tpu.nodes.create"):
        await make().plan(SPEC, ladder(), lease_for=timedelta(hours=2))


def test_it_is_a_backend_by_name(google: GoogleFake):
    assert "tpu_vm" in backend_names()
    found = make_backend("tpu_vm", cloud=FakeAccess(google), zones=",".join(ZONES))
    assert isinstance(found, TpuVmBackend)
    assert isinstance(found, Backend)
    assert found.acquires_in_task is False
    assert found.ships_runtime is True
