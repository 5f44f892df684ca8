"""A Kubernetes and a Google on loopback that share one clock, and what goes on in them by itself.

Time passes only while somebody sleeps. Pods get hosts where node pools have nodes, and lose them with these.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from google.cloud import container_v1

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.record import LEASE
from raytpu_ops.tpu.capacity import ladder
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.naming import lease_id, node_pool_name
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake import GoogleFake
from tests.google_fake.access import FakeAccess
from tests.google_fake.fake import CLUSTER, ZONE
from tests.google_fake.queued import Queue
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import NAMESPACE, POD_TEMPLATES, PODS, RAY_CLUSTERS, REQUESTS, SECRETS, FakeKube
from tests.unit.gke.seen import SPEC

#: Names of the lease and its pools.
LEASE_ID = lease_id(ME)
POOLS = [node_pool_name(ME, 0), node_pool_name(ME, 1)]
OTHER_ZONE = "us-central2-a"
BOTH_ZONES = {"zones": [ZONE, OTHER_ZONE]}
KINDS = (RAY_CLUSTERS, PODS, SECRETS, POD_TEMPLATES, REQUESTS)
RUNNING = container_v1.NodePool.Status.RUNNING


class World:
    """Both, and a backend for them.

    :ivar said: lines for the log.
    :ivar meanwhile: called at each pause: what somebody else does.
    """

    def __init__(self, kube: FakeKube, google: GoogleFake, access: KubeconfigAccess) -> None:
        self.kube, self.google, self.access = kube, google, access
        self.said: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None
        kube.clock = google.clock.now
        [cluster] = google.container.clusters.values()
        self.queue = Queue(google.container, cluster)

    @property
    def now(self) -> datetime:
        return self.google.clock.now()

    async def sleep(self, seconds: float) -> None:
        """Time passes, and the world goes on meanwhile."""
        self.passes(seconds)
        await asyncio.sleep(0)

    def passes(self, seconds: float) -> None:
        """The same for who lets nobody else go on."""
        self.kube.forget_requests()
        self.google.advance(seconds)
        self.settle()
        self.meanwhile()

    def settle(self) -> None:
        """What kubelets, KubeRay and the autoscaler do by themselves."""
        self.kube.settle()
        self._queue()
        for name, cluster in self.kube.all(RAY_CLUSTERS).items():
            wanted = not cluster["spec"].get("suspend") and not cluster["metadata"].get("deletionTimestamp")
            there = any(pod["metadata"]["labels"].get("ray.io/cluster") == name for pod in self.kube.all(PODS).values())
            if wanted and not there:
                self._ask_for_hosts(name)
                if self.has_hosts(cluster):
                    self.kube.become_whole(name)
            elif there and cluster["spec"].get("suspend"):
                for pod in self.pods_of(name):
                    self.kube.forget(PODS, pod)

    def _queue(self) -> None:
        """Google goes on with the requests in its queue."""
        requests = self.kube.all(REQUESTS)
        told = self.queue.look(requests.values(), self.kube.all(POD_TEMPLATES), lambda _: bool(self.kube.all(PODS)))
        for name, rows in told.items():
            self.kube.store(REQUESTS, {**requests[name], "status": {"conditions": rows}})

    def has_hosts(self, cluster: Mapping[str, Any]) -> bool:
        """There are nodes for all of its pods."""
        group = cluster["spec"]["workerGroupSpecs"][0]
        return self.nodes(cluster["metadata"]["name"]) >= group["replicas"] * group["numOfHosts"]

    def nodes(self, lease: str) -> int:
        """Nodes of the lease's own pools."""
        [cluster] = self.google.container.clusters.values()
        return sum(
            cluster.sizes[name] for name, pool in cluster.pools.items() if pool.config.labels.get(LEASE) == lease
        )

    def _ask_for_hosts(self, lease: str) -> None:
        """Pods that wait make the autoscaler fill empty pools."""
        [cluster] = self.google.container.clusters.values()
        for name, pool in cluster.pools.items():
            empty = pool.autoscaling.enabled and pool.status == RUNNING and not cluster.sizes[name]
            empty = empty and not pool.queued_provisioning.enabled
            if empty and pool.config.labels.get(LEASE) == lease and not pool.etag.startswith("asked"):
                pool.etag = "asked"
                self.google.container.scale_up(
                    f"{cluster.name}/nodePools/{name}", pool.autoscaling.total_max_node_count
                )

    def pods_of(self, name: str) -> list[str]:
        return [
            pod for pod, one in self.kube.all(PODS).items() if one["metadata"]["labels"].get("ray.io/cluster") == name
        ]

    def backend(
        self, *, node_pools: Any = True, sleep: Callable[[float], Awaitable[None]] | None = None, **options: Any
    ) -> GkeBackend:
        """A backend, as another process would make it.

        :param sleep: default: the world's own.
        """
        pools = dict(node_pools) if isinstance(node_pools, dict) else {}
        return GkeBackend(
            self.access,
            cloud=FakeAccess(self.google),
            clock=lambda: self.now,
            sleep=sleep or self.sleep,
            namespace=NAMESPACE,
            node_pools={"cluster": CLUSTER, **pools},
            **options,
        )

    def plain_backend(self) -> GkeBackend:
        """One that was told nothing of node pools."""
        return GkeBackend(
            self.access, cloud=FakeAccess(self.google), clock=lambda: self.now, sleep=self.sleep, namespace=NAMESPACE
        )

    async def plan(self, backend: GkeBackend, capacity: Any = None, spec: SliceSpec = SPEC, **deadlines: Any) -> Plan:
        plan = await backend.plan(spec, ladder(capacity), lease_for=timedelta(hours=12))
        return plan.model_copy(update={"deadlines": plan.deadlines.model_copy(update=deadlines)})

    async def granted(self, capacity: Any = None, **options: Any) -> SliceLease:
        """A lease whose hosts all run; of what was asked for it nothing is counted."""
        backend = self.backend(**options)
        lease = await backend.acquire(await self.plan(backend, capacity), ME, say=self.said.append)
        self.settle()
        self.google.calls.clear()
        self.kube.calls.clear()
        return lease

    async def released(self, lease: SliceLease, **options: Any) -> list[str]:
        """Release it until nothing is left; what was removed."""
        removed: list[str] = []
        for _ in range(200):
            done = await self.backend(**options).release(lease)
            removed += done.removed
            if not done.left:
                return removed
            await self.sleep(10)
        raise AssertionError(f"still there: {done.left}")

    def empty(self) -> None:
        """As if nothing had ever been asked for, made or spoilt, at either side."""
        [cluster] = self.google.container.clusters.values()
        cluster.pools.clear()
        cluster.sizes.clear()
        self.google.container.operations.clear()
        self.google.compute.policies.clear()
        self.google.calls.clear()
        self.google.faults.clear()
        self.kube.empty()

    # What is left

    @property
    def pools(self) -> dict[str, container_v1.NodePool]:
        """Node pools, by short name."""
        return {name.rpartition("/")[2]: pool for name, pool in self.google.node_pools().items()}

    @property
    def left(self) -> dict[str, list[str]]:
        """All that bills or is in the way, by kind; empty once nothing is left."""
        found = {
            "pools": list(self.pools),
            "policies": list(self.google.compute.policies),
            **{
                kind.plural: list(self.kube.all(kind))
                for kind in (RAY_CLUSTERS, PODS, SECRETS, POD_TEMPLATES, REQUESTS)
            },
        }
        return {kind: names for kind, names in found.items() if names}

    def record(self, name: str) -> dict[str, Any]:
        """A RayCluster, copied."""
        return copy.deepcopy(self.kube.all(RAY_CLUSTERS)[name])

    def asked(self, *methods: str) -> Sequence[str]:
        """Calls of these methods at Google, in order, as ``Method name``."""
        return [
            f"{call.method} {call.resource.rpartition('/')[2]}" for call in self.google.calls if call.method in methods
        ]


async def acquired(world: World, capacity: Any = None, spec: SliceSpec = SPEC, **options: Any) -> SliceLease:
    """A lease, with the backend's options."""
    backend = world.backend(**options)
    return await backend.acquire(await world.plan(backend, capacity, spec), ME, say=world.said.append)
