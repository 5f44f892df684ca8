"""The few calls of the Cloud TPU API that a lease takes.

Only NOT_FOUND means absent (F07). Creating and deleting answer with an operation that nobody here waits for: what
counts is the queued resource itself, and it can be read by whoever comes after us. Where there is none, the operation
says why (F06).
Not here: credentials, time-outs and what a refusal means (``google/clients.py``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from raytpu_ops.backends.google.access import CloudAccess
from raytpu_ops.backends.google.clients import GoogleApis, Unheard
from raytpu_ops.backends.google.refusals import ended, is_not_yet
from raytpu_ops.backends.tpu_vm.objects import NodeView, QueuedView
from raytpu_ops.backends.tpu_vm.startup import STATE
from raytpu_ops.backends.tpu_vm.states import Meaning
from raytpu_ops.tpu.errors import Misconfigured, RemoteUnavailable

#: The location that stands for all of them, in a list; Google then says in ``unreachable`` which ones did not answer.
#: The reference does not name it: it is what ``gcloud compute tpus queued-resources list --zone=-`` sends.
EVERYWHERE = "-"
#: So many nodes are asked for by name; more come with all nodes of the zone, in one answer.
_ONE_BY_ONE = 4


class TpuApi:
    """The Cloud TPU API of a project; use it as an async context manager.

    Every method raises :class:`~raytpu_ops.tpu.errors.RemoteUnavailable` while Google does not answer, and what
    ``google/refusals.py`` says for a refusal.

    :param access: who asks.
    """

    def __init__(self, access: CloudAccess) -> None:
        self.apis = GoogleApis(access)

    async def __aenter__(self) -> Self:
        await self.apis.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.apis.__aexit__(kind, error, trace)

    @property
    def project(self) -> str:
        """Id of the project."""
        return self.apis.project

    def _parent(self, zone: str) -> str:
        return f"projects/{self.project}/locations/{zone}"

    async def queued_resource(self, zone: str, name: str) -> QueuedView | None:
        """One queued resource; None where Google says that there is none."""
        found = await self.apis.ask_or_none(
            f"get queued resource {name} in {zone}",
            self.apis.tpu.get_queued_resource,
            name=f"{self._parent(zone)}/queuedResources/{name}",
        )
        return None if found is None else QueuedView.of(found)

    async def queued_resources(self, zone: str, unheard: Unheard | None = None) -> list[QueuedView]:
        """All queued resources of a zone, or :data:`EVERYWHERE`.

        :param unheard: takes the locations that did not answer; None makes that an error.
        """
        found = await self.apis.ask_all(
            f"list queued resources in {zone}",
            self.apis.tpu.list_queued_resources,
            "queued_resources",
            unheard=unheard,
            parent=self._parent(zone),
        )
        return [QueuedView.of(one) for one in found]

    async def create(self, zone: str, name: str, resource: dict[str, Any]) -> str:
        """Ask for a queued resource.

        :param resource: fields of ``tpu_v2.QueuedResource``.
        :return: the operation's name.
        """
        begun = await self.apis.ask(
            f"create queued resource {name} in {zone}",
            self.apis.tpu.create_queued_resource,
            parent=self._parent(zone),
            queued_resource_id=name,
            queued_resource=resource,
        )
        return str(begun.operation.name)

    async def is_over(self, operation: str, asked: str) -> bool:
        """Whether an operation has ended; also where Google knows it no more.

        :param operation: its name.
        :param asked: verb and object, for messages.
        :raises RayTpuError: what it ended with (F06): of a class that says whether another zone or rung may help.
        """
        found = await self.apis.ask_or_none(
            f"get {operation}", self.apis.tpu.get_operation, request={"name": operation}
        )
        if found is not None and (error := ended(found.error, asked)):
            raise error
        return found is None or bool(found.done)

    async def delete(self, zone: str, name: str) -> bool:
        """Tell a queued resource to go, with its nodes (F11); fine where it is gone.

        :return: whether it goes; Google refuses that while it makes the nodes or takes them away.
        """
        return await self._told_to_go(
            f"delete queued resource {name} in {zone}",
            self.apis.tpu.delete_queued_resource,
            {"name": f"{self._parent(zone)}/queuedResources/{name}", "force": True},
            lambda: self.queued_resource(zone, name),
        )

    async def nodes(self, zone: str, unheard: Unheard | None = None) -> list[NodeView]:
        """All nodes of a zone, or :data:`EVERYWHERE`.

        :param unheard: takes the locations that did not answer; None makes that an error.
        """
        found = await self.apis.ask_all(
            f"list nodes in {zone}", self.apis.tpu.list_nodes, "nodes", unheard=unheard, parent=self._parent(zone)
        )
        return [NodeView.of(one) for one in found]

    async def node(self, zone: str, name: str) -> NodeView | None:
        """One node; None where Google says that there is none."""
        found = await self.apis.ask_or_none(
            f"get node {name} in {zone}", self.apis.tpu.get_node, name=f"{self._parent(zone)}/nodes/{name}"
        )
        return None if found is None else NodeView.of(found)

    async def nodes_of(self, view: QueuedView) -> list[NodeView]:
        """Those nodes of a queued resource that exist, in the order of its slices."""
        if len(view.node_ids) <= _ONE_BY_ONE:
            found = [await self.node(view.zone, name) for name in view.node_ids]
            return [node for node in found if node is not None]
        by_id = {node.id: node for node in await self.nodes(view.zone)}
        return [by_id[name] for name in view.node_ids if name in by_id]

    async def delete_node(self, zone: str, name: str) -> bool:
        """Tell a node to go; fine where it is gone.

        :return: whether it goes.
        """
        return await self._told_to_go(
            f"delete node {name} in {zone}",
            self.apis.tpu.delete_node,
            {"name": f"{self._parent(zone)}/nodes/{name}"},
            lambda: self.node(zone, name),
        )

    async def _told_to_go(
        self,
        asked: str,
        method: Callable[..., Awaitable[Any]],
        request: dict[str, Any],
        look: Callable[[], Awaitable[QueuedView | NodeView | None]],
    ) -> bool:
        try:
            await self.apis.ask_or_none(asked, method, request=request)
        except (Misconfigured, RemoteUnavailable) as error:
            not_yet = is_not_yet(error)
            if isinstance(error, RemoteUnavailable) and not not_yet:
                raise
            # Somebody else may have told it to go in the same moment, of which Google says either.
            there = await look()
            if there is not None and there.meaning is not Meaning.GOING:
                if not_yet:
                    return False
                raise
        return True

    async def said(self, zone: str, node: str) -> list[str]:
        """What the startup scripts of a node's VMs said last, one line a worker, in their order; empty: nothing yet."""
        answer = await self.apis.ask(
            f"get guest attributes of node {node} in {zone}",
            self.apis.tpu.get_guest_attributes,
            request={"name": f"{self._parent(zone)}/nodes/{node}", "query_path": STATE},
        )
        namespace, _, key = STATE.partition("/")
        return [
            next(
                (one.value for one in worker.query_value.items if (one.namespace, one.key) == (namespace, key)),
                "",
            )
            for worker in answer.guest_attributes
        ]
