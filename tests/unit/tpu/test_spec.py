"""A spec is what a person wrote, in canonical words, and everything follows from it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured
from raytpu_ops.tpu.shapes import catalogue
from raytpu_ops.tpu.spec import MAX_SLICES, SliceSpec

a_spec = st.builds(
    lambda shape, slices: SliceSpec.of(
        shape.generation.name, shape.topology, machine_type=shape.machine_type, num_slices=slices
    ),
    st.sampled_from(catalogue()),
    st.integers(1, MAX_SLICES),
)


def test_words_become_canonical():
    spec = SliceSpec.of("TPU-V6E", "4X4", num_slices=2)
    assert spec.model_dump() == {
        "generation": "v6e",
        "topology": "4x4",
        "machine_type": "ct6e-standard-4t",
        "num_slices": 2,
    }


def test_the_same_slices_in_other_words_are_the_same_spec():
    assert SliceSpec.of("trillium", "4x4") == SliceSpec.of("v6e-16") == SliceSpec(generation="v6e", topology="4x4")


@given(spec=a_spec)
def test_a_spec_survives_json(spec):
    assert SliceSpec.of(json.loads(spec.model_dump_json())) == spec
    assert SliceSpec.model_validate_json(spec.model_dump_json()) == spec


@given(spec=a_spec)
def test_hosts_and_chips_are_those_of_all_slices(spec):
    assert spec.hosts == spec.shape.hosts * spec.num_slices
    assert spec.chips == spec.hosts * spec.shape.chips_per_host


def test_a_spec_reads_well():
    assert str(SliceSpec.of("v4", "2x2x2", num_slices=2)) == "2 x v4 2x2x2 (2 hosts, 8 chips each)"
    assert str(SliceSpec.of("v6e-1")) == "1 x v6e 1x1 (1 host, 1 chip each)"


def test_a_spec_passes_through():
    spec = SliceSpec.of("v4-16")
    assert SliceSpec.of(spec) is spec


def test_a_spec_never_changes():
    with pytest.raises(ValueError, match="frozen"):
        SliceSpec.of("v4-16").num_slices = 3


def test_a_whole_spec_and_single_words_contradict():
    with pytest.raises(InvalidSpec, match="not both"):
        SliceSpec.of(SliceSpec.of("v4-16"), "2x2x2")


def test_the_constructor_refuses_in_the_same_words():
    with pytest.raises(InvalidSpec) as by_reader:
        SliceSpec.of({"generation": "v4", "topology": "2x2x2", "num_slices": 0})
    with pytest.raises(InvalidSpec) as by_constructor:
        SliceSpec(generation="v4", topology="2x2x2", num_slices=0)
    assert str(by_constructor.value).partition(": ")[2] == str(by_reader.value).partition(": ")[2]


def test_a_refusal_is_a_misconfiguration_and_a_value_error():
    with pytest.raises(InvalidSpec) as refused:
        SliceSpec.of("v9")
    assert isinstance(refused.value, Misconfigured)
    assert isinstance(refused.value, ValueError)
    assert refused.value.as_event()["failure_class"] == "Misconfigured"
