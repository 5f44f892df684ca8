"""Looking at a lease: it never fails for a far side that is silent, and reads what helps a person."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.tpu.capacity import OnDemand
from raytpu_ops.tpu.deadlines import Deadlines, Phase, Schedule
from raytpu_ops.tpu.errors import Misconfigured
from raytpu_ops.tpu.lease import SliceLease
from tests.unit.gke import seen
from tests.unit.gke.conftest import ME, Time
from tests.unit.gke.fake_kube import (
    AWAY,
    CUT,
    FORBIDDEN,
    NAMESPACE,
    PODS,
    RAY_CLUSTERS,
    RAY_TOKEN,
    RESET,
    SECRETS,
    WORKLOADS,
    FakeKube,
    Fault,
    answer,
    refusal,
)
from tests.unit.ray.fake_ray import FakeRay, node_row

Make = Callable[..., GkeBackend]


@pytest.fixture
async def ray(kube: FakeKube) -> AsyncIterator[FakeRay]:
    """Ray behind the service proxy, with every host of the lease."""
    async with FakeRay(RAY_TOKEN) as fake:
        kube.ray = fake.address
        fake.rows["nodes"] = [
            node_row("head", seen.address(None), head=True),
            *(
                node_row(f"n{number}{host}", seen.address(number, host), slice_name=f"slice-{number}", worker_id=host,
                         chips=4)
                for number, host in seen.HOSTS
            ),
        ]  # fmt: skip
        yield fake


@pytest.fixture
def whole(kube: FakeKube, lease: SliceLease) -> SliceLease:
    kube.become_whole(lease.id)
    return lease


def change_pod(kube: FakeKube, lease: SliceLease, part: str, **status: Any) -> str:
    name = f"{lease.id}-{part}"
    made = copy.deepcopy(kube.all(PODS)[name])
    made["status"] |= status
    kube.store(PODS, made)
    return name


def crash(kube: FakeKube, lease: SliceLease, part: str = "head") -> str:
    """Its container ends again and again."""
    state = {
        "name": "ray-head" if part == "head" else "ray-worker",
        "restartCount": 3,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
        "lastState": {"terminated": {"reason": "Error", "exitCode": 13}},
    }
    return change_pod(
        kube, lease, part, conditions=[seen.condition("PodScheduled")], containerStatuses=[state], phase="Running"
    )


# Whole


async def test_a_lease_is_whole_when_everybody_says_so(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease, ray: FakeRay
):
    report = await backend.observe(whole)

    assert report.ready, report.describe()
    assert kube.count("list workloads") == 0  # no queue, so Kueue is not asked
    assert kube.count("get pods/log") == 0
    assert all(call.startswith(("get", "list")) for call in kube.calls)  # a look changes nothing


async def test_ray_is_asked_with_its_own_token_and_not_shown_the_api_servers(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease, ray: FakeRay
):
    await backend.observe(whole)
    await backend.observe(whole)

    for request in ray.seen:
        assert request.headers["x-ray-authorization"] == f"Bearer {RAY_TOKEN}"
        assert "authorization" not in request.headers
    assert kube.count("get secrets") == 1


async def test_a_head_that_is_not_ready_is_not_asked(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease, ray: FakeRay
):
    change_pod(kube, whole, "head", conditions=[seen.condition("PodScheduled"), seen.condition("Ready", False)])

    report = await backend.observe(whole)

    assert not report.ready
    assert ray.requests == []
    assert kube.count("get secrets") == 0


async def test_a_ray_that_does_not_answer_is_no_error(kube: FakeKube, backend: GkeBackend, whole: SliceLease):
    report = await backend.observe(whole)

    assert not report.ready
    assert not report.head_alive
    assert "Ray does not answer: " in report.describe()
    assert "no endpoints available for service" in report.describe()
    assert report.stands


async def test_a_token_that_kuberay_has_not_made_yet_is_waited_for(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease, ray: FakeRay
):
    kube.forget(SECRETS, whole.id)
    assert "Ray's token is not there yet" in (await backend.observe(whole)).describe()

    kube.set_token(whole.id, RAY_TOKEN)
    assert (await backend.observe(whole)).ready


async def test_a_lease_that_is_granted_anew_has_its_own_token(
    kube: FakeKube, time: Time, backend: GkeBackend, whole: SliceLease, ray: FakeRay, plan: Plan
):
    """The same name, the same backend in the same process, another token."""
    assert (await backend.observe(whole)).ready
    await backend.release(whole)
    kube.settle()
    time.passes(60)
    ray.token = "another"
    again = await backend.acquire(plan, ME)
    kube.become_whole(again.id, token="another")

    assert (await backend.observe(again)).ready


# Silence


SILENT = [RESET, CUT, AWAY, answer(502, "<html>Bad Gateway</html>"), answer(200, "<html>log in</html>")]


@pytest.mark.parametrize("call", ["get rayclusters", "list pods", "list workloads"])
@pytest.mark.parametrize("fault", SILENT, ids=["reset", "cut", "503", "502", "page"])
async def test_a_silent_server_is_told_and_never_raised(kube: FakeKube, make: Make, call: str, fault: Fault):
    """F07."""
    backend = make(queue="team")
    plan = await backend.plan(seen.SPEC, [OnDemand()], lease_for=timedelta(hours=1))
    lease = await backend.acquire(plan, ME)
    kube.fails(call, fault, always=True)

    report = await backend.observe(lease)

    assert not report.ready
    assert report.fatal is None
    assert report.stands  # what runs there may run on
    assert "Kubernetes" in report.describe()
    assert NAMESPACE in report.describe()


async def test_silence_after_hours_in_a_queue_counts_from_when_it_began(
    kube: FakeKube, time: Time, backend: GkeBackend, whole: SliceLease
):
    """F10, F41: a server that restarts for a moment must not end what has waited for hours."""
    schedule = Schedule(begun=time() - timedelta(hours=3), deadlines=Deadlines())
    began = time()
    kube.fails("get rayclusters", AWAY, AWAY)

    for seconds in (0, 20):
        time.passes(seconds)
        report = await backend.observe(whole)
        assert report.since == began
        assert schedule.until(report.phase, report.since) > time() + timedelta(minutes=10)
    assert (await backend.observe(whole)).since != began

    time.passes(600)
    kube.fails("get rayclusters", AWAY)
    assert (await backend.observe(whole)).since == time()


async def test_a_right_that_is_missing_is_no_silence(kube: FakeKube, backend: GkeBackend, whole: SliceLease):
    kube.fails("list pods", FORBIDDEN)

    with pytest.raises(Misconfigured, match=r"deploy/gke/rbac.yaml"):
        await backend.observe(whole)


# Gone


async def test_a_raycluster_that_is_gone_is_fatal(kube: FakeKube, backend: GkeBackend, whole: SliceLease):
    kube.forget(RAY_CLUSTERS, whole.id)

    assert (await backend.observe(whole)).fatal == f"RayCluster {whole.id} does not exist any more"


async def test_one_that_is_being_deleted_is_fatal(kube: FakeKube, backend: GkeBackend, whole: SliceLease):
    await backend.release(whole)

    assert "is being deleted" in str((await backend.observe(whole)).fatal)


async def test_a_strangers_raycluster_in_its_place_is_not_looked_at(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease, ray: FakeRay
):
    kube.change(RAY_CLUSTERS, whole.id, labels={"team": "a"})

    assert (await backend.observe(whole)).fatal is not None
    assert ray.requests == []


async def test_one_whose_record_was_written_over_is_still_the_lease(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease, ray: FakeRay
):
    kube.change(RAY_CLUSTERS, whole.id, annotations=None)

    assert (await backend.observe(whole)).ready


# Last words


async def test_a_head_that_crashes_again_and_again_is_quoted(kube: FakeKube, backend: GkeBackend, whole: SliceLease):
    """F21."""
    name = crash(kube, whole)
    kube.logs[name] = "starting\ncannot bind 6379\n"

    report = await backend.observe(whole)

    assert "exit code 13" in report.describe()
    assert "its last words: starting | cannot bind 6379" in report.describe()
    assert kube.count("get pods/log") == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (refusal(500, "Get https://10.0.0.9:10250/containerLogs: no route to host"), "no route to host"),
        (FORBIDDEN, "deploy/gke/rbac.yaml"),
        (RESET, "Kubernetes at"),
    ],
    ids=["kubelet", "rights", "reset"],
)
async def test_a_log_that_cannot_be_read_does_not_take_the_report_away(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease, fault: Fault, said: str
):
    crash(kube, whole)
    kube.fails("get pods/log", fault, always=True)

    report = await backend.observe(whole)

    assert "CrashLoopBackOff" in report.describe()
    assert said in report.describe()


async def test_of_many_pods_that_crash_a_few_are_quoted(kube: FakeKube, backend: GkeBackend, whole: SliceLease):
    for part in ("head", *(f"slice-{number}-host-{host}" for number, host in seen.HOSTS)):
        crash(kube, whole, part)

    await backend.observe(whole)

    assert kube.count("get pods/log") == 2


# Kueue


def queued(kube: FakeKube, lease: SliceLease, version: str | None) -> None:
    """Kueue of that version has a Workload for it, which waits for quota."""
    if version is None:
        return
    kube.kinds.add(WORKLOADS[version])
    uid = kube.all(RAY_CLUSTERS)[lease.id]["metadata"]["uid"]
    waits = seen.workload(seen.condition("QuotaReserved", False, "Pending", "insufficient quota in flavor v4"))
    waits["metadata"] |= {"name": "w", "labels": {"kueue.x-k8s.io/job-uid": uid}}
    kube.store(WORKLOADS[version], waits)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("v1beta2", "queued by Kueue in LocalQueue team: insufficient quota in flavor v4"),
        ("v1beta1", "queued by Kueue in LocalQueue team: insufficient quota in flavor v4"),
        (None, "is there such a LocalQueue in the namespace?"),
    ],
)
async def test_kueue_is_quoted_where_a_queue_is_named(kube: FakeKube, make: Make, version: str | None, said: str):
    backend = make(queue="team")
    plan = await backend.plan(seen.SPEC, [OnDemand()], lease_for=timedelta(hours=1))
    lease = await backend.acquire(plan, ME)
    queued(kube, lease, version)

    report = await backend.observe(lease)

    assert report.phase is Phase.QUEUED
    assert said in report.describe()


# Repair


def lose(kube: FakeKube, ray: FakeRay, lease: SliceLease, number: int, host: int) -> str:
    """The host of that pod is gone: the pod is not ready any more, and Ray's node is dead."""
    (row,) = (row for row in ray.rows["nodes"] if row["node_id"] == f"n{number}{host}")
    row["state"] = "DEAD"
    part = f"slice-{number}-host-{host}"
    return change_pod(kube, lease, part, conditions=[seen.condition("PodScheduled"), seen.condition("Ready", False)])


async def test_only_pods_of_the_broken_slice_are_taken_away(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease, ray: FakeRay
):
    """F13: a slice is replaced whole, and nothing else is touched."""
    gone = lose(kube, ray, whole, 1, 1)
    assert (await backend.observe(whole)).broken == ["slice-1"]

    assert await backend.repair(whole) == whole

    asked = {request.name: request.data for request in kube if request.method.value == "DELETE"}
    assert asked.keys() == {f"{whole.id}-slice-1-host-0", gone}
    assert asked[gone]["gracePeriodSeconds"] == 0  # nobody is there to say that it has ended
    assert "gracePeriodSeconds" not in asked[f"{whole.id}-slice-1-host-0"]
    assert all(one["preconditions"]["uid"] for one in asked.values())
    assert kube.count("delete rayclusters") == 0


async def test_a_repair_that_is_cut_short_goes_on(kube: FakeKube, backend: GkeBackend, whole: SliceLease, ray: FakeRay):
    lose(kube, ray, whole, 0, 0)
    kube.fails("delete pods", AWAY, RESET)

    await backend.repair(whole)

    left = {name for name, one in kube.all(PODS).items() if "deletionTimestamp" not in one["metadata"]}
    assert left == {f"{whole.id}-{part}" for part in ("head", "slice-1-host-0", "slice-1-host-1")}


@pytest.mark.parametrize(("after_s", "told_again"), [(30, False), (32, True)])
async def test_a_pod_that_is_ending_is_told_again_only_where_its_host_is_gone(
    kube: FakeKube,
    time: Time,
    backend: GkeBackend,
    whole: SliceLease,
    ray: FakeRay,
    after_s: int,
    told_again: bool,
):
    gone = lose(kube, ray, whole, 1, 1)
    other = f"{whole.id}-slice-1-host-0"
    kube.change(PODS, other, deletionTimestamp=seen.text(1))
    time.passes(after_s)

    await backend.repair(whole)

    asked = {request.name for request in kube if request.method.value == "DELETE"}
    assert asked == ({gone, other} if told_again else {gone})


async def test_a_head_whose_host_is_gone_is_taken_away_with_its_hosts(
    kube: FakeKube, time: Time, backend: GkeBackend, whole: SliceLease
):
    """KubeRay waits for its pod for ever, and makes no other one."""
    head = f"{whole.id}-head"
    kube.change(PODS, head, deletionTimestamp=seen.text(1))
    time.passes(30)
    await backend.repair(whole)
    assert kube.count("delete") == 0

    time.passes(2)
    await backend.repair(whole)

    asked = {request.name: request.data for request in kube if request.method.value == "DELETE"}
    assert len(asked) == 1 + len(seen.HOSTS)
    assert asked[head]["gracePeriodSeconds"] == 0
    assert head not in kube.all(PODS)


async def test_a_lease_with_nothing_broken_is_left_as_it_is(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease, ray: FakeRay
):
    assert await backend.repair(whole) == whole
    kube.fails("get rayclusters", AWAY)
    assert await backend.repair(whole) == whole

    assert kube.count("delete") == 0
