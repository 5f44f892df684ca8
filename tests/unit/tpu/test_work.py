"""Work arrives on the cluster as it was written; events come back out of a log full of other lines."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytpu_ops.tpu.errors import FailureClass, InvalidSpec
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.tpu.work import (
    ENTRYPOINT,
    EVENT_MARK,
    WORK_LIMIT_BYTES,
    CommandWork,
    Event,
    FunctionWork,
    TrainWork,
    check_target,
    dump_event,
    dump_work,
    load_work,
    parse_event,
)

SPEC = SliceSpec.of("v4", "2x2x2", num_slices=2)
TRAIN = TrainWork.of(spec=SPEC, train_loop="digits.train:loop", storage="gs://bucket/runs", run_name="digits")

plain_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
plain_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | plain_text,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(plain_text, children, max_size=3),
    max_leaves=10,
)


class TestWire:
    @given(config=st.dictionaries(plain_text, plain_json, max_size=4), env=st.dictionaries(st.just("A_1"), plain_text))
    def test_train_work_arrives_as_it_was_written(self, config, env):
        work = TrainWork.of(**{**TRAIN.model_dump(), "config": config, "env": env})
        assert load_work(dump_work(work)) == work
        assert "\n" not in dump_work(work)

    @given(args=st.lists(plain_json, max_size=3), kwargs=st.dictionaries(st.sampled_from(["a", "b_c"]), plain_json))
    def test_function_work_arrives_as_it_was_written(self, args, kwargs):
        work = FunctionWork.of(spec=SPEC, function="a.b:c.d", args=args, kwargs=kwargs)
        assert load_work(dump_work(work)) == work

    @given(argv=st.lists(plain_text, max_size=4))
    def test_nothing_in_a_command_is_interpreted(self, argv):
        work = CommandWork.of(spec=SPEC, argv=["echo", "; rm -rf $HOME `id` $(id) | tee\n", *argv])
        assert load_work(dump_work(work)) == work

    def test_tuples_arrive_as_the_lists_that_they_become(self):
        work = TrainWork.of(**{**TRAIN.model_dump(), "config": {"layers": (128, (64, 32))}})
        assert work.config == {"layers": [128, [64, 32]]}
        assert load_work(dump_work(work)) == work

    def test_the_constructor_and_of_are_the_same(self):
        assert TrainWork(**TRAIN.model_dump()) == TrainWork.of(TRAIN.model_dump()) == TrainWork.of(TRAIN) == TRAIN

    def test_a_work_just_within_the_limit_passes_and_one_beyond_is_refused_with_both_numbers(self):
        spare = WORK_LIMIT_BYTES - len(dump_work(TrainWork.of(**{**TRAIN.model_dump(), "config": {"blob": ""}})))
        fits = TrainWork.of(**{**TRAIN.model_dump(), "config": {"blob": "x" * spare}})
        assert len(dump_work(fits)) == WORK_LIMIT_BYTES
        beyond = TrainWork.of(**{**TRAIN.model_dump(), "config": {"blob": "x" * (spare + 1)}})
        with pytest.raises(InvalidSpec, match=rf"{WORK_LIMIT_BYTES + 1} bytes as JSON, at most {WORK_LIMIT_BYTES}"):
            dump_work(beyond)

    def test_the_limit_counts_bytes_and_not_characters(self):
        with pytest.raises(InvalidSpec, match="bytes"):
            dump_work(TrainWork.of(**{**TRAIN.model_dump(), "config": {"blob": "é" * (WORK_LIMIT_BYTES // 2 + 1)}}))

    def test_the_entrypoint_is_the_same_for_every_work(self):
        assert ENTRYPOINT == "python -m raytpu_ops.runtime"

    def test_values_of_the_environment_are_never_shown(self):
        with pytest.raises(InvalidSpec) as refused:
            TrainWork.of(**{**TRAIN.model_dump(), "env": {"TOKEN": ["hunter2"]}})
        assert "TOKEN" in str(refused.value)
        assert "hunter2" not in str(refused.value)

    def test_text_that_is_no_work_is_not_repeated(self):
        with pytest.raises(InvalidSpec) as refused:
            load_work('{"env": {"TOKEN": "hunter2"')
        assert "hunter2" not in str(refused.value)


NO_TARGETS = """
    a : a: :b a:b:c a/b:c a.b ../a:b a:b() a:b;c 1a:b a..b:c .a:b a:b. a:class import:x os:system('id') a:b# ünï:b a-b:c
"""


class TestTargets:
    @pytest.mark.parametrize("target", ["a:b", "digits.train:loop", "a_1.b2:C.method", "_a:_b"])
    def test_a_target_names_module_and_attribute(self, target):
        assert check_target(target, "app") == target

    @pytest.mark.parametrize("target", ["", "a b:c", "a:b\n", *NO_TARGETS.split()])
    def test_anything_else_is_refused_with_an_example(self, target):
        with pytest.raises(ValueError, match=r"app must be 'package.module:function'"):
            check_target(target, "app")


class TestEvents:
    @given(data=st.dictionaries(plain_text, plain_json, max_size=3), message=plain_text)
    def test_an_event_comes_back_out_of_the_log(self, data, message):
        event = Event(event="failed", data=data, failure_class=FailureClass.PREEMPTED, message=message)
        line = dump_event(event)
        assert len(line.splitlines()) == 1
        assert parse_event(line) == event
        assert parse_event(f"{line}\r\n") == event

    @pytest.mark.parametrize(
        "line",
        [
            "",
            "loss 0.1",
            f"(pid=1, ip=127.0.0.1) {EVENT_MARK}{{}}",
            f" {EVENT_MARK}" + '{"event":"result"}',
            f"{EVENT_MARK}",
            f"{EVENT_MARK}not json",
            f"{EVENT_MARK}" + '{"event":"party"}',
            f"{EVENT_MARK}[]",
            f"{EVENT_MARK}" + '{"event":"failed","failure_class":"Boredom"}',
        ],
    )
    def test_any_other_line_is_none(self, line):
        assert parse_event(line) is None

    @pytest.mark.parametrize("kind", ["workers", "hosts"])
    def test_the_slices_of_started_work_are_named_once_each(self, kind):
        hosts = [{"slice": name, "worker_id": worker} for name in ("s1", "s0") for worker in (0, 1)]
        assert Event(event="started", data={kind: hosts}).slices == ["s0", "s1"]

    @pytest.mark.parametrize("data", [{}, {"workers": 3}, {"hosts": ["s0", {"slice": 0}, {}]}])
    def test_work_that_names_no_slice_has_none(self, data):
        assert Event(event="started", data=data).slices == []

    def test_a_newer_runtime_may_say_more(self):
        assert parse_event(EVENT_MARK + '{"event":"started","mood":"fine"}') == Event(event="started")

    def test_numbers_that_json_has_not_arrive_as_null(self):
        line = dump_event(Event(event="result", data={"loss": math.nan, "best": math.inf}))
        json.loads(line.removeprefix(EVENT_MARK), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert parse_event(line) == Event(event="result", data={"loss": None, "best": None})
