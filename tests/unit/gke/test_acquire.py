"""Granting a lease: made once, adopted ever after, and taken back where it fails."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.backend import ANSWER_WITHIN
from raytpu_ops.backends.gke.record import OWNER, RECORD
from raytpu_ops.tpu.capacity import OnDemand
from raytpu_ops.tpu.deadlines import Deadlines
from raytpu_ops.tpu.errors import CapacityUnavailable, DeadlineExceeded, Misconfigured, RayTpuError
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.naming import lease_id
from raytpu_ops.tpu.spec import SliceSpec
from tests.unit.gke.conftest import ME, Time
from tests.unit.gke.fake_kube import (
    AWAY,
    FORBIDDEN,
    LOST,
    NAMESPACE,
    NO_WEBHOOK,
    QUOTA,
    RAY_CLUSTERS,
    RESET,
    FakeKube,
    Fault,
    refusal,
)
from tests.unit.gke.seen import SPEC, START

Make = Callable[..., GkeBackend]
NAME = lease_id(ME)


def of(kube: FakeKube, name: str = NAME) -> dict[str, Any]:
    return kube.all(RAY_CLUSTERS)[name]


def being_deleted(kube: FakeKube) -> bool:
    return "deletionTimestamp" in of(kube)["metadata"]


# Made


async def test_one_raycluster_is_made_that_says_whose_it_is(kube: FakeKube, backend: GkeBackend, plan: Plan):
    lease = await backend.acquire(plan, ME)

    assert kube.calls == ["get rayclusters", "patch rayclusters"]
    assert kube.all(RAY_CLUSTERS).keys() == {lease.id}
    made = of(kube, lease.id)
    groups = [made["spec"]["headGroupSpec"], *made["spec"]["workerGroupSpecs"]]
    for one in (made, *(group["template"] for group in groups)):
        assert one["metadata"]["labels"][OWNER] == ME.digest
        assert one["metadata"]["labels"]["raytpu-dag"] == "digits"
    assert (lease.owner, lease.spec, lease.backend) == (ME, SPEC, "gke")
    assert (lease.granted_at, lease.expires_at) == (START, START + timedelta(hours=12))
    assert lease.ray.address == (
        f"{kube.address}/api/v1/namespaces/{NAMESPACE}/services/{lease.id}-head-svc:dashboard/proxy"
    )
    assert lease.ray.token == f"Secret {NAMESPACE}/{lease.id}"
    assert lease.place["namespace"] == NAMESPACE
    assert SliceLease.from_xcom(json.loads(json.dumps(lease.to_xcom()))) == lease


async def test_mapped_tasks_have_a_raycluster_each(kube: FakeKube, backend: GkeBackend, plan: Plan):
    each = [ME.model_copy(update={"map_index": index}) for index in range(3)]

    leases = await asyncio.gather(*(backend.acquire(plan, one) for one in each))

    assert kube.all(RAY_CLUSTERS).keys() == {lease.id for lease in leases}
    assert len(kube.all(RAY_CLUSTERS)) == 3


# Adopted


async def test_the_retry_gets_the_same_lease_and_writes_nothing(
    kube: FakeKube, time: Time, make: Make, plan: Plan, lease: SliceLease
):
    """F39: another process, later."""
    time.passes(600)

    assert await make().acquire(plan, ME) == lease
    assert kube.calls == ["get rayclusters"]


async def test_two_at_once_end_with_one_raycluster(kube: FakeKube, make: Make, plan: Plan):
    """F34, F39: a zombie and its retry."""
    one, other = await asyncio.gather(make().acquire(plan, ME), make().acquire(plan, ME))

    assert one.id == other.id
    assert kube.all(RAY_CLUSTERS).keys() == {one.id}


@pytest.mark.parametrize("looks", [0, 7])
async def test_a_create_whose_answer_got_lost_is_adopted(kube: FakeKube, backend: GkeBackend, plan: Plan, looks: int):
    """F02: the object is there, the client saw a reset, and the server does not answer for a while."""
    kube.fails("patch", replace(LOST, then=lambda: kube.fails("get", *[RESET] * looks)))

    lease = await backend.acquire(plan, ME)

    assert kube.calls == ["get rayclusters", "patch rayclusters", *["get rayclusters"] * (looks + 1)]
    assert kube.all(RAY_CLUSTERS).keys() == {lease.id}
    assert lease.granted_at == START


async def test_a_create_that_never_arrived_is_sent_again(kube: FakeKube, backend: GkeBackend, plan: Plan):
    kube.fails("patch", RESET, NO_WEBHOOK, refusal(409, "the object has been modified", "Conflict"))

    lease = await backend.acquire(plan, ME)

    assert kube.count("patch") == 4
    assert kube.all(RAY_CLUSTERS).keys() == {lease.id}


# Waits for the one before


async def test_the_former_one_goes_before_a_new_one_is_made(
    kube: FakeKube, time: Time, backend: GkeBackend, plan: Plan, lease: SliceLease
):
    """F08: one that is being deleted is not the wanted one."""
    kube.become_whole(lease.id)
    former = of(kube)["metadata"]["uid"]
    await backend.release(lease)
    assert being_deleted(kube)

    def third_pause() -> None:
        if time.pauses == 3:
            kube.settle()

    time.meanwhile = third_pause
    again = await backend.acquire(plan, ME)

    assert again.id == lease.id
    assert again.granted_at > lease.granted_at
    assert of(kube)["metadata"]["uid"] != former
    assert not being_deleted(kube)


async def test_a_former_one_that_a_finalizer_holds_is_named_in_the_end(
    kube: FakeKube, time: Time, backend: GkeBackend, plan: Plan, lease: SliceLease
):
    """F24."""
    kube.change(RAY_CLUSTERS, NAME, finalizers=["example.com/hold"])
    await backend.release(lease)
    time.meanwhile = kube.settle

    with pytest.raises(DeadlineExceeded, match=r"still being deleted; it is held by finalizers example.com/hold"):
        await backend.acquire(plan, ME)

    assert time() - START <= ANSWER_WITHIN + timedelta(seconds=10)
    assert kube.count("patch") == 0


# Not ours


def as_is(kube: FakeKube) -> None:
    """A RayCluster of that name, made by hand."""
    kube.store(RAY_CLUSTERS, {"metadata": {"name": NAME, "labels": {"team": "a"}}, "spec": {}})


def of_another_owner(kube: FakeKube) -> None:
    made = of(kube)
    other = ME.model_copy(update={"run_id": "another"})
    text = made["metadata"]["annotations"][RECORD].replace("manual__2026-11-30", "another")
    kube.change(RAY_CLUSTERS, NAME, labels={OWNER: other.digest}, annotations={RECORD: text})


@pytest.mark.parametrize(
    ("stranger", "whose"),
    [(as_is, "was not made by raytpu-ops"), (of_another_owner, "belongs to digits/another/provision")],
)
async def test_a_stranger_with_the_name_is_named_and_left_alone(
    kube: FakeKube,
    backend: GkeBackend,
    plan: Plan,
    lease: SliceLease,
    stranger: Callable[[FakeKube], None],
    whose: str,
):
    """F03."""
    stranger(kube)
    before = copy.deepcopy(of(kube))

    with pytest.raises(Misconfigured, match=f"RayCluster {NAMESPACE}/{NAME} exists and {whose}: delete or rename it"):
        await backend.acquire(plan, ME)

    assert of(kube) == before
    assert await backend.find(ME) is None


@pytest.mark.parametrize("options", [{}, {"image": "another:1"}, {"queue": "team"}], ids=str)
async def test_the_owners_own_with_another_spec_or_other_options_is_not_taken_for_it(
    kube: FakeKube, make: Make, lease: SliceLease, options: dict[str, Any]
):
    """F03."""
    spec = SPEC if options else SliceSpec.of("v4", "2x2x2", num_slices=1)
    other = make(**options)
    plan = await other.plan(spec, [OnDemand()], lease_for=timedelta(hours=1))
    before = copy.deepcopy(of(kube))

    with pytest.raises(Misconfigured, match=r"exists for digits/.*with another spec or other options .*release it"):
        await other.acquire(plan, ME)

    assert of(kube) == before


@pytest.mark.parametrize("annotations", [None, {}, {RECORD: "{}"}, {RECORD: "no json"}], ids=str)
async def test_one_whose_record_was_written_over_is_told_with_the_command_to_delete_it(
    kube: FakeKube, backend: GkeBackend, plan: Plan, lease: SliceLease, annotations: dict[str, str] | None
):
    kube.change(RAY_CLUSTERS, NAME, annotations=annotations)

    with pytest.raises(Misconfigured, match=f"`kubectl delete raycluster {NAME} --namespace {NAMESPACE}`"):
        await backend.acquire(plan, ME)

    assert not being_deleted(kube)


# Fails


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (FORBIDDEN, Misconfigured),
        (QUOTA, CapacityUnavailable),
        (refusal(403, 'admission webhook "x" denied the request: no', "Forbidden"), Misconfigured),
        (refusal(422, 'RayCluster.ray.io "x" is invalid: spec', "Invalid"), Misconfigured),
    ],
    ids=["rights", "quota", "webhook", "invalid"],
)
async def test_what_waiting_cannot_mend_ends_it_at_once_with_nothing_left(
    kube: FakeKube, time: Time, backend: GkeBackend, plan: Plan, fault: Fault, kind: type[RayTpuError]
):
    kube.fails("patch", fault, always=True)

    with pytest.raises(kind):
        await backend.acquire(plan, ME)

    assert (kube.count("patch"), time.pauses) == (1, 0)
    assert kube.all(RAY_CLUSTERS) == {}


async def test_an_admission_webhook_that_stays_down_is_named_in_the_end(
    kube: FakeKube, time: Time, backend: GkeBackend, plan: Plan
):
    """F16."""
    kube.fails("patch", NO_WEBHOOK, always=True)

    with pytest.raises(DeadlineExceeded, match=r'failed calling webhook "mraycluster.kb.io"') as late:
        await backend.acquire(plan, ME)

    assert f"RayCluster {NAMESPACE}/{NAME}" in str(late.value)
    assert ANSWER_WITHIN <= time() - START < 2 * ANSWER_WITHIN
    assert 30 < kube.count("patch") < 300  # it backs off, and does not stop to try
    assert kube.all(RAY_CLUSTERS) == {}


async def test_without_the_right_to_look_nothing_is_made(kube: FakeKube, backend: GkeBackend, plan: Plan):
    """F07, F32: made blindly, it could not be found again."""
    kube.fails("get rayclusters", FORBIDDEN, always=True)

    with pytest.raises(Misconfigured, match=r"deploy/gke/rbac.yaml"):
        await backend.acquire(plan, ME)

    assert kube.count("patch") == 0


def lost_then_away_until_it_is_over(kube: FakeKube, time: Time, *further: tuple[str, Fault]) -> None:
    """The object is made, nobody hears of it, and the server is back once the wait is over."""
    over = time() + ANSWER_WITHIN

    def back() -> None:
        if time() >= over:
            kube.heals()
            for call, fault in further:
                kube.fails(call, fault, always=True)

    kube.fails("patch", replace(LOST, then=lambda: kube.fails("get", replace(AWAY, then=back), always=True)))


async def test_what_was_made_is_taken_back_where_granting_it_fails(
    kube: FakeKube, time: Time, backend: GkeBackend, plan: Plan
):
    """F32: Airflow runs no teardown after a setup that failed."""
    lost_then_away_until_it_is_over(kube, time)

    with pytest.raises(DeadlineExceeded) as late:
        await backend.acquire(plan, ME)

    assert being_deleted(kube)
    assert "may be left" not in str(late.value)


@pytest.mark.parametrize("call", ["get rayclusters", "delete rayclusters"])
async def test_what_cannot_be_taken_back_is_named(
    kube: FakeKube, time: Time, backend: GkeBackend, plan: Plan, call: str
):
    """F32: polling is denied, or deleting is."""
    lost_then_away_until_it_is_over(kube, time, (call, FORBIDDEN))

    with pytest.raises(DeadlineExceeded) as late:
        await backend.acquire(plan, ME)

    said = str(late.value)
    assert f"RayCluster {NAMESPACE}/{NAME} may be left: Kubernetes refused to {call.split()[0]}" in said
    assert "deploy/gke/rbac.yaml" in said
    assert "\n" not in said
    assert not being_deleted(kube)
    kube.heals()
    assert [one.id for one in await backend.list_leases()] == [NAME]  # and the reaper finds it


async def test_a_stranger_is_not_taken_back(kube: FakeKube, time: Time, backend: GkeBackend, plan: Plan):
    as_is(kube)
    over = time() + ANSWER_WITHIN
    kube.fails("get", replace(AWAY, then=lambda: kube.heals() if time() >= over else None), always=True)

    with pytest.raises(DeadlineExceeded):
        await backend.acquire(plan, ME)

    assert kube.count("delete") == 0


async def test_a_server_that_is_away_is_waited_for_no_longer_than_the_deadline_and_nothing_is_said_to_be_left(
    kube: FakeKube, time: Time, backend: GkeBackend, plan: Plan
):
    kube.fails("get", AWAY, always=True)
    short = plan.model_copy(update={"deadlines": Deadlines(provisioning=timedelta(seconds=20))})

    with pytest.raises(DeadlineExceeded, match="the provisioning deadline") as late:
        await backend.acquire(short, ME)

    assert time() - START < timedelta(minutes=1)
    assert "may be left" not in str(late.value)  # it was never asked for
