"""The life of node pools on the clock, and of the operations that make and remove them.

Not here: requests (`container.py`), and nodes that really run (`boots.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from google.cloud import container_v1 as gke
from google.rpc import status_pb2

from tests.google_fake import pool_rules, refusals
from tests.google_fake.clock import Clock
from tests.google_fake.compute import Compute
from tests.google_fake.faults import Fate, Faults
from tests.google_fake.refusals import Code, Refusal

Status = gke.NodePool.Status
OpType = gke.Operation.Type
_DONE = gke.Operation.Status.DONE
_SPECIFIC = gke.ReservationAffinity.Type.SPECIFIC_RESERVATION


@dataclass
class Delays:
    """How long things take, seconds; of the order that GKE takes."""

    create: float = 180
    fail: float = 60
    delete: float = 180
    scale_up: float = 60


@dataclass
class Cluster:
    """One cluster.

    :param name: `projects/P/locations/L/clusters/C`.
    :param zones: where its pools may be; the first is the default.
    :param endpoint: host and port of its API server.
    :param ca: its certificate authority, PEM, base64.
    """

    name: str
    zones: tuple[str, ...]
    endpoint: str = "127.0.0.1"
    ca: str = ""
    pools: dict[str, gke.NodePool] = field(default_factory=dict)
    #: Nodes that each pool has.
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def location(self) -> str:
        """`projects/P/locations/L`."""
        return self.name.partition("/clusters/")[0]

    @property
    def project(self) -> str:
        """Its project."""
        return self.name.split("/")[1]


class PoolWatcher(Protocol):
    """Who hears of pools as they come and go; called while the fake's lock is held, so it must not block."""

    def grown(self, cluster: Cluster, pool: gke.NodePool) -> None:
        """The pool has nodes now."""

    def shrunk(self, cluster: Cluster, pool: gke.NodePool) -> None:
        """The pool's nodes go away: it is deleted, or they were taken back."""

    def busy(self, cluster: Cluster, pool: gke.NodePool) -> bool:
        """Whether nodes of the pool are still coming or going; its operation waits for them."""


class Pools:
    """All node pools of all clusters.

    :param clock: of the fake.
    :param faults: that pools meet.
    """

    def __init__(self, clock: Clock, faults: Faults) -> None:
        self.clock = clock
        self.faults = faults
        self.delays = Delays()
        self.clusters: dict[str, Cluster] = {}
        self.operations: dict[str, gke.Operation] = {}
        self.watchers: list[PoolWatcher] = []
        #: How many things a cluster does at once (F04).
        self.at_once = 1
        #: Compute Engine, whose reservations and policies pools name.
        self.compute = Compute(clock, self.uses, self.policies_used)
        #: Pools that were ever made, full names, in order.
        self.made: list[str] = []
        self._numbers = itertools.count(1)

    # What a test looks at and does

    def cluster(self, name: str) -> Cluster:
        """A cluster.

        :raises Refusal: there is none of that name.
        """
        if name not in self.clusters:
            raise refusals.not_found(name)
        return self.clusters[name]

    def pools(self) -> dict[str, gke.NodePool]:
        """All pools, by full name."""
        return {
            f"{one.name}/nodePools/{name}": pool for one in self.clusters.values() for name, pool in one.pools.items()
        }

    def uses(self, reservation: str) -> int:
        """Nodes that pools have in a reservation.

        :param reservation: `projects/P/reservations/N`.
        """
        owner, name = reservation.split("/")[1], reservation.rpartition("/")[2]
        found = 0
        for cluster in self.clusters.values():
            for pool in cluster.pools.values():
                affinity = pool.config.reservation_affinity
                named = affinity.consume_reservation_type == _SPECIFIC and next(iter(affinity.values), "")
                if named in (reservation, name if owner == cluster.project else None):
                    found += cluster.sizes[pool.name]
        return found

    def policies_used(self) -> list[str]:
        """Workload policies that pools name, short names."""
        names = (pool.placement_policy.policy_name for pool in self.pools().values())
        return [name.rpartition("/")[2] for name in names if name]

    def put(self, cluster: str, pool: gke.NodePool, *, nodes: int | None = None) -> gke.NodePool:
        """A pool that somebody else made: it is there at once."""
        found = self.cluster(cluster)
        pool = gke.NodePool(pool)
        pool.status = pool.status or Status.RUNNING
        self._complete(found, pool)
        found.pools[pool.name] = pool
        found.sizes[pool.name] = pool.initial_node_count if nodes is None else nodes
        return pool

    def preempt(self, name: str) -> None:
        """F12: the pool's nodes are taken back; the pool itself stays, without them."""
        with self.clock.lock:
            self._take_back(*self._find(name))

    def vanish(self, name: str) -> None:
        """A pool is deleted by somebody else, at once."""
        with self.clock.lock:
            cluster, pool = self._find(name)
            self._drop(cluster, pool)

    def scale_up(self, name: str, nodes: int) -> None:
        """What the autoscaler does when pods wait for a pool with no nodes; they come after a while."""
        with self.clock.lock:
            cluster, pool = self._find(name)

            def come() -> None:
                if cluster.pools.get(pool.name) is pool and pool.status == Status.RUNNING:
                    self._resize(cluster, pool, nodes)

            self.clock.after(self.delays.scale_up, come)

    def fill(self, name: str, nodes: int, runs_s: float) -> None:
        """What a granted ProvisioningRequest does: the pool's nodes come, all at once, and go after so many seconds."""
        with self.clock.lock:
            cluster, pool = self._find(name)
            self._resize(cluster, pool, nodes)
            self.clock.after(runs_s, lambda: self._take_back(cluster, pool))

    def occupy(self, cluster: str, seconds: float, kind: OpType = OpType.UPGRADE_MASTER) -> str:
        """F04: the cluster does something else for so long.

        :return: the operation's id.
        """
        with self.clock.lock:
            operation = self._begin(self.cluster(cluster), kind, cluster)
            self.clock.after(seconds, lambda: self._end(operation))
            return operation.name

    # State

    def _find(self, name: str) -> tuple[Cluster, gke.NodePool]:
        parent, _, pool = name.partition("/nodePools/")
        cluster = self.cluster(parent)
        if pool not in cluster.pools:
            raise refusals.not_found(name)
        return cluster, cluster.pools[pool]

    def _complete(self, cluster: Cluster, pool: gke.NodePool) -> None:
        """What the service fills in."""
        pool.self_link = f"https://container.googleapis.com/v1/{cluster.name}/nodePools/{pool.name}"
        pool.version = "1.34.1-gke.100"
        pool.etag = f"etag-{next(self._numbers)}"
        if not pool.locations:
            pool.locations = list(cluster.zones)
        if not pool.config.machine_type:
            pool.config.machine_type = "e2-medium"

    def _begin(self, cluster: Cluster, kind: OpType, target: str) -> gke.Operation:
        now = self.clock.now()
        number = next(self._numbers)
        name = f"operation-{int(now.timestamp() * 1000)}-{number:08x}-0000-4000-8000-{number:012x}"
        operation = gke.Operation(
            name=name,
            operation_type=kind,
            status=gke.Operation.Status.RUNNING,
            location=cluster.location.rpartition("/")[2],
            self_link=f"https://container.googleapis.com/v1/{cluster.location}/operations/{name}",
            target_link=f"https://container.googleapis.com/v1/{target}",
            start_time=_text(now),
        )
        self.operations[f"{cluster.location}/operations/{name}"] = operation
        return operation

    def _end(self, operation: gke.Operation, error: status_pb2.Status | None = None, kind: str = "") -> None:
        operation.status = _DONE
        operation.end_time = _text(self.clock.now())
        if error is not None:
            operation.error = error
            operation.status_message = error.message
            operation.nodepool_conditions = [_condition(error, kind)]

    def _refuse_if_busy(self, cluster: Cluster) -> None:
        running = [
            operation
            for operation in self.operations.values()
            if operation.status != _DONE and f"/v1/{cluster.name}/" in f"{operation.target_link}/"
        ]
        if len(running) >= self.at_once:
            raise refusals.busy(running[0].name)

    def _grow(self, cluster: Cluster, pool: gke.NodePool, operation: gke.Operation) -> None:
        """Nodes come, and when they are there the pool runs."""
        if cluster.pools.get(pool.name) is pool and pool.status == Status.PROVISIONING:
            self._resize(cluster, pool, pool.initial_node_count)
        self._when_settled(cluster, pool, lambda: self._succeed(cluster, pool, operation))

    def _succeed(self, cluster: Cluster, pool: gke.NodePool, operation: gke.Operation) -> None:
        if cluster.pools.get(pool.name) is pool and pool.status == Status.PROVISIONING:
            pool.status = Status.RUNNING
        self._end(operation)

    def _resize(self, cluster: Cluster, pool: gke.NodePool, nodes: int) -> None:
        cluster.sizes[pool.name] = nodes
        if nodes:
            self._tell("grown", cluster, pool)
        limit = pool.config.max_run_duration
        if nodes and limit:
            self.clock.after(limit.total_seconds(), lambda: self._take_back(cluster, pool))

    def _take_back(self, cluster: Cluster, pool: gke.NodePool) -> None:
        if cluster.pools.get(pool.name) is pool:
            cluster.sizes[pool.name] = 0
            self._tell("shrunk", cluster, pool)

    def _when_settled(self, cluster: Cluster, pool: gke.NodePool, then: Callable[[], None]) -> None:
        """Go on when real nodes, if there are any, have come or gone."""
        if any(watcher.busy(cluster, pool) for watcher in self.watchers):
            self.clock.after(1, lambda: self._when_settled(cluster, pool, then))
        else:
            then()

    def _fail(self, cluster: Cluster, pool: gke.NodePool, operation: gke.Operation, fate: Fate) -> None:
        """F01, F06: the operation is DONE and carries an error, and the pool exists in ERROR."""
        error = status_pb2.Status()
        error.CopyFrom(fate.error)
        zone = pool.locations[0]
        words = {
            "hosts": pool.initial_node_count,
            "instance": f"gke-{cluster.name.rpartition('/')[2]}-{pool.name}-518980c1-9cxr"[:63],
            "project": cluster.project,
            "zone": zone,
            "region": zone.rpartition("-")[0],
            "reservation": next(iter(pool.config.reservation_affinity.values), "?"),
        }
        error.message = error.message.format_map(words)
        self._end(operation, error, fate.kind)
        if cluster.pools.get(pool.name) is pool and pool.status == Status.PROVISIONING:
            pool.status = Status.ERROR
            pool.status_message = error.message
            pool.conditions = [_condition(error, fate.kind)]

    def _drop(self, cluster: Cluster, pool: gke.NodePool) -> None:
        del cluster.pools[pool.name]
        cluster.sizes.pop(pool.name, None)
        self._tell("shrunk", cluster, pool)

    def _tell(self, what: str, cluster: Cluster, pool: gke.NodePool) -> None:
        for watcher in self.watchers:
            getattr(watcher, what)(cluster, pool)

    def _fate(self, cluster: Cluster, pool: gke.NodePool) -> Fate | None:
        """How the making of a pool ends, if not well."""
        return (
            pool_rules.late_failure(pool)
            or self._without_reservation(cluster, pool)
            or self.faults.fate_of(pool.name, pool.locations[0])
        )

    def _without_reservation(self, cluster: Cluster, pool: gke.NodePool) -> Fate | None:
        """A pool that names a reservation which is not there, or has not enough left."""
        affinity = pool.config.reservation_affinity
        if affinity.consume_reservation_type != _SPECIFIC or not self.compute.reservations:
            return None  # a test that sells none does not ask for them either
        name, zone = affinity.values[0], pool.locations[0]
        found, free = self.compute.free_in(cluster.project, zone, name)
        if found is None:
            # GoogleCloudPlatform/cluster-toolkit#5043
            text = (
                f'Google Compute Engine: reservation "{name}" not found for node pool "{pool.name}" at zone "{zone}".'
            )
            return Fate(Refusal(Code.NOT_FOUND, text).status)
        short = pool.initial_node_count - (free if found.machine_type == pool.config.machine_type else 0)
        if short <= 0:
            return None
        # GoogleCloudPlatform/gsutil#1000
        text = (
            f'Reservation does not have enough resources for the request: specific reservation "{name}" is '
            f'insufficient for node pool "{pool.name}" at zone "{zone}": required {pool.initial_node_count} and short '
            f"of {short} VM count of machine type {pool.config.machine_type}."
        )
        return Fate(Refusal(Code.RESOURCE_EXHAUSTED, text).status, kind="GCE_STOCKOUT")


def _condition(error: status_pb2.Status, kind: str) -> gke.StatusCondition:
    code = gke.StatusCondition.Code[kind] if kind else gke.StatusCondition.Code.UNKNOWN
    return gke.StatusCondition(code=code, canonical_code=error.code, message=error.message)


def _text(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
