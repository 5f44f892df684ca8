"""What the testbed costs, what KubeRay takes by itself, and what `acquire` takes on top of that.

`python -m tests.benchmarks.testbed`, a part of `make bench`, starts five nodes, applies a RayCluster of two
slices of two hosts as `kubectl apply` would, and waits until Ray has labelled all hosts; the `gke` backend
acquires the same one and waits until it is whole. Both again, as often as `--rounds` says, each first every
other time, behind one bare apply that pays what is paid once. Each figure is wall time of this machine in this
run, so a ratio is worth more than a second; above `LIMIT` it is an error. `--cold-build` also builds every part
into an empty cache, which takes half an hour or more.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.manifest import ray_cluster
from raytpu_ops.flows.leases import give_back, wait_whole
from raytpu_ops.tpu.capacity import OnDemand
from raytpu_ops.tpu.deadlines import Schedule
from raytpu_ops.tpu.lease import SliceLease
from tests.cluster.leases import V4, acquired, backend
from tests.testbed import parts
from tests.testbed.client import Testbed
from tests.testbed.faults import KubernetesFaults, wait_until
from tests.testbed.ray_view import ray_labels

NODES = ("cpu", "v4-2x2x2*2")
#: What `acquire` may take, as a multiple of what a bare apply takes.
LIMIT = 1.25


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


def compare(bare: Callable[[], float], ours: Callable[[], float], rounds: int) -> float:
    """How many times the seconds of the one the other takes: the median of pairs that ran one after the other.

    :param bare: takes seconds, and says how many.
    :param ours: the same.
    :param rounds: how often.
    """
    bare()  # pulls images and fills caches
    ratios: list[float] = []
    for number in range(rounds):
        order = (bare, ours) if number % 2 == 0 else (ours, bare)
        seconds = {one: one() for one in order}
        ratios.append(seconds[ours] / seconds[bare])
    return statistics.median(ratios)


def measured(testbed: Testbed, rounds: int) -> float:
    """The same RayCluster by a bare apply and by `acquire`.

    :param testbed: with nodes for two slices.
    :param rounds: how often.
    """
    gke = backend(testbed.kubeconfig)
    manifest = ray_cluster("bare", V4, OnDemand(), gke.settings)
    numbers = itertools.count()

    def bare() -> float:
        seconds = bare_apply(testbed, manifest)
        show("RayCluster, bare apply until all hosts are labelled", seconds)
        show("its foreground deletion", delete(testbed, "bare", "default"))
        return seconds

    def ours() -> float:
        began = time.monotonic()
        lease = asyncio.run(acquired_and_whole(gke, next(numbers)))
        seconds = time.monotonic() - began
        show("the same, acquired until it is labelled and whole", seconds)
        with timed("its release"):
            asyncio.run(give_back(gke, lease, by=datetime.now(UTC) + timedelta(minutes=3), say=str, poll_s=0.5))
        return seconds

    return compare(bare, ours, rounds)


async def acquired_and_whole(gke: GkeBackend, number: int) -> SliceLease:
    """A lease on two slices of two hosts, whole.

    :param gke: the backend.
    :param number: of the round; each has a lease of its own.
    """
    lease = await acquired(gke, f"round-{number}")
    await wait_whole(gke, lease, schedule=Schedule.start({"provisioning": 900, "labelled": 900}), say=str)
    return lease


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.testbed")
    parser.add_argument("--cold-build", action="store_true", help="build all parts anew, elsewhere")
    parser.add_argument("--if-built", action="store_true", help="else only say why there is nothing to measure")
    parser.add_argument("--rounds", type=int, default=3, choices=range(3, 100), metavar="N", help="three or more")
    arguments = parser.parse_args()
    reason = parts.unready(nodes=True, kueue=False)
    if reason and arguments.if_built:
        print(f"Not measured: {reason}")
        return 0
    if arguments.cold_build:
        cold_build()
    with timed("up, control plane alone"):
        testbed = Testbed.up(control_plane=True)
    testbed.down()
    with timed("up, five nodes"):
        testbed = Testbed.up(*NODES)
    try:
        ratio = measured(testbed, arguments.rounds)
    finally:
        with timed("down"):
            testbed.down()
    print(f"acquire takes {ratio:.2f} times what a bare apply takes (limit {LIMIT})")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
