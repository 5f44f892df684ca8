"""A lease is ready when Ray answers and every slice of it is whole."""

from __future__ import annotations

import pytest

from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.readiness import HostReport, Readiness, SliceReport


def a_host(worker_id: int, free: int = 4) -> HostReport:
    return HostReport(
        node_id=f"n{worker_id}", address=f"127.1.1.{worker_id}", worker_id=worker_id, chips=4, chips_free=free
    )


def a_slice(**changes: object) -> SliceReport:
    fields = {"name": "s0", "hosts_wanted": 2, "hosts": [a_host(0), a_host(1)]}
    return SliceReport(**{**fields, **changes})


def test_whole_slices_and_a_head_are_ready():
    report = Readiness(slices=[a_slice(), a_slice(name="s1")], head_alive=True)
    assert report.ready
    assert report.describe() == "2 of 2 slices whole, 4 of 4 hosts labelled"


@pytest.mark.parametrize(
    "report",
    [
        Readiness(slices=[a_slice()], head_alive=False),
        Readiness(slices=[], head_alive=True),
        Readiness(slices=[a_slice()], head_alive=True, problems=["a node of no slice has TPUs"]),
        Readiness(slices=[a_slice(), a_slice(missing=["worker 1"])], head_alive=True),
        Readiness(slices=[a_slice(), a_slice(broken=True)], head_alive=True),
    ],
)
def test_anything_less_is_not_ready(report):
    assert not report.ready


def test_a_held_host_leaves_the_slice_whole_and_not_free():
    held = a_slice(hosts=[a_host(0), a_host(1, free=0)])
    assert held.whole
    assert not held.free
    assert a_slice().free


def test_the_line_for_the_log_names_slice_and_reason():
    report = Readiness(slices=[a_slice(hosts=[a_host(0)], missing=["worker 1 is not labelled"])], head_alive=True)
    assert report.describe() == "0 of 1 slices whole, 1 of 2 hosts labelled; s0: worker 1 is not labelled"


def test_broken_slices_are_named():
    report = Readiness(slices=[a_slice(), a_slice(name="s1", broken=True)], head_alive=True)
    assert report.broken == ["s1"]
    assert "s1: broken" in report.describe()


def test_nothing_of_what_ran_is_left_without_a_head():
    report = Readiness(slices=[a_slice()], headless=True)
    assert report.lost
    assert not report.stands
    silent = Readiness(slices=[a_slice()])
    assert not silent.lost
    assert silent.stands


@pytest.mark.parametrize(
    ("slices", "count", "stand"),
    [
        (["s0"], 1, True),
        (["s1"], 1, False),
        (["s0", "s1"], 2, False),
        (["s0", "s2"], 2, True),
        (["s7"], 1, False),
        ([], 1, True),
        ([], 2, True),
        ([], 3, False),
        ([], 9, False),
    ],
)
@pytest.mark.parametrize(
    ("lost", "phase"),
    [
        ({"broken": True}, Phase.LABELLED),
        ({"hosts": [a_host(0)], "missing": ["a pod waits for a node"]}, Phase.PROVISIONING),
        ({"hosts": [], "missing": ["its request is in a queue"]}, Phase.QUEUED),
    ],
    ids=["broken", "made anew", "queued for"],
)
def test_what_runs_on_some_of_the_slices_stands_with_those(lost, phase, slices, count, stand):
    """One that is not in the report any more has been replaced."""
    report = Readiness(slices=[a_slice(), a_slice(name="s1", **lost), a_slice(name="s2")], head_alive=True, phase=phase)
    assert report.stands_under(slices, count) is stand
    assert not report.stands


def test_all_of_the_slices_are_as_many_as_anybody_can_want():
    assert Readiness(slices=[a_slice()], head_alive=True).stands_under([], 2)


def test_slices_whose_hosts_are_only_late_stand():
    """Ray may be silent, or a host's Ray may be starting again."""
    report = Readiness(slices=[a_slice(hosts=[], missing=["none of its hosts has joined Ray"])])
    assert report.stands_under(["s0"], 1)


@pytest.mark.parametrize("slices", [[], ["s0"]])
def test_silence_of_whoever_runs_the_slices_says_nothing_of_them(slices):
    """Google or the API server is away; work goes on under Ray all the same."""
    assert Readiness(problems=["the API server does not answer"]).stands_under(slices, 1)


@pytest.mark.parametrize("gone", [{"fatal": "the head is dead"}, {"headless": True}])
def test_nothing_stands_where_the_lease_as_a_whole_is_gone(gone):
    assert not Readiness(slices=[a_slice()], head_alive=True, **gone).stands_under(["s0"], 1)


def test_nothing_stands_where_the_lease_as_a_whole_is_queued():
    """A queue gives it hosts only when it lets it go on."""
    queued = a_slice(hosts=[], missing=["has no quota yet"])
    assert not Readiness(slices=[queued], phase=Phase.QUEUED).stands_under(["s0"], 1)


def test_a_report_survives_json():
    report = Readiness(slices=[a_slice()], head_alive=True, fatal="the head is gone")
    assert Readiness.model_validate_json(report.model_dump_json()) == report
