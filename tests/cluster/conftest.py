"""Fixtures of the tests that need a whole Kubernetes; see `tests/testbed`.

The testbed, skipped by name where it cannot run, and where the suite is pointed at another cluster:

- `control_plane`: no nodes; `queued`: the same with Kueue
- `slices`: one plain node and two slices of two hosts; `growing`: nodes that come when they are wanted;
  `queued_slice`: a plain node and one slice, with Kueue
- `built`: none; the test starts its own

What any cluster can show, be it the testbed or the one that `RAYTPU_TEST_KUBECONFIG` names:

- `any_cluster`: no nodes are needed; `any_queue`: with Kueue; `kubernetes`: with two slices of v4 2x2x2;
  `any_queued_slice`: with Kueue and one slice
- `namespace`: one of the module's own in `kubernetes`; nothing of it is left afterwards
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import needs

if TYPE_CHECKING:
    from tests.testbed.client import Testbed
    from tests.testbed.faults import KubernetesFaults

HERE = Path(__file__).parent
#: Fixture -> the testbed's options. Tests run in this order, so each of them is up once.
TESTBEDS: dict[str, dict[str, Any]] = {
    "control_plane": {"control_plane": True},
    "queued": {"control_plane": True, "kueue": True},
    "queued_slice": {"nodes": ("cpu", "v4-2x2x2"), "kueue": True},
    "growing": {"nodes": ("cpu",), "autoscale": ("v4-2x2x1*2", "v4-2x2x2*2"), "autoscale_idle": 3},
    "slices": {"nodes": ("cpu", "v4-2x2x2*2")},
}
#: Stand-ins, for a cluster that somebody named, of what a test would use otherwise.
ANY = {
    "any_cluster": "control_plane",
    "any_queue": "queued",
    "any_queued_slice": "queued_slice",
    "kubernetes": "slices",
}


class Shared:
    """The testbed that modules use one after another: up until another one is wanted, so never two at once."""

    def __init__(self) -> None:
        self._name = ""
        self._testbed: Testbed | None = None

    def get(self, name: str) -> Testbed:
        """The one of that name, as the module before has left it.

        :param name: of the fixture.
        """
        from tests.testbed.client import Testbed

        if self._testbed is None or self._name != name:
            self.down()
            options = dict(TESTBEDS[name])
            self._name, self._testbed = name, Testbed.up(*options.pop("nodes", ()), **options)
        return self._testbed

    def down(self) -> None:
        """End it; nothing of it is left."""
        from tests.cluster.traces import assert_gone, processes_of

        testbed, self._testbed = self._testbed, None
        if testbed is not None:
            processes = processes_of(testbed)
            testbed.down()
            assert_gone(testbed, processes)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that share a testbed one after another, those without one first; else the order stays."""
    order = {name: number for number, name in enumerate(("built", *TESTBEDS))}
    order |= {name: order[instead] for name, instead in ANY.items()}

    def place(item: pytest.Item) -> int:
        if not item.path.is_relative_to(HERE):
            return -1
        return max((order[name] for name in getattr(item, "fixturenames", ()) if name in order), default=-1)

    items.sort(key=place)
    for item in items:
        if place(item) >= 0:
            item.add_marker("testbed")


@pytest.fixture(scope="session")
def _shared() -> Iterator[Shared]:
    shared = Shared()
    yield shared
    shared.down()


@pytest.fixture(scope="session")
def built() -> None:
    """What a testbed is made of; for tests that start one by themselves."""
    needs.a_testbed(nodes=True)


@pytest.fixture(scope="module")
def control_plane(_shared: Shared) -> Testbed:
    """API server, controllers, scheduler, KubeRay, the TPU webhook; no nodes."""
    needs.a_testbed(nodes=False)
    return _shared.get("control_plane")


@pytest.fixture(scope="module")
def queued(_shared: Shared) -> Testbed:
    """The control plane with Kueue."""
    needs.a_testbed(nodes=False, kueue=True)
    return _shared.get("queued")


@pytest.fixture(scope="module")
def queued_slice(_shared: Shared) -> Testbed:
    """One plain node and one slice of two hosts (v4 2x2x2), with Kueue."""
    needs.a_testbed(nodes=True, kueue=True)
    return _shared.get("queued_slice")


@pytest.fixture(scope="module")
def growing(_shared: Shared) -> Testbed:
    """One plain node; up to two slices of one host and two of two hosts come when pods want them, and go."""
    needs.a_testbed(nodes=True)
    return _shared.get("growing")


@pytest.fixture(scope="module")
def slices(_shared: Shared) -> Testbed:
    """One plain node and two slices of two hosts (v4 2x2x2)."""
    needs.a_testbed(nodes=True)
    return _shared.get("slices")


@pytest.fixture(scope="session")
def _given() -> Iterator[KubernetesFaults | None]:
    """The cluster that `RAYTPU_TEST_KUBECONFIG` names."""
    given = needs.given_kubeconfig()
    if given is None:
        yield None
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
def any_cluster(request: pytest.FixtureRequest, _given: KubernetesFaults | None) -> KubernetesFaults:
    """A cluster with KubeRay and the TPU webhook, with or without nodes."""
    if _given is None:
        return request.getfixturevalue("control_plane")  # type: ignore[no-any-return]
    needs.tpu_webhook(_given)
    return _given


@pytest.fixture(scope="module")
def any_queue(request: pytest.FixtureRequest, _given: KubernetesFaults | None) -> KubernetesFaults:
    """The same with Kueue."""
    if _given is None:
        return request.getfixturevalue("queued")  # type: ignore[no-any-return]
    needs.kueue(_given)
    return _given


@pytest.fixture(scope="module")
def any_queued_slice(request: pytest.FixtureRequest, _given: KubernetesFaults | None) -> KubernetesFaults:
    """A cluster with Kueue and a slice of two hosts (v4 2x2x2)."""
    if _given is None:
        return request.getfixturevalue("queued_slice")  # type: ignore[no-any-return]
    needs.kueue(_given)
    needs.tpu_webhook(_given)
    needs.tpu_nodes(_given, "tpu-v4-podslice", "2x2x2", 2)
    return _given


@pytest.fixture(scope="module")
def kubernetes(request: pytest.FixtureRequest, _given: KubernetesFaults | None) -> KubernetesFaults:
    """A cluster with two slices of two hosts (v4 2x2x2), each in a node pool of its own."""
    if _given is None:
        return request.getfixturevalue("slices")  # type: ignore[no-any-return]
    needs.tpu_webhook(_given)
    needs.tpu_nodes(_given, "tpu-v4-podslice", "2x2x2", 4)
    return _given


@pytest.fixture(scope="module")
def namespace(kubernetes: KubernetesFaults, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the module's own."""
    module = request.path.stem.removeprefix("test_").replace("_", "-")
    with kubernetes.namespace(module[:40]) as name:
        yield name
