"""What is known before anything is made: refused where it is surely wrong, a note where it may be or can't be told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from raytpu_ops.backends.google import roles
from raytpu_ops.backends.google.access import DefaultAccess
from raytpu_ops.backends.google.clients import GoogleApis
from raytpu_ops.backends.google.machines import Needs
from raytpu_ops.backends.google.preflight import judged_reservation, preflight
from raytpu_ops.backends.google.price import checked_price, cost_note
from raytpu_ops.tpu.capacity import AnyCapacity, FlexStart, OnDemand, Reservation, Spot
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake import GoogleFake
from tests.google_fake.fake import PROJECT, ZONE

ROOT = Path(__file__).parents[3]
V4 = SliceSpec.of("v4", "2x2x2", num_slices=2)
V6E = SliceSpec.of("v6e", "4x4")
REGION = "us-central2"
DAY = timedelta(hours=24)
GIB = 2**30


@pytest.fixture
async def apis(google: GoogleFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GoogleApis]:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(google.key_file(tmp_path)))
    async with GoogleApis(DefaultAccess(endpoints=google.endpoints), timeout_s=20) as found:
        yield found


async def gke(apis: GoogleApis, *ladder: AnyCapacity, spec: SliceSpec = V4, **more: Any) -> list[str]:
    fields = {"role": roles.GKE, "lease_for": DAY, **more}
    return await preflight(apis, spec, ladder or [OnDemand()], fields.pop("zones", [ZONE]), **fields)


async def tpu_vm(apis: GoogleApis, *ladder: AnyCapacity, spec: SliceSpec = V4, **more: Any) -> list[str]:
    fields = {"role": roles.TPU_VM, "lease_for": DAY, "runtime_version": "tpu-ubuntu2204-base", **more}
    return await preflight(apis, spec, ladder or [OnDemand()], fields.pop("zones", [ZONE]), **fields)


async def test_a_plan_with_nothing_wrong_says_what_it_may_cost(google: GoogleFake, apis: GoogleApis) -> None:
    google.compute.quotas[REGION] = {"TPU_PODSLICE_V4": (64, 0)}
    assert await gke(apis) == [
        "16 chips for at most 24 h are 384 chip-hours; set price_per_chip_hour to see what they cost"
    ]
    assert await tpu_vm(apis, price_per_chip_hour=3.22) == [
        "16 chips for at most 24 h are 384 chip-hours, 1,236.48 at 3.22 each; less where the lease is released earlier",
        "quota was not checked, Cloud TPU has its own, by zone or region: gcloud beta quotas info list "
        f"--service=tpu.googleapis.com --project={PROJECT} --filter=quotaId:TPU",
    ]
    assert google.node_pools() == google.queued_resources() == {}


class TestPermissions:
    async def test_missing_ones_are_named_with_the_role_that_has_them(
        self, google: GoogleFake, apis: GoogleApis
    ) -> None:
        google.deny("container.clusters.update", "container.operations.list")
        with pytest.raises(Misconfigured) as caught:
            await gke(apis)
        words = str(caught.value)
        assert "lacks container.clusters.update, container.operations.list; the role raytpu_gke has them: " in words
        create, update, bind = words.partition(": gcloud")[2].partition(" (update in the place of create")
        assert create == f" iam roles create raytpu_gke --project tpu-project --file {ROOT}/deploy/google/role-gke.yaml"
        assert update
        assert "add-iam-policy-binding tpu-project --role projects/tpu-project/roles/raytpu_gke --member" in bind

    async def test_those_for_a_policy_count_where_one_is_made(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.deny("compute.resourcePolicies.create")
        assert len(await gke(apis, spec=V6E)) == 2
        with pytest.raises(Misconfigured, match=r"compute\.resourcePolicies\.create"):
            await gke(apis, spec=V6E, permissions=roles.WORKLOAD_POLICY)

    async def test_without_a_right_to_look_less_is_checked(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.deny("compute.reservations.get", "tpu.acceleratortypes.get")
        notes = await tpu_vm(apis, Reservation("r"))
        assert "without compute.reservations.get, tpu.acceleratortypes.get less can be checked before" in notes[2]
        assert any(note.startswith("reservation r in us-central2-b was not checked: ") for note in notes)
        assert any(note.startswith("accelerator type v4-16 in us-central2-b was not checked: ") for note in notes)

    async def test_an_api_for_permissions_that_is_off_is_a_note(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.disable("cloudresourcemanager")
        assert "permissions were not checked: Google, test permissions" in (await gke(apis))[1]

    async def test_a_far_side_that_does_not_answer_is_a_note(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.faults.unavailable("*", None)
        notes = await gke(apis, Reservation("r"), OnDemand())
        assert len(notes) == 5
        assert all("not checked" in note for note in notes[1:])


class TestReservations:
    async def test_one_that_fits(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.compute.add_reservation("r", "ct4p-hightpu-4t", 8, zone=ZONE, project=PROJECT, in_use=2)
        assert f"reservation r in {ZONE} has 6 of 8 VMs free, 4 are needed" in await gke(apis, Reservation("r"))

    async def test_one_that_is_used_by_others_now(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.compute.add_reservation("r", "ct4p-hightpu-4t", 8, zone=ZONE, project=PROJECT, in_use=5)
        assert f"reservation r in {ZONE} has 3 of 8 VMs free now, 4 are needed" in await gke(apis, Reservation("r"))

    async def test_one_that_is_too_small_whoever_uses_it(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.compute.add_reservation("r", "ct4p-hightpu-4t", 3, zone=ZONE, project=PROJECT)
        for ask in (gke, tpu_vm):
            with pytest.raises(Misconfigured, match="reservation r in us-central2-b has 3 VMs, 4 are needed"):
                await ask(apis, Reservation("r"))

    async def test_one_for_other_machines(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.compute.add_reservation("r", "ct5p-hightpu-4t", 8, zone=ZONE, project=PROJECT)
        with pytest.raises(Misconfigured, match="is for ct5p-hightpu-4t, v4 2x2x2 .* needs ct4p-hightpu-4t"):
            await gke(apis, Reservation("r"))

    async def test_one_of_another_project(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.compute.add_reservation("r", "ct4p-hightpu-4t", 8, zone=ZONE, project="other-project")
        notes = await gke(apis, Reservation("projects/other-project/reservations/r"))
        assert f"reservation r in {ZONE} has 8 of 8 VMs free, 4 are needed" in notes

    async def test_one_that_is_nowhere(self, apis: GoogleApis) -> None:
        with pytest.raises(Misconfigured, match="there is no reservation r in us-central2-b"):
            await gke(apis, Reservation("r"))
        assert "Compute Engine has no reservation r in us-central2-b; Cloud TPU may have it" in await tpu_vm(
            apis, Reservation("r")
        )

    async def test_one_zone_of_several_is_enough(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.compute.add_reservation("r", "ct4p-hightpu-4t", 8, zone=ZONE, project=PROJECT)
        notes = await gke(apis, Reservation("r"), zones=["us-central2-a", ZONE])
        assert "Compute Engine has no reservation r in us-central2-a: tries there will fail" in notes

    def test_one_of_chips(self) -> None:
        def resources(chips: int) -> list[Any]:
            return [{"accelerator": {"acceleratorCount": chips, "acceleratorType": "ct6e"}}]

        def found(chips: int, used: int) -> Any:
            return {"aggregateReservation": {"reservedResources": resources(chips), "inUseResources": resources(used)}}

        assert judged_reservation(found(8, 0), V6E, "r")[0] == (
            "r has 8 chips, 16 are needed: ask for fewer or smaller slices"
        )
        assert judged_reservation(found(32, 4), V6E, "r") == (None, "r has 28 of 32 chips free, 16 are needed")

    def test_numbers_are_text_in_googles_json(self) -> None:
        found = {"specificReservation": {"count": "4", "inUseCount": "1", "instanceProperties": {}}}
        assert judged_reservation(found, V6E, "r") == (None, "r has 3 of 4 VMs free now, 4 are needed")

    def test_one_that_goes_away(self) -> None:
        assert judged_reservation({"status": "DELETING"}, V6E, "r")[0] == "r is DELETING"

    def test_one_of_an_unknown_kind_is_a_note(self) -> None:
        assert judged_reservation({}, V6E, "r") == (None, "r is of a kind whose size is not read here")


class TestQuota:
    async def test_each_kind_of_capacity_has_its_own(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.compute.quotas[REGION] = {"TPU_PODSLICE_V4": (64, 60), "PREEMPTIBLE_TPU_PODSLICE_V4": (8, 0)}
        notes = await gke(apis, OnDemand(), Spot())
        assert notes[1:] == [
            "quota TPU_PODSLICE_V4 in us-central2 leaves 4 of 64 chips, 16 are needed: on_demand will be refused there",
            "quota PREEMPTIBLE_TPU_PODSLICE_V4 in us-central2 leaves 8 of 8 chips, 16 are needed: spot will be refused "
            "there",
        ]
        google.compute.quotas[REGION] = {"TPU_PODSLICE_V4": (0, 0), "PREEMPTIBLE_TPU_PODSLICE_V4": (16, 0)}
        assert len(await gke(apis, FlexStart(3600))) == 1

    async def test_all_that_share_one_are_named(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.compute.quotas[REGION] = {"TPU_PODSLICE_V4": (64, 0), "PREEMPTIBLE_TPU_PODSLICE_V4": (8, 0)}
        [note] = (await gke(apis, Spot(), FlexStart(3600), OnDemand(), Spot()))[1:]
        assert note.endswith("16 are needed: spot, flex_start will be refused there")

    async def test_a_reservation_needs_none_that_is_free(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.compute.add_reservation("r", "ct4p-hightpu-4t", 8, zone=ZONE, project=PROJECT)
        google.compute.quotas[REGION] = {"TPU_PODSLICE_V4": (64, 64)}
        assert not [note for note in await gke(apis, Reservation("r")) if "quota" in note]
        [note] = [note for note in await gke(apis, Reservation("r"), OnDemand()) if "quota" in note]
        assert note.endswith("16 are needed: on_demand will be refused there")

    async def test_that_of_tpu_vms_is_not_shown_there(self, google: GoogleFake, apis: GoogleApis) -> None:
        assert "quota was not checked, Cloud TPU has its own, by zone or region: gcloud" in (await tpu_vm(apis))[1]
        assert google.asked("regions.get") == []

    async def test_newer_generations_are_not_shown_there(self, google: GoogleFake, apis: GoogleApis) -> None:
        shows = f"--service=compute.googleapis.com --project={PROJECT} --filter=metric:tpus_per_tpu_family"
        assert (await gke(apis, spec=V6E))[1] == f"quota of v6e was not checked: gcloud beta quotas info list {shows}"
        assert google.asked("regions.get") == []


class TestMachineType:
    async def test_a_zone_that_lacks_it_is_a_note_and_none_that_has_it_is_refused(
        self, google: GoogleFake, apis: GoogleApis
    ) -> None:
        google.compute.lacks.add("us-central2-a/ct4p-hightpu-4t")
        notes = await gke(apis, zones=["us-central2-a", ZONE])
        assert (
            "Compute Engine has no machine type ct4p-hightpu-4t in us-central2-a: it is tried in the other zones"
            in (notes)
        )
        google.compute.lacks.add(f"{ZONE}/ct4p-hightpu-4t")
        with pytest.raises(
            Misconfigured, match="no machine type ct4p-hightpu-4t in us-central2-a, us-central2-b: name"
        ):
            await gke(apis, zones=["us-central2-a", ZONE])

    @pytest.mark.parametrize(
        ("host", "said"),
        [
            (Needs(300, 32 * GIB), "a host's pod asks for 300 CPUs, it has 240, of which GKE keeps some"),
            (Needs(240, 32 * GIB), "a host's pod asks for 240 CPUs, it has 240, of which GKE keeps some"),
            (Needs(300, 512 * GIB), "300 CPUs, it has 240 and 512 GiB, it has 407 GiB, of which"),
        ],
        ids=str,
    )
    async def test_one_without_room_for_the_hosts_pod_is_refused(
        self, apis: GoogleApis, host: Needs, said: str
    ) -> None:
        """Its chips would be paid for while the pod waits."""
        with pytest.raises(Misconfigured, match=said):
            await gke(apis, host=host)

    async def test_one_with_little_room_for_it_is_a_note(self, apis: GoogleApis) -> None:
        fits = await gke(apis, host=Needs(200, 360 * GIB))
        assert await gke(apis, host=Needs(230, 400 * GIB), zones=["us-central2-a", ZONE]) == [
            *fits,
            "a host's pod asks for 230 CPUs, it has 240: GKE and its own pods may leave less of a ct4p-hightpu-4t",
            "a host's pod asks for 400 GiB, it has 407 GiB: GKE and its own pods may leave less of a ct4p-hightpu-4t",
        ]

    async def test_one_that_may_not_be_looked_at_is_a_note(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.deny("compute.machineTypes.get")
        notes = await gke(apis)
        assert "without compute.machineTypes.get less can be checked before slices are made" in notes
        assert any(note.startswith(f"machine type ct4p-hightpu-4t in {ZONE} was not checked: Google") for note in notes)

    async def test_a_far_side_that_fails_is_a_note(self, google: GoogleFake, apis: GoogleApis) -> None:
        """F07: it is no absence."""
        google.faults.internal("machineTypes.get")
        notes = await gke(apis)
        assert any(note.startswith(f"machine type ct4p-hightpu-4t in {ZONE} was not checked: Google") for note in notes)


class TestZones:
    async def test_a_zone_without_the_generation_is_refused(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.tpu.zones = {ZONE: frozenset({"v4-8", "v4-16"})}
        with pytest.raises(Misconfigured, match="Cloud TPU has no accelerator type v5litepod-16 in us-central2-b"):
            await tpu_vm(apis, spec=SliceSpec.of("v5e", "4x4"), runtime_version="v2-alpha-tpuv5-lite")

    async def test_a_runtime_version_that_is_none_is_refused(self, apis: GoogleApis) -> None:
        with pytest.raises(Misconfigured, match="no runtime version v9 in us-central2-b"):
            await tpu_vm(apis, runtime_version="v9")

    async def test_one_zone_of_several_is_enough(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.tpu.zones = {"us-west9-a": frozenset(), ZONE: frozenset({"v4-16"})}
        notes = await tpu_vm(apis, zones=["us-west9-a", ZONE])
        assert "Cloud TPU has no accelerator type v4-16 in us-west9-a: it is tried in the other zones" in notes

    async def test_a_zone_that_is_none_is_refused_though_others_are_some(
        self, google: GoogleFake, apis: GoogleApis
    ) -> None:
        """Nothing could be released there, nor seen to be gone."""
        google.tpu.zones = {ZONE: frozenset({"v4-16"})}
        with pytest.raises(Misconfigured, match="zones: Cloud TPU is not in us-nowhere1-a, or not for this project"):
            await tpu_vm(apis, zones=[ZONE, "us-nowhere1-a"])

    async def test_an_api_that_is_off_is_refused(self, google: GoogleFake, apis: GoogleApis) -> None:
        google.disable("tpu")
        with pytest.raises(Misconfigured, match="enable the API"):
            await tpu_vm(apis)


class TestPrice:
    def test_by_generation_in_any_spelling(self) -> None:
        price = checked_price({"v6e": 2.7, "ironwood": "12"})
        assert price == {"v6e": 2.7, "7x": 12.0}
        assert "1,036.80 at 2.7 each" in cost_note(V6E, DAY, price)
        assert "set price_per_chip_hour" in cost_note(V4, DAY, price)

    def test_a_form_sends_text(self) -> None:
        assert checked_price("1.5") == 1.5
        assert checked_price(None) is None

    @pytest.mark.parametrize("value", ["much", 0, -1, float("nan"), {"v9": 1}, {"v6e": "x"}, [1]])
    def test_what_is_no_price_is_refused(self, value: Any) -> None:
        with pytest.raises(InvalidSpec, match="price_per_chip_hour: "):
            checked_price(value)
