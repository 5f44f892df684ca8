"""Random lives of leases with node pools; `RAYTPU_SEED=… pytest tests/unit/gke/test_pools_random.py` repeats one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.gke.pool_lives import KINDS, lives

#: Here; `tests/cluster/test_gke_lives.py` goes through five hundred.
SEQUENCES = 30


@pytest.mark.timeout(300)
async def test_whatever_happens_nothing_is_left_and_there_are_never_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seeds = [int(os.environ["RAYTPU_SEED"])] if "RAYTPU_SEED" in os.environ else range(SEQUENCES)
    await lives(tmp_path, monkeypatch, seeds)


async def test_a_seed_is_the_same_life_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What failed is seen again: the same calls at the same instants, the same ends."""
    once, again = [await lives(tmp_path, monkeypatch, range(8)) for _ in range(2)]
    for seed, (one, other) in enumerate(zip(once, again, strict=True)):
        assert one.told == other.told, f"seed {seed}"
    assert {line for life in once for line in life.log} >= {*KINDS}
