"""What befalls queued resources and TPU nodes in the fake, and what it refuses, as Cloud TPU does."""

from __future__ import annotations

from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import tpu_v2

from tests.google_fake import GoogleFake
from tests.google_fake.refusals import Code, Refusal
from tests.unit.google.requests_to_google import PARENT, QUEUED, queued

Tpu = tpu_v2.TpuClient
State = tpu_v2.QueuedResourceState.State
NodeState = tpu_v2.Node.State
NODE = f"{PARENT}/nodes/qr"


def create(tpu: Tpu, resource: tpu_v2.QueuedResource, **more: Any) -> Any:
    request = {"parent": PARENT, "queued_resource_id": "qr", "queued_resource": resource, **more}
    return tpu.create_queued_resource(request=request)


def state(tpu: Tpu) -> State:
    return State(tpu.get_queued_resource(name=QUEUED).state.state)


def test_f10_a_queue_may_be_as_long_as_it_likes(google: GoogleFake, tpu: Tpu) -> None:
    google.tpu.delays.queue = 3 * 3600
    create(tpu, queued())
    google.advance(2 * 3600)
    assert state(tpu) == State.WAITING_FOR_RESOURCES
    assert google.nodes() == {}
    google.advance(3600 + 30)
    assert state(tpu) == State.PROVISIONING
    google.advance(300)
    assert state(tpu) == State.ACTIVE


def test_f10_a_queue_may_never_end(google: GoogleFake, tpu: Tpu) -> None:
    google.tpu.delays.queue = float("inf")
    create(tpu, queued())
    google.advance(30 * 24 * 3600)
    assert state(tpu) == State.WAITING_FOR_RESOURCES


def test_f06_one_that_comes_to_nothing_says_why_in_its_operation_alone(google: GoogleFake, tpu: Tpu) -> None:
    google.faults.late(Refusal(Code.RESOURCE_EXHAUSTED, "no quota"))
    name = create(tpu, queued()).operation.name
    assert state(tpu) == State.CREATING
    assert not tpu.get_operation({"name": name}).done
    google.advance(google.tpu.delays.accept)
    found = tpu.get_operation({"name": name})
    assert (found.done, found.error.code, found.error.message) == (True, 8, "no quota")
    with pytest.raises(exceptions.NotFound):
        state(tpu)


def test_a_request_is_withdrawn_when_its_time_is_over(google: GoogleFake, tpu: Tpu) -> None:
    google.tpu.delays.queue = float("inf")
    create(tpu, queued(queueing_policy={"valid_until_duration": "600s"}))
    google.advance(599)
    assert state(tpu) == State.WAITING_FOR_RESOURCES
    google.advance(1)
    assert state(tpu) == State.FAILED
    assert "allocation interval" in tpu.get_queued_resource(name=QUEUED).state.failed_data.error.message


def test_f09_a_request_that_nobody_asks_about_stays_with_its_label_until_it_is_deleted(
    google: GoogleFake, tpu: Tpu
) -> None:
    """Google's "Manage queued resources": one whose time is over stays in the queue, until it is deleted explicitly."""
    google.tpu.delays.queue = float("inf")
    create(tpu, queued({"labels": {"raytpu-owner": "a"}}, queueing_policy={"valid_until_duration": "600s"}))

    for state_then in (State.WAITING_FOR_RESOURCES, State.FAILED):
        google.advance(599 if state_then is State.WAITING_FOR_RESOURCES else 30 * 24 * 3600)
        [left] = tpu.list_queued_resources(parent=PARENT)
        assert State(left.state.state) == state_then
        assert dict(left.tpu.node_spec[0].node.labels) == {"raytpu-owner": "a"}
        assert google.nodes() == {}

    tpu.delete_queued_resource(name=QUEUED)
    google.advance(600)
    assert list(tpu.list_queued_resources(parent=PARENT)) == []


@pytest.mark.parametrize(("fault", "word"), [("stockout", "no more capacity"), ("quota", "Quota")])
def test_f11_a_failed_one_says_why_and_stays_until_it_is_deleted_at_once(
    google: GoogleFake, tpu: Tpu, fault: str, word: str
) -> None:
    getattr(google.faults, fault)()
    create(tpu, queued())
    google.advance(24 * 3600)
    found = tpu.get_queued_resource(name=QUEUED)
    assert found.state.state == State.FAILED
    assert word in found.state.failed_data.error.message
    assert found.state.failed_data.error.code == 8
    tpu.delete_queued_resource(name=QUEUED)
    google.advance(60)
    assert google.queued_resources() == {}


@pytest.mark.parametrize("where", [State.PROVISIONING, State.ACTIVE, State.SUSPENDING])
def test_f11_others_are_deleted_by_force_alone(google: GoogleFake, tpu: Tpu, where: State) -> None:
    google.tpu.put(QUEUED, queued(), where)
    with pytest.raises(exceptions.FailedPrecondition, match=where.name):
        tpu.delete_queued_resource(name=QUEUED)
    tpu.delete_queued_resource(request={"name": QUEUED, "force": True})
    assert state(tpu) == State.DELETING
    google.advance(60)
    assert (google.queued_resources(), google.nodes()) == ({}, {})


def test_f12_a_node_that_is_taken_back_lingers_and_keeps_its_name(google: GoogleFake, tpu: Tpu) -> None:
    google.tpu.put(QUEUED, queued())
    google.tpu.preempt(NODE)
    assert tpu.get_node(name=NODE).state == NodeState.PREEMPTED
    assert state(tpu) == State.SUSPENDING
    google.advance(24 * 3600)
    assert state(tpu) == State.SUSPENDED
    found = tpu.get_queued_resource(name=QUEUED)
    assert found.state.state_initiator == tpu_v2.QueuedResourceState.StateInitiator.SERVICE
    assert NODE in google.nodes()
    with pytest.raises(exceptions.AlreadyExists):
        create(tpu, queued())
    with pytest.raises(exceptions.AlreadyExists, match="nodes/qr"):
        create(tpu, queued(), queued_resource_id="qr-2")
    tpu.delete_queued_resource(name=QUEUED)
    google.advance(60)
    create(tpu, queued())


def test_a_node_that_somebody_deletes_suspends_its_queued_resource(google: GoogleFake, tpu: Tpu) -> None:
    google.tpu.put(QUEUED, queued())
    tpu.delete_node(name=NODE)
    google.advance(120)
    assert state(tpu) == State.SUSPENDED
    assert google.nodes() == {}


def test_a_request_that_is_sent_twice_is_one(google: GoogleFake, tpu: Tpu) -> None:
    first = create(tpu, queued(), request_id="5b1f3b3e-3f0c-4d1c-8d5c-1f5d6a7b8c9d")
    again = create(tpu, queued(), request_id="5b1f3b3e-3f0c-4d1c-8d5c-1f5d6a7b8c9d")
    assert first.operation.name == again.operation.name
    with pytest.raises(exceptions.AlreadyExists):
        create(tpu, queued())
    assert google.tpu.made == [QUEUED]


def test_the_answer_of_a_create_is_lost_and_the_queued_resource_is_there(google: GoogleFake, tpu: Tpu) -> None:
    google.faults.lost("tpu.CreateQueuedResource")
    with pytest.raises(exceptions.DeadlineExceeded):
        create(tpu, queued())
    assert state(tpu) == State.CREATING


def test_metadata_and_labels_of_a_node_may_change(google: GoogleFake, tpu: Tpu) -> None:
    google.tpu.put(QUEUED, queued({"metadata": {"a": "1"}}))
    node = tpu_v2.Node(name=NODE, metadata={"b": "2"})
    tpu.update_node(node=node, update_mask={"paths": ["metadata"]})
    assert dict(tpu.get_node(name=NODE).metadata) == {"b": "2"}
    with pytest.raises(exceptions.InvalidArgument, match="runtime_version"):
        tpu.update_node(node=node, update_mask={"paths": ["runtime_version"]})


def test_a_zone_may_not_have_it(google: GoogleFake, tpu: Tpu) -> None:
    google.tpu.zones = {"us-central2-b": frozenset({"v4-8"})}
    with pytest.raises(exceptions.InvalidArgument, match="not available in zone us-central2-b"):
        create(tpu, queued())
    assert [one.type_ for one in tpu.list_accelerator_types(parent=PARENT)] == ["v4-8"]
    with pytest.raises(exceptions.PermissionDenied, match="Location us-east5-a"):
        list(tpu.list_queued_resources(parent=PARENT.replace("us-central2-b", "us-east5-a")))


def test_all_zones_are_listed_at_once(google: GoogleFake, tpu: Tpu) -> None:
    google.tpu.put(QUEUED, queued())
    everywhere = PARENT.replace("us-central2-b", "-")
    assert [one.name for one in tpu.list_queued_resources(parent=everywhere)] == [QUEUED]
    assert [one.name for one in tpu.list_nodes(parent=everywhere)] == [NODE]


@pytest.mark.parametrize(
    ("resource", "word"),
    [
        (queued({"accelerator_config": {"type_": "V4", "topology": "3x3x3"}}), "has no topology"),
        (queued({"accelerator_config": {}, "accelerator_type": "v9-8"}), "Invalid accelerator type"),
        (queued({"accelerator_type": "v4-16"}), "Exactly one"),
        (queued({"runtime_version": "v2-alpha-tpuv9"}), "does not exist"),
        (queued({"runtime_version": "v2-alpha-tpuv6e"}), "not compatible"),
        (queued({"labels": {"Owner": "a"}}), "Label keys"),
        (queued({"metadata": {"a.b": "c"}}), "Metadata key"),
        (queued(spot={}, reservation_name="projects/p/reservations/r"), "mutually exclusive"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(tpu: Tpu, resource: tpu_v2.QueuedResource, word: str) -> None:
    with pytest.raises(exceptions.InvalidArgument, match=word):
        create(tpu, resource)


@pytest.mark.parametrize("name", ["Qr", "1r", "q" * 64, "qr-"])
def test_names_have_rules(tpu: Tpu, name: str) -> None:
    with pytest.raises(exceptions.InvalidArgument, match="queued_resource_id"):
        create(tpu, queued(), queued_resource_id=name)


def test_what_a_vm_tells_is_a_guest_attribute_of_its_node(google: GoogleFake, tpu: Tpu) -> None:
    google.tpu.put(QUEUED, queued())
    google.tpu.say(NODE, "raytpu/state", "ready", worker=1)
    google.tpu.say(NODE, "other/key", "x", worker=1)

    def told(**more: Any) -> list[list[str]]:
        answer = tpu.get_guest_attributes(request={"name": NODE, "query_path": "raytpu/state", **more})
        return [[one.value for one in worker.query_value.items] for worker in answer.guest_attributes]

    assert told() == [[], ["ready"]]
    assert told(worker_ids=["1"]) == [["ready"]]


def test_machines_that_come_and_go_hold_up_what_is_said_of_them(google: GoogleFake, tpu: Tpu) -> None:
    machines = _Machines()
    google.tpu.watchers.append(machines)
    create(tpu, queued())
    google.advance(300)
    assert (machines.there, state(tpu)) == ({NODE}, State.PROVISIONING)
    machines.slow = False
    google.advance(1)
    assert state(tpu) == State.ACTIVE

    machines.slow = True
    tpu.delete_queued_resource(request={"name": QUEUED, "force": True})
    google.advance(300)
    assert (machines.there, state(tpu)) == (set(), State.DELETING)
    machines.slow = False
    google.advance(1)
    assert google.queued_resources() == {}


class _Machines:
    """What boots machines, slowly."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.slow = True

    def node_made(self, node: tpu_v2.Node, shape: object) -> None:
        self.there.add(node.name)

    def node_changed(self, node: tpu_v2.Node) -> None:
        pass

    def node_gone(self, node: tpu_v2.Node) -> None:
        self.there.discard(node.name)

    def busy(self, node: tpu_v2.Node) -> bool:
        return self.slow

    def guest_attributes(self, node: tpu_v2.Node) -> list[dict[str, str]]:
        return []
