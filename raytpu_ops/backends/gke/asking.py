"""The ProvisioningRequests of a lease: made, made anew, withdrawn; each call is safe to be done again.

Nothing is remembered in the process. A request that asks for the nodes of another pool than the slice has by now is
deleted before its successor is made. Pod templates stay until their RayCluster goes: they cost nothing.
Not here: what the requests say (``queued.py``), how often they are looked at (``granting.py``, ``pool_leases.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from raytpu_ops.backends.gke import queued
from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.backends.gke.queued import RequestView
from raytpu_ops.backends.gke.record import OWNER, Record
from raytpu_ops.tpu.errors import Misconfigured
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.waits import Pending


async def requests_of(kube: KubeApi, owner: Owner) -> list[RequestView]:
    """The owner's requests; none where the cluster knows no such kind."""
    found = await kube.provisioning_requests(f"{OWNER}={owner.digest}")
    return [RequestView.of(one) for one in found[1]] if found else []


async def ask(
    kube: KubeApi, cluster: Mapping[str, Any], record: Record, run_for: timedelta
) -> Pending | list[RequestView]:
    """See to it that each pool of the lease has its request.

    :param cluster: the RayCluster, as Kubernetes has it.
    :param run_for: how long the nodes are wanted.
    :return: the requests, once all are there.
    :raises Misconfigured: the cluster knows no such kind.
    """
    found = await kube.provisioning_requests(f"{OWNER}={record.owner.digest}")
    if found is None:
        raise Misconfigured(
            f"capacity: Queued needs ProvisioningRequests ({queued.GROUP}), which this cluster does not know: use "
            f"{queued.NEEDS}, or another kind of capacity"
        )
    version, made = found
    wanted = queued.wanted(record)
    views = [RequestView.of(one) for one in made]
    uid = cluster["metadata"]["uid"]
    right = [one.name for one in views if not one.deleting and one.cluster == uid and wanted.get(one.name) == one.pool]
    others = [one for one in made if one["metadata"]["name"] not in right]
    for one in others:
        await kube.delete_provisioning_request(one)
    if others:
        return Pending("; ".join(f"ProvisioningRequest {one['metadata']['name']} goes first" for one in others))
    missing = [name for name in wanted if name not in right]
    for name in missing:
        await kube.apply_pod_template(queued.pod_template(cluster, record, wanted[name]))
        await kube.apply_provisioning_request(queued.request(cluster, record, name, run_for, version))
    return Pending(f"{len(missing)} of {len(wanted)} ProvisioningRequests are being made") if missing else views


async def withdraw(kube: KubeApi, owner: Owner) -> list[str]:
    """Tell the owner's requests to go: Google is not asked for nodes any more.

    :return: names of those that were still there.
    """
    found = await kube.provisioning_requests(f"{OWNER}={owner.digest}")
    made = found[1] if found else []
    for one in made:
        await kube.delete_provisioning_request(one)
    return [one["metadata"]["name"] for one in made]
