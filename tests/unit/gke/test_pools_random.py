"""Random lives of leases with node pools; `RAYTPU_SEED=… pytest tests/unit/gke/test_pools_random.py` repeats one."""

from __future__ import annotations

import os

import pytest

from tests.unit.gke.pool_lives import lives
from tests.unit.gke.pool_world import World

#: Here; `tests/cluster/test_gke_lives.py` goes through five hundred.
SEQUENCES = 30


@pytest.mark.timeout(300)
async def test_whatever_happens_nothing_is_left_and_there_are_never_too_many(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    seeds = [int(os.environ["RAYTPU_SEED"])] if "RAYTPU_SEED" in os.environ else range(SEQUENCES)
    await lives(world, monkeypatch, seeds)
