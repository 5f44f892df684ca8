"""A lease stays with the cluster that granted it, whichever context a kubeconfig names as its current one later."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.hooks.kubernetes import access_from, found_again
from raytpu_ops.tpu.errors import Misconfigured
from tests.unit.gke.conftest import ME, Time
from tests.unit.gke.fake_kube import NAMESPACE, RAY_CLUSTERS, FakeKube, Serving

WAYS = ("nothing", "file", "connection to a file", "connection with a kubeconfig", "connection with its text")


class Two:
    """Two clusters in one kubeconfig, and the options that lead to the current one."""

    def __init__(self, clusters: Mapping[str, FakeKube], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clusters, self.file, self.monkeypatch = clusters, file, monkeypatch

    def switch(self, current: str, *, without: str = "") -> None:
        """``kubectl config use-context``, wherever a kubeconfig is."""
        there = [name for name in self.clusters if name != without]
        content = {
            "clusters": [{"name": name, "cluster": {"server": self.clusters[name].address}} for name in there],
            "users": [{"name": "me", "user": {"token": "first"}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": "me"}} for name in there],
            "current-context": current,
        }
        self.file.write_text(yaml.safe_dump(content))
        self.monkeypatch.setenv("KUBECONFIG", str(self.file))
        self._connect("to_file", kube_config_path=str(self.file))
        self._connect("object", kube_config=content)
        self._connect("text", kube_config=json.dumps(content))

    def _connect(self, conn_id: str, **extra: Any) -> None:
        value = json.dumps({"conn_type": "kubernetes", "extra": extra})
        self.monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", value)

    def options(self, way: str) -> dict[str, str]:
        conn_ids = dict(zip(WAYS[2:], ("to_file", "object", "text"), strict=True))
        return {"nothing": {}, "file": {"kubeconfig": str(self.file)}}.get(way) or (
            {"kubernetes_conn_id": conn_ids[way]} if way in conn_ids else {}
        )


@pytest.fixture
async def two(time: Time, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Two]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with Serving(FakeKube(time)) as one, Serving(FakeKube(time)) as other:
        yield Two({"one": one, "other": other}, tmp_path / "config", monkeypatch)


def backend(options: Mapping[str, Any], time: Time) -> GkeBackend:
    access, rest = access_from(options)
    return GkeBackend(access, clock=time, sleep=time.sleep, **{"namespace": NAMESPACE, **rest})


@pytest.mark.parametrize("way", WAYS)
async def test_a_lease_is_given_back_where_it_was_granted(two: Two, time: Time, plan: Plan, way: str) -> None:
    two.switch("one")
    lease = await backend(two.options(way), time).acquire(plan, ME)
    assert "deletionTimestamp" not in two.clusters["one"].all(RAY_CLUSTERS)[lease.id]["metadata"]

    two.switch("other")
    await backend(found_again(two.options(way), lease.place), time).release(lease)

    assert "deletionTimestamp" in two.clusters["one"].all(RAY_CLUSTERS)[lease.id]["metadata"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_context_that_is_gone_is_no_word_that_nothing_is_left(
    two: Two, time: Time, plan: Plan, way: str
) -> None:
    two.switch("one")
    lease = await backend(two.options(way), time).acquire(plan, ME)

    two.switch("other", without="one")
    with pytest.raises(Misconfigured, match=r"\bone\b"):
        await backend(found_again(two.options(way), lease.place), time).release(lease)


@pytest.mark.parametrize("way", WAYS)
async def test_new_credentials_are_those_of_the_same_context(two: Two, way: str) -> None:
    two.switch("one")
    access, _ = access_from(two.options(way))
    await access.configuration()

    two.switch("other")

    assert (await access.configuration(renew=True)).host == two.clusters["one"].address
