"""One round of making the node pools that are there into those that are wanted; the caller goes on until it is done.

A round reads what Google has, does what follows from it, and can be done again at any time by anybody:
a create whose answer got lost is found by the next round and adopted (F02), a pool that is going is
waited for (F08), an error in an operation is read whatever its state says (F01, F06).
Not here: what the views mean (``node_pools.py``), how often and how long (``granting.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raytpu_ops.backends.gke.node_pools import (
    DIGEST,
    NodePoolView,
    OperationView,
    Scene,
    Sight,
    Wanted,
    creations,
    scene,
)
from raytpu_ops.backends.gke.pools_api import PoolsApi
from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.backends.google.fields import region_of
from raytpu_ops.tpu.errors import CapacityUnavailable, Misconfigured, RayTpuError
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.waits import Pending


class Reconciler:
    """Brings the pools of one step about.

    :param wanted: the pools.
    :param google: the cluster's node pools.
    """

    def __init__(self, wanted: Wanted, google: PoolsApi) -> None:
        self._wanted, self._google = wanted, google
        #: The operation that Google named as the one to wait for (F04).
        self._busy = ""

    async def refuse_strangers(self, pools: Sequence[NodePoolView]) -> None:
        """Before anything is made, refuse what can't be made because somebody else has its name.

        :param pools: all of the cluster's.
        :raises Misconfigured: a pool, or the workload policy that they need, was not made for the owner.
        """
        refuse_strangers(pools, self._wanted.names, self._wanted.owner)
        if self._wanted.own_policy is not None:
            await found_policy(self._google, self._wanted.owner, self._wanted.own_policy, self._wanted.zone)

    async def round(
        self, sight: Sight, record: str, spent: Sequence[str], *, may_create: bool = True, others: Sequence[str] = ()
    ) -> Pending | None:
        """Do what can be done now.

        :param sight: what Google has, seen before the record was read.
        :param record: the lease, as JSON, which new pools carry.
        :param spent: names of operations whose failure has been dealt with.
        :param may_create: begin new pools; off when their time is over.
        :param others: names of pools of the owner that are none of this round's business.
        :return: None once every pool runs.
        :raises CapacityUnavailable: a pool could not be had.
        :raises Misconfigured: a pool can't be had as it was asked for, or somebody else's has its name.
        """
        pools = [pool for pool in sight.pools if pool.name not in others]
        refuse_strangers(pools, self._wanted.names, self._wanted.owner)
        found = scene(self._wanted, pools, sight.operations, spent)
        if found.failures:
            raise _worst(found.failures)
        if found.is_whole:
            return None
        blocked = self._blocked(sight.operations) or await self._act(found, record, may_create=may_create)
        return Pending(_words(found, blocked))

    async def clear(self, sight: Sight) -> tuple[Pending | None, list[str]]:
        """Take the pools of this step away. The policy that was made for them stays: the next step's need the same.

        :param sight: what Google has, seen before the record was read.
        :return: what is still there, None once nothing is; and the names of all operations that failed.
        """
        owner, digest = self._wanted.owner, self._wanted.digest
        mine = [one for one in sight.pools if one.is_of(owner) and one.labels.get(DIGEST) == digest]
        making = creations(sight.operations, self._wanted.names)
        under_way = [one.target for one in making if not one.done]
        if mine or under_way:
            blocked = self._blocked(sight.operations) or await self._delete(mine)
            words = [one.words() for one in mine] or [f"node pool {name} is being made" for name in under_way]
            return Pending("; ".join([*words, *([blocked] if blocked else [])])), []
        return None, [one.name for one in making if one.failed]

    def _blocked(self, operations: Sequence[OperationView]) -> str:
        """The operation that Google named before still runs."""
        return self._waits() if any(one.name == self._busy and not one.done for one in operations) else ""

    def _waits(self) -> str:
        return f"Google works on {self._busy} first"

    async def _act(self, found: Scene, record: str, *, may_create: bool) -> str:
        """:return: what keeps it from doing all of it, in words."""
        if found.doomed:
            return await self._delete(found.doomed)
        if not found.absent or not may_create:
            return ""
        policy = await self._policy()
        if policy:
            return policy
        for name in found.absent:
            busy = await self._google.create(self._wanted.request(name, record))
            if busy is not None:
                self._busy = busy
                return self._waits()
        return ""

    async def _delete(self, pools: Sequence[NodePoolView]) -> str:
        for pool in pools:
            busy = None if pool.status == "STOPPING" else await self._google.delete(pool.name)
            if busy is not None:
                self._busy = busy
                return self._waits()
        return ""

    async def _policy(self) -> str:
        """See to the workload policy that the pools need; what it lacks, in words."""
        name, wanted = self._wanted.own_policy, self._wanted
        if name is None:
            return ""
        there = await found_policy(self._google, wanted.owner, name, wanted.zone)
        if there is None:
            await self._google.create_policy(region_of(wanted.zone), name, wanted.shape.topology, mark(wanted.owner))
            return f"workload policy {name} is being made"
        status = there.get("status", "READY")
        return "" if status == "READY" else f"workload policy {name} is {status}"


def refuse_strangers(pools: Sequence[NodePoolView], names: Sequence[str], owner: Owner) -> None:
    """Names hold a digest of their owner, so this is somebody's copy (F03).

    :param pools: all of the cluster's.
    :param names: those that are wanted.
    :raises Misconfigured: a pool has one of these names and was not made for the owner.
    """
    strangers = [pool.name for pool in pools if pool.name in names and not pool.is_of(owner)]
    if strangers:
        raise Misconfigured(
            f"node pool {', '.join(strangers)} exists and was not made for {owner.key}: delete it, or name it in "
            "node_pools.reuse"
        )


async def found_policy(google: PoolsApi, owner: Owner, name: str, zone: str) -> Mapping[str, Any] | None:
    """The owner's workload policy; None where there is none of that name.

    :param zone: where its pools are.
    :raises Misconfigured: it was not made for the owner.
    """
    region = region_of(zone)
    there = await google.policy(region, name)
    if there is not None and mark(owner) not in str(there.get("description")):
        raise Misconfigured(
            f"resource policy {name} in {region} exists and was not made for {owner.key}: delete it, or name it in "
            "node_pools.workload_policy"
        )
    return there


def mark(owner: Owner) -> str:
    """What the description of a resource policy says of whose it is; there are no labels there."""
    return f"{OWNER}={owner.digest}"


async def remove_policy(google: PoolsApi, owner: Owner, name: str | None, zone: str) -> str:
    """Tell the workload policy that was made for a lease to go.

    :param name: its name; None where the lease needed none of its own.
    :return: empty once it is gone, else its state in words.
    """
    if name is None:
        return ""
    region = region_of(zone)
    there = await google.policy(region, name)
    if there is None or mark(owner) not in str(there.get("description")):
        return ""
    if there.get("status") != "DELETING":
        await google.delete_policy(region, name)
    return f"workload policy {name} in {region} is being deleted"


def _worst(failures: Sequence[RayTpuError]) -> RayTpuError:
    """One error for all: what asking again cannot mend goes first."""
    final = [one for one in failures if not isinstance(one, CapacityUnavailable)]
    first = (final or list(failures))[0]
    return type(first)("; ".join(dict.fromkeys(str(one) for one in final or failures)))


def _words(found: Scene, blocked: str) -> str:
    """What is there and what is under way, in one phrase."""
    total = len(found.running) + len(found.waiting) + len(found.absent)
    parts = [f"{len(found.running)} of {total} node pools run"]
    parts += [f"{pool.name} goes first" for pool in found.doomed]
    parts += [*found.waiting, *(f"{name} is not there yet" for name in found.absent)]
    return "; ".join([*parts, *([blocked] if blocked else [])])
