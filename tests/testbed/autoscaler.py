"""GKE's cluster autoscaler, played: a node pool comes for a slice that fits nowhere, and goes when it is empty.

All hosts of a slice come at once, in a pool of their own. Standard pools that scale from zero, node
auto-provisioning and Autopilot look the same to a pod, so there is one of them here. The pods get the
events that the real one writes: TriggeredScaleUp, NotTriggerScaleUp, FailedScaleUp; its nodes, ScaleDown.
The rules are in `scaling_rules.py`.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import fnmatch
import secrets
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.testbed import scaling_rules as rules
from tests.testbed.api import ApiError
from tests.testbed.nodes import Pool
from tests.testbed.scaling_rules import Limit, Object

if TYPE_CHECKING:
    from tests.testbed.inside import Cluster

_COMPONENT = "cluster-autoscaler"
#: Seconds between two looks; the real one takes ten.
_INTERVAL = 0.5
#: Seconds from the request for machines to the answer that there are none.
_ANSWER = 1.0


class _NoCapacity(Exception):
    """There are no machines of that kind."""


@dataclass
class _Owned:
    """A pool that was booted here.

    :param pool: the pool.
    :param limit: that it counts for.
    :param key: the slice that it waits for, or waited for last.
    :param booting: it is not ready yet.
    :param empty_since: when its last pod was seen to be gone, by the loop's clock.
    """

    pool: Pool
    limit: Limit
    key: str
    booting: bool = True
    empty_since: float | None = None


@dataclass(frozen=True)
class _View:
    """One look at the cluster."""

    waiting: dict[str, list[Object]]
    placed: dict[str, set[str]]
    nodes: dict[str, Object]


class Autoscaler:
    """The program.

    :param cluster: the run.
    :param specs: what it may boot: `v4-2x2x2*4`, up to four such slices.
    :param idle: seconds after which an empty pool is removed.
    :param backoff: seconds after a failure in which that kind of pool is not tried again.
    """

    def __init__(self, cluster: Cluster, specs: Iterable[str], idle: float, backoff: float = 5.0) -> None:
        self._cluster, self._api = cluster, cluster.api
        self._limits = rules.limits(specs)
        self._idle, self._backoff = idle, backoff
        self._owned: dict[str, _Owned] = {}
        self._closed_until: dict[str, float] = {}
        self._told: dict[str, str] = {}
        self._boots: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None
        #: Patterns of the kinds of pool that there are no machines for: `v4-*`.
        self.stockouts: list[str] = []

    def start(self) -> None:
        """Look after the cluster from now on."""
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End, and remove every pool that is left of it."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        await asyncio.gather(*self._boots, return_exceptions=True)
        for name in list(self._owned):
            await self._cluster.remove_pool(name)
        self._owned.clear()

    def describe(self) -> dict[str, Any]:
        """Its pools with the slice that each is for, and whether it still runs."""
        return {
            "pools": {name: {"slice": one.key, "booting": one.booting} for name, one in self._owned.items()},
            "stockouts": self.stockouts,
            "running": self._loop is not None and not self._loop.done(),
        }

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except (ApiError, aiohttp.ClientError, TimeoutError) as error:
                print(f"autoscaler: {error}; it looks again", flush=True)
            except Exception:
                traceback.print_exc()  # nobody awaits this task, so it says by itself what ended it
                raise
            await asyncio.sleep(_INTERVAL)

    async def _look(self) -> None:
        pods = await self._list("/api/v1/pods")
        nodes = {one["metadata"]["name"]: one for one in await self._list("/api/v1/nodes")}
        view = _View(rules.waiting(pods), rules.placed(pods), nodes)
        for key, group in view.waiting.items():
            await self._help(key, group, view)
        for one in list(self._owned.values()):
            await self._shrink(one, view)

    async def _list(self, path: str) -> list[Object]:
        return list((await self._api.call("GET", path)).get("items") or [])

    # Up

    async def _help(self, key: str, group: list[Object], view: _View) -> None:
        if any(one.key == key and self._is_free_for(key, one, view) for one in self._owned.values()):
            return  # the scheduler will see to it
        for one in self._owned.values():
            # What was booted for a slice that needs it no more is as good for another.
            if one.key not in view.waiting and self._is_free_for(key, one, view) and self._fits(group[0], one):
                one.key = key
                return
        reasons = [rules.refusal(group[0], limit) or self._is_closed(limit) for limit in self._limits]
        if None in reasons:
            await self._trigger(self._limits[reasons.index(None)], key, group)
            return
        message = rules.not_triggered(one for one in reasons if one is not None)
        for pod in group:
            if self._told.get(pod["metadata"]["uid"]) != message:
                await self._tell(pod, "NotTriggerScaleUp", message)

    def _is_free_for(self, key: str, one: _Owned, view: _View) -> bool:
        """All of its hosts are there, or will be, and none of them is another slice's."""
        if one.booting:
            return True
        nodes = [view.nodes.get(name) for name in one.pool.node_names]
        whole = all(node is not None and not node["spec"].get("unschedulable") for node in nodes)
        return whole and all(view.placed.get(name, set()) <= {key} for name in one.pool.node_names)

    def _fits(self, pod: Object, one: _Owned) -> bool:
        return rules.refusal(pod, one.limit) is None and rules.asked_labels(pod) == one.pool.labels

    def _is_closed(self, limit: Limit) -> str | None:
        if sum(one.limit == limit for one in self._owned.values()) >= limit.most:
            return rules.AT_MOST
        until = self._closed_until.get(limit.pool, 0.0)
        return rules.BACKOFF if asyncio.get_running_loop().time() < until else None

    async def _trigger(self, limit: Limit, key: str, group: list[Object]) -> None:
        labels = rules.asked_labels(group[0])
        [pool] = self._cluster.reserve(limit.pool, labels)
        owned = _Owned(replace(pool, taints=tuple(rules.taints_of(labels))), limit, key)
        self._owned[pool.name] = owned
        group_id = f"gke-testbed-{pool.name}-grp"
        for pod in group:
            message = f"pod triggered scale-up: [{{{group_id} 0->{pool.hosts} (max: {pool.hosts})}}]"
            await self._tell(pod, "TriggeredScaleUp", message)
        task = asyncio.create_task(self._boot(owned, group))
        self._boots.add(task)
        task.add_done_callback(self._boots.discard)

    async def _boot(self, owned: _Owned, group: list[Object]) -> None:
        limit = owned.limit
        try:
            if any(fnmatch.fnmatch(limit.pool, pattern) for pattern in self.stockouts):
                await asyncio.sleep(_ANSWER)
                raise _NoCapacity("GCE out of resources")
            await self._cluster.add_pool(owned.pool)
            owned.booting = False
        except Exception as error:  # noqa: BLE001 - whatever it is, the pods are told, and another try follows
            if not isinstance(error, _NoCapacity):
                traceback.print_exc()
            self._closed_until[limit.pool] = asyncio.get_running_loop().time() + self._backoff
            owned.booting = False  # where removing it fails, it is tried again as with any empty pool
            await self._remove(owned)
            zone = owned.pool.node_labels["topology.kubernetes.io/zone"]
            for pod in group:
                message = f"Node scale up in zones {zone} associated with this pod failed: {error}. "
                await self._tell(pod, "FailedScaleUp", f"{message}Pod is at risk of not being scheduled.", "Warning")

    # Down

    async def _shrink(self, one: _Owned, view: _View) -> None:
        names = one.pool.node_names
        wanted = one.key in view.waiting and self._is_free_for(one.key, one, view)
        if one.booting or wanted or any(view.placed.get(name) for name in names):
            one.empty_since = None
            return
        now = asyncio.get_running_loop().time()
        one.empty_since = now if one.empty_since is None else one.empty_since
        if now - one.empty_since < self._idle:
            return
        left = [view.nodes[name] for name in names if name in view.nodes]
        for node in left:
            await self._cordon(node, on=True)
        placed = rules.placed(await self._list("/api/v1/pods"))
        if any(placed.get(name) for name in names):  # the scheduler was quicker
            for node in left:
                await self._cordon(node, on=False)
            return
        for node in left:
            await self._tell(node, "ScaleDown", "node removed by cluster autoscaler")
        await self._remove(one)

    async def _remove(self, one: _Owned) -> None:
        try:
            await self._cluster.remove_pool(one.pool.name)
        except (ApiError, aiohttp.ClientError) as error:
            print(f"autoscaler: pool {one.pool.name} is not removed yet: {error}", flush=True)
        else:
            del self._owned[one.pool.name]

    async def _cordon(self, node: Object, *, on: bool) -> None:
        path = f"/api/v1/nodes/{node['metadata']['name']}"
        await self._api.call("PATCH", path, {"spec": {"unschedulable": on}}, "application/merge-patch+json")

    # Events

    async def _tell(self, about: Object, reason: str, message: str, kind: str = "Normal") -> None:
        """Write an event; as with the real one, it is lost if it cannot be written.

        :param about: a pod or a node.
        :param reason: in one word.
        :param message: in words.
        :param kind: `Normal` or `Warning`.
        """
        metadata = about["metadata"]
        self._told[metadata["uid"]] = message
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        involved = {
            "apiVersion": "v1",
            "kind": "Pod" if "namespace" in metadata else "Node",
            "name": metadata["name"],
            "uid": metadata["uid"],
            **({"namespace": metadata["namespace"]} if "namespace" in metadata else {}),
        }
        namespace = metadata.get("namespace", "default")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{secrets.token_hex(8)}", "namespace": namespace},
            "involvedObject": involved,
            "type": kind,
            "reason": reason,
            "message": message,
            "source": {"component": _COMPONENT},
            "reportingComponent": _COMPONENT,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._api.call("POST", f"/api/v1/namespaces/{namespace}/events", event)
        except (ApiError, aiohttp.ClientError) as error:
            print(f"autoscaler: the event {reason} of {metadata['name']} is lost: {error}", flush=True)
