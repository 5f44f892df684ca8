"""Leases as they are found at Google, from queued resources and nodes alone.

An owner's lease is looked for by its name in the zones that a task names; all leases are looked for in all zones of the
project, so that whoever cleans up need not know where anybody asked for slices (F09).
Not here: what a lease is made of (``leases.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from raytpu_ops.backends.base import Say
from raytpu_ops.backends.tpu_vm.api import EVERYWHERE, TpuApi
from raytpu_ops.backends.tpu_vm.leases import lease_of
from raytpu_ops.backends.tpu_vm.objects import NodeView, QueuedView, unread
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.errors import Misconfigured
from raytpu_ops.tpu.lease import Owner, SliceLease

log = logging.getLogger(__name__)


async def found(
    api: TpuApi, zones: Sequence[str], owner: Owner | None = None, *, who: Mapping[str, str], say: Say
) -> list[SliceLease]:
    """Leases; of nodes whose queued resource is gone too, because those bill.

    An owner may have one in each zone, where its task was cleared with other zones: all are told, the last one first.

    :param api: open.
    :param zones: that are named; where there are none, all that there are.
    :param owner: whose, in those zones; None for everybody's in all zones.
    :param who: acts at Google, as options.
    :param say: takes a line for what is ours and can't be read, and for zones that are named and do not answer.
    :raises Misconfigured: the owner's can't be read.
    :raises RemoteUnavailable: Google does not answer; for an owner, not for all zones.
    """
    away: set[str] = set()
    # Of everybody's, one that is away keeps no other from being seen.
    unheard = None if owner else away.update
    leases: dict[tuple[str, str], SliceLease] = {}
    for zone in (zones if owner else ()) or (EVERYWHERE,):
        nodes = await api.nodes(zone, unheard)
        if owner and zone != EVERYWHERE:
            views = await _named(api, zone, naming.lease_id(owner))
        else:
            views = await api.queued_resources(zone, unheard)
        for view in views:
            # A copy that somebody made of one carries its record, but has a name of its own.
            if view.record is not None and view.id == naming.lease_id(view.record.owner):
                its = [node for node in nodes if (node.zone, node.queued) == (view.zone, view.id)]
                leases[view.zone, view.id] = lease_of(view, view.record, its, who=who)
        there = {(view.zone, view.id) for view in views}
        for node in nodes:
            if node.record is None:
                continue
            if (key := (node.zone, naming.lease_id(node.record.owner))) not in leases:
                leases[key] = lease_of(None, node.record, [node], who=who)
        _tell_unread([*views, *(node for node in nodes if (node.zone, node.queued) not in there)], owner, say)
    _tell_away({one.rpartition("/")[2] for one in away}, set(zones), say)
    told = [lease for lease in leases.values() if owner in (None, lease.owner)]
    return sorted(told, key=lambda lease: lease.granted_at, reverse=True)


def _tell_away(away: set[str], named: set[str], say: Say) -> None:
    for tell, some in ((say, away & named), (log.warning, away - named)):
        if some:
            tell(f"Google does not answer for {', '.join(sorted(some))}: leases there are not seen")


def _tell_unread(seen: Iterable[QueuedView | NodeView], owner: Owner | None, say: Say) -> None:
    for one in seen:
        if one.owner is None or one.record is not None:
            continue
        if owner is None:
            say(unread(one))
        elif one.owner == owner.digest:
            raise Misconfigured(unread(one))


async def _named(api: TpuApi, zone: str, name: str) -> list[QueuedView]:
    view = await api.queued_resource(zone, name)
    return [] if view is None else [view]
