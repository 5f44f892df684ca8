"""GKE's queued provisioning: the nodes of a pool come when a ProvisioningRequest for them is granted, all at once.

Such a pool is empty and stays so, however many pods wait. A request names a pod template and how many of them there
will be; Google queues it, brings all nodes, and takes those back that nobody uses within some ten minutes.

Pure: nothing is asked and nothing is sent. Sources: autoscaling.x-k8s.io/v1 of Kubernetes' cluster autoscaler;
GKE's "flex-start with queued provisioning", which speaks of GPUs, and its tutorial on TPUs with Dynamic Workload
Scheduler, read in 2026; reports from people who did it with TPU7x.
Not here: the calls (``api.py``), their order (``asking.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from raytpu_ops.backends.gke.manifest import API_VERSION, KIND, POOL_LABEL
from raytpu_ops.backends.gke.objects import Condition, conditions
from raytpu_ops.backends.gke.record import LEASE, Record, instant, labels_for
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.capacity import FLEX_START_LIMIT
from raytpu_ops.tpu.errors import CapacityUnavailable

Json = dict[str, Any]

GROUP, PLURAL = "autoscaling.x-k8s.io", "provisioningrequests"
#: Newest first; GKE has ``v1`` since 1.32.2-gke.1652000.
VERSIONS = ("v1", "v1beta1")
NEEDS = "GKE 1.32.2-gke.1652000 or newer"
CLASS = "queued-provisioning.gke.io"
#: GKE sets it as label and taint on the nodes of such pools.
_QUEUED = "cloud.google.com/gke-queued"
TOLERATION = {"key": _QUEUED, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
#: GKE checks a template with this label by the rules that pods have to keep.
_CHECKED = {"cloud.google.com/apply-warden-policies": "true"}
#: By these a pod says which request brought its node; the autoscaler asks for no other node for it then.
_CONSUMES, _CLASS_OF = f"{GROUP}/consume-provisioning-request", f"{GROUP}/provisioning-class-name"


def is_queued(record: Record) -> bool:
    """Whether the lease's nodes come by ProvisioningRequests."""
    return record.capacity.get("kind") == "queued"


def wanted(record: Record) -> dict[str, str]:
    """The requests of a lease: name -> the node pool whose nodes it asks for.

    The name stays where a pool is replaced by another, so that pods may say it.
    """
    pools = record.pools.names if record.pools is not None else []
    return {naming.node_pool_name(record.owner, index): pool for index, pool in enumerate(pools)}


def pod_template(cluster: Mapping[str, Any], record: Record, pool: str) -> Json:
    """The ``PodTemplate`` that a request names: a host as KubeRay will make it, on that pool.

    :param cluster: the RayCluster, as Kubernetes has it.
    """
    template = copy.deepcopy(cluster["spec"]["workerGroupSpecs"][0]["template"])
    template["spec"]["nodeSelector"][POOL_LABEL] = pool
    metadata = _metadata(cluster, record, pool)
    metadata["labels"] |= _CHECKED
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": template}


def request(cluster: Mapping[str, Any], record: Record, name: str, run_for: timedelta, version: str) -> Json:
    """The ``ProvisioningRequest`` for the nodes of a pool.

    :param cluster: the RayCluster, as Kubernetes has it.
    :param run_for: how long the nodes are wanted; Google takes them back then, and after a week at the latest.
    :param version: of the API.
    """
    return {
        "apiVersion": f"{GROUP}/{version}",
        "kind": "ProvisioningRequest",
        "metadata": _metadata(cluster, record, name),
        "spec": {
            "provisioningClassName": CLASS,
            "parameters": {"maxRunDurationSeconds": str(int(min(run_for, FLEX_START_LIMIT).total_seconds()))},
            "podSets": [{"count": record.spec.shape.hosts, "podTemplateRef": {"name": wanted(record)[name]}}],
        },
    }


def _metadata(cluster: Mapping[str, Any], record: Record, name: str) -> Json:
    """Nothing of it outlives the RayCluster, whoever deletes that."""
    of = cluster["metadata"]
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": of["name"], "uid": of["uid"]}
    labels = {**labels_for(record.owner), LEASE: of["name"]}
    return {"name": name, "namespace": of["namespace"], "labels": labels, "ownerReferences": [owner]}


def consuming(cluster: Mapping[str, Any], record: Record) -> list[Json] | None:
    """The RayCluster's worker groups, with hosts that say which request their nodes came by.

    All slices share one template. So only the hosts of a single slice can say it; those of several wait for nodes
    of their pools, however these come. Hosts on other kinds of capacity must not: no autoscaler would help them.

    :return: None where they say already what they should.
    """
    names = list(wanted(record)) if is_queued(record) else []
    said = {_CONSUMES: names[0], _CLASS_OF: CLASS} if len(names) == 1 else {}
    groups: list[Json] = copy.deepcopy(cluster["spec"]["workerGroupSpecs"])
    metadata = groups[0]["template"]["metadata"]
    before = metadata.pop("annotations", None) or {}
    if after := {**{key: text for key, text in before.items() if key not in (_CONSUMES, _CLASS_OF)}, **said}:
        metadata["annotations"] = after
    return None if after == before else groups


@dataclass(frozen=True)
class RequestView:
    """A ProvisioningRequest.

    :param name: its name.
    :param pool: the node pool whose nodes it asks for.
    :param cluster: uid of the RayCluster that it goes with.
    :param created: when, UTC.
    :param deleting: it is being deleted.
    :param conditions: what GKE says, by type.
    """

    name: str
    pool: str
    cluster: str
    created: datetime | None
    deleting: bool
    conditions: Mapping[str, Condition]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> RequestView:
        """Read a ProvisioningRequest."""
        metadata = found["metadata"]
        return cls(
            name=metadata["name"],
            pool=found["spec"]["podSets"][0]["podTemplateRef"]["name"],
            cluster=next((one["uid"] for one in metadata.get("ownerReferences") or []), ""),
            created=instant(metadata.get("creationTimestamp")),
            deleting=bool(metadata.get("deletionTimestamp")),
            conditions=conditions(found.get("status") or {}),
        )

    def _is(self, kind: str) -> Condition | None:
        found = self.conditions.get(kind)
        return found if found is not None and found.true else None

    @property
    def provisioned(self) -> Condition | None:
        """All nodes came."""
        return self._is("Provisioned")

    @property
    def refused(self) -> Condition | None:
        """Its nodes will never come, or were taken back."""
        return self._is("Failed") or self._is("CapacityRevoked")

    @property
    def expired(self) -> Condition | None:
        """Nodes that nobody uses are taken back from now on; it is so some ten minutes after they came."""
        return self._is("BookingExpired")

    @property
    def waits(self) -> bool:
        """Google has it in its queue, or has not looked at it yet."""
        return not (self.provisioned or self.refused)

    def words(self) -> str:
        """What GKE says of it, in one phrase."""
        for kind in ("Failed", "CapacityRevoked", "BookingExpired", "Provisioned", "Accepted"):
            if found := self._is(kind):
                # While it is queued, "not provisioned" has the time at which Google means to have it.
                later = self.conditions.get("Provisioned") if kind == "Accepted" else None
                told = (later.message if later else "") or found.message or found.reason
                return f"ProvisioningRequest {self.name} is {kind}{f': {told}' if told else ''}"
        return f"ProvisioningRequest {self.name} is made, and GKE has not looked at it yet"


def unasked(record: Record, requests: Sequence[RequestView]) -> list[str]:
    """Node pools of a lease whose nodes nobody asks for."""
    asked = [(one.name, one.pool) for one in requests if not one.deleting]
    return [pool for name, pool in wanted(record).items() if is_queued(record) and (name, pool) not in asked]


def granted_since(requests: Sequence[RequestView]) -> datetime | None:
    """Since when all of them have been granted; None while one has not, or GKE does not say."""
    told = [one.provisioned.since if one.provisioned else None for one in requests]
    known = [since for since in told if since is not None]
    return max(known) if known and len(known) == len(told) else None


def check(requests: Sequence[RequestView], hosts: int, placed: int) -> None:
    """Refuse to wait for what will not come.

    :param requests: those of a lease.
    :param hosts: of each slice.
    :param placed: hosts that have a node by now.
    :raises CapacityUnavailable: in the API's words.
    """
    expired = [one for one in requests if one.expired]
    # Which host is on the nodes of which request nobody says: one that is used expires as well.
    unused = expired if placed < hosts * len(expired) else []
    lost = [one for one in requests if one.refused] or unused
    if lost:
        raise CapacityUnavailable("; ".join(one.words() for one in lost))
