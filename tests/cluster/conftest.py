"""Fixtures of the tests that need a whole Kubernetes; see `tests/testbed`.

- `control_plane`, `queued`, `slices`: a testbed, up for one module; skipped by name where it cannot run
- `kubernetes`: a cluster with slices: the one that `RAYTPU_TEST_KUBECONFIG` names, else `slices`
- `any_cluster`: the same for tests that need no nodes, else `control_plane`
- `namespace`: one of the module's own in `kubernetes`; nothing of it is left afterwards
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.cluster import needs

if TYPE_CHECKING:
    from tests.testbed.client import Testbed
    from tests.testbed.faults import KubernetesFaults


@pytest.fixture(scope="module")
def control_plane() -> Iterator[Testbed]:
    """API server, controllers, scheduler, KubeRay, the TPU webhook; no nodes."""
    needs.a_testbed(nodes=False)
    from tests.testbed.client import Testbed

    with Testbed.up(control_plane=True) as testbed:
        yield testbed


@pytest.fixture(scope="module")
def queued() -> Iterator[Testbed]:
    """The control plane with Kueue."""
    needs.a_testbed(nodes=False, kueue=True)
    from tests.testbed.client import Testbed

    with Testbed.up(control_plane=True, kueue=True) as testbed:
        yield testbed


@pytest.fixture(scope="module")
def slices() -> Iterator[Testbed]:
    """One plain node and two slices of two hosts (v4 2x2x2)."""
    needs.a_testbed(nodes=True)
    from tests.testbed.client import Testbed

    with Testbed.up("cpu", "v4-2x2x2*2") as testbed:
        yield testbed


def _given_or(request: pytest.FixtureRequest, own: str) -> Iterator[KubernetesFaults]:
    given = needs.given_kubeconfig()
    if given is None:
        yield request.getfixturevalue(own)
        return
    pytest.importorskip("kubernetes", reason="tests on a cluster need the extra `dev`")
    from tests.testbed.faults import KubernetesFaults

    cluster = KubernetesFaults(given)
    try:
        needs.kuberay(cluster)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def kubernetes(request: pytest.FixtureRequest) -> Iterator[KubernetesFaults]:
    """A cluster with KubeRay and slices: the one that `RAYTPU_TEST_KUBECONFIG` names, else `slices`."""
    yield from _given_or(request, "slices")


@pytest.fixture(scope="module")
def any_cluster(request: pytest.FixtureRequest) -> Iterator[KubernetesFaults]:
    """A cluster with KubeRay, with or without nodes: the named one, else `control_plane`."""
    yield from _given_or(request, "control_plane")


@pytest.fixture(scope="module")
def namespace(kubernetes: KubernetesFaults, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the module's own."""
    module = request.path.stem.removeprefix("test_").replace("_", "-")
    with kubernetes.namespace(module[:40]) as name:
        yield name
