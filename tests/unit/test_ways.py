"""How tests are told apart that run side by side: none of those that would be in each other's way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LONGEST, way

REPOSITORY = Path(__file__).parents[2]


def ways() -> dict[str, str]:
    files = [str(path.relative_to(REPOSITORY)) for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))]
    return {file: way(file, (REPOSITORY / file).read_text()) for file in files}


def test_all_that_may_use_the_nodes_of_a_cluster_that_somebody_named_goes_one_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAYTPU_TEST_KUBECONFIG", "/some/kubeconfig")
    assert len({one for file, one in ways().items() if file.startswith("tests/cluster/")}) == 1


def test_without_one_nodes_from_google_and_nodes_of_a_testbed_go_two_ways(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAYTPU_TEST_KUBECONFIG", raising=False)
    found = ways()
    assert found["tests/cluster/test_gke_pipeline.py"] == "nodes"
    assert found["tests/cluster/test_gke_node_pools.py"] == "nodes from Google"
    assert found["tests/cluster/test_proxy.py"] == "others"


def test_airflow_with_ray_and_each_alone_go_three_ways():
    assert len({one for file, one in ways().items() if file.startswith("tests/integration/")} - {"others"}) == 3


@pytest.mark.parametrize("cluster", ["", "/some/kubeconfig"])
def test_every_way_has_its_place(monkeypatch: pytest.MonkeyPatch, cluster: str):
    monkeypatch.setenv("RAYTPU_TEST_KUBECONFIG", cluster)
    assert set(ways().values()) <= set(LONGEST)
