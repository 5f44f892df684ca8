"""Each phase has a deadline of its own; instants are UTC wherever they are read."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest

from raytpu_ops.tpu.deadlines import Deadlines, Phase
from raytpu_ops.tpu.errors import InvalidSpec


def test_every_phase_has_a_deadline_and_nothing_else_has():
    assert [phase.value for phase in Phase] == list(Deadlines.model_fields)


@pytest.mark.parametrize("given", [None, {}, Deadlines()])
def test_nothing_is_the_defaults(given):
    assert Deadlines.of(given) == Deadlines()


def test_one_phase_leaves_the_others():
    changed = Deadlines.of({"running": 90})
    assert changed.running == timedelta(seconds=90)
    assert changed.model_copy(update={"running": Deadlines().running}) == Deadlines()


@pytest.mark.parametrize("given", [None, {"running": 90}, Deadlines(running=90), {"running": Deadlines().running}])
def test_what_nobody_said_is_left_to_others(given):
    others = Deadlines(provisioning=7200, running=60)
    both = Deadlines.of(given).over(others)
    assert both.provisioning == others.provisioning
    assert both.running == (Deadlines.of(given).running if given else others.running)


def test_seconds_timedeltas_and_json_are_the_same():
    asked = Deadlines(queued=1.5, running=timedelta(days=3))
    assert Deadlines.of(json.loads(asked.model_dump_json())) == asked
    assert Deadlines.of(asked.model_dump()) == asked


@pytest.mark.parametrize("phase", Phase)
def test_an_instant_is_the_phases_start_and_its_duration(phase):
    start = datetime(2026, 1, 1, tzinfo=UTC)
    deadlines = Deadlines(**{phase.value: 60})
    assert deadlines.at(phase, start) == start + timedelta(minutes=1)


def test_an_instant_is_utc_whatever_the_start_was():
    start = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=5)))
    at = Deadlines(running=60).at(Phase.RUNNING, start)
    assert at.utcoffset() == timedelta(0)
    assert at == start + timedelta(minutes=1)


def test_without_a_start_the_phase_begins_now():
    before = datetime.now(UTC)
    at = Deadlines(running=60).at(Phase.RUNNING)
    assert before <= at - timedelta(minutes=1) <= datetime.now(UTC)


def test_a_start_without_a_time_zone_is_refused():
    with pytest.raises(InvalidSpec, match="no time zone"):
        Deadlines().at(Phase.RUNNING, datetime(2026, 1, 1))  # noqa: DTZ001  the point of the test
