"""The handwritten digits that scikit-learn ships: 1797 images of 8 x 8 pixels, split once and for all."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

#: Every fourth image is held out: nobody trains on it, and the evaluation asks for each of them.
HELD_OUT = 0.25


def _load() -> tuple[np.ndarray, np.ndarray]:
    # The file of sklearn.datasets.load_digits(), without importing all of scikit-learn on every host.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("scikit-learn is not installed: it ships the digits", name="sklearn")
    rows = np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.float32)
    order = np.random.default_rng(0).permutation(len(rows))
    return rows[order, :64] / 16.0, rows[order, 64].astype(np.int32)


def training() -> tuple[np.ndarray, np.ndarray]:
    """Images (rows of 64 pixels between 0 and 1) and their digits, to train on."""
    images, digits = _load()
    first = int(len(images) * HELD_OUT)
    return images[first:], digits[first:]


def held_out() -> tuple[np.ndarray, np.ndarray]:
    """Images and digits that no training has seen."""
    images, digits = _load()
    first = int(len(images) * HELD_OUT)
    return images[:first], digits[:first]
