"""The few calls about node pools that this backend makes to Google, and its answers as views.

Each is one request; who waits, and what is made of the answer, is decided elsewhere. Errors leave as ours
(``google/clients.py``). Not here: what the views mean (``node_pools.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raytpu_ops.backends.gke.node_pools import Json, NodePoolView, OperationView, Sight
from raytpu_ops.backends.gke.pool_settings import cluster_parts
from raytpu_ops.backends.gke.record import RECORD
from raytpu_ops.backends.google.enums import word_of
from raytpu_ops.backends.google.machines import machine_type
from raytpu_ops.backends.google.refusals import busy_with, is_absent, is_there_already
from raytpu_ops.tpu.errors import RayTpuError

if TYPE_CHECKING:
    from raytpu_ops.backends.google.clients import GoogleApis

#: The taint effects of google.container.v1, as Kubernetes spells them.
_EFFECTS = {"NO_SCHEDULE": "NoSchedule", "PREFER_NO_SCHEDULE": "PreferNoSchedule", "NO_EXECUTE": "NoExecute"}


class PoolsApi:
    """The node pools of one cluster.

    :param apis: Google's clients, open.
    :param cluster: ``projects/…/locations/…/clusters/…``.
    """

    def __init__(self, apis: GoogleApis, cluster: str) -> None:
        self.cluster = cluster
        self._apis = apis
        self._project, self._location, self._name = cluster_parts(cluster)

    async def look(self) -> Sight:
        """Operations and pools, in this order: a pool whose operation has ended is seen as that left it."""
        operations = await self.operations()
        return Sight(operations, await self.pools())

    async def pools(self) -> list[NodePoolView]:
        """All of the cluster's pools."""
        answer = await self._apis.ask(
            f"list node pools of cluster {self._name}", self._apis.container.list_node_pools, parent=self.cluster
        )
        return [_pool_view(pool) for pool in answer.node_pools]

    async def pool(self, name: str) -> NodePoolView | None:
        """One pool; None only where Google says that it does not exist (F07)."""
        found = await self._apis.ask_or_none(
            f"get node pool {name}", self._apis.container.get_node_pool, name=self._path(name)
        )
        return None if found is None else _pool_view(found)

    async def operations(self) -> list[OperationView]:
        """Operations on this cluster and its pools that Google still tells of."""
        parent = f"projects/{self._project}/locations/{self._location}"
        answer = await self._apis.ask(
            f"list operations in {self._location}", self._apis.container.list_operations, parent=parent
        )
        ours = f"/clusters/{self._name}"
        return [
            _operation_view(one)
            for one in answer.operations
            if ours in one.target_link and f"{one.target_link}/".split(ours, 1)[1].startswith("/")
        ]

    async def create(self, request: Json) -> str | None:
        """Begin to make a pool.

        :return: None where it has begun or such a pool exists already, else the operation that has to end first
            (F04), or that it is one that Google does not name.
        """
        from google.cloud.container_v1 import NodePool

        name = request["name"]
        return await self._begin(
            f"create node pool {name}",
            self._apis.container.create_node_pool,
            parent=self.cluster,
            node_pool=NodePool(request),
        )

    async def delete(self, name: str) -> str | None:
        """Begin to delete a pool.

        :return: None where it has begun or there is no such pool, else as :meth:`create`.
        """
        return await self._begin(
            f"delete node pool {name}", self._apis.container.delete_node_pool, name=self._path(name)
        )

    async def _begin(self, asked: str, method: Any, **fields: Any) -> str | None:
        try:
            await self._apis.ask(asked, method, **fields)
        except RayTpuError as error:
            busy = busy_with(error)
            if busy is not None:
                return busy or "another operation on the cluster"
            # Whose it is, and whether it is what was asked for, the next look tells (F03).
            if is_there_already(error) or (asked.startswith("delete") and is_absent(error)):
                return None
            raise
        return None

    async def brings_nodes(self) -> bool:
        """Whether GKE makes node pools by itself for pods that fit nowhere."""
        found = await self._apis.ask(f"get cluster {self._name}", self._apis.container.get_cluster, name=self.cluster)
        return bool(found.autoscaling.enable_node_autoprovisioning or found.autopilot.enabled)

    async def machine(self, zone: str, name: str) -> Mapping[str, Any] | None:
        """A machine type; see :func:`~raytpu_ops.backends.google.machines.machine_type`."""
        return await machine_type(self._apis, self._project, zone, name)

    async def policy(self, region: str, name: str) -> Mapping[str, Any] | None:
        """A resource policy of Compute Engine; None only where Google says that it does not exist."""
        return await self._apis.compute_or_none(
            f"{self._compute}/regions/{region}/resourcePolicies/{name}", f"get resource policy {name}"
        )

    async def create_policy(self, region: str, name: str, topology: str, description: str) -> None:
        """Begin to make a workload policy, which places the hosts of a TPU7x slice."""
        body = {
            "name": name,
            "description": description,
            "workloadPolicy": {"type": "HIGH_THROUGHPUT", "acceleratorTopology": topology},
        }
        try:
            await self._apis.compute(
                "POST",
                f"{self._compute}/regions/{region}/resourcePolicies",
                f"create workload policy {name}",
                body=body,
            )
        except RayTpuError as error:
            if not is_there_already(error):
                raise

    async def delete_policy(self, region: str, name: str) -> None:
        """Begin to delete a resource policy; nothing happens where there is none."""
        try:
            await self._apis.compute(
                "DELETE", f"{self._compute}/regions/{region}/resourcePolicies/{name}", f"delete workload policy {name}"
            )
        except RayTpuError as error:
            if not is_absent(error):
                raise

    @property
    def _compute(self) -> str:
        return f"projects/{self._project}"

    def _path(self, name: str) -> str:
        return f"{self.cluster}/nodePools/{name}"


def _pool_view(pool: Any) -> NodePoolView:
    config, scaling = pool.config, pool.autoscaling
    return NodePoolView(
        name=pool.name,
        status=word_of(pool.status),
        labels=dict(config.labels),
        record=config.metadata.get(RECORD),
        zones=tuple(pool.locations),
        machine_type=config.machine_type,
        topology=pool.placement_policy.tpu_topology,
        # gcloud's --num-nodes, --total-max-nodes and --max-nodes.
        nodes=pool.initial_node_count or scaling.total_max_node_count or scaling.max_node_count,
        taints=tuple(_taint(one) for one in config.taints),
        complaint=_complaint(pool),
    )


def _taint(taint: Any) -> tuple[str, str, str]:
    effect = word_of(taint.effect)
    return taint.key, taint.value, _EFFECTS.get(effect, effect)


def _complaint(pool: Any) -> str | None:
    """What GKE says is wrong with a pool: its conditions, or its status in older words."""
    told = [f"{word_of(one.code)}: {one.message}" if one.code else one.message for one in pool.conditions]
    return "; ".join(line for line in told if line) or pool.status_message or None


def _operation_view(operation: Any) -> OperationView:
    error = operation.error
    return OperationView(
        name=operation.name,
        kind=word_of(operation.operation_type),
        target=operation.target_link.rpartition("/")[2],
        done=word_of(operation.status) == "DONE",
        error=error if error.code or error.message else operation.status_message or None,
    )
