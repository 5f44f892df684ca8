"""Google has words that the installed client is too old for: they are told as they come, and stop nothing."""

from __future__ import annotations

from typing import Any

import pytest
from google.cloud.container_v1 import NodePool

from tests.google_fake.fake import CLUSTER
from tests.unit.gke.fake_kube import PODS
from tests.unit.gke.pool_world import POOLS, World, acquired

#: A number that no version of the client has a word for.
NEWER: Any = 99

#: The client's own noise about it.
pytestmark = pytest.mark.filterwarnings("ignore:Unrecognized .* enum value:UserWarning")


@pytest.fixture
def newer(world: World) -> World:
    """One in which a stranger's pool and an operation are of kinds that came after the client."""
    labels: dict[str, Any] = {"conditions": [{"code": NEWER, "message": "new"}], "status": NEWER}
    config = {"machine_type": "e2-medium", "taints": [{"key": "a", "value": "b", "effect": NEWER}]}
    world.google.container.put(CLUSTER, NodePool(name="team-b", config=config, **labels))
    world.google.container.occupy(CLUSTER, 0, NEWER)
    world.google.advance(1)
    return world


async def test_a_lease_is_acquired_seen_and_released_beside_them(newer: World):
    lease = await acquired(newer)
    for pod in newer.kube.all(PODS).values():  # pools are looked at where a host is missing
        pod["status"] = {"phase": "Pending", "conditions": []}

    report = await newer.backend().observe(lease)
    await newer.released(lease)

    assert "can't be seen" not in report.describe()
    assert newer.left == {"pools": ["team-b"]}


async def test_such_a_word_on_a_pool_of_the_lease_is_told(newer: World):
    lease = await acquired(newer)
    pool = newer.pools[POOLS[1]]
    pool.status = NodePool.Status.ERROR
    pool.conditions = [{"code": NEWER, "message": "it has a new illness"}]
    for pod in newer.kube.all(PODS).values():
        pod["status"] = {"phase": "Pending", "conditions": []}

    report = await newer.backend().observe(lease)

    assert f"node pool {POOLS[1]} is ERROR: {NEWER}: it has a new illness" in report.describe()
