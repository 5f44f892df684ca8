"""What the testbed costs, and what KubeRay takes by itself: the yardstick for `acquire`.

`python -m tests.benchmarks.testbed` starts five nodes, applies a RayCluster of two slices of two hosts
as `kubectl apply` would, and waits until Ray has labelled all hosts. Each figure is wall time of this
machine in this run, so a ratio is worth more than a second. `--cold-build` also builds every part into
an empty cache, which takes half an hour or more.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.manifests import ray_cluster
from tests.testbed import parts
from tests.testbed.client import Testbed
from tests.testbed.faults import KubernetesFaults, wait_until
from tests.testbed.ray_view import ray_labels

NODES = ("cpu", "v4-2x2x2*2")


def bare_apply(cluster: KubernetesFaults, manifest: dict[str, Any], *, within: float = 900) -> float:
    """Seconds from a server-side apply of a RayCluster until Ray has labelled every host of it.

    :param cluster: where.
    :param manifest: the RayCluster.
    :param within: seconds.
    """
    name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    hosts = sum(group["replicas"] * group["numOfHosts"] for group in manifest["spec"]["workerGroupSpecs"])
    resource = cluster.dynamic.resources.get(api_version="ray.io/v1", kind="RayCluster")
    began = time.monotonic()
    resource.server_side_apply(body=manifest, name=name, namespace=namespace, field_manager="benchmark")
    wait_until(
        lambda: len(ray_labels(cluster, name, namespace)) == hosts,
        within,
        lambda: f"of {hosts} hosts Ray labelled {ray_labels(cluster, name, namespace)}",
    )
    return time.monotonic() - began


def delete(cluster: KubernetesFaults, name: str, namespace: str, *, within: float = 180) -> float:
    """Seconds from the foreground deletion of a RayCluster until it and its pods are gone.

    :param cluster: where.
    :param name: of the RayCluster.
    :param namespace: of the RayCluster.
    :param within: seconds.
    """
    resource = cluster.dynamic.resources.get(api_version="ray.io/v1", kind="RayCluster")
    began = time.monotonic()
    resource.delete(name=name, namespace=namespace, body={"propagationPolicy": "Foreground"})
    wait_until(
        lambda: (
            all(one.metadata.name != name for one in resource.get(namespace=namespace).items)
            and not cluster.count("v1", "Pod", f"ray.io/cluster={name}")
        ),
        within,
        f"the RayCluster {name} or a pod of it is left",
    )
    return time.monotonic() - began


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long it took.

    :param what: it is.
    """
    began = time.monotonic()
    yield
    show(what, time.monotonic() - began)


def show(what: str, seconds: float) -> None:
    """One line of the result.

    :param what: was measured.
    :param seconds: that it took.
    """
    print(f"{what:<56} {seconds:7.1f} s", flush=True)


def cold_build() -> None:
    """Build every part with empty caches of ours and of Go; modules that were downloaded stay."""
    before = {name: os.environ.get(name) for name in ("RAYTPU_TESTBED_CACHE", "GOCACHE")}
    with tempfile.TemporaryDirectory(prefix="raytpu-cold-") as folder, timed("cold build, all parts"):
        try:
            os.environ["RAYTPU_TESTBED_CACHE"] = str(Path(folder) / "parts")
            os.environ["GOCACHE"] = str(Path(folder) / "go")
            parts.ensure(nodes=True, kueue=True)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.testbed")
    parser.add_argument("--cold-build", action="store_true", help="build all parts anew, elsewhere")
    if parser.parse_args().cold_build:
        cold_build()
    with timed("up, control plane alone"):
        testbed = Testbed.up(control_plane=True)
    testbed.down()
    with timed("up, five nodes"):
        testbed = Testbed.up(*NODES)
    try:
        manifest = ray_cluster("bare")
        show("RayCluster, bare apply until all hosts are labelled", bare_apply(testbed, manifest))
        show("its foreground deletion", delete(testbed, "bare", "default"))
    finally:
        with timed("down"):
            testbed.down()


if __name__ == "__main__":
    main()
