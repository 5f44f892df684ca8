"""The life of queued resources and their nodes on the clock, and of the operations that they bring.

Not here: requests (`tpu.py`), and machines that really run (`vms.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from google.cloud import tpu_v2
from google.longrunning import operations_pb2
from google.protobuf.message import Message
from google.rpc import status_pb2

from tests.google_fake import refusals, tpu_rules
from tests.google_fake.clock import Clock
from tests.google_fake.faults import Fate, Faults
from tests.google_fake.refusals import Code

State = tpu_v2.QueuedResourceState.State
Initiator = tpu_v2.QueuedResourceState.StateInitiator
NodeState = tpu_v2.Node.State


@dataclass
class Delays:
    """How long things take, seconds; of the order that Cloud TPU takes."""

    accept: float = 5
    wait: float = 5
    #: In the queue; `inf` for ever.
    queue: float = 30
    provision: float = 120
    delete: float = 45
    suspend: float = 60
    start: float = 60


@dataclass
class Held:
    """How Google refuses to delete what is made or taken away just then, by force too.

    :param by_operation: the request is taken, and its operation has the error.
    :param gives_up: a request that is refused makes one that is PROVISIONING fail.
    """

    by_operation: bool = False
    gives_up: bool = True


@dataclass
class Queued:
    """A queued resource and what the API does not show of it.

    :param resource: as it is shown.
    :param node_ids: of its nodes.
    :param fate: how it ends, if not well.
    """

    resource: tpu_v2.QueuedResource
    node_ids: list[str]
    fate: Fate | None = None
    made: float = 0
    nodes_left: set[str] = field(default_factory=set)

    @property
    def state(self) -> State:
        """Its state."""
        return State(self.resource.state.state)


class NodeWatcher(Protocol):
    """Who boots machines; called while the fake's lock is held, so it must not block."""

    def node_made(self, node: tpu_v2.Node, shape: tpu_rules.Shape) -> None:
        """A node is ready, and its machines boot; its network endpoints may be filled in."""

    def node_changed(self, node: tpu_v2.Node) -> None:
        """Its metadata is another."""

    def node_gone(self, node: tpu_v2.Node) -> None:
        """A node is deleted, stopped or taken back."""

    def busy(self, node: tpu_v2.Node) -> bool:
        """Whether machines of it are still coming or going; the state machine waits for them."""

    def guest_attributes(self, node: tpu_v2.Node) -> list[dict[str, str]]:
        """What each worker has told, `namespace/key` -> value."""


class Queue:
    """All queued resources and nodes.

    :param clock: of the fake.
    :param faults: that queued resources meet.
    """

    def __init__(self, clock: Clock, faults: Faults) -> None:
        self.clock = clock
        self.faults = faults
        self.delays = Delays()
        self.queued: dict[str, Queued] = {}
        self.nodes: dict[str, tpu_v2.Node] = {}
        self.operations: dict[str, operations_pb2.Operation] = {}
        self.watchers: list[NodeWatcher] = []
        #: Zones that there are, and accelerator types that each of them has; None for all.
        self.zones: dict[str, frozenset[str] | None] = {}
        #: Zones that do not answer where all of them are asked.
        self.away: set[str] = set()
        #: Whether Google deletes nothing in PROVISIONING and SUSPENDING.
        self.held: Held | None = None
        #: Queued resources that were ever made, full names, in order.
        self.made: list[str] = []
        #: Node -> worker -> guest attributes.
        self.told: dict[str, dict[int, dict[str, str]]] = {}
        self._requests: dict[str, operations_pb2.Operation] = {}
        self._numbers = itertools.count(1)

    # What a test does

    def preempt(self, node: str) -> None:
        """F12: a spot node is taken back: it lingers as PREEMPTED, its queued resource becomes SUSPENDED.

        :param node: full name.
        """
        with self.clock.lock:
            found = self._node(node)
            found.state = NodeState.PREEMPTED
            self._tell("node_gone", found)
            if found.queued_resource in self.queued:
                self._suspend(found.queued_resource, Initiator.SERVICE)

    def put(self, name: str, resource: tpu_v2.QueuedResource, state: State = State.ACTIVE) -> tpu_v2.QueuedResource:
        """A queued resource that somebody else made: it is there at once.

        :param name: full name.
        """
        with self.clock.lock:
            found = self._admit(name, resource)
            self._set(found, state)
            if state in (State.PROVISIONING, State.ACTIVE, State.SUSPENDING):
                self._make_nodes(found)
            if state == State.ACTIVE:
                self._nodes_ready(found)
            return found.resource

    def set_node(self, node: str, state: NodeState, health: tpu_v2.Node.Health | None = None, why: str = "") -> None:
        """A node changes by itself: repair, maintenance."""
        with self.clock.lock:
            found = self._node(node)
            found.state = state
            if health is not None:
                found.health = health
            found.health_description = why

    def say(self, node: str, path: str, value: str, worker: int = 0) -> None:
        """A VM tells a guest attribute, where no real one does.

        :param node: full name.
        :param path: `namespace/key`.
        """
        self.told.setdefault(node, {}).setdefault(worker, {})[path] = value

    def shape_of(self, node: tpu_v2.Node) -> tpu_rules.Shape:
        """What a node that is there is made of."""
        return tpu_rules.shape_of(tpu_v2.Node(accelerator_config=node.accelerator_config))

    # State machine

    def _queued(self, name: str) -> Queued:
        if name not in self.queued:
            raise refusals.not_found(name)
        return self.queued[name]

    def _node(self, name: str) -> tpu_v2.Node:
        if name not in self.nodes:
            raise refusals.not_found(name)
        return self.nodes[name]

    def _nodes_of(self, found: Queued) -> list[tpu_v2.Node]:
        return [node for node in self.nodes.values() if node.queued_resource == found.resource.name]

    def _admit(self, name: str, asked: tpu_v2.QueuedResource) -> Queued:
        resource = tpu_v2.QueuedResource(asked)
        resource.name = name
        resource.create_time = self.clock.now()
        found = Queued(resource, tpu_rules.node_ids(asked, name.rpartition("/")[2]))
        self.queued[name] = found
        self.made.append(name)
        self._expire_later(found)
        return found

    def _expire_later(self, found: Queued) -> None:
        """The request is withdrawn when its time in the queue is over."""
        policy = found.resource.queueing_policy
        if "valid_until_duration" in policy:
            seconds = policy.valid_until_duration.total_seconds()
        elif "valid_until_time" in policy:
            seconds = (policy.valid_until_time - self.clock.now()).total_seconds()
        else:
            return

        def expire() -> None:
            if found.state in (State.CREATING, State.ACCEPTED, State.WAITING_FOR_RESOURCES):
                # "Manage queued resources" in Google Cloud's documentation
                text = "the requested resources were not available within the allocation interval"
                self._fail(found, status_pb2.Status(code=Code.DEADLINE_EXCEEDED.value[0], message=text))

        self.clock.after(max(0, seconds), expire)

    def _later(self, found: Queued, state: State, seconds: float, then: Callable[[Queued], None]) -> None:
        """Enter a state and go on from it, unless something else happened meanwhile."""
        self._set(found, state)

        def go_on() -> None:
            if self.queued.get(found.resource.name) is found and found.state == state:
                then(found)

        if seconds != float("inf"):
            self.clock.after(seconds, go_on)

    def _accept(self, found: Queued) -> None:
        self._later(found, State.ACCEPTED, self.delays.wait, self._wait)

    def _wait(self, found: Queued) -> None:
        self._later(found, State.WAITING_FOR_RESOURCES, self.delays.queue, self._provision)

    def _provision(self, found: Queued) -> None:
        if found.fate is not None:
            error = status_pb2.Status()
            error.CopyFrom(found.fate.error)
            zone = found.resource.name.split("/")[3]
            error.message = _words_of(found.fate, zone)
            self._fail(found, error)
            return
        self._make_nodes(found)
        self._later(found, State.PROVISIONING, self.delays.provision, self._activate)

    def _activate(self, found: Queued) -> None:
        self._nodes_ready(found)

        def active() -> None:
            if self.queued.get(found.resource.name) is found and found.state == State.PROVISIONING:
                self._set(found, State.ACTIVE)

        self._when_settled(self._nodes_of(found), active)

    def _when_settled(self, nodes: list[tpu_v2.Node], then: Callable[[], None]) -> None:
        """Go on when real machines, if there are any, have come or gone."""
        if any(watcher.busy(node) for watcher in self.watchers for node in nodes):
            self.clock.after(1, lambda: self._when_settled(nodes, then))
        else:
            then()

    def _fail(self, found: Queued, error: status_pb2.Status) -> None:
        """F11: it stays, and holds quota, until somebody deletes it."""
        self._set(found, State.FAILED)
        found.resource.state.failed_data = {"error": error}

    def _come_to_nothing(self, found: Queued, operation: operations_pb2.Operation) -> None:
        """Nothing is left of it but what its operation says."""
        assert found.fate is not None, "it was looked for"
        del self.queued[found.resource.name]
        fail(operation, found.fate.error)

    def _suspend(self, name: str, who: Initiator) -> None:
        found = self._queued(name)
        if found.state in (State.DELETING, State.SUSPENDED, State.SUSPENDING):
            return
        self._later(found, State.SUSPENDING, self.delays.suspend, self._suspended)
        found.resource.state.state_initiator = who

    def _give_up(self, found: Queued) -> None:
        def failed(found: Queued) -> None:
            for node in self._nodes_of(found):
                self._stop(node, NodeState.DELETING)
                del self.nodes[node.name]
            self._fail(found, status_pb2.Status(code=Code.CANCELLED.value[0], message="Cancelled."))

        self._later(found, State.SUSPENDING, self.delays.suspend, failed)

    def _suspended(self, found: Queued) -> None:
        who = found.resource.state.state_initiator
        for node in self._nodes_of(found):
            if node.state != NodeState.PREEMPTED:  # a node that was taken back lingers, others are removed
                self._stop(node, NodeState.DELETING)
                del self.nodes[node.name]
        self._set(found, State.SUSPENDED)
        found.resource.state.state_initiator = who

    def _set(self, found: Queued, state: State) -> None:
        found.resource.state = tpu_v2.QueuedResourceState(state=state)

    def _make_nodes(self, found: Queued) -> None:
        parent = found.resource.name.partition("/queuedResources/")[0]
        (spec,) = found.resource.tpu.node_spec
        for node_id in found.node_ids:
            node = tpu_v2.Node(spec.node)
            node.name = f"{parent}/nodes/{node_id}"
            node.state = NodeState.CREATING
            node.create_time = self.clock.now()
            node.queued_resource = found.resource.name
            node.multislice_node = len(found.node_ids) > 1
            node.id = next(self._numbers) + 10**18
            shape = tpu_rules.shape_of(node)
            node.accelerator_type = shape.accelerator_type
            node.accelerator_config = {"type_": shape.family.type_, "topology": shape.topology}
            if "spot" in found.resource:
                node.scheduling_config.spot = True
            self.nodes[node.name] = node

    def _nodes_ready(self, found: Queued) -> None:
        for node in self._nodes_of(found):
            shape = self.shape_of(node)
            number = next(self._numbers) % 250
            node.network_endpoints = [
                {"ip_address": f"10.164.{number}.{worker % 250 + 2}", "port": 8470} for worker in range(shape.hosts)
            ]
            node.state = NodeState.READY
            node.health = tpu_v2.Node.Health.HEALTHY
            for watcher in self.watchers:
                watcher.node_made(node, shape)

    def _stop(self, node: tpu_v2.Node, state: NodeState) -> None:
        node.state = state
        self._tell("node_gone", node)

    def _tell(self, what: str, node: tpu_v2.Node) -> None:
        for watcher in self.watchers:
            getattr(watcher, what)(node)

    def _operation(self, target: str, verb: str) -> operations_pb2.Operation:
        now = self.clock.now()
        parent = "/".join(target.split("/")[:4])
        name = f"{parent}/operations/operation-{int(now.timestamp() * 1000)}-{next(self._numbers):012x}-0000-0000"
        operation = operations_pb2.Operation(name=name)
        metadata = tpu_v2.OperationMetadata(create_time=now, target=target, verb=verb, api_version="v2")
        operation.metadata.Pack(tpu_v2.OperationMetadata.pb(metadata))
        self.operations[name] = operation
        return operation


def finish(operation: operations_pb2.Operation, answer: Message) -> None:
    operation.done = True
    operation.response.Pack(answer)


def fail(operation: operations_pb2.Operation, error: status_pb2.Status) -> None:
    operation.done = True
    operation.error.CopyFrom(error)


def _words_of(fate: Fate, zone: str) -> str:
    """A queued resource meets the fates of pools in words of its own."""
    if fate.kind == "GCE_STOCKOUT":
        # hashicorp/terraform-provider-google#21243
        return (
            f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are '
            "offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x9f48947a7d57c8d]"
        )
    return fate.error.message.format(
        zone=zone, region=zone.rpartition("-")[0], reservation="?", hosts="?", instance="?"
    )
