"""A queued resource and its nodes become the lease that tasks hand on.

Pure. Not here: how they are fetched and changed (``finding.py``, ``granting.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from urllib.parse import urlsplit

from raytpu_ops.backends.tpu_vm.objects import NodeView, QueuedView
from raytpu_ops.backends.tpu_vm.record import TOKEN, Record
from raytpu_ops.backends.tpu_vm.startup import DASHBOARD_PORT, SERVE_PORT
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.lease import RayEndpoint, SliceLease

#: The kind under which a lease names its queued resource, as ``zone/name``.
CREATED = "queued resource"


def lease_of(
    view: QueuedView | None, record: Record, nodes: Sequence[NodeView], *, who: Mapping[str, str]
) -> SliceLease:
    """The lease as its objects tell it; ungranted, it has no address yet and expires with its place in the queue.

    :param view: None where only nodes are left of it.
    :param nodes: those of its nodes that exist.
    :param who: acts at Google, as options.
    """
    name = naming.lease_id(record.owner)
    zone = view.zone if view is not None else nodes[0].zone
    slices = list(view.node_ids) if view is not None else [node.id for node in nodes]
    granted = _granted_at(nodes)
    begun = granted or record.climb.begun
    ends = record.ends or (granted or max(record.until, begun)) + record.lease_for
    return SliceLease(
        id=name,
        owner=record.owner,
        backend="tpu_vm",
        spec=record.spec,
        capacity=record.capacity,
        created={CREATED: [f"{zone}/{name}"], "slice": slices},
        # Each an option, by which a later task finds it again.
        place={"zones": ",".join(record.settings["zones"]), **who},
        ray=_endpoint(name, zone, record, next((node for node in nodes if node.id == slices[0]), None)),
        attempts=record.climb.tried,
        granted_at=begun,
        expires_at=max(ends, begun),
    )


def zones_of(lease: SliceLease) -> list[str]:
    """Where the lease was granted, and then where else it may be: one that is granted anew may be in another zone."""
    granted = [where.partition("/")[0] for where in lease.created.get(CREATED, [])]
    return [*granted, *filter(None, lease.place.get("zones", "").split(","))]


def _granted_at(nodes: Iterable[NodeView]) -> datetime | None:
    """Nodes are made the moment they are granted."""
    return max((node.created for node in nodes if node.created is not None), default=None)


def _endpoint(name: str, zone: str, record: Record, first: NodeView | None) -> RayEndpoint:
    """How Ray is reached.

    :param first: the first slice's node, None where it does not exist yet.
    """
    address = (first.external if record.external else first.address) if first is not None else None
    # A URL that leads nowhere (RFC 2606) while there is no address.
    host = address or f"{name}.invalid"
    dashboard = record.dashboard or f"http://{host}:{DASHBOARD_PORT}"
    serve = record.serve or f"http://{_bracketed(urlsplit(dashboard).hostname or host)}:{SERVE_PORT}"
    # Where the head is known by a proxy's or a public address, it has others itself.
    listens = "0.0.0.0" if record.settings.get("ray_head") else first and first.address  # noqa: S104  a head of theirs
    return RayEndpoint(
        address=dashboard,
        serve_address=serve,
        serve_listens=f"{listens}:{SERVE_PORT}" if listens else None,
        token=f"metadata {TOKEN} of queued resource {zone}/{name}",
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
