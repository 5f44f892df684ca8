"""A slice becomes the request for a GKE node pool, and GKE's answers become views that say what to do next.

Pure: nothing is asked and nothing is sent. Sources: google.container.v1 (NodePool, Operation); Google's
"Deploy TPU workloads in GKE Standard", "TPU7x (Ironwood) in GKE" and "flex-start" pages, read in 2026.
Not here: the calls (``pools_api.py``), their order (``granting.py``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from raytpu_ops.backends.gke.manifest import POOL_LABEL, Nodes
from raytpu_ops.backends.gke.pool_settings import NodePools
from raytpu_ops.backends.gke.queued import TOLERATION
from raytpu_ops.backends.gke.record import LEASE, OWNER, RECORD, labels_for
from raytpu_ops.backends.google.refusals import operation_failed, told
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.capacity import AnyCapacity
from raytpu_ops.tpu.errors import CapacityUnavailable, RayTpuError, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.shapes import SliceShape
from raytpu_ops.tpu.spec import SliceSpec

Json = dict[str, Any]

#: The label that says by which request a pool was made: it differs from step to step of a ladder.
DIGEST = f"{naming.LABEL_PREFIX}digest"
_RESERVATION_KEY = "compute.googleapis.com/reservation-name"
#: Images in Artifact Registry, logs and metrics need one; what it may do is for IAM to say.
_SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
#: The states in which a pool will never be what was asked for, with and without one that goes.
_FAILED = frozenset({"ERROR", "RUNNING_WITH_ERROR"})
_LOST = _FAILED | {"STOPPING"}
#: GKE tries that long to make a pool for which there are no machines ("Not all instances running in IGM after 35m…"),
#: with some more, and deletes none on that cluster before it is through.
TRIES_WITHIN = timedelta(hours=1)


@dataclass(frozen=True)
class Wanted:
    """The pools of a lease in one step of its ladder.

    :param owner: whose they are.
    :param lease: the lease's id.
    :param shape: of each slice.
    :param rung: the kind of capacity.
    :param zone: where.
    :param names: one pool for each slice.
    :param options: the user's.
    """

    owner: Owner
    lease: str
    shape: SliceShape
    rung: AnyCapacity
    zone: str
    names: tuple[str, ...]
    options: NodePools

    def request(self, name: str, record: str) -> Json:
        """What GKE is asked to make: a ``NodePool`` of google.container.v1.

        :param name: of the pool.
        :param record: the lease, as JSON, which the pool carries.
        """
        pool = self._pool(name)
        config = pool["config"]
        config["labels"][DIGEST] = config["resource_labels"][DIGEST] = self.digest
        config["metadata"] = {RECORD: record}
        return pool

    @property
    def digest(self) -> str:
        """Sixteen hex digits that change with anything that is asked for, but for the pool's name."""
        text = json.dumps(self._pool(""), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def own_policy(self) -> str | None:
        """Name of the workload policy that is made for the pools; None where they need none, or the user has one."""
        return own_policy(self.lease, self.shape, self.options)

    def _pool(self, name: str) -> Json:
        shape, options = self.shape, self.options
        labels = {**options.labels, **labels_for(self.owner), LEASE: self.lease}
        config: Json = {
            "machine_type": shape.machine_type,
            "oauth_scopes": _SCOPES,
            "labels": dict(labels),
            "resource_labels": dict(labels),
            # Nobody else's pods land on chips that this lease pays for.
            "taints": [{"key": LEASE, "value": self.lease, "effect": "NO_SCHEDULE"}],
            **_machine(options),
        }
        pool: Json = {
            "name": name,
            "initial_node_count": shape.hosts,
            "locations": [self.zone],
            "config": config,
            "management": {"auto_upgrade": True, "auto_repair": True},
            **_network(options),
        }
        if options.version:
            pool["version"] = options.version
        if shape.placement == "compact":
            pool["placement_policy"] = {"type_": "COMPACT", "tpu_topology": shape.topology}
        elif shape.placement == "workload":  # F42: the topology is the policy's
            pool["placement_policy"] = {"policy_name": self.own_policy or options.workload_policy}
        self._pay(pool)
        return pool

    def _pay(self, pool: Json) -> None:
        """What the rung changes."""
        rung, config = self.rung, pool["config"]
        if rung.kind == "spot":
            config["spot"] = True
        elif rung.kind == "reservation":
            config["reservation_affinity"] = {
                "consume_reservation_type": "SPECIFIC_RESERVATION",
                "key": _RESERVATION_KEY,
                "values": [rung.name],
            }
        elif rung.kind in ("flex_start", "queued"):
            config["flex_start"] = True
            config["reservation_affinity"] = {"consume_reservation_type": "NO_RESERVATION"}
            pool["initial_node_count"] = 0
            pool["autoscaling"] = {
                "enabled": True,
                "total_min_node_count": 0,
                "total_max_node_count": self.shape.hosts,
                "location_policy": "ANY",
            }
            pool["management"]["auto_repair"] = False
        if rung.kind == "flex_start":
            config["max_run_duration"] = rung.max_run_duration
        elif rung.kind == "queued":  # there the request for the nodes says how long they run
            pool["queued_provisioning"] = {"enabled": True}


def _machine(options: NodePools) -> Json:
    """What the user says of the nodes."""
    said: Json = {
        "service_account": options.service_account,
        "disk_size_gb": options.disk_size_gb,
        "disk_type": options.disk_type,
        "image_type": options.image_type,
        "tags": list(options.tags),
        "gcfs_config": {"enabled": True} if options.image_streaming else None,
        "shielded_instance_config": {"enable_secure_boot": True} if options.secure_boot else None,
    }
    return {key: value for key, value in said.items() if value}


def _network(options: NodePools) -> Json:
    said: Json = {}
    if options.pod_range:
        said["pod_range"] = options.pod_range
    if options.private_nodes is not None:
        said["enable_private_nodes"] = options.private_nodes
    return {"network_config": said} if said else {}


def node_pool_names(owner: Owner, spec: SliceSpec) -> list[str]:
    """What a lease's pools are called when they are made, one for each slice; replacements have names of their own."""
    return [naming.node_pool_name(owner, index) for index in range(spec.num_slices)]


def own_policy(lease: str, shape: SliceShape, options: NodePools) -> str | None:
    """See :attr:`Wanted.own_policy`."""
    return lease if shape.placement == "workload" and not options.workload_policy else None


def own_nodes(lease: str, ladder: Sequence[AnyCapacity] = ()) -> Nodes:
    """How pods find the nodes that were made for a lease.

    :param ladder: kinds of capacity that are tried.
    """
    ours = {"key": LEASE, "operator": "Equal", "value": lease, "effect": "NoSchedule"}
    queued = [TOLERATION] if any(rung.kind == "queued" for rung in ladder) else []
    return Nodes({LEASE: lease}, [ours, *queued])


@dataclass(frozen=True)
class NodePoolView:
    """A node pool.

    :param status: GKE's word.
    :param labels: of its nodes.
    :param record: the lease's record that it carries, as JSON; None where somebody else made it.
    :param zones: where its nodes are.
    :param machine_type: of its nodes.
    :param topology: of its placement policy; empty where there is none.
    :param nodes: nodes that it was made with.
    :param taints: of its nodes: key, value, effect, as Kubernetes spells them.
    :param complaint: what GKE says is wrong with it; a ``google.rpc.Status``, text, or None.
    """

    name: str
    status: str
    labels: Mapping[str, str] = field(default_factory=dict)
    record: str | None = None
    zones: tuple[str, ...] = ()
    machine_type: str = ""
    topology: str = ""
    nodes: int = 0
    taints: tuple[tuple[str, str, str], ...] = ()
    complaint: Any = None

    def is_of(self, owner: Owner) -> bool:
        """It was made for that owner."""
        return self.labels.get(OWNER) == owner.digest

    @property
    def is_lost(self) -> bool:
        """It will never be what was asked for."""
        return self.status in _LOST

    @property
    def is_coming(self) -> bool:
        """GKE still makes it."""
        return self.status == "PROVISIONING"

    def words(self) -> str:
        """Its state, in one phrase."""
        why = getattr(self.complaint, "message", self.complaint)
        return f"node pool {self.name} is {self.status}{f': {why}' if why else ''}"


@dataclass(frozen=True)
class OperationView:
    """An operation on the cluster or one of its pools.

    :param kind: ``CREATE_NODE_POOL`` and the like.
    :param target: name of the pool, or of the cluster.
    :param done: it has ended.
    :param error: a ``google.rpc.Status``, or text, where it failed; None where it did not.
    """

    name: str
    kind: str
    target: str
    done: bool
    error: Any = None

    @property
    def failed(self) -> bool:
        """It has ended, and not well (F06)."""
        return self.done and self.error is not None


class Sight(NamedTuple):
    """What Google has, at one moment. It is looked at before the record of a lease is read: a pool that is seen is in
    the record then, or nobody wants it any more, however many processes work on the lease (F34).

    :param operations: those that GKE still tells of.
    :param pools: all of the cluster's.
    """

    operations: Sequence[OperationView]
    pools: Sequence[NodePoolView]


@dataclass(frozen=True)
class Scene:
    """What was found of the pools that are wanted, and what follows.

    :param doomed: the owner's pools that are not wanted as they are: they have to go first.
    :param absent: names of pools that have to be made.
    :param waiting: what is under way, in words.
    :param running: pools that are as they should be.
    :param failures: what has failed, as errors.
    """

    doomed: tuple[NodePoolView, ...]
    absent: tuple[str, ...]
    waiting: tuple[str, ...]
    running: tuple[NodePoolView, ...]
    failures: tuple[RayTpuError, ...]

    @property
    def is_whole(self) -> bool:
        """Every pool runs, and nothing else is left to do."""
        return not (self.doomed or self.absent or self.waiting or self.failures)


def scene(
    wanted: Wanted, pools: Sequence[NodePoolView], operations: Sequence[OperationView], spent: Sequence[str] = ()
) -> Scene:
    """Compare what is there with what is wanted.

    :param pools: all of the cluster's.
    :param operations: those that GKE still tells of.
    :param spent: names of operations whose failure has been dealt with.
    """
    ours = [pool for pool in pools if pool.is_of(wanted.owner)]
    right = [pool for pool in ours if pool.name in wanted.names and pool.labels.get(DIGEST) == wanted.digest]
    by_name = {pool.name: pool for pool in right if pool.status != "STOPPING"}
    doomed = [pool for pool in ours if pool.name not in by_name]
    there = {pool.name for pool in pools}
    absent, waiting, running, failures = [], [], [], []
    for name in wanted.names:
        pool, made_by = by_name.get(name), [one for one in creations(operations, [name]) if one.name not in spent]
        failed = next((one for one in made_by if one.failed), None)
        if failed is not None:
            failures.append(failure(failed.error, f"create node pool {name}"))
        elif pool is not None and pool.status in _FAILED:
            failures.append(failure(pool.complaint, pool.words()))
        elif any(not one.done for one in made_by):
            waiting.append(f"{name} is being made")
        elif pool is None:
            absent.extend([] if name in there else [name])
        elif pool.status == "RUNNING":
            running.append(pool)
        else:
            waiting.append(f"{name} is {pool.status}")
    return Scene(
        doomed=tuple(doomed),
        absent=tuple(absent),
        waiting=tuple(waiting),
        running=tuple(running),
        failures=tuple(failures),
    )


def is_making(pools: Sequence[NodePoolView]) -> bool:
    """Whether GKE still makes one of the pools, whoever's it is: it may delete no other meanwhile.

    :param pools: all of the cluster's.
    """
    return any(pool.is_coming for pool in pools)


def creations(operations: Sequence[OperationView], names: Sequence[str]) -> list[OperationView]:
    """Those that make, or made, pools of these names."""
    return [one for one in operations if one.kind == "CREATE_NODE_POOL" and one.target in names]


def failure(status: Any, asked: str) -> RayTpuError:
    """Why a pool could not be had. What Google calls an error of its own is worth another rung or another try.

    :param status: a ``google.rpc.Status``, text, or nothing.
    :param asked: what failed, for the message.
    """
    if status is None or isinstance(status, str):
        error = told(status or "it gives no reason", asked)
    else:
        error = operation_failed(status, asked) or told("it gives no reason", asked)
    return CapacityUnavailable(str(error)) if isinstance(error, RemoteUnavailable) else error


def misfit(pool: NodePoolView, shape: SliceShape) -> str | None:
    """Why a pool of somebody else's is no slice of that shape; None where it is one."""
    if pool.machine_type != shape.machine_type:
        return f"its machines are {pool.machine_type}, not {shape.machine_type}"
    if shape.placement == "compact" and pool.topology != shape.topology:
        return f"its topology is {pool.topology or 'that of one host'}, not {shape.topology}"
    if pool.nodes != shape.hosts:
        return f"it was made with {pool.nodes} nodes, and the slice has {shape.hosts} hosts"
    if pool.is_lost:
        return pool.words()
    return None


def nodes_of(pools: Sequence[NodePoolView], others: Sequence[NodePoolView]) -> Nodes | None:
    """How pods find the nodes of these pools, and of no others.

    :return: None where the pools share no label that sets them apart.
    """
    first, *rest = pools
    if rest:
        shared = dict(first.labels.items() & set.intersection(*(set(one.labels.items()) for one in rest)))
    else:
        shared, others = {POOL_LABEL: first.name}, ()
    if any(shared.items() <= other.labels.items() for other in others):
        return None
    taints = sorted({taint for pool in pools for taint in pool.taints})
    tolerations = [{"key": key, "operator": "Equal", "value": value, "effect": effect} for key, value, effect in taints]
    return Nodes(shared, tolerations) if shared else None
