"""Giving a lease back: every step is tried, what is left is told, and strangers are left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.flows.leases import give_back
from raytpu_ops.tpu.errors import DeadlineExceeded, Misconfigured
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.waits import utc_now
from tests.unit.gke.conftest import Time
from tests.unit.gke.fake_kube import (
    AWAY,
    FORBIDDEN,
    LOST,
    NAMESPACE,
    PODS,
    RAY_CLUSTERS,
    RESET,
    SECRETS,
    FakeKube,
    Fault,
    refusal,
)

Make = Callable[..., GkeBackend]
PARTS = ["head", "slice-0-host-0", "slice-0-host-1", "slice-1-host-0", "slice-1-host-1"]


@pytest.fixture
def whole(kube: FakeKube, lease: SliceLease) -> SliceLease:
    """A lease whose pods all run."""
    kube.become_whole(lease.id)
    return lease


def pod(lease: SliceLease, part: str) -> str:
    return f"{lease.id}-{part}"


def ending(kube: FakeKube) -> set[str]:
    return {name for name, one in kube.all(PODS).items() if one["metadata"].get("deletionTimestamp")}


def nothing_is_left(kube: FakeKube) -> bool:
    return not (kube.all(RAY_CLUSTERS) or kube.all(PODS) or kube.all(SECRETS))


def deletions(kube: FakeKube) -> list[dict[str, Any]]:
    return [request.data for request in kube if request.method.value == "DELETE"]


async def test_the_raycluster_and_its_pods_are_told_to_go_in_one_go(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease
):
    """F25: without waiting for the garbage collector."""
    uid = kube.all(RAY_CLUSTERS)[whole.id]["metadata"]["uid"]

    released = await backend.release(whole)

    what = f"RayCluster {NAMESPACE}/{whole.id}"
    assert released.removed == [what, *(f"pod {pod(whole, part)}" for part in PARTS)]
    assert released.left == [f"{what} was told to go", *(f"pod {pod(whole, part)} is ending" for part in PARTS)]
    assert ending(kube) == {pod(whole, part) for part in PARTS}
    assert deletions(kube)[0] == {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
    assert all(one["preconditions"]["uid"] for one in deletions(kube))


async def test_it_is_told_once_and_looked_at_until_nothing_is_left(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease
):
    await backend.release(whole)
    again = await backend.release(whole)
    assert (again.removed, len(again.left)) == ([], 6)
    assert kube.count("delete") == 6

    kube.settle()
    for _ in range(2):
        last = await backend.release(whole)
        assert (last.removed, last.left) == ([], [])
    assert kube.count("delete") == 6
    assert nothing_is_left(kube)


@pytest.mark.parametrize("options", [{}, {"queue": "team", "reach": "service", "runtime": "image"}], ids=str)
async def test_a_teardown_leaves_nothing_whatever_the_options(
    kube: FakeKube, make: Make, whole: SliceLease, options: dict[str, Any]
):
    """F43: every option at its default, and some that are not those of the task that provisioned."""
    released = await give_back(
        make(**options), whole, by=utc_now() + timedelta(minutes=1), say=lambda _: kube.settle(), poll_s=0.01
    )

    assert nothing_is_left(kube)
    assert len(released.removed) == 6


async def test_what_a_finalizer_holds_is_named_while_the_chips_are_back(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease
):
    """F24."""
    kube.change(RAY_CLUSTERS, whole.id, finalizers=["example.com/hold"])
    await backend.release(whole)
    kube.settle()

    released = await backend.release(whole)

    assert kube.all(PODS) == {}
    assert released.left == [
        f"RayCluster {NAMESPACE}/{whole.id} is being deleted; it is held by finalizers example.com/hold"
    ]
    with pytest.raises(DeadlineExceeded, match=r"still there and billing: .*finalizers example.com/hold"):
        await give_back(backend, whole, by=utc_now(), say=lambda _: None)


# Hosts that are gone


async def test_pods_of_hosts_that_are_gone_are_not_waited_for_for_ever(
    kube: FakeKube, time: Time, backend: GkeBackend, whole: SliceLease
):
    lost = pod(whole, "slice-1-host-1")
    kube.lost.add(lost)
    await backend.release(whole)
    kube.settle()

    for seconds in (5, 34):  # it had 10 s to end, and 30 s beyond
        time.passes(seconds)
        released = await backend.release(whole)
        assert released.removed == []
        assert f"pod {lost} is ending" in released.left
    assert kube.count("delete") == 6

    time.passes(3)
    released = await backend.release(whole)
    assert released.removed == [f"pod {lost}, whose host is gone"]
    assert deletions(kube)[-1]["gracePeriodSeconds"] == 0
    kube.settle()
    assert (await backend.release(whole)).left == []
    assert nothing_is_left(kube)


# Steps that fail


async def test_pods_are_told_to_go_where_the_raycluster_cannot_be_deleted(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease
):
    kube.fails("delete rayclusters", FORBIDDEN)

    released = await backend.release(whole)

    assert released.left[0].startswith(f"Kubernetes refused to delete RayCluster {NAMESPACE}/{whole.id} (403)")
    assert "deploy/gke/rbac.yaml" in released.left[0]
    assert len(ending(kube)) == 5


@pytest.mark.parametrize("fault", [AWAY, RESET, FORBIDDEN, refusal(404, "404 page not found")], ids=str)
async def test_pods_are_told_to_go_where_the_raycluster_cannot_be_seen(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease, fault: Fault
):
    """F07: what cannot be seen is not gone. The pods' own labels say whose they are."""
    kube.fails("get rayclusters", fault, always=True)

    released = await backend.release(whole)

    assert f"get RayCluster {NAMESPACE}/{whole.id}" in released.left[0]
    assert len(ending(kube)) == 5


@pytest.mark.parametrize("call", ["list pods", "delete pods"])
async def test_the_raycluster_goes_where_its_pods_cannot_be_told(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease, call: str
):
    kube.fails(call, FORBIDDEN, always=True)

    released = await backend.release(whole)

    assert kube.all(RAY_CLUSTERS)[whole.id]["metadata"]["deletionTimestamp"]
    assert any(f"Kubernetes refused to {call.split()[0]} pod" in one for one in released.left)


async def test_one_pod_that_cannot_be_deleted_does_not_keep_the_others(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease
):
    kube.fails("delete pods", AWAY)

    released = await backend.release(whole)

    assert ending(kube) == {pod(whole, part) for part in PARTS[1:]}
    assert f"Kubernetes is not able to delete pod {NAMESPACE}/{pod(whole, 'head')} now (503)" in released.left[1]
    assert len((await backend.release(whole)).removed) == 1
    assert len(ending(kube)) == 5


async def test_a_server_that_is_away_is_asked_again_until_all_is_gone(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease
):
    kube.fails("", RESET, RESET, AWAY, LOST)
    told: list[str] = []

    def say(line: str) -> None:
        told.append(line)
        kube.settle()

    await give_back(backend, whole, by=utc_now() + timedelta(minutes=1), say=say, poll_s=0.01)

    assert nothing_is_left(kube)
    assert any("Kubernetes at" in line for line in told)


async def test_a_deletion_whose_answer_got_lost_is_not_told_as_undone(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease
):
    kube.fails("delete rayclusters", replace(LOST, kind="cut"))

    assert "Kubernetes at" in (await backend.release(whole)).left[0]
    assert "is being deleted" in (await backend.release(whole)).left[0]
    assert kube.count("delete rayclusters") == 1


async def test_credentials_that_are_refused_fail_in_words(kube: FakeKube, backend: GkeBackend, whole: SliceLease):
    kube.tokens.clear()

    released = await backend.release(whole)

    assert len(released.left) == 2
    assert all("credentials, also renewed ones" in one for one in released.left)


async def test_a_way_to_the_server_that_is_none_is_an_error(whole: SliceLease, tmp_path: Path):
    backend = GkeBackend(KubeconfigAccess(str(tmp_path / "none")), namespace=NAMESPACE)

    with pytest.raises(Misconfigured, match="is no file on this machine"):
        await backend.release(whole)


# Not ours


def strangers(kube: FakeKube, lease: SliceLease) -> None:
    """Ours is gone, and somebody has made a RayCluster of the same name, with pods."""
    for name in kube.all(PODS):
        kube.change(PODS, name, labels={"ray.io/cluster": lease.id})
    kube.change(RAY_CLUSTERS, lease.id, labels={"team": "a"})


async def test_nothing_happens_to_a_strangers_raycluster_of_the_same_name(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease
):
    """F03."""
    strangers(kube, whole)

    released = await backend.release(whole)

    assert (released.removed, released.left) == ([], [])
    assert kube.count("delete") == 0
    assert await backend.repair(whole) == whole
    assert kube.count("delete") == 0


async def test_a_strangers_pods_are_left_alone_where_the_raycluster_cannot_be_seen(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease
):
    strangers(kube, whole)
    kube.fails("get rayclusters", AWAY)

    await backend.release(whole)

    assert kube.count("delete") == 0


async def test_one_that_took_its_place_in_between_is_not_deleted(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease
):
    """The uid is a precondition of each deletion."""
    really = kube._delete

    def swapped(request: Any, kind: Any, name: str) -> Any:
        kube.change(kind, name, uid="new")
        return really(request, kind, name)

    kube._delete = swapped  # type: ignore[method-assign]
    await backend.release(whole)

    assert kube.count("delete") == 6
    assert ending(kube) == set()
    assert "deletionTimestamp" not in kube.all(RAY_CLUSTERS)[whole.id]["metadata"]


async def test_a_lease_whose_record_was_written_over_is_given_back_all_the_same(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease
):
    """A green teardown beside a RayCluster that bills would be the worst of all."""
    kube.change(RAY_CLUSTERS, whole.id, annotations=None)

    await backend.release(whole)
    kube.settle()

    assert (await backend.release(whole)).left == []
    assert nothing_is_left(kube)


async def test_pods_whose_raycluster_is_gone_already_are_given_back(
    kube: FakeKube, backend: GkeBackend, whole: SliceLease
):
    kube.forget(RAY_CLUSTERS, whole.id)

    released = await backend.release(whole)

    assert len(released.removed) == len(ending(kube)) == 5
