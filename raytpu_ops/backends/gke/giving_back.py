"""Giving a lease back: its RayCluster, its pods, the node pools that were made for it.

Every step is tried, whatever the others did, and one round can be done again at any time. Node pools cost
money until Google has no trace of them, so each is looked at by its name until the answer is NOT_FOUND (F07).
Not here: how often, and how long (``flows/leases.py``, ``backend.py``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from raytpu_ops.backends.base import Released
from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.backends.gke.asking import withdraw
from raytpu_ops.backends.gke.claim import held_by
from raytpu_ops.backends.gke.node_pools import TRIES_WITHIN, NodePoolView, is_making
from raytpu_ops.backends.gke.objects import ClusterView, PodView
from raytpu_ops.backends.gke.pools_api import PoolsApi
from raytpu_ops.backends.gke.reconciling import remove_policy
from raytpu_ops.backends.gke.record import HOLD, owned_by, read_record
from raytpu_ops.backends.google.fields import region_of
from raytpu_ops.tpu.errors import Misconfigured, RayTpuError
from raytpu_ops.tpu.lease import Owner


@dataclass
class GivingBack:
    """One round of it.

    :param owner: whose it is.
    :param lease: the lease's id.
    :param namespace: of the RayCluster.
    :param clock: the time, UTC.
    """

    owner: Owner
    lease: str
    namespace: str
    clock: Callable[[], datetime]
    removed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    #: Pools that the RayCluster names: a lease in XCom knows of none that came in the place of lost ones.
    pools: list[str] = field(default_factory=list)
    #: What is left because it was refused: asking again does not change that.
    refused: list[str] = field(default_factory=list)
    #: How much longer than usual it may take until all is gone.
    held: timedelta = timedelta(0)

    @property
    def is_stuck(self) -> bool:
        """Nothing more comes of further rounds."""
        return bool(self.left) and self.left == self.refused

    @property
    def released(self) -> Released:
        """What this round did."""
        return Released(removed=self.removed, left=self.left, held=self.held)

    async def requests(self, api: KubeApi) -> None:
        """Google is asked for no more nodes."""
        for name in await withdraw(api, self.owner):
            self.removed.append(f"ProvisioningRequest {name}")
            self.left.append(f"ProvisioningRequest {name} was told to go")

    async def kubernetes(self, api: KubeApi) -> None:
        """The RayCluster and, without waiting for the garbage collector, its pods (F25)."""
        await self.tried(self._cluster(api))
        await self.tried(self._pods(api))

    async def let_go(self, api: KubeApi) -> None:
        """Google has nothing of the lease any more, so its RayCluster need not be found again."""
        there = await api.ray_cluster(self.lease)
        if there is None or not owned_by(there, self.owner):
            return
        view = ClusterView.of(there)
        if view.deleting and HOLD in view.finalizers:
            await api.let_go(there, HOLD)

    async def google(self, google: PoolsApi, names: Sequence[str], policy: str | None, zones: Sequence[str]) -> bool:
        """The node pools, then the workload policy that they named.

        :param names: of pools that were made, as far as the lease knows. They go also where nobody may look at them.
        :param policy: of the workload policy that was made for them, None where none was.
        :param zones: in whose regions that may be.
        :return: whether Google has nothing of the lease any more.
        """
        before = len(self.left)
        await self.tried(self._node_pools(google, [*dict.fromkeys([*names, *self.pools])]))
        if len(self.left) == before and policy is not None:
            for zone in {region_of(zone): zone for zone in zones}.values():
                await self.tried(self._policy(google, policy, zone))
        return len(self.left) == before

    async def tried(self, step: Awaitable[None]) -> None:
        """Whatever becomes of it, the other steps follow."""
        try:
            await step
        except RayTpuError as error:
            self.left.append(str(error))
            if isinstance(error, Misconfigured):
                self.refused.append(str(error))

    async def _cluster(self, api: KubeApi) -> None:
        there = await api.ray_cluster(self.lease)
        if there is None or not owned_by(there, self.owner):
            return  # ours is gone
        if (record := read_record(there)) is not None and record.pools is not None:
            self.pools = record.pools.names
        what, view = f"RayCluster {self.namespace}/{self.lease}", ClusterView.of(there)
        if view.deleting:
            self.left.append(f"{what} is being deleted; it is held by {held_by(view)}")
            return
        await api.delete_ray_cluster(self.lease, view.uid)
        self.removed.append(what)
        self.left.append(f"{what} was told to go")

    async def _pods(self, api: KubeApi) -> None:
        for pod in [PodView.of(one) for one in await api.pods(self.lease) if owned_by(one, self.owner)]:
            await self.tried(self._pod(api, pod))
            self.left.append(f"pod {pod.name} is ending")

    async def _pod(self, api: KubeApi, pod: PodView) -> None:
        lost = pod.is_lost(self.clock())
        if not pod.deleting or lost:
            await api.delete_pod(pod.name, pod.uid, at_once=lost)
            self.removed.append(f"pod {pod.name}{', whose host is gone' if lost else ''}")

    async def _node_pools(self, google: PoolsApi, names: Sequence[str]) -> None:
        try:
            found = await self._found(google, names)
        except Misconfigured:
            # Nobody may look (F32). These names were written down while no stranger had them, so what has them is ours.
            for name in names:
                await self.tried(self._unseen(google, name))
            raise
        for pool in found:
            await self.tried(self._node_pool(google, pool))

    async def _found(self, google: PoolsApi, names: Sequence[str]) -> list[NodePoolView]:
        pools = await google.pools()
        self.held = TRIES_WITHIN if is_making(pools) else self.held
        found = {pool.name: pool for pool in pools if pool.is_of(self.owner)}
        for name in names:
            if name in found:
                continue
            pool = await google.pool(name)
            if pool is not None and pool.is_of(self.owner):
                found[name] = pool
        return list(found.values())

    async def _unseen(self, google: PoolsApi, name: str) -> None:
        busy = await google.delete(name)
        if busy is not None:
            self.left.append(f"node pool {name} may be there, and Google works on {busy} first")
            return
        words = f"node pool {name} was told to go if it is there, and can't be looked at"
        self.left.append(words)
        self.refused.append(words)

    async def _node_pool(self, google: PoolsApi, pool: NodePoolView) -> None:
        begun, words = await told_to_go(google, pool)
        self.removed += [f"node pool {pool.name}"] if begun else []
        self.left.append(words)

    async def _policy(self, google: PoolsApi, name: str, zone: str) -> None:
        there = await remove_policy(google, self.owner, name, zone)
        if there:
            self.left.append(there)


async def told_to_go(google: PoolsApi, pool: NodePoolView) -> tuple[bool, str]:
    """Delete a node pool, unless that is under way.

    :return: whether it has begun just now, and what there still is, in words.
    """
    if pool.status == "STOPPING":
        return False, f"node pool {pool.name} is being deleted"
    busy = await google.delete(pool.name)
    if busy is not None:
        return False, f"node pool {pool.name} is {pool.status}, and Google works on {busy} first"
    return True, f"node pool {pool.name} was told to go"
