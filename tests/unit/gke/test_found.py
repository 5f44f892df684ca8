"""Leases are found again from their RayClusters alone, whatever else stands there."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.record import OWNER, RECORD
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.naming import lease_id
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import FORBIDDEN, NAMESPACE, NO_WEBHOOK, RAY_CLUSTERS, RESET, FakeKube, refusal

Make = Callable[..., GkeBackend]
NAME = lease_id(ME)


def of(kube: FakeKube) -> dict[str, Any]:
    return kube.all(RAY_CLUSTERS)[NAME]


async def test_the_owners_lease_is_found_from_its_raycluster_alone(kube: FakeKube, make: Make, lease: SliceLease):
    assert await make().find(ME) == lease
    assert await make().find(ME.model_copy(update={"run_id": "another"})) is None


async def test_a_server_that_is_away_does_not_mean_that_there_is_none(
    kube: FakeKube, backend: GkeBackend, lease: SliceLease
):
    """F07."""
    kube.fails("get rayclusters", RESET, NO_WEBHOOK, refusal(429, "too many requests"))

    assert await backend.find(ME) == lease

    kube.fails("get rayclusters", FORBIDDEN)
    with pytest.raises(Misconfigured):
        await backend.find(ME)


async def test_leases_are_listed_and_narrowed(kube: FakeKube, backend: GkeBackend, plan: Plan):
    owners = [
        Owner(dag_id=dag, run_id=run, task_id="provision")
        for dag, run in [("digits", "manual__2026-11-30T08:00:00+00:00"), ("Ziffern täglich/😀", "r"), ("digits", "r")]
    ]
    one, two, three = [await backend.acquire(plan, owner) for owner in owners]

    assert sorted(found.id for found in await backend.list_leases()) == sorted([one.id, two.id, three.id])
    assert await backend.list_leases(dag_id="Ziffern täglich/😀") == [two]
    assert await backend.list_leases(dag_id="digits", run_id=owners[0].run_id) == [one]
    assert await backend.list_leases(task_id="another") == []


@pytest.mark.parametrize("labels", [None, {"team": "a"}], ids=str)
async def test_strangers_are_skipped(
    kube: FakeKube, backend: GkeBackend, plan: Plan, lease: SliceLease, labels: dict[str, str] | None
):
    mine = await backend.acquire(plan, ME.model_copy(update={"run_id": "mine"}))
    kube.change(RAY_CLUSTERS, NAME, labels=labels)
    said: list[str] = []

    assert await backend.list_leases(said.append) == [mine]
    assert said == []
    assert await backend.find(ME) is None


DELETE = f"`kubectl delete raycluster {NAME} --namespace {NAMESPACE}`"


@pytest.mark.parametrize(
    "broken",
    [
        {"annotations": None},
        {"annotations": {RECORD: "no json"}},
        {"annotations": {RECORD: "null"}},
        {"annotations": {RECORD: '{"owner": {}}'}},
        {"labels": {OWNER: "somebody-else"}},
    ],
    ids=str,
)
async def test_one_of_ours_that_cannot_be_read_is_told_and_keeps_nobody_else(
    kube: FakeKube, backend: GkeBackend, plan: Plan, lease: SliceLease, broken: dict[str, Any]
):
    """It bills all the same: a list without it would be a lie (F07)."""
    mine = await backend.acquire(plan, ME.model_copy(update={"run_id": "mine"}))
    kube.change(RAY_CLUSTERS, NAME, **broken)
    said: list[str] = []

    assert await backend.list_leases(said.append) == [mine]
    (line,) = said
    assert line.startswith(f"RayCluster {NAMESPACE}/{NAME} has our label raytpu-owner, and its annotation")
    assert DELETE in line


async def test_a_copy_that_somebody_made_under_another_name_is_not_a_second_lease(
    kube: FakeKube, backend: GkeBackend, lease: SliceLease
):
    twin = copy.deepcopy(of(kube))
    twin["metadata"] |= {"name": "a-copy-of-it", "uid": "another"}
    kube.store(RAY_CLUSTERS, twin)
    said: list[str] = []

    assert await backend.list_leases(said.append) == [lease]
    assert said == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dashboard", "not an address"),
        ("dashboard", "http://user:password@host"),
        ("serve", "ftp://x"),
        ("expires_at", "2020-01-01T00:00:00Z"),
        ("granted_at", "2026-11-30T08:00:00"),
        ("spec", {"generation": "v99"}),
        ("owner", {"dag_id": "digits"}),
        ("capacity", []),
    ],
)
async def test_a_release_by_owner_fails_where_somebody_edited_the_record(
    kube: FakeKube, backend: GkeBackend, lease: SliceLease, field: str, value: Any
):
    record = json.loads(of(kube)["metadata"]["annotations"][RECORD])
    kube.change(RAY_CLUSTERS, NAME, annotations={RECORD: json.dumps({**record, field: value})})

    assert await backend.list_leases() == []
    with pytest.raises(Misconfigured, match=re.escape(DELETE)):  # "there is none" would be green, and it bills
        await backend.find(ME)


async def test_a_record_that_a_newer_version_wrote_is_read(kube: FakeKube, backend: GkeBackend, lease: SliceLease):
    """Airflow's machines are upgraded one by one."""
    record = json.loads(of(kube)["metadata"]["annotations"][RECORD])
    for part in (record, record["spec"], record["deadlines"]):
        part["surplus"] = 1
    kube.change(RAY_CLUSTERS, NAME, annotations={RECORD: json.dumps(record)})

    assert await backend.list_leases() == [lease]
    assert await backend.find(ME) == lease


async def test_a_label_that_leases_do_not_have_is_refused(kube: FakeKube, backend: GkeBackend):
    with pytest.raises(InvalidSpec, match="can't be narrowed by team: use dag_id, run_id, task_id"):
        await backend.list_leases(team="a")
    assert kube.calls == []
