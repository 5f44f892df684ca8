"""GKE's cluster manager: requests about clusters, node pools and operations.

Not here: what makes sense in a request (`pool_rules.py`), and what happens by and by (`pool_life.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.cloud import container_v1 as gke

from tests.google_fake import pool_rules, refusals
from tests.google_fake.gate import Ask, Rpc
from tests.google_fake.pool_life import Cluster, OpType, Pools, Status
from tests.google_fake.refusals import Refusal


class Container(Pools):
    """The service.

    :ivar came_with: pools that every cluster came with, beside those that are made, put and looked at.
    :ivar provisions_itself: clusters make node pools for pods that fit nowhere.
    """

    came_with: tuple[gke.NodePool, ...] = (
        gke.NodePool(
            name="default-pool", status=Status.RUNNING, initial_node_count=1, config={"machine_type": "e2-standard-4"}
        ),
    )
    provisions_itself = False

    @property
    def rpcs(self) -> Mapping[str, Rpc]:
        """The methods."""
        update, get = "container.clusters.update", "container.clusters.get"
        return {
            "GetCluster": Rpc(gke.GetClusterRequest, gke.Cluster, _named(get), self._get_cluster),
            "ListNodePools": Rpc(gke.ListNodePoolsRequest, gke.ListNodePoolsResponse, _parent(get), self._list),
            "GetNodePool": Rpc(gke.GetNodePoolRequest, gke.NodePool, _named(get), self._get),
            "CreateNodePool": Rpc(gke.CreateNodePoolRequest, gke.Operation, _create_ask, self._create),
            "DeleteNodePool": Rpc(gke.DeleteNodePoolRequest, gke.Operation, _named(update), self._delete),
            "GetOperation": Rpc(
                gke.GetOperationRequest, gke.Operation, _named("container.operations.get"), self._get_operation
            ),
            "ListOperations": Rpc(
                gke.ListOperationsRequest,
                gke.ListOperationsResponse,
                _parent("container.operations.list"),
                self._list_operations,
            ),
        }

    # Methods

    def _get_cluster(self, request: gke.GetClusterRequest) -> gke.Cluster:
        cluster = self.cluster(request.name)
        return gke.Cluster(
            name=cluster.name.rpartition("/")[2],
            location=cluster.location.rpartition("/")[2],
            locations=list(cluster.zones),
            endpoint=cluster.endpoint,
            master_auth={"cluster_ca_certificate": cluster.ca},
            node_pools=self._pools(cluster),
            autoscaling={"enable_node_autoprovisioning": self.provisions_itself},
            status=gke.Cluster.Status.RUNNING,
            current_master_version="1.34.1-gke.100",
        )

    def _list(self, request: gke.ListNodePoolsRequest) -> gke.ListNodePoolsResponse:
        return gke.ListNodePoolsResponse(node_pools=self._pools(self.cluster(request.parent)))

    def _pools(self, cluster: Cluster) -> list[gke.NodePool]:
        base = [gke.NodePool(one, locations=[cluster.zones[0]]) for one in self.came_with]
        return [*base, *cluster.pools.values()]

    def _get(self, request: gke.GetNodePoolRequest) -> gke.NodePool:
        return self._find(request.name)[1]

    def _create(self, request: gke.CreateNodePoolRequest) -> gke.Operation:
        cluster = self.cluster(request.parent)
        asked = request.node_pool
        pool_rules.check_name(asked.name)
        full = f"{cluster.name}/nodePools/{asked.name}"
        if asked.name in cluster.pools:
            raise refusals.exists(full)
        self._refuse_if_busy(cluster)
        pool_rules.check(asked, cluster.zones, self.compute.policy_names())
        pool = gke.NodePool(asked)
        pool.status = Status.PROVISIONING
        self._complete(cluster, pool)
        cluster.pools[pool.name] = pool
        cluster.sizes[pool.name] = 0
        self.made.append(full)
        operation = self._begin(cluster, OpType.CREATE_NODE_POOL, full)
        fate = self._fate(cluster, pool)
        if fate is None:
            self.clock.after(self.delays.create, lambda: self._grow(cluster, pool, operation))
        else:
            self.clock.after(self.delays.fail, lambda: self._fail(cluster, pool, operation, fate))
        return operation

    def _delete(self, request: gke.DeleteNodePoolRequest) -> gke.Operation:
        cluster, pool = self._find(request.name)
        self._refuse_if_busy(cluster)
        self._refuse_if_worked_on(request.name)
        pool.status = Status.STOPPING
        self._tell("shrunk", cluster, pool)
        operation = self._begin(cluster, OpType.DELETE_NODE_POOL, request.name)

        def gone() -> None:
            self._end(operation)
            if cluster.pools.get(pool.name) is pool:
                self._drop(cluster, pool)

        self.clock.after(self.delays.delete, lambda: self._when_settled(cluster, pool, gone))
        return operation

    def _refuse_if_worked_on(self, pool: str) -> None:
        """However much the cluster does at once, it does one thing to a pool: prometheus/test-infra#84."""
        for operation in self.operations.values():
            if operation.status != gke.Operation.Status.DONE and operation.target_link.endswith(f"/v1/{pool}"):
                raise refusals.busy_doing(operation.name, "creating a node pool", pool.split("/")[5])

    def _get_operation(self, request: gke.GetOperationRequest) -> gke.Operation:
        if request.name not in self.operations:
            raise refusals.not_found(request.name)
        return self.operations[request.name]

    def _list_operations(self, request: gke.ListOperationsRequest) -> gke.ListOperationsResponse:
        wanted = request.parent.replace("/locations/-", "/locations/")
        found = [operation for name, operation in self.operations.items() if name.startswith(wanted)]
        return gke.ListOperationsResponse(operations=found)


def _named(permission: str) -> Callable[[Any], Ask]:
    return lambda request: Ask(_required(request.name), (permission,))


def _parent(permission: str) -> Callable[[Any], Ask]:
    return lambda request: Ask(_required(request.parent), (permission,))


def _required(name: str) -> str:
    if not name:
        raise Refusal(refusals.Code.INVALID_ARGUMENT, "Location must be set.", reason="badRequest")
    return name


def _create_ask(request: gke.CreateNodePoolRequest) -> Ask:
    # Nodes run as a service account, and whoever makes them must be allowed to act as it.
    return Ask(
        f"{_required(request.parent)}/nodePools/{request.node_pool.name}",
        ("container.clusters.update", "iam.serviceAccounts.actAs"),
    )
