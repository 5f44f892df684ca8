"""What Kubernetes, KubeRay and Kueue say, as frozen records: read once, here, out of their JSON.

Not here: what it means for a lease (``health.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from raytpu_ops.backends.gke.manifest import HEAD_CONTAINER, HOST_CONTAINER
from raytpu_ops.backends.gke.record import Record, instant, read_record

Json = Mapping[str, Any]

#: A pod whose host should have ended it so long ago has no host any more.
_LOST_AFTER = timedelta(seconds=30)


@dataclass(frozen=True)
class Condition:
    """A condition of any object.

    :param true: its status is ``True``; one that is ``Unknown`` is not.
    :param reason: a word.
    :param message: a sentence.
    :param since: when it became so, UTC.
    """

    true: bool
    reason: str
    message: str
    since: datetime | None


def conditions(status: Json) -> dict[str, Condition]:
    """The conditions of a status, by type."""
    return {
        row["type"]: Condition(
            true=row.get("status") == "True",
            reason=row.get("reason") or "",
            message=" ".join(str(row.get("message") or "").split()),
            since=instant(row.get("lastTransitionTime")),
        )
        for row in status.get("conditions") or []
    }


@dataclass(frozen=True)
class ClusterView:
    """A RayCluster.

    :param name: its name.
    :param uid: its identity: a new one of the same name has another.
    :param created: when, UTC.
    :param deleting: it is being deleted.
    :param finalizers: what holds it in deletion.
    :param suspended: its pods are not wanted now; Kueue says so while it queues.
    :param halted: KubeRay's condition: it has no pods for that reason. Its time is when that changed last.
    :param queue: Kueue's LocalQueue, None where it has none.
    :param seen: KubeRay's status is of the spec as it is.
    :param head_ready: KubeRay's condition.
    :param provisioned: KubeRay's condition: every pod was ready once.
    :param ready_workers: pods of hosts that are ready, as KubeRay counts.
    :param desired_workers: how many it wants.
    :param failure: why KubeRay cannot go on, in its words.
    :param climb: the kind of capacity that is being tried for its node pools, and where; empty where none is.
    :param flex_start: its nodes come when they are free, and no request says how far that is.
    """

    name: str
    uid: str
    created: datetime | None
    deleting: bool
    finalizers: tuple[str, ...]
    suspended: bool
    halted: Condition | None
    queue: str | None
    seen: bool
    head_ready: bool
    provisioned: bool
    ready_workers: int
    desired_workers: int
    failure: str
    climb: str
    flex_start: bool

    @classmethod
    def of(cls, cluster: Json) -> ClusterView:
        """Read a RayCluster."""
        metadata, status = cluster["metadata"], cluster.get("status") or {}
        found = conditions(status)
        failed = found.get("ReplicaFailure")
        head, whole = found.get("HeadPodReady"), found.get("RayClusterProvisioned")
        record = read_record(cluster)
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            created=instant(metadata.get("creationTimestamp")),
            deleting=bool(metadata.get("deletionTimestamp")),
            finalizers=tuple(metadata.get("finalizers") or ()),
            suspended=bool(cluster["spec"].get("suspend")),
            halted=found.get("RayClusterSuspended"),
            queue=(metadata.get("labels") or {}).get("kueue.x-k8s.io/queue-name"),
            seen=bool(status) and status.get("observedGeneration") == metadata.get("generation"),
            head_ready=bool(head and head.true),
            provisioned=bool(whole and whole.true),
            ready_workers=int(status.get("readyWorkerReplicas") or 0),
            desired_workers=int(status.get("desiredWorkerReplicas") or 0),
            failure=f"{failed.reason}: {failed.message}" if failed and failed.true else str(status.get("reason") or ""),
            climb=_climb(record),
            flex_start=record is not None and record.capacity.get("kind") == "flex_start",
        )


def lease_record(cluster: Json) -> Record | None:
    """The record of a RayCluster, its time counted from when Kueue let the lease have its slices.

    While it is in the queue, however often, it has the queue's time and then its own: who waits is not taken for it,
    and one that nobody waits for any more is taken in the end.

    :return: None where somebody else made it, or wrote over it.
    """
    record = read_record(cluster)
    if record is None:
        return None
    view = ClusterView.of(cluster)
    if view.queue is None:
        return record
    halted, lease_for = view.halted, record.expires_at - record.granted_at
    begun = max(record.granted_at, (halted and halted.since) or record.granted_at)
    # Kueue has the first word, KubeRay goes by it a moment later.
    queues = view.suspended or (halted is not None and halted.true)
    until = begun + lease_for + (record.deadlines.queued if queues else timedelta(0))
    return record.model_copy(update={"granted_at": begun, "expires_at": until})


@dataclass(frozen=True)
class PodView:
    """A pod of a RayCluster.

    :param replica: number of its slice; None for the head, and where nobody has numbered it.
    :param host: number of the host in its slice, as KubeRay counts.
    :param worker_id: ``TPU_WORKER_ID`` as the webhook set it.
    :param slice_name: ``TPU_NAME`` as the webhook set it.
    :param ip: its address, None while it has none.
    :param created: when, UTC.
    :param gone_by: it is being deleted, and its host should have ended it by then, UTC.
    :param phase: Kubernetes' word.
    :param scheduled: its condition ``PodScheduled``.
    :param ready: it is ready.
    :param waiting: why Ray's container waits: reason and message.
    :param restarts: how often Ray's container was started again.
    :param last_end: how its last run ended: reason and exit code.
    :param running_since: when its present run began, UTC; None while it does not run.
    """

    name: str
    uid: str
    is_head: bool
    replica: int | None
    host: int | None
    worker_id: str | None
    slice_name: str | None
    ip: str | None
    created: datetime | None
    gone_by: datetime | None
    phase: str
    scheduled: Condition | None
    ready: bool
    waiting: tuple[str, str]
    restarts: int
    last_end: str
    running_since: datetime | None

    @classmethod
    def of(cls, pod: Json) -> PodView:
        """Read a pod."""
        metadata, status = pod["metadata"], pod.get("status") or {}
        labels = metadata.get("labels") or {}
        is_head = labels.get("ray.io/node-type") == "head"
        found = conditions(status)
        main = _main(pod, HEAD_CONTAINER if is_head else HOST_CONTAINER)
        ran = _named(status.get("containerStatuses"), main.get("name", ""))
        state = ran.get("state") or {}
        env = {row["name"]: row.get("value") for row in main.get("env") or []}
        replica = labels.get("ray.io/worker-group-replica-index") or _last_number(labels.get("replicaIndex"))
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            is_head=is_head,
            replica=_number(replica),
            host=_number(labels.get("ray.io/replica-host-index")),
            worker_id=env.get("TPU_WORKER_ID"),
            slice_name=env.get("TPU_NAME"),
            ip=status.get("podIP"),
            created=instant(metadata.get("creationTimestamp")),
            gone_by=instant(metadata.get("deletionTimestamp")),
            phase=status.get("phase") or "",
            scheduled=found.get("PodScheduled"),
            ready=bool(found.get("Ready") and found["Ready"].true),
            waiting=_waiting(status, state),
            restarts=int(ran.get("restartCount") or 0),
            last_end=_ended((ran.get("lastState") or {}).get("terminated") or state.get("terminated")),
            running_since=instant((state.get("running") or {}).get("startedAt")),
        )

    @property
    def deleting(self) -> bool:
        """It is being deleted."""
        return self.gone_by is not None

    def is_lost(self, now: datetime) -> bool:
        """Its host should have ended it long ago, and is not there any more."""
        return self.gone_by is not None and now > self.gone_by + _LOST_AFTER

    @property
    def is_placed(self) -> bool:
        """It has a host."""
        return self.scheduled is not None and self.scheduled.true

    @property
    def is_over(self) -> bool:
        """It ended and does not come back by itself."""
        return self.phase in ("Failed", "Succeeded")

    @property
    def container(self) -> str:
        """Name of Ray's container in it."""
        return HEAD_CONTAINER if self.is_head else HOST_CONTAINER

    @property
    def restarts_again_and_again(self) -> bool:
        """Kubernetes holds it back because it ends each time."""
        return self.waiting[0] == "CrashLoopBackOff"

    def words(self) -> str:
        """Why it is not ready, in one phrase."""
        if self.deleting:
            return "is being deleted"
        if self.is_over:
            return f"has ended ({self.last_end or self.phase})"
        if not self.is_placed:
            why = self.scheduled.message if self.scheduled else "the scheduler has not looked at it yet"
            return f"waits for a node: {why}"
        reason, message = self.waiting
        ended = f"; it ended {self.restarts} times, last with {self.last_end}" if self.restarts else ""
        if reason:
            return f"{reason}{f': {message}' if message else ''}{ended}"
        if self.running_since is None:
            return f"has a node, its container does not run yet{ended}"
        return f"runs, and {'is not ready' if self.is_head else 'Ray has not labelled it'} yet{ended}"


def first_hosts_since(hosts: Iterable[PodView], num_slices: int) -> datetime | None:
    """Since when every slice has had a first host: all are granted then, and the others' nodes are on their way.

    :param hosts: pods of hosts.
    :return: None while a slice has none.
    """
    firsts: dict[int | None, datetime] = {}
    for pod in hosts:
        since = pod.scheduled.since if pod.scheduled is not None and pod.is_placed else None
        if since is not None:
            firsts[pod.replica] = min(since, firsts.get(pod.replica, since))
    return max(firsts.values()) if firsts and len(firsts) >= num_slices else None


@dataclass(frozen=True)
class WorkloadView:
    """Kueue's Workload.

    :param admitted: since when quota is reserved and its pods are wanted, UTC; None while it queues.
    :param why: why it waits, in Kueue's words.
    :param evicted: why it lost its quota, in Kueue's words; empty where it never did.
    :param queued_since: when it began to wait, UTC, where Kueue says.
    """

    admitted: datetime | None
    why: str
    evicted: str
    queued_since: datetime | None

    @classmethod
    def of(cls, workload: Json) -> WorkloadView:
        """Read a Workload."""
        found = conditions(workload.get("status") or {})
        admitted, reserved, evicted = found.get("Admitted"), found.get("QuotaReserved"), found.get("Evicted")
        is_admitted = bool(admitted and admitted.true)
        lost = bool(evicted and evicted.true)
        waits = next((one for one in (reserved, admitted) if one and not one.true), None)
        return cls(
            admitted=admitted.since if admitted and is_admitted else None,
            why=waits.message if waits else "",
            evicted=f"{evicted.reason}: {evicted.message}" if evicted and lost else "",
            queued_since=evicted.since if evicted and lost else instant(workload["metadata"].get("creationTimestamp")),
        )


def _climb(record: Record | None) -> str:
    if record is None or record.pools is None or record.pools.granted:
        return ""
    return f"{record.capacity.get('kind')} in {record.pools.zone}"


def _main(pod: Json, name: str) -> Json:
    containers: list[Json] = pod["spec"].get("containers") or []
    return _named(containers, name) or (containers[0] if containers else {})


def _named(rows: Iterable[Json] | None, name: str) -> Json:
    return next((row for row in rows or [] if row.get("name") == name), {})


def _waiting(status: Json, state: Json) -> tuple[str, str]:
    """Why the pod waits: of an init container where one is at it, else of Ray's own."""
    for row in status.get("initContainerStatuses") or []:
        one = (row.get("state") or {}).get("waiting")
        if one and one.get("reason") not in (None, "PodInitializing"):
            return one["reason"], " ".join(str(one.get("message") or "").split())
    waiting = state.get("waiting") or {}
    return waiting.get("reason") or "", " ".join(str(waiting.get("message") or "").split())


def _ended(terminated: Json | None) -> str:
    if not terminated:
        return ""
    return f"{terminated.get('reason') or 'Error'}, exit code {terminated.get('exitCode')}"


def _number(text: object) -> int | None:
    return int(text) if isinstance(text, str) and text.isdecimal() else None


def _last_number(text: str | None) -> str | None:
    """``3`` of ``group-3``, the label by which the webhook numbers slices itself."""
    return text.rpartition("-")[2] if text else None
