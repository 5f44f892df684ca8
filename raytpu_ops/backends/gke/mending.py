"""Node pools that are lost are made anew under other names (F12), by as many tasks of a run at once as there are (F34).

The names come first: they are written into the RayCluster's record, as names of pools that are still to come, before
anything is deleted or made. Each look goes by the record as it is then. So tasks that mend one lease at the same time
make the same pools, and what one that was killed has begun, any other finishes.

Not here: one round of making pools (``reconciling.py``), requests for their nodes (``asking.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.backends.gke.asking import ask, requests_of
from raytpu_ops.backends.gke.giving_back import told_to_go
from raytpu_ops.backends.gke.granting import Tools, pools_of
from raytpu_ops.backends.gke.node_pools import NodePoolView, Sight, Wanted, creations, is_making
from raytpu_ops.backends.gke.objects import ClusterView
from raytpu_ops.backends.gke.queued import RequestView, check, is_queued, unasked
from raytpu_ops.backends.gke.reconciling import Reconciler
from raytpu_ops.backends.gke.record import RECORD, Record, read_record
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.capacity import ladder
from raytpu_ops.tpu.deadlines import Deadlines, Phase
from raytpu_ops.tpu.errors import CapacityUnavailable, DeadlineExceeded, Preempted
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.waits import Done, Pending

#: How ``naming.node_pool_name`` ends the name of a replacement.
_REPLACEMENT = re.compile(r"-s[0-9]+-r([0-9]+)\Z")


class Mending:
    """One mend.

    :param lease: as the task that mends it knows it.
    :param tools: what it is done with.
    """

    def __init__(self, lease: SliceLease, tools: Tools) -> None:
        self._lease, self._tools = lease, tools
        #: By names: one remembers what Google named as the operation to wait for.
        self._reconcilers: dict[tuple[str, ...], Reconciler] = {}

    async def run(self) -> Record | None:
        """Mend it.

        :return: the record as it is then; None where the lease has no pools of its own, or not yet.
        :raises CapacityUnavailable: there are no chips in the place of those that are gone, or they did not come within
            the deadlines that the lease was granted by.
        :raises Preempted: the lease is being given back.
        """
        try:
            return await self._run()
        except Preempted:
            await self._taken_back()
            raise

    async def _run(self) -> Record | None:
        what, begun = f"lease {self._lease.id}", self._tools.clock()
        answer_by = Deadlines().at(Phase.STARTING, begun)
        record, is_lost = await self._tools.until(what, self._begin, answer_by, Phase.STARTING)
        if record is None or not is_lost:
            return record
        [rung] = ladder(record.capacity)
        phase = Phase.QUEUED if rung.waits_in_queue else Phase.PROVISIONING
        waits = rung.within or (rung.valid_for if rung.kind == "queued" else None)
        by = begun + waits if waits else record.deadlines.at(phase, begun)
        try:
            return await self._tools.until(f"{what}, node pools in the place of lost ones", self._look, by, phase)
        except DeadlineExceeded as error:  # what ends a rung of a ladder as well
            raise CapacityUnavailable(str(error)) from error

    async def _taken_back(self) -> None:
        """A release that looked just before a pool was made here does not know of it."""
        names = sorted({name for names in self._reconcilers for name in names})
        begun = self._tools.clock()
        by = Deadlines().at(Phase.RELEASING, begun)
        what = f"what was made in the place of lost node pools of lease {self._lease.id}"
        await self._tools.until(what, lambda: self._gone(names, begun), by, Phase.RELEASING)

    async def _gone(self, names: Sequence[str], begun: datetime) -> Pending | Done[None]:
        async with self._tools.kube() as kube:
            there = await kube.ray_cluster(self._lease.id)
        record = read_record(there) if there is not None else None
        wanted = record.pools.names if record is not None and record.pools is not None else []
        left: list[str] = []
        for name in names:
            pool = await self._tools.google.pool(name)
            # A name that a RayCluster has is for whoever releases that one.
            if pool is None or name in wanted or not pool.is_of(self._lease.owner):
                continue
            left.append((await told_to_go(self._tools.google, pool))[1])
        # GKE works on one pool after the other: the one that it is making may be somebody else's.
        if left and is_making(await self._tools.google.pools()):
            return self._tools.while_making("; ".join(left), Deadlines(), begun)
        return Pending("; ".join(left)) if left else Done(None)

    async def _begin(self) -> Done[tuple[Record | None, bool]]:
        """Write down names for all that is lost, also for what did not come when somebody mended it before.

        :return: the record, and whether anything has to come.
        """
        sight = await self._tools.google.look()
        async with self._tools.kube() as kube:
            there, record = await self._read(kube)
            if record.pools is None or not record.pools.granted:
                return Done((None, False))
            requests = await requests_of(kube, record.owner) if is_queued(record) else []
            record = await self._renamed(kube, there, record, _lost(record, sight, requests), sight)
            return Done((record, bool(pools_of(record).coming or unasked(record, requests))))

    async def _look(self) -> Pending | Done[Record]:
        sight = await self._tools.google.look()
        async with self._tools.kube() as kube:
            there, record = await self._read(kube)
            pools = pools_of(record)
            requests = await requests_of(kube, record.owner) if is_queued(record) else []
            # One that does not come ends the wait, as an error; the next mend begins with another name for it.
            lost = [name for name in _lost(record, sight, requests) if name not in pools.coming]
            if lost:
                await self._renamed(kube, there, record, lost, sight)
                return Pending(f"node pool {', '.join(lost)} is lost as well")
            others = [name for name in pools.names if name not in pools.coming]
            reconciler = self._reconciler(record)
            pending = await reconciler.round(sight, record.model_dump_json(), pools.spent, others=others)
            if pending is None and is_queued(record):
                pending = await _queued_again(kube, there, record)
            if pending is not None:
                return pending
            if not pools.coming:  # it was written down by somebody else
                return Done(record)
            return Done(await self._written(kube, there, record, coming=[]))

    async def _read(self, kube: KubeApi) -> tuple[Mapping[str, Any], Record]:
        """The RayCluster, and its record: nothing is made for one that is being given back."""
        there = await kube.ray_cluster(self._lease.id)
        record = read_record(there) if there is not None else None
        if there is None or record is None or record.owner != self._lease.owner or ClusterView.of(there).deleting:
            raise Preempted(
                f"lease {self._lease.id} was released, so its lost node pools are not replaced. Clear the task that "
                "provisioned it to get a new one."
            )
        return there, record

    async def _renamed(
        self, kube: KubeApi, there: Mapping[str, Any], record: Record, lost: Sequence[str], sight: Sight
    ) -> Record:
        """Write down the names of the pools that stand in for lost ones, before any is made."""
        if not lost:
            return record
        pools, owner = pools_of(record), record.owner
        fresh = {name: _next(owner, index, name) for index, name in enumerate(pools.names) if name in lost}
        names = [fresh.get(name, name) for name in pools.names]
        coming = [name for name in names if name in (*pools.coming, *fresh.values())]
        # What was made by such a name for a former lease of the owner is none of this one's.
        spent = [*pools.spent, *(one.name for one in creations(sight.operations, [*fresh.values()]) if one.done)]
        return await self._written(kube, there, record, names=names, coming=coming, spent=spent)

    async def _written(self, kube: KubeApi, there: Mapping[str, Any], record: Record, **pools: list[str]) -> Record:
        changed = record.model_copy(update={"pools": pools_of(record).model_copy(update=pools)})
        suspend = bool(there["spec"].get("suspend"))
        # Where it is gone by now the next look tells.
        await kube.change_ray_cluster(there, {RECORD: changed.model_dump_json()}, suspend=suspend)
        return changed

    def _reconciler(self, record: Record) -> Reconciler:
        pools = pools_of(record)
        coming = tuple(pools.coming)
        if coming not in self._reconcilers:
            [rung] = ladder(record.capacity)
            shape, options = record.spec.shape, pools.options
            wanted = Wanted(record.owner, self._lease.id, shape, rung, pools.zone, coming, options)
            self._reconcilers[coming] = Reconciler(wanted, self._tools.google)
        return self._reconcilers[coming]


async def _queued_again(kube: KubeApi, there: Mapping[str, Any], record: Record) -> Pending | None:
    """Ask for the nodes of pools that stand in for lost ones, until they are there.

    :param there: the RayCluster.
    """
    asked = await ask(kube, there, record, record.expires_at - record.granted_at)
    if isinstance(asked, Pending):
        return asked
    # The bookings of slices that stand have expired long ago.
    check(asked, record.spec.shape.hosts, placed=record.spec.hosts)
    waiting = [one.words() for one in asked if one.waits]
    return Pending("; ".join(waiting)) if waiting else None


def lacking(record: Record, pools: Sequence[NodePoolView], requests: Sequence[RequestView]) -> dict[str, str]:
    """The lease's pools that are lost, or whose nodes are, or that are still to be made: name -> why, in words.

    :param pools: all of the cluster's.
    :param requests: for their nodes, where these are queued for.
    """
    named = pools_of(record)
    found = {pool.name: pool for pool in pools if pool.is_of(record.owner)}
    refused = {one.pool: one.words() for one in requests if one.refused}
    words: dict[str, str] = {}
    for name in named.names:
        if name not in found:
            words[name] = f"node pool {name} is {'not there yet' if name in named.coming else 'gone'}"
        elif found[name].is_lost:
            words[name] = found[name].words()
        elif name in refused:
            words[name] = refused[name]
    return words


def _lost(record: Record, sight: Sight, requests: Sequence[RequestView]) -> list[str]:
    """Those that need another name: a name that was written down and that nobody has used yet is still good."""
    pools = pools_of(record)
    made = [one for one in creations(sight.operations, pools.coming) if one.done and one.name not in pools.spent]
    used = {one.name for one in sight.pools} | {one.target for one in made}
    return [name for name in lacking(record, sight.pools, requests) if name in used or name not in pools.coming]


def _next(owner: Owner, index: int, name: str) -> str:
    """The name of the pool that stands in for that one; a replacement never has an old name."""
    again = _REPLACEMENT.search(name)
    return naming.node_pool_name(owner, index, 1 + (int(again[1]) if again else 0))
