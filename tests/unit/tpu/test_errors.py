"""One word for each kind of failure, whichever way it travels."""

from __future__ import annotations

import json

import pytest

from raytpu_ops.tpu import errors
from raytpu_ops.tpu.errors import FailureClass, InvalidSpec, Misconfigured, RayTpuError, error_for, from_event


@pytest.mark.parametrize("failure_class", FailureClass)
def test_every_class_has_an_error_and_comes_back_from_an_event(failure_class):
    error = error_for(failure_class, "what happened")
    event = json.loads(json.dumps(error.as_event()))
    again = from_event(event)
    assert (type(again), str(again), again.failure_class) == (type(error), "what happened", failure_class)


def test_every_error_of_the_tree_has_a_class_that_finds_it():
    tree = [getattr(errors, name) for name in dir(errors)]
    for error in tree:
        if isinstance(error, type) and issubclass(error, RayTpuError) and error is not RayTpuError:
            assert issubclass(error, type(error_for(error.failure_class, "")))


def test_a_refused_spec_arrives_as_one_so_that_no_retry_refuses_it_again():
    assert type(from_event(InvalidSpec("no").as_event())) is InvalidSpec
    assert type(from_event(Misconfigured("no").as_event())) is Misconfigured


def test_a_word_that_is_no_class_is_refused():
    with pytest.raises(ValueError, match="Boredom"):
        error_for("Boredom", "")
