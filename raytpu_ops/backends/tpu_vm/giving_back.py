"""Giving a lease's queued resource back: told to go, and looked at until Google says that there is none.

One look at a time; who waits, and for how long, is decided elsewhere. Every step is tried whatever the others did:
the money is in the nodes, so they are told to go also where the queued resource cannot be read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeVar

from raytpu_ops.backends.tpu_vm.api import TpuApi
from raytpu_ops.backends.tpu_vm.health import lost
from raytpu_ops.backends.tpu_vm.objects import NodeView, QueuedView
from raytpu_ops.backends.tpu_vm.record import OWNER
from raytpu_ops.backends.tpu_vm.states import HELD, Meaning
from raytpu_ops.tpu.errors import RayTpuError, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner

Answer = TypeVar("Answer")

#: How long Google may hold what is told to go: PROVISIONING has been seen to last two hours.
HELD_WITHIN = timedelta(hours=2)


@dataclass
class GivingBack:
    """What one look at one zone or several found.

    :param only: when those were begun that are meant; None means all of the owner's.
    :param removed: what was told to go.
    :param left: what is still there, and why.
    :param errors: what could not be done or seen; also among ``left``.
    :param whole: of each queued resource that was there, whether it was granted and nothing of it lost.
    :param held: how much longer that may take, since Google deletes nothing in the state in which something is.
    """

    only: Collection[datetime] | None = None
    removed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    errors: list[RayTpuError] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    held: timedelta = timedelta(0)

    async def look(self, api: TpuApi, zone: str, name: str, owner: Owner, *, ours: bool = False) -> None:
        """Tell what is there to go.

        :param name: of the queued resource.
        :param owner: whose it must be; another's stays.
        :param ours: it is known to be the owner's, so it goes also where nobody may look at it (F32).
        """
        going = await self._try(self._queued(api, zone, name, owner, ours), f"queued resource {name} in {zone}")
        what = f"nodes in {zone} with the label {OWNER}={owner.digest}"
        await self._try(self._nodes(api, zone, owner, bool(going)), what)

    async def _try(self, step: Awaitable[Answer], what: str) -> Answer | None:
        try:
            return await step
        except RayTpuError as error:
            self.errors.append(error)
            self.left.append(f"{what} may be left: {error}")
            return None

    async def _queued(self, api: TpuApi, zone: str, name: str, owner: Owner, ours: bool) -> bool:
        """Whether it is on its way out, and its nodes with it."""
        try:
            view = await api.queued_resource(zone, name)
        except RemoteUnavailable:
            raise
        except RayTpuError:
            if ours:
                await api.delete(zone, name)
            raise
        if view is None or not self._meant(view, owner):
            return False
        self.whole.append(await self._is_whole(api, view))
        if view.meaning is Meaning.GOING:
            self.left.append(f"{view} is being deleted")
            return True
        took = await api.delete(zone, name)
        self._told(str(view), view.state, took)
        if view.state in HELD:  # where Google took that, its operation may still come to nothing
            self.held = HELD_WITHIN
        return True

    def _told(self, what: str, state: str, took: bool) -> None:
        if took:
            self.removed.append(what)
            self.left.append(f"{what} is being deleted")
        else:
            self.held = HELD_WITHIN
            self.left.append(f"{what} is {state}, in which Google deletes nothing: it is told again until that is over")

    async def _is_whole(self, api: TpuApi, view: QueuedView) -> bool:
        """Whether nobody has a reason to ask for it anew."""
        if self.only is not None or view.meaning is not Meaning.THERE:
            return False
        nodes = await self._try(api.nodes_of(view), f"nodes of {view}")
        return nodes is not None and not lost(view, nodes)

    async def _nodes(self, api: TpuApi, zone: str, owner: Owner, going: bool) -> None:
        for node in await api.nodes(zone):
            if not self._meant(node, owner):
                continue
            if node.meaning is Meaning.GOING or going:
                self.left.append(f"{node} is {node.state}")
            else:
                self._told(str(node), node.state, await api.delete_node(zone, node.id))

    def _meant(self, found: QueuedView | NodeView, owner: Owner) -> bool:
        if found.owner != owner.digest or self.only is None:
            return found.owner == owner.digest
        return found.record is not None and found.record.climb.begun in self.only
