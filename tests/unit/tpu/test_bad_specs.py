"""More than two hundred specs, ladders, deadlines and names that are wrong, each refused in one clear line.

A case says where the mistake is and what would be right; the error must say both, before anything starts.
"""

from __future__ import annotations

import math
from datetime import timedelta

import pytest

from raytpu_ops.tpu.capacity import FlexStart, OnDemand, Queued, Reservation, Spot, ladder
from raytpu_ops.tpu.deadlines import Deadlines
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.naming import Kind, check_name, slice_name, submission_id
from raytpu_ops.tpu.shapes import catalogue, resolve
from raytpu_ops.tpu.spec import SliceSpec
from tests.unit.tpu.refusals import (
    CUBES,
    GENERATIONS,
    LONG,
    SHELL,
    SPEC,
    Case,
    Rude,
    assert_refused_in_one_clear_line,
    numbered,
)

NAN, INF = math.nan, math.inf
FLAT = "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"
OWNER = Owner(dag_id="train", run_id="manual__1", task_id="provision")


def shape(where: str, right: str, *words: object) -> Case:
    return (lambda: SliceSpec.of(words[0], words[1], machine_type=words[2] if len(words) > 2 else None), where, right)


def generation(value: object, right: str = GENERATIONS) -> Case:
    return (lambda: SliceSpec.of(value, "4x4"), "generation", right)


def slices(value: object, right: str) -> Case:
    return (lambda: SliceSpec.of("v4", "2x2x2", num_slices=value), "num_slices", right)


def capacity(value: object, right: str, where: str = "capacity") -> Case:
    return (lambda: ladder(value), where, right)


def deadline(value: object, right: str, phase: str = "running") -> Case:
    return (lambda: Deadlines.of({phase: value}), phase, right)


def name(value: object, right: str, kind: Kind = Kind.RAY_CLUSTER) -> Case:
    return (lambda: check_name(value, kind, "cluster_name"), "cluster_name", right)


GENERATION_CASES = [
    generation("", "v6e-16"),
    generation(" "),
    generation("v2"),
    generation("v3"),
    generation("v3-8"),
    generation("v6", "'v6e'"),
    generation("v5", GENERATIONS),
    generation("v8"),
    generation("trilium", "'trillium'"),
    generation("ironwod", "'ironwood'"),
    generation("tpu"),
    generation("TPU-"),
    generation("v5elite"),
    generation("a100"),
    generation("nvidia-h100-80gb"),
    generation("cpu"),
    generation("v6e 16"),
    generation("v6e16"),
    generation("v6e-0"),
    generation("v6e--16"),
    generation("v6e-016"),
    generation("v6e-16.5"),
    generation("v6e-1e3"),
    generation("v6e-\uff11\uff16"),
    generation("v\uff14"),
    generation("\u0432\u0034"),
    generation(SHELL),
    generation("v4\n--privileged"),
    generation("v4; drop table leases"),
    generation("v4\0"),
    generation("{{ params.generation }}"),
    generation("../v4"),
    generation(LONG),
    generation("v4-" + "9" * 5000),
    generation(None, "v6e-16"),
    generation(4, "v6e-16"),
    generation(6.0),
    generation(True),
    generation(b"v4"),
    generation(["v4"]),
    generation(Rude()),
    generation(resolve("v4", "2x2x2")),
    generation(10**5000),
    generation("ct6e-standard-4t", "machine_type='ct6e-standard-4t'"),
    generation("tpu7x-standard-4t", "generation='7x'"),
    (lambda: catalogue("v9"), "generation", GENERATIONS),
]

SHAPE_CASES = [
    shape("topology", FLAT, "v6e", None),
    shape("topology", CUBES, "v4", None),
    shape("topology", FLAT, "v6e", ""),
    shape("topology", FLAT, "v6e", "2x2x2"),
    shape("topology", CUBES, "v4", "4x4"),
    shape("topology", CUBES, "7x", "2x2"),
    shape("topology", FLAT, "v5e", "16"),
    shape("topology", "'16x16'", "v5e", "32x32"),
    shape("topology", "'4x8'", "v6e", "8x4"),
    shape("topology", "'2x2x4'", "v5p", "4x2x2"),
    shape("topology", "'2x2x1'", "v4", "1x2x2"),
    shape("topology", "'4x4x4'", "v4", "4x4x5"),
    shape("topology", "'2x2x1'", "v4", "1x1x1"),
    shape("topology", FLAT, "v6e", "2x8"),
    shape("topology", FLAT, "v6e", "3x3"),
    shape("topology", FLAT, "v6e", "0x0"),
    shape("topology", "'4x4'", "v6e", "04x04"),
    shape("topology", FLAT, "v6e", "-4x4"),
    shape("topology", FLAT, "v6e", "4x-4"),
    shape("topology", FLAT, "v6e", "4x"),
    shape("topology", FLAT, "v6e", "x4"),
    shape("topology", FLAT, "v6e", "4xx4"),
    shape("topology", FLAT, "v6e", "4*4"),
    shape("topology", FLAT, "v6e", "4,4"),
    shape("topology", FLAT, "v6e", "4 x 4"),
    shape("topology", FLAT, "v6e", "axb"),
    shape("topology", FLAT, "v6e", "4.0x4.0"),
    shape("topology", FLAT, "v6e", "\uff14x\uff14"),
    shape("topology", FLAT, "v6e", "4x4; reboot"),
    shape("topology", FLAT, "v6e", "4x4\n4x4 extra"),
    shape("topology", FLAT, "v6e", SHELL),
    shape("topology", FLAT, "v6e", "99999999999x99999999999"),
    shape("topology", FLAT, "v6e", LONG),
    shape("topology", CUBES, "v4", "x".join(["4"] * 50)),
    shape("topology", "4096 chips", "v4", "16x16x20"),
    shape("topology", "6144 chips", "v5p", "16x20x24"),
    shape("topology", "9216 chips", "7x", "20x24x24"),
    shape("topology", "'4x4'", "v6e", 16),
    shape("topology", "'4x4'", "v6e", True),
    shape("topology", "'4x4'", "v6e", 4.4),
    shape("topology", "'2x2x2'", "v4", (2, 2, 2)),
    shape("topology", "'2x2x2'", "v4", [2, 2, 2]),
    shape("topology", "'2x2x2'", "v4", b"2x2x2"),
    shape("topology", "'2x2x2'", "v4", {"x": 2}),
    shape("topology", "'2x2x2'", "v4", Rude()),
    shape("topology", "v6e-32", "v6e-16", "4x8"),
    shape("topology", "v4-8", "v4-16", "2x2x1"),
    shape("topology", "leave one of them out", "v6e-4x4", "4x8"),
    shape("topology", "4x4x32, 4x8x16, 8x8x8", "v5p-1024", None),
    shape("generation", "v4-8, v4-16, v4-32", "v4-17", None),
    shape("generation", "v4-8, v4-16, v4-32", "v4-4", None),
    shape("generation", "v5litepod-256", "v5litepod-512", None),
    shape("generation", "v7x-18432", "tpu7x-999999", None),
    shape("machine_type", "'ct6e-standard-8t' (1 host of 8 chips) or 'ct6e-standard-4t'", "v6e", "2x4"),
    shape("machine_type", "'ct5lp-hightpu-8t' (1 host of 8 chips)", "v5e-8", None),
    shape("machine_type", "'ct6e-standard-4t'", "v6e", "4x4", "ct6e-standard-8t"),
    shape("machine_type", "'ct6e-standard-4t'", "v6e", "4x4", "ct5lp-hightpu-4t"),
    shape("machine_type", "'ct6e-standard-1t'", "v6e", "1x1", "ct6e-standard-4t"),
    shape("machine_type", "'ct4p-hightpu-4t'", "v4", "2x2x2", "n2-standard-4"),
    shape("machine_type", "'ct4p-hightpu-4t'", "v4", "2x2x2", ""),
    shape("machine_type", "'ct4p-hightpu-4t'", "v4", "2x2x2", 4),
    shape("machine_type", "'ct4p-hightpu-4t'", "v4", "2x2x2", True),
    shape("machine_type", "'ct4p-hightpu-4t'", "v4", "2x2x2", ["ct4p-hightpu-4t"]),
    shape("machine_type", "'ct4p-hightpu-4t'", "v4", "2x2x2", SHELL),
    shape("machine_type", "'ct4p-hightpu-4t'", "v4", "2x2x2", LONG),
]

SPEC_CASES = [
    slices(0, "greater than or equal to 1"),
    slices(-1, "greater than or equal to 1"),
    slices(257, "less than or equal to 256"),
    slices(10**30, "less than or equal to 256"),
    slices("2", "integer"),
    slices("two", "integer"),
    slices(True, "integer"),
    slices(False, "integer"),
    slices(1.0, "integer"),
    slices(1.5, "integer"),
    slices(NAN, "integer"),
    slices(INF, "integer"),
    slices(None, "integer"),
    slices([2], "integer"),
    slices(Rude(), "integer"),
    slices("{{ params.slices }}", "integer"),
    (lambda: SliceSpec.of({**SPEC, "topologie": "4x4"}), "topologie", "'topology'"),
    (lambda: SliceSpec.of({"name": "v4", "topology": "2x2x2"}), "name", "there are generation, topology, machine_type"),
    (lambda: SliceSpec.of({**SPEC, "slices": 2}), "slices", "num_slices"),
    (lambda: SliceSpec.of({**SPEC, "zone": "us-central1-a"}), "zone", "there are generation, topology"),
    (lambda: SliceSpec.of({**SPEC, SHELL: 1}), "spec", "there are generation, topology"),
    (lambda: SliceSpec.of({**SPEC, 5: 1}), "spec", "strings"),
    (lambda: SliceSpec.of({}), "generation", GENERATIONS),
    (lambda: SliceSpec(), "generation", GENERATIONS),  # type: ignore[call-arg]
    (lambda: SliceSpec(generation="v4", topology="4x4", machine_type="x"), "topology", CUBES),
    (lambda: SliceSpec.of(SPEC, "2x2x2"), "spec", "either a whole spec or"),
    (lambda: resolve("v4", "2x2x2").host_env("s", 2), "worker_id", "0 to 1"),
    (lambda: resolve("v4", "2x2x2").host_env("s", -1), "worker_id", "0 to 1"),
]

CAPACITY_CASES = [
    capacity([], "OnDemand()"),
    capacity((), "OnDemand()"),
    capacity("", "'on_demand' or 'spot'"),
    capacity("spotty", "'spot'"),
    capacity("reservation", "Reservation(name)"),
    capacity("preemptible", "'on_demand' or 'spot'"),
    capacity(SHELL, "'on_demand' or 'spot'"),
    capacity(5, "'on_demand' or 'spot'"),
    capacity(True, "'on_demand' or 'spot'"),
    capacity(b"spot", "'on_demand' or 'spot'"),
    capacity({"spot"}, "'on_demand' or 'spot'"),
    capacity(Spot, "'on_demand' or 'spot'"),
    capacity(Rude(), "'on_demand' or 'spot'"),
    capacity(iter([Spot()]), "'on_demand' or 'spot'"),
    capacity([None], "'on_demand' or 'spot'", "capacity[0]"),
    capacity([Spot(), [OnDemand()]], "'on_demand' or 'spot'", "capacity[1]"),
    capacity([Spot(), OnDemand(), "spot"], "once", "capacity[2]"),
    capacity({}, "kind"),
    capacity({"kind": "spott"}, "'spot'"),
    capacity({"kind": 5}, "'spot'"),
    capacity({"kind": "spot", "price": 3}, "no such field", "price"),
    capacity({"kind": "reservation"}, "missing", "name"),
    capacity({"kind": "flex_start"}, "missing", "max_run_duration"),
    capacity({"kind": "queued", "valid_for": -1}, "longer than zero", "valid_for"),
    (lambda: Reservation(), "name", "missing"),
    (lambda: Reservation(""), "name", "at least 1"),
    (lambda: Reservation("Team-A"), "name", "lower-case"),
    (lambda: Reservation("team a"), "name", "lower-case"),
    (lambda: Reservation("team-"), "name", "lower-case"),
    (lambda: Reservation("1team"), "name", "starting with a letter"),
    (lambda: Reservation("a" * 64), "name", "at most 63"),
    (lambda: Reservation("a\nb"), "name", "one line"),
    (lambda: Reservation(SHELL), "name", "lower-case"),
    (lambda: Reservation("projects/p/reservations/r"), "name", "projects/PROJECT/reservations/NAME"),
    (lambda: Reservation("projects/other-project/../r"), "name", "projects/PROJECT/reservations/NAME"),
    (lambda: Reservation(5), "name", "string"),
    (lambda: Reservation(["team-a"]), "name", "string"),
    (lambda: Reservation("team-a", zone="b"), "zone", "there are within, kind, name"),
    (lambda: Spot(max_price=1), "max_price", "there are within, kind"),  # type: ignore[call-arg]
    (lambda: FlexStart(), "max_run_duration", "missing"),
    (lambda: FlexStart(0), "max_run_duration", "longer than zero"),
    (lambda: FlexStart(-5), "max_run_duration", "longer than zero"),
    (lambda: FlexStart(timedelta(days=8)), "max_run_duration", "at most 7 days"),
    (lambda: FlexStart(NAN), "max_run_duration", "finite"),
    (lambda: FlexStart("3600"), "max_run_duration", "timedelta or a number of seconds"),
    (lambda: FlexStart(True), "max_run_duration", "timedelta or a number of seconds"),
    (lambda: Queued(INF), "valid_for", "finite"),
    (lambda: Queued(-INF), "valid_for", "finite"),
    (lambda: Queued(10**40), "valid_for", "at most 365 days"),
    (lambda: Queued(timedelta.max), "valid_for", "at most 365 days"),
    (lambda: Queued(timedelta.min), "valid_for", "longer than zero"),
]

DEADLINE_CASES = [
    deadline(0, "longer than zero"),
    deadline(0.0, "longer than zero"),
    deadline(-1, "longer than zero"),
    deadline(timedelta(0), "longer than zero"),
    deadline(timedelta(seconds=-1), "longer than zero"),
    deadline("-PT5M", "timedelta or a number of seconds"),
    deadline("PT0S", "longer than zero"),
    deadline("P9999D", "at most 365 days"),
    deadline("Pizza", "duration"),
    deadline(NAN, "finite"),
    deadline(INF, "finite"),
    deadline(-INF, "finite"),
    deadline(1e30, "at most 365 days"),
    deadline(-1e30, "longer than zero"),
    deadline(10**400, "at most 365 days"),
    deadline(timedelta.max, "at most 365 days"),
    deadline(True, "timedelta or a number of seconds"),
    deadline("60", "timedelta or a number of seconds"),
    deadline("1:00:00", "timedelta or a number of seconds"),
    deadline("ten minutes", "timedelta or a number of seconds"),
    deadline("{{ params.hours }}", "timedelta or a number of seconds"),
    deadline(b"PT1H", "timedelta or a number of seconds"),
    deadline(None, "timedelta or a number of seconds"),
    deadline([60], "timedelta or a number of seconds"),
    deadline({"hours": 1}, "timedelta or a number of seconds"),
    deadline(Rude(), "timedelta or a number of seconds"),
    deadline(5, "'running'", "runing"),
    deadline(5, "queued, provisioning, labelled, starting, running, releasing", "execution"),
    (lambda: Deadlines.of({1: 5}), "deadlines", "strings"),
    (lambda: Deadlines.of(60), "deadlines", "queued, provisioning"),
    (lambda: Deadlines.of(0), "deadlines", "queued, provisioning"),
    (lambda: Deadlines.of(False), "deadlines", "queued, provisioning"),
    (lambda: Deadlines.of(""), "deadlines", "queued, provisioning"),
    (lambda: Deadlines.of("PT1H"), "deadlines", "queued, provisioning"),
    (lambda: Deadlines.of([("running", 5)]), "deadlines", "queued, provisioning"),
    (lambda: Deadlines.of(timedelta(hours=1)), "deadlines", "queued, provisioning"),
    (lambda: Deadlines(running=-5), "running", "longer than zero"),
    (lambda: Deadlines(sleeping=5), "sleeping", "queued, provisioning"),  # type: ignore[call-arg]
]

NAME_CASES = [
    name("a" * 54, "at most 53"),
    name("a" * 48, "at most 47", Kind.RAY_JOB),
    name("a" * 48, "at most 47", Kind.RAY_SERVICE),
    name("a" * 41, "at most 40", Kind.NODE_POOL),
    name(LONG, "at most 53"),
    name("", "lower-case letters"),
    name("My Cluster", "'my-cluster'"),
    name("my_cluster", "'my-cluster'"),
    name("1cluster", "starting with a letter"),
    name("-cluster", "'cluster'"),
    name("cluster-", "'cluster'"),
    name("cl\u00fcster", "'cluster'"),
    name("\u30af\u30e9\u30b9\u30bf", "lower-case letters"),
    name("cluster\n", "'cluster'"),
    name("a.b", "'a-b'"),
    name("../../etc/passwd", "'etc-passwd'"),
    name(SHELL, "lower-case letters"),
    name("a\0b", "'a-b'"),
    name(None, "text"),
    name(5, "text"),
    name(True, "text"),
    name(b"cluster", "text"),
    name(["cluster"], "text"),
    name(Rude(), "text"),
    (lambda: slice_name("Lease", 0), "lease name", "'lease'"),
    (lambda: slice_name("lease", -1), "slice index", "0 to 9999"),
    (lambda: slice_name("lease", True), "slice index", "0 to 9999"),
    (lambda: slice_name("lease", 0, 10_000), "replacement", "0 to 9999"),
    (lambda: submission_id(OWNER, -1, 0), "epoch", "0 to 9999"),
    (lambda: submission_id(OWNER, 0, 10_000), "attempt", "0 to 9999"),
    (lambda: submission_id(OWNER, "1", 0), "epoch", "0 to 9999"),  # type: ignore[arg-type]
]

CASES = {
    "generation": GENERATION_CASES,
    "shape": SHAPE_CASES,
    "spec": SPEC_CASES,
    "capacity": CAPACITY_CASES,
    "deadline": DEADLINE_CASES,
    "name": NAME_CASES,
}


@pytest.mark.parametrize("case", numbered(CASES))
def test_it_is_refused_in_one_clear_line(case: Case):
    assert_refused_in_one_clear_line(case)


def test_there_are_more_than_two_hundred_of_them():
    assert sum(len(cases) for cases in CASES.values()) > 200
