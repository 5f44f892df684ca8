"""Node pools whose nodes Google queues: requests for them, what GKE says of these, and nothing of it left."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import kmock
import pytest

from raytpu_ops.backends.gke import queued
from raytpu_ops.backends.gke.queued import RequestView
from raytpu_ops.tpu.capacity import FlexStart, OnDemand, Queued
from raytpu_ops.tpu.errors import CapacityUnavailable, InvalidSpec, Misconfigured
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake.fake import ZONE
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import POD_TEMPLATES, REQUESTS, refusal
from tests.unit.gke.pool_queue import QUEUED, acquired, dies, never, requests
from tests.unit.gke.pool_world import LEASE_ID, POOLS, World
from tests.unit.gke.seen import SPEC, condition

ONE = SliceSpec.of("v4", "2x2x2")
ANNOTATIONS = {
    "autoscaling.x-k8s.io/consume-provisioning-request": POOLS[0],
    "autoscaling.x-k8s.io/provisioning-class-name": "queued-provisioning.gke.io",
}


def template(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.record(LEASE_ID)["spec"]["workerGroupSpecs"][0]["template"]
    return found


# Granted


async def test_each_slice_has_a_request_for_the_nodes_of_its_pool(world: World):
    lease = await acquired(world)

    assert world.nodes(lease.id) == SPEC.hosts
    assert list(requests(world)) == POOLS
    for name in POOLS:
        spec = requests(world)[name]["spec"]
        assert spec["podSets"] == [{"count": 2, "podTemplateRef": {"name": name}}]
        assert spec["provisioningClassName"] == "queued-provisioning.gke.io"
        assert spec["parameters"] == {"maxRunDurationSeconds": str(12 * 3600)}
        assert world.pools[name].queued_provisioning.enabled
        assert not world.pools[name].config.max_run_duration
    assert lease.capacity["kind"] == "queued"
    # Google's time is none of the lease's.
    assert lease.expires_at == lease.granted_at + timedelta(hours=12)


async def test_a_requests_pods_are_those_that_kuberay_makes_on_that_pool(world: World):
    await acquired(world)

    host = template(world)
    for name, found in world.kube.all(POD_TEMPLATES).items():
        assert found["metadata"]["labels"]["cloud.google.com/apply-warden-policies"] == "true"
        assert found["template"]["spec"].pop("nodeSelector") == {
            **host["spec"]["nodeSelector"],
            "cloud.google.com/gke-nodepool": name,
        }
        assert found["template"]["spec"] == {k: v for k, v in host["spec"].items() if k != "nodeSelector"}
    assert {"key": "cloud.google.com/gke-queued", "value": "true"}.items() <= host["spec"]["tolerations"][-1].items()


async def test_all_of_it_is_the_owners_and_goes_with_the_raycluster(world: World):
    await acquired(world)

    uid = world.record(LEASE_ID)["metadata"]["uid"]
    for kind in (REQUESTS, POD_TEMPLATES):
        for one in world.kube.all(kind).values():
            assert one["metadata"]["labels"]["raytpu-owner"] == ME.digest
            assert [ref["uid"] for ref in one["metadata"]["ownerReferences"]] == [uid]


@pytest.mark.parametrize(("spec", "said"), [(ONE, ANNOTATIONS), (SPEC, {})], ids=["one", "two"])
async def test_the_hosts_of_a_single_slice_say_by_which_request_they_come(
    world: World, spec: SliceSpec, said: dict[str, str]
):
    await acquired(world, spec=spec)
    assert template(world)["metadata"].get("annotations", {}) == said


async def test_hosts_on_another_kind_of_capacity_say_it_no_more(world: World):
    """No autoscaler would bring nodes for them."""
    world.queue.refusal = "there are none"

    lease = await acquired(world, [QUEUED, FlexStart(3600)], ONE)

    assert lease.capacity["kind"] == "flex_start"
    assert "annotations" not in template(world)["metadata"]


@pytest.mark.parametrize(
    ("lease_for", "runs"), [(timedelta(hours=3), "10800"), (timedelta(days=30), "604800")], ids=str
)
async def test_nodes_run_as_long_as_the_lease_and_a_week_at_the_most(world: World, lease_for: timedelta, runs: str):
    backend = world.backend()
    plan = await backend.plan(ONE, [QUEUED], lease_for=lease_for)

    await backend.acquire(plan, ME)

    [request] = requests(world).values()
    assert request["spec"]["parameters"]["maxRunDurationSeconds"] == runs
    assert any("queued hosts are taken back after 7 days" in note for note in plan.notes) == (runs == "604800")


async def test_pods_wait_from_the_moment_at_which_google_is_asked(world: World):
    """Nodes that nobody uses at once are taken back."""
    suspended: list[bool] = []

    def look() -> None:
        if any("status" in one for one in requests(world).values()):
            suspended.append(world.record(LEASE_ID)["spec"]["suspend"])

    world.meanwhile = look
    await acquired(world)

    assert suspended[1:]
    assert not any(suspended[1:])
    assert any("ProvisioningRequest" in line and "successfully queued" in line for line in world.said)


async def test_the_older_version_of_the_api_will_do(world: World):
    older = kmock.resource(REQUESTS.group, "v1beta1", REQUESTS.plural)
    world.kube.kinds = {older if kind == REQUESTS else kind for kind in world.kube.kinds}
    never(world)
    world.meanwhile = lambda: dies() if world.kube.all(older) else None

    with pytest.raises(asyncio.CancelledError):
        await acquired(world, spec=ONE)

    [made] = world.kube.all(older).values()
    assert made["apiVersion"] == "autoscaling.x-k8s.io/v1beta1"


# Refused


async def test_a_cluster_without_the_kind_is_too_old(world: World):
    world.kube.kinds -= {REQUESTS}

    with pytest.raises(Misconfigured, match=r"use GKE 1.32.2-gke.1652000 or newer") as refused:
        await acquired(world, [QUEUED, OnDemand()])

    assert "left:" not in str(refused.value)
    assert world.left == {}


async def test_without_the_rights_it_says_so(world: World):
    words = 'provisioningrequests is forbidden: User "x" cannot list resource "provisioningrequests"'
    world.kube.fails("list provisioningrequests", refusal(403, words, "Forbidden"), always=True)

    with pytest.raises(Misconfigured, match=r"cannot list .*deploy/gke/rbac.yaml"):
        await acquired(world)

    assert world.left == {}


async def test_what_is_never_granted_gives_way_with_nothing_left_of_it(world: World):
    """F10."""
    never(world)
    begun = world.now

    lease = await acquired(world, [QUEUED, OnDemand()])

    [tried] = lease.attempts
    assert tried.startswith(f"queued in {ZONE}: lease {LEASE_ID}")
    assert "the queued deadline" in tried
    assert "was successfully queued" in tried
    assert timedelta(minutes=50) <= world.now - begun < timedelta(minutes=60)
    assert lease.capacity["kind"] == "on_demand"
    assert requests(world) == {}
    assert not any(pool.queued_provisioning.enabled for pool in world.pools.values())


@pytest.mark.parametrize("rung", [Queued(600), Queued(timedelta(days=3))], ids=["valid_for", "deadline"])
async def test_a_queue_is_waited_in_as_long_as_the_place_is_good_for_and_no_longer_than_its_phase(
    world: World, rung: Queued
):
    never(world)
    begun = world.now

    with pytest.raises(CapacityUnavailable):
        await acquired(world, rung, queued=timedelta(minutes=20), provisioning=timedelta(minutes=1))

    assert 0 <= (world.now - begun - min(rung.valid_for, timedelta(minutes=20))).total_seconds() < 300
    assert world.left == {}


async def test_a_request_that_fails_ends_the_rung_in_googles_words(world: World):
    world.queue.refusal = "GKE_OUT_OF_THEM: there will never be so many"

    lease = await acquired(world, [QUEUED, OnDemand()])

    [tried] = lease.attempts
    assert tried == (
        f"queued in {ZONE}: ProvisioningRequest {POOLS[0]} is Failed: {world.queue.refusal}; "
        f"ProvisioningRequest {POOLS[1]} is Failed: {world.queue.refusal}"
    )
    assert requests(world) == {}


async def test_nodes_that_no_pod_comes_to_are_gone_and_so_is_the_rung(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(World, "has_hosts", lambda *_: False)

    with pytest.raises(CapacityUnavailable, match=f"ProvisioningRequest {POOLS[0]} is BookingExpired: .* scale down"):
        await acquired(world, spec=ONE)

    assert world.left == {}


async def test_the_next_zone_is_asked_anew(world: World):
    [cluster] = world.google.container.clusters.values()
    cluster.zones = (ZONE, "us-central2-a")
    world.queue.refusal = "none here"

    def elsewhere() -> None:
        if any(pool.locations == ["us-central2-a"] for pool in world.pools.values()):
            world.queue.refusal = ""

    world.meanwhile = elsewhere
    backend = world.backend(node_pools={"zones": [ZONE, "us-central2-a"]})
    lease = await backend.acquire(await world.plan(backend, QUEUED), ME)

    assert len(lease.attempts) == 1
    assert lease.place["zone"] == "us-central2-a"


def view(name: str, *conditions: str) -> RequestView:
    return RequestView.of(
        {
            "metadata": {"name": name},
            "spec": {"podSets": [{"podTemplateRef": {"name": name}}]},
            "status": {"conditions": [condition(one, message=f"of {name}") for one in conditions]},
        }
    )


def test_a_booking_that_expires_under_pods_is_no_failure():
    """Some ten minutes after nodes came it always does."""
    both = [view("a", "Accepted", "Provisioned", "BookingExpired"), view("b", "Accepted")]
    queued.check(both, 2, placed=2)
    with pytest.raises(CapacityUnavailable, match="a is BookingExpired: of a$"):
        queued.check(both, 2, placed=1)


def test_capacity_that_is_revoked_is_gone_though_its_pods_are_placed():
    with pytest.raises(CapacityUnavailable, match="^ProvisioningRequest b is CapacityRevoked: of b$"):
        queued.check([view("a", "Provisioned"), view("b", "Provisioned", "CapacityRevoked")], 2, placed=3)


def test_the_time_at_which_google_means_to_have_it_is_told():
    later = condition("Provisioned", False, message="ETA: 2026-12-01T08:00:00Z")
    waits = replace(view("a", "Accepted"), conditions={**view("a", "Accepted").conditions})
    assert waits.words() == "ProvisioningRequest a is Accepted: of a"
    told = RequestView.of(
        {
            "metadata": {"name": "a"},
            "spec": {"podSets": [{"podTemplateRef": {"name": "a"}}]},
            "status": {"conditions": [condition("Accepted"), later]},
        }
    )
    assert told.words() == "ProvisioningRequest a is Accepted: ETA: 2026-12-01T08:00:00Z"


# Plans


async def test_a_plan_says_what_is_asked_of_google(world: World):
    plan = await world.plan(world.backend(), QUEUED)
    assert "2 ProvisioningRequests with a PodTemplate, in the queued step" in plan.creates
    assert "queued: each slice is granted by itself, and paid for until the last one is there" in plan.notes
    one = await world.plan(world.backend(), QUEUED, ONE)
    assert "1 ProvisioningRequest with a PodTemplate, in the queued step" in one.creates
    assert not any("each slice" in note for note in one.notes)


async def test_without_pools_of_its_own_it_is_refused_with_both_ways(world: World):
    with pytest.raises(InvalidSpec, match=r"option node_pools, without reuse; .* name a Kueue LocalQueue"):
        await world.plan(world.plain_backend(), QUEUED)
