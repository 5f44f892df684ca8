"""Fixtures of the tests that need a whole Kubernetes; see `tests/testbed`.

Where the testbed cannot run, its tests are skipped by name, with what is missing.
`RAYTPU_TEST_KUBECONFIG` is for tests that take `kubernetes`: they run against that cluster instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.testbed.client import Testbed
    from tests.testbed.faults import KubernetesFaults


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: starts a whole Kubernetes on this machine; needs root and built parts")


def _usable(*, nodes: bool, kueue: bool = False) -> None:
    pytest.importorskip("kubernetes", reason="the testbed needs the extra `cluster`")
    pytest.importorskip("grpc", reason="the testbed needs the extra `cluster`")
    from tests.testbed import parts

    reason = parts.missing(nodes=nodes, kueue=kueue)
    if reason:
        pytest.skip(reason)
    unbuilt = [one.name for one in parts.wanted(nodes=nodes, kueue=kueue) if not one.built()]
    if unbuilt:
        # Half an hour of compiling is nothing to start by surprise.
        pytest.skip(f"not built yet: {', '.join(unbuilt)}; run `python -m tests.testbed build --kueue`")


@pytest.fixture(scope="module")
def control_plane() -> Iterator[Testbed]:
    """API server, controllers, scheduler, KubeRay, the TPU webhook; no nodes."""
    _usable(nodes=False)
    from tests.testbed.client import Testbed

    with Testbed.up(control_plane=True) as testbed:
        yield testbed


@pytest.fixture(scope="module")
def queued() -> Iterator[Testbed]:
    """The control plane with Kueue."""
    _usable(nodes=False, kueue=True)
    from tests.testbed.client import Testbed

    with Testbed.up(control_plane=True, kueue=True) as testbed:
        yield testbed


@pytest.fixture(scope="module")
def slices() -> Iterator[Testbed]:
    """One plain node and two slices of two hosts (v4 2x2x2)."""
    _usable(nodes=True)
    from tests.testbed.client import Testbed

    with Testbed.up("cpu", "v4-2x2x2*2") as testbed:
        yield testbed


@pytest.fixture(scope="module")
def kubernetes(request: pytest.FixtureRequest) -> KubernetesFaults:
    """Any cluster with KubeRay: the one that `RAYTPU_TEST_KUBECONFIG` names, else `slices`."""
    given = os.environ.get("RAYTPU_TEST_KUBECONFIG")
    if not given:
        found: KubernetesFaults = request.getfixturevalue("slices")
        return found
    from tests.testbed.faults import KubernetesFaults

    return KubernetesFaults(Path(given))
