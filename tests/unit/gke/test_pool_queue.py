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
from raytpu_ops.tpu.capacity import FlexStart, OnDemand, Queued, Spot
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.errors import CapacityUnavailable, InvalidSpec, Misconfigured
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.naming import node_pool_name
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake.fake import CLUSTER, ZONE
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import POD_TEMPLATES, PODS, RAY_CLUSTERS, REQUESTS, Fault, refusal
from tests.unit.gke.pool_killer import Killer
from tests.unit.gke.pool_world import LEASE_ID, POOLS, World
from tests.unit.gke.seen import SPEC, condition

ONE = SliceSpec.of("v4", "2x2x2")
QUEUED = Queued(timedelta(hours=20), within=timedelta(minutes=50))
ANNOTATIONS = {
    "autoscaling.x-k8s.io/consume-provisioning-request": POOLS[0],
    "autoscaling.x-k8s.io/provisioning-class-name": "queued-provisioning.gke.io",
}


@pytest.fixture(autouse=True)
def _quick(world: World) -> None:
    world.google.container.at_once = 5


async def acquired(world: World, capacity: Any = QUEUED, spec: SliceSpec = SPEC, **deadlines: Any) -> SliceLease:
    backend = world.backend()
    lease = await backend.acquire(await world.plan(backend, capacity, spec, **deadlines), ME, say=world.said.append)
    world.settle()
    return lease


def requests(world: World) -> dict[str, Any]:
    return world.kube.all(REQUESTS)


def template(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.record(LEASE_ID)["spec"]["workerGroupSpecs"][0]["template"]
    return found


def never(world: World) -> None:
    """Google grants nothing that is queued."""
    world.google.container.delays.scale_up = 1e7


def dies() -> None:
    raise asyncio.CancelledError


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


async def test_without_pools_of_its_own_it_is_refused_with_both_ways(world: World):
    with pytest.raises(InvalidSpec, match=r"option node_pools, without reuse; .* name a Kueue LocalQueue"):
        await world.plan(world.plain_backend(), QUEUED)


# Killed, released, found


async def test_while_it_queues_the_report_says_so_and_hours_of_it_are_no_start_up(world: World):
    """F10."""
    never(world)
    backend = world.backend()
    plan = await world.plan(backend, QUEUED)
    world.meanwhile = lambda: dies() if "hosts are there" in "".join(world.said) else None
    with pytest.raises(asyncio.CancelledError):
        await backend.acquire(plan, ME, say=world.said.append)

    [lease] = await world.backend().list_leases()
    report = await world.backend().observe(lease)

    assert report.phase is Phase.QUEUED
    assert f"ProvisioningRequest {POOLS[0]} is Accepted" in report.describe()
    assert not report.broken


async def test_a_release_while_it_queues_ends_the_queueing_first(world: World):
    never(world)
    backend = world.backend()
    plan = await world.plan(backend, QUEUED)
    world.meanwhile = lambda: dies() if requests(world) else None
    with pytest.raises(asyncio.CancelledError):
        await backend.acquire(plan, ME)
    world.meanwhile = lambda: None
    [lease] = await world.backend().list_leases()

    released = await world.backend().release(lease)

    assert released.removed[:2] == [f"ProvisioningRequest {name}" for name in POOLS]
    assert f"ProvisioningRequest {POOLS[0]} was told to go" in released.left
    await world.released(lease)
    assert world.left == {}


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(monkeypatch)


def anew(world: World) -> None:
    """As if nothing had ever been; the first rung fails in the queue, the next one is granted by it."""
    [cluster] = world.google.container.clusters.values()
    cluster.pools.clear()
    cluster.sizes.clear()
    world.google.container.operations.clear()
    world.kube.empty()
    world.google.calls.clear()
    world.queue.refusal = "none here"
    world.meanwhile = lambda: setattr(world.queue, "refusal", "" if climbed(world) else "none here")


def climbed(world: World) -> bool:
    there = world.kube.all(RAY_CLUSTERS)
    return bool(there) and '"step":1' in there[LEASE_ID]["metadata"]["annotations"]["raytpu-lease"]


async def test_it_is_finished_or_given_back_whole_whenever_its_process_dies(world: World, killer: Killer):
    """F39, F09: through a request that fails to one that is granted, in the next zone."""
    [cluster] = world.google.container.clusters.values()
    cluster.zones = (ZONE, "us-central2-a")
    delays = world.google.container.delays
    delays.create = delays.delete = delays.scale_up = 4
    options = {"node_pools": {"zones": list(cluster.zones)}}
    plan = await world.plan(world.backend(**options), QUEUED, ONE)

    anew(world)
    killer.rests()
    await world.backend(**options).acquire(plan, ME)
    every = killer.calls
    assert every > 30

    for number in range(every):
        anew(world)
        killer.at(number, answered=True)
        with pytest.raises(asyncio.CancelledError):
            await world.backend(**options).acquire(plan, ME)
        killer.rests()
        if number % 2:
            lease = await world.backend(**options).acquire(plan, ME)
            assert (len(lease.attempts), lease.place["zone"]) == (1, "us-central2-a"), number
            assert list(requests(world)) == list(world.pools) == POOLS[:1], number
            await world.released(lease, **options)
        for found in await world.backend(**options).list_leases():
            await world.released(found, **options)
        assert world.left == {}, number


# Mended


def lose(world: World, pool: str, how: str) -> None:
    """The nodes of slice 1 are gone, and its pods wait again."""
    if how == "revoked":
        world.queue.revoke(pool)
    else:
        world.google.container.vanish(f"{CLUSTER}/nodePools/{pool}")
    for name, pod in world.kube.all(PODS).items():
        if "slice-1" in name:
            pod["status"]["conditions"] = [condition("PodScheduled", False, "Unschedulable", "0/3 nodes")]
            pod["status"]["phase"] = "Pending"
    world.settle()


@pytest.mark.parametrize("how", ["revoked", "gone"])
async def test_a_slice_whose_nodes_are_gone_is_queued_for_anew_on_another_pool(world: World, how: str):
    """F12."""
    lease, again = await acquired(world), node_pool_name(ME, 1, 1)
    lose(world, POOLS[1], how)

    report = await world.backend().observe(lease)
    assert len(report.broken) == 1
    assert ("CapacityRevoked" if how == "revoked" else f"node pool {POOLS[1]} is gone") in report.describe()
    mended = await world.backend().repair(lease)

    assert mended.created["node pool"] == [POOLS[0], again]
    assert list(world.pools) == [POOLS[0], again]
    # Its name stays, so that pods may say it.
    asked = {name: one["spec"]["podSets"][0]["podTemplateRef"]["name"] for name, one in requests(world).items()}
    assert asked == {POOLS[0]: POOLS[0], POOLS[1]: again}
    assert world.nodes(lease.id) == SPEC.hosts
    await world.released(lease)
    assert world.left == {}


async def test_a_replacement_that_google_never_has_says_so(world: World):
    lease = await acquired(world)
    lose(world, POOLS[1], "gone")
    world.queue.refusal = "no more of them"

    with pytest.raises(CapacityUnavailable, match=f"ProvisioningRequest {POOLS[1]} is Failed: no more of them"):
        await world.backend().repair(lease)

    await world.released(lease)
    assert world.left == {}


async def broken(world: World) -> SliceLease:
    """A lease whose second slice Google has taken back."""
    anew(world)
    world.meanwhile, world.queue.refusal = (lambda: None), ""
    lease = await acquired(world)
    lose(world, POOLS[1], "revoked")
    return lease


async def test_a_mend_that_is_cut_at_any_point_is_finished_by_the_next(world: World, killer: Killer):
    delays = world.google.container.delays
    delays.create = delays.delete = delays.scale_up = 4
    lease = await broken(world)
    killer.rests()
    await world.backend().repair(lease)
    every = killer.calls
    assert every > 15

    for number in range(every):
        lease = await broken(world)
        killer.at(number, answered=True)
        with pytest.raises(asyncio.CancelledError):
            await world.backend().repair(lease)
        killer.rests()

        while (report := await world.backend().observe(lease)).broken:
            lease = await world.backend().repair(lease)
        if report.phase is Phase.QUEUED:
            await world.sleep(10)
        lease = await world.backend().find(ME) or lease

        assert world.nodes(lease.id) == SPEC.hosts, number
        assert sorted(world.pools) == sorted(lease.created["node pool"]), number


@pytest.mark.parametrize("first", [Spot(), QUEUED], ids=["spot", "queued"])
async def test_requests_are_looked_for_only_where_some_may_be(world: World, first: Any):
    lease = await acquired(world, first)
    world.kube.calls.clear()
    await world.released(lease)
    assert (world.kube.count("list provisioningrequests") > 0) == (first is QUEUED)


async def test_a_conflict_with_what_somebody_else_wrote_is_read_again(world: World):
    lost = Fault("reset", applied=True)
    world.kube.fails("patch provisioningrequests", lost, lost)
    world.kube.fails("patch podtemplates", lost, lost)

    await acquired(world)

    assert list(requests(world)) == POOLS
