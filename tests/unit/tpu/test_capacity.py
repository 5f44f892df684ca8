"""A ladder is what a DAG author wrote, in order, each rung once."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from raytpu_ops.tpu.capacity import FlexStart, OnDemand, Queued, Reservation, Spot, ladder
from raytpu_ops.tpu.errors import InvalidSpec

RUNGS = [
    OnDemand(),
    Spot(),
    Reservation("team-a"),
    Reservation("projects/other-project/reservations/team-a"),
    FlexStart(timedelta(days=7)),
    Queued(3600),
]


def test_nothing_is_on_demand():
    assert ladder() == ladder(None) == [OnDemand()]


@pytest.mark.parametrize("rung", RUNGS, ids=repr)
def test_one_rung_is_a_ladder(rung):
    assert ladder(rung) == ladder([rung]) == ladder((rung,)) == [rung]


def test_order_is_kept():
    assert ladder(RUNGS) == RUNGS
    assert ladder(RUNGS[::-1]) == RUNGS[::-1]


@pytest.mark.parametrize("rung", RUNGS, ids=repr)
def test_a_rung_survives_json(rung):
    assert ladder(json.loads(rung.model_dump_json())) == [rung]


@pytest.mark.parametrize(
    ("word", "rung"),
    [
        ("spot", Spot()),
        (" SPOT ", Spot()),
        ("on_demand", OnDemand()),
        ("on-demand", OnDemand()),
        ("OnDemand", OnDemand()),
    ],
)
def test_words_of_a_form(word, rung):
    assert ladder(word) == [rung]


def test_seconds_and_timedeltas_are_the_same_duration():
    assert FlexStart(7200) == FlexStart(timedelta(hours=2)) == FlexStart(max_run_duration=7200.0)
    assert Queued(60) == Queued(timedelta(minutes=1))


def test_two_reservations_are_two_rungs():
    assert len(ladder([Reservation("a"), Reservation("b")])) == 2


def test_the_same_rung_twice_is_refused_by_its_place():
    with pytest.raises(InvalidSpec, match=r"capacity\[2\]: spot stands there twice"):
        ladder([Spot(), OnDemand(), "spot"])


def test_the_place_of_a_bad_rung_is_named():
    with pytest.raises(InvalidSpec, match=r"capacity\[1\]: 'spotty' .*did you mean 'spot'"):
        ladder(["spot", "spotty"])
