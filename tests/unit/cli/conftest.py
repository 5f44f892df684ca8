"""The cluster that the doctor's tests look at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kmock
import pytest

from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.cli import doctor_gke
from raytpu_ops.cli.doctor import Check
from tests.unit.cli.fake_cluster import FakeCluster, kubeconfig


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def look(cluster: FakeCluster, tmp_path: Path) -> Callable[..., dict[str, Check]]:
    """The doctor's rows by name, as it saw the cluster with the backend's options; nothing was created there."""

    async def checks(settings: Settings) -> list[Check]:
        async with kmock.RawHandler() as handler, kmock.Server(handler):
            cluster.install(handler)
            found = await doctor_gke.checks(KubeconfigAccess(str(kubeconfig(tmp_path, str(handler.url)))), settings)
            for request in handler:
                wrote = request.method.value != "GET" and "reviews" not in request.url.path
                assert not wrote or request.params["dryRun"] == "All", f"{request.url} changes something"
            return found

    def rows(**options: Any) -> dict[str, Check]:
        return {check.name: check for check in asyncio.run(checks(Settings(namespace="raytpu", **options)))}

    return rows
