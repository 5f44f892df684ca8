"""Five hundred random lives of a lease with node pools, with faults and crashes; `make test` has some of them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("google.cloud.container_v1", reason="Google's clients are part of the extra `dev`")
pytest.importorskip("kmock", reason="the fake API server needs the extra `dev`")

from tests.unit.gke.pool_lives import lives

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


async def test_five_hundred_random_lives_leave_nothing_and_never_have_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lives(tmp_path, monkeypatch, range(500))
