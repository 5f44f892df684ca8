"""The demo's data: the digits of scikit-learn, split the same way wherever it is asked for."""

from __future__ import annotations

import numpy as np
from digits.data import held_out, training
from sklearn.datasets import load_digits


def test_every_digit_is_in_exactly_one_part() -> None:
    parts = [np.column_stack([images * 16, digits]) for images, digits in (training(), held_out())]
    together = np.concatenate(parts)
    known = load_digits()
    expected = np.column_stack([known.data, known.target])
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, expected.tolist()))
    assert len(parts[1]) == len(expected) // 4


def test_the_split_is_the_same_every_time() -> None:
    for first, second in zip(held_out(), held_out(), strict=True):
        np.testing.assert_array_equal(first, second)


def test_every_digit_is_held_out_often_enough_to_be_judged() -> None:
    _, digits = held_out()
    assert np.bincount(digits, minlength=10).min() > 20
