"""One look at a lease: KubeRay, Kubernetes, Kueue, GKE and Ray are asked, each only for what is still of interest.

Not here: what the answers mean (``health.py``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.backends.gke.asking import requests_of
from raytpu_ops.backends.gke.health import Seen, judged
from raytpu_ops.backends.gke.objects import ClusterView, PodView, WorkloadView
from raytpu_ops.backends.gke.queued import RequestView, is_queued
from raytpu_ops.backends.gke.record import Record, owned_by, read_record
from raytpu_ops.tpu.errors import RayTpuError, RemoteUnavailable
from raytpu_ops.tpu.lease import SliceLease

if TYPE_CHECKING:
    from raytpu_ops.ray.client import RayClient

#: Pods that end again and again whose last words are read, in one look.
_READ_LOGS = 2

#: What GKE says of a lease's own node pools: those that are lost, and why it can't be asked.
Lost = Callable[[Record, Sequence[RequestView]], Awaitable[tuple[list[str], str]]]


async def looked(api: KubeApi, lease: SliceLease, ray: Callable[[], RayClient], lost: Lost, now: datetime) -> Seen:
    """Look at it.

    :param api: the API server, open.
    :param ray: makes a client for the lease's Ray.
    :param lost: asks GKE.
    :param now: the time, UTC.
    """
    there = await api.ray_cluster(lease.id)
    if there is None or not owned_by(there, lease.owner):
        return Seen(None, at=now)
    cluster, record = ClusterView.of(there), read_record(there)
    pods = [PodView.of(pod) for pod in await api.pods(lease.id)]
    workload = await api.workload(cluster.uid) if cluster.queue else None
    failing = [pod for pod in pods if pod.restarts_again_and_again][:_READ_LOGS]
    seen = Seen(
        cluster=cluster,
        at=now,
        pods=pods,
        workload=WorkloadView.of(workload) if workload else None,
        last_lines={pod.name: await _last_lines(api, pod) for pod in failing},
    )
    if seen.answering and not cluster.suspended:
        seen = await _asked(lease, seen, ray)
    if record is None or judged(lease.spec, lease.id, seen).ready:
        return seen
    if is_queued(record):
        seen = replace(seen, requests=await requests_of(api, record.owner))
    pools, silence = await lost(record, seen.requests)
    return replace(seen, lost_pools=pools, pools_silence=silence)


async def _last_lines(api: KubeApi, pod: PodView) -> list[str]:
    """A log that can't be read, such as on a host that is gone, does not take the rest of the report away."""
    try:
        return await api.last_lines(pod.name, pod.container)
    except RayTpuError as error:
        return [f"(not to be had: {error})"]


async def _asked(lease: SliceLease, seen: Seen, ray: Callable[[], RayClient]) -> Seen:
    """With what Ray says."""
    try:
        async with ray() as client:
            seen = replace(seen, nodes=await client.nodes())
            if not judged(lease.spec, lease.id, seen).ready:
                return seen  # who holds which chips matters later, and a head that starts has enough to do
            return replace(seen, holders=await client.holders(), usage=await client.usage())
    except RemoteUnavailable as error:
        return replace(seen, silence=str(error)) if seen.nodes is None else seen
