"""Cloud TPU's API: requests about queued resources, nodes and operations.

Not here: what makes sense in a request (`tpu_rules.py`), and what happens by and by (`tpu_queue.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.cloud import tpu_v2
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from tests.google_fake import pool_rules, refusals, tpu_rules
from tests.google_fake.gate import Ask, Rpc
from tests.google_fake.refusals import Code, Refusal
from tests.google_fake.tpu_queue import Held, Initiator, NodeState, Queue, Queued, State, fail, finish

#: States in which a queued resource may be deleted without `force`.
_DELETABLE = (State.ACCEPTED, State.WAITING_FOR_RESOURCES, State.SUSPENDED, State.FAILED)
#: States in which `force` may not help.
_HELD = (State.PROVISIONING, State.SUSPENDING)


class Tpu(Queue):
    """The service."""

    @property
    def rpcs(self) -> Mapping[str, Rpc]:
        """The methods of `google.cloud.tpu.v2.Tpu`."""
        lro = operations_pb2.Operation
        v2 = tpu_v2
        return {
            "CreateQueuedResource": Rpc(v2.CreateQueuedResourceRequest, lro, _ask_create, self._create),
            "GetQueuedResource": Rpc(
                v2.GetQueuedResourceRequest,
                v2.QueuedResource,
                _named("tpu.nodes.get"),
                lambda request: self._queued(request.name).resource,
            ),
            "ListQueuedResources": Rpc(
                v2.ListQueuedResourcesRequest,
                v2.ListQueuedResourcesResponse,
                _parent("tpu.nodes.list"),
                self._list_queued,
            ),
            "DeleteQueuedResource": Rpc(v2.DeleteQueuedResourceRequest, lro, _named("tpu.nodes.delete"), self._delete),
            "GetNode": Rpc(
                v2.GetNodeRequest, v2.Node, _named("tpu.nodes.get"), lambda request: self._node(request.name)
            ),
            "ListNodes": Rpc(v2.ListNodesRequest, v2.ListNodesResponse, _parent("tpu.nodes.list"), self._list_nodes),
            "DeleteNode": Rpc(v2.DeleteNodeRequest, lro, _named("tpu.nodes.delete"), self._delete_node),
            "UpdateNode": Rpc(v2.UpdateNodeRequest, lro, _ask_update, self._update_node),
            "GetGuestAttributes": Rpc(
                v2.GetGuestAttributesRequest,
                v2.GetGuestAttributesResponse,
                _named("tpu.nodes.get"),  # IAM has no permission of its own for them
                self._guest,
            ),
            "ListAcceleratorTypes": Rpc(
                v2.ListAcceleratorTypesRequest,
                v2.ListAcceleratorTypesResponse,
                _parent("tpu.acceleratortypes.list"),
                lambda request: v2.ListAcceleratorTypesResponse(accelerator_types=self._types(request.parent)),
            ),
            "GetAcceleratorType": Rpc(
                v2.GetAcceleratorTypeRequest, v2.AcceleratorType, _named("tpu.acceleratortypes.get"), self._get_type
            ),
            "ListRuntimeVersions": Rpc(
                v2.ListRuntimeVersionsRequest,
                v2.ListRuntimeVersionsResponse,
                _parent("tpu.runtimeversions.list"),
                lambda request: v2.ListRuntimeVersionsResponse(runtime_versions=self._runtimes(request.parent)),
            ),
            "GetRuntimeVersion": Rpc(
                v2.GetRuntimeVersionRequest, v2.RuntimeVersion, _named("tpu.runtimeversions.get"), self._get_runtime
            ),
        }

    @property
    def operation_rpcs(self) -> Mapping[str, Rpc]:
        """The methods of `google.longrunning.Operations`."""
        pb = operations_pb2
        return {
            "GetOperation": Rpc(
                pb.GetOperationRequest, pb.Operation, _named("tpu.operations.get"), self._get_operation
            ),
            "ListOperations": Rpc(
                pb.ListOperationsRequest,
                pb.ListOperationsResponse,
                _named("tpu.operations.list"),
                lambda request: pb.ListOperationsResponse(
                    operations=[one for name, one in self.operations.items() if name.startswith(request.name)]
                ),
            ),
        }

    # Methods

    def _zone(self, parent: str) -> frozenset[str] | None:
        zone = parent.split("/")[3] if parent.count("/") >= 3 else ""
        if self.zones and zone not in self.zones and zone != "-":
            raise Refusal(
                Code.PERMISSION_DENIED, f"Location {zone} is not found or access is unauthorized.", reason="forbidden"
            )
        return self.zones.get(zone)

    def _create(self, request: tpu_v2.CreateQueuedResourceRequest) -> operations_pb2.Operation:
        parent = request.parent
        offered = self._zone(parent)
        if request.request_id and request.request_id in self._requests:
            return self._requests[request.request_id]
        tpu_rules.check_id(request.queued_resource_id, "queued_resource_id")
        name = f"{parent}/queuedResources/{request.queued_resource_id}"
        if name in self.queued:
            raise refusals.exists(name)
        tpu_rules.check_queued(request.queued_resource, parent)
        shape = tpu_rules.shape_of(request.queued_resource.tpu.node_spec[0].node)
        if offered is not None and shape.accelerator_type not in offered:
            raise refusals.invalid(
                f'Accelerator type "{shape.accelerator_type}" is not available in zone {parent.rpartition("/")[2]}.'
            )
        for node_id in tpu_rules.node_ids(request.queued_resource, request.queued_resource_id):
            tpu_rules.check_id(node_id, "node_id")
            if f"{parent}/nodes/{node_id}" in self.nodes:
                raise refusals.exists(f"{parent}/nodes/{node_id}")
        found = self._admit(name, request.queued_resource)
        found.fate = self.faults.fate_of(request.queued_resource_id, parent.rpartition("/")[2])
        operation = self._operation(name, "create")
        if found.fate is not None and found.fate.late:
            self._later(found, State.CREATING, self.delays.accept, lambda one: self._come_to_nothing(one, operation))
            return operation
        self._later(found, State.CREATING, self.delays.accept, self._accept)
        self.clock.after(self.delays.accept, lambda: finish(operation, tpu_v2.QueuedResource.pb(found.resource)))
        if request.request_id:
            self._requests[request.request_id] = operation
        return operation

    def _delete(self, request: tpu_v2.DeleteQueuedResourceRequest) -> operations_pb2.Operation:
        found = self._queued(request.name)
        if found.state == State.DELETING:
            raise Refusal(
                Code.FAILED_PRECONDITION, f"QueuedResource {request.name} is already being deleted.", reason="conflict"
            )
        held = self.held if found.state in _HELD else None
        if found.state not in _DELETABLE and (held or not request.force):
            return self._held(found, held)
        self._set(found, State.DELETING)
        for node in self._nodes_of(found):
            self._stop(node, NodeState.DELETING)
        operation = self._operation(request.name, "delete")

        def gone() -> None:
            if self.queued.get(request.name) is found:
                for node in self._nodes_of(found):
                    del self.nodes[node.name]
                del self.queued[request.name]
            finish(operation, empty_pb2.Empty())

        nodes = self._nodes_of(found)
        self.clock.after(self.delays.delete, lambda: self._when_settled(nodes, gone))
        return operation

    def _held(self, found: Queued, held: Held | None) -> operations_pb2.Operation:
        """It can't be deleted in its state."""
        error = refusals.not_in_state("DeleteQueuedResource", found.state.name, [state.name for state in _DELETABLE])
        if held is not None and held.gives_up and found.state == State.PROVISIONING:
            self._give_up(found)
        if held is None or not held.by_operation:
            raise error
        operation = self._operation(found.resource.name, "delete")
        self.clock.after(self.delays.accept, lambda: fail(operation, error.status))
        return operation

    def _list_queued(self, request: tpu_v2.ListQueuedResourcesRequest) -> tpu_v2.ListQueuedResourcesResponse:
        self._zone(request.parent)
        found = [one.resource for name, one in self.queued.items() if self._listed(name, request.parent)]
        return tpu_v2.ListQueuedResourcesResponse(queued_resources=found, unreachable=self._unreachable(request.parent))

    def _list_nodes(self, request: tpu_v2.ListNodesRequest) -> tpu_v2.ListNodesResponse:
        self._zone(request.parent)
        return tpu_v2.ListNodesResponse(
            nodes=[node for name, node in self.nodes.items() if self._listed(name, request.parent)],
            unreachable=self._unreachable(request.parent),
        )

    def _listed(self, name: str, parent: str) -> bool:
        """Whether something is in a zone; `-` for all zones of the project that answer."""
        project, _, zone = parent.partition("/locations/")
        if zone != "-":
            return name.startswith(f"{parent}/")
        return name.startswith(f"{project}/locations/") and name.split("/")[3] not in self.away

    def _unreachable(self, parent: str) -> list[str]:
        project, _, zone = parent.partition("/locations/")
        return [f"{project}/locations/{one}" for one in sorted(self.away)] if zone == "-" else []

    def _delete_node(self, request: tpu_v2.DeleteNodeRequest) -> operations_pb2.Operation:
        node = self._node(request.name)
        self._stop(node, NodeState.DELETING)
        if node.queued_resource in self.queued:
            self._suspend(node.queued_resource, Initiator.USER)
        operation = self._operation(request.name, "delete")

        def gone() -> None:
            if self.nodes.get(request.name) is node:
                del self.nodes[request.name]
            finish(operation, empty_pb2.Empty())

        self.clock.after(self.delays.delete, lambda: self._when_settled([node], gone))
        return operation

    def _guest(self, request: tpu_v2.GetGuestAttributesRequest) -> tpu_v2.GetGuestAttributesResponse:
        node = self._node(request.name)
        hosts = self.shape_of(node).hosts
        told = [self.told.get(request.name, {}).get(worker, {}) for worker in range(hosts)]
        for watcher in self.watchers:
            told = [{**one, **real} for one, real in zip(told, watcher.guest_attributes(node), strict=False)] or told
        namespace, _, key = request.query_path.strip("/").partition("/")
        answer = tpu_v2.GetGuestAttributesResponse()
        for worker, found in enumerate(told):
            if request.worker_ids and str(worker) not in request.worker_ids:
                continue
            items = [
                {"namespace": path.partition("/")[0], "key": path.partition("/")[2], "value": value}
                for path, value in found.items()
                if namespace in ("", path.partition("/")[0]) and key in ("", path.partition("/")[2])
            ]
            answer.guest_attributes.append({"query_path": request.query_path, "query_value": {"items": items}})
        return answer

    def _update_node(self, request: tpu_v2.UpdateNodeRequest) -> operations_pb2.Operation:
        node = self._node(request.node.name)
        for path in request.update_mask.paths:
            if path not in ("description", "tags", "labels", "metadata"):
                raise refusals.invalid(f"Field {path} of a node cannot be updated.")
            setattr(node, path, getattr(request.node, path))
        pool_rules.check_labels(node.labels, "node.labels")
        self._tell("node_changed", node)
        operation = self._operation(request.node.name, "update")
        self.clock.after(self.delays.accept, lambda: finish(operation, tpu_v2.Node.pb(node)))
        return operation

    def _types(self, parent: str) -> list[tpu_v2.AcceleratorType]:
        offered = self._zone(parent)
        names: dict[str, tpu_v2.AcceleratorType] = {}
        for shape in tpu_rules.catalogue():
            word = shape.accelerator_type
            if offered is None or word in offered:
                name = f"{parent}/acceleratorTypes/{word}"
                found = names.setdefault(word, tpu_v2.AcceleratorType(name=name, type_=word))
                found.accelerator_configs.append({"type_": shape.family.type_, "topology": shape.topology})
        return list(names.values())

    def _get_type(self, request: tpu_v2.GetAcceleratorTypeRequest) -> tpu_v2.AcceleratorType:
        return _pick(self._types(request.name.rpartition("/acceleratorTypes/")[0]), request.name)

    def _runtimes(self, parent: str) -> list[tpu_v2.RuntimeVersion]:
        self._zone(parent)
        return [
            tpu_v2.RuntimeVersion(name=f"{parent}/runtimeVersions/{word}", version=word) for word in tpu_rules.RUNTIMES
        ]

    def _get_runtime(self, request: tpu_v2.GetRuntimeVersionRequest) -> tpu_v2.RuntimeVersion:
        return _pick(self._runtimes(request.name.rpartition("/runtimeVersions/")[0]), request.name)

    def _get_operation(self, request: operations_pb2.GetOperationRequest) -> operations_pb2.Operation:
        if request.name not in self.operations:
            raise refusals.not_found(request.name)
        return self.operations[request.name]


def _pick(found: list[Any], name: str) -> Any:
    for one in found:
        if one.name == name:
            return one
    raise refusals.not_found(name)


def _named(permission: str) -> Callable[[Any], Ask]:
    return lambda request: Ask(request.name, (permission,))


def _parent(permission: str) -> Callable[[Any], Ask]:
    return lambda request: Ask(request.parent, (permission,))


def _ask_create(request: tpu_v2.CreateQueuedResourceRequest) -> Ask:
    # IAM knows no permissions for queued resources, those for nodes count:
    # https://cloud.google.com/iam/docs/roles-permissions/tpu. The machines run as a service account, and whoever
    # makes them must be allowed to act as it.
    return Ask(
        f"{request.parent}/queuedResources/{request.queued_resource_id}",
        ("tpu.nodes.create", "iam.serviceAccounts.actAs"),
    )


def _ask_update(request: tpu_v2.UpdateNodeRequest) -> Ask:
    return Ask(request.node.name, ("tpu.nodes.update",))
