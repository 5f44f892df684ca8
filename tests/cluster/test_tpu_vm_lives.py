"""Five hundred random lives of a lease of TPU VMs, with faults and crashes; `make test` goes through some of them."""

from __future__ import annotations

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="Google's clients are part of the extra `dev`")

from tests.unit.tpu_vm.test_random import live

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


async def test_five_hundred_random_lives_leave_nothing_and_never_have_two() -> None:
    for seed in range(500):
        await live(seed)
