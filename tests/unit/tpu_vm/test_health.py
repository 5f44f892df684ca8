"""How whole a lease is: every state of Google's, and Ray on top of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from google.cloud import tpu_v2

from raytpu_ops.backends.ladder import Climb
from raytpu_ops.backends.tpu_vm import states
from raytpu_ops.backends.tpu_vm.health import Seen, judged
from raytpu_ops.backends.tpu_vm.leases import lease_of
from raytpu_ops.backends.tpu_vm.objects import NodeView, QueuedView
from raytpu_ops.backends.tpu_vm.record import Record
from raytpu_ops.backends.tpu_vm.states import Meaning
from raytpu_ops.ray.states import LABEL_SLICE_NAME, LABEL_WORKER_ID, RayNode
from raytpu_ops.tpu.capacity import Spot
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.readiness import Readiness
from tests.unit.tpu_vm.conftest import ME, SPEC

BEGUN = datetime(2026, 11, 30, 8, tzinfo=UTC)
MADE = BEGUN + timedelta(hours=3)
NAMES = ("lease-ab12-0", "lease-ab12-1")
RECORD = Record(
    owner=ME,
    spec=SPEC,
    capacity={"kind": "spot"},
    climb=Climb.start(BEGUN),
    ladder=[Spot()],
    settings={"zones": ["us-central2-b"]},
    digest="d",
    lease_for=timedelta(hours=1),
    until=BEGUN + timedelta(hours=4),
)
QUEUED = QueuedView("us-central2-b", "lease", "ACTIVE", None, NAMES, ME.digest, RECORD, "secret")


def node(name: str, state: str = "READY", health: str = "HEALTHY") -> NodeView:
    return NodeView("us-central2-b", name, state, health, ME.digest, RECORD, "lease", f"10.0.{name[-1]}.2", None, MADE)


NODES = {name: node(name) for name in NAMES}


def ray_node(name: str, worker: int, *, alive: bool = True, head: bool = False) -> RayNode:
    labels = {**SPEC.shape.ray_labels, LABEL_SLICE_NAME: name, LABEL_WORKER_ID: str(worker)}
    return RayNode(
        node_id=f"{name}-{worker}",
        address=f"10.0.{name[-1]}.{worker + 2}",
        alive=alive,
        is_head=head,
        labels=labels,
        resources={"TPU": 4.0},
    )


RAY = [ray_node(name, worker, head=name is NAMES[0] and worker == 0) for name in NAMES for worker in (0, 1)]
WHOLE = Seen(QUEUED, NODES, RAY)


LEASE = lease_of(QUEUED, RECORD, list(NODES.values()), who={})


def report(seen: Seen) -> Readiness:
    return judged(LEASE, seen)


def test_ready_is_all_of_it():
    found = report(WHOLE)
    assert found.ready
    assert found.stands
    assert found.since == MADE


@pytest.mark.parametrize("state", [one.name for one in tpu_v2.QueuedResourceState.State][1:])
def test_every_state_of_a_queued_resource_has_a_meaning(state: str):
    """F11."""
    assert states.queued_resource(state) is not Meaning.UNKNOWN
    found = report(replace(WHOLE, queued=replace(QUEUED, state=state)))
    lost = state in ("FAILED", "DELETING", "SUSPENDING", "SUSPENDED")
    assert found.fatal is None
    assert found.broken == (list(NAMES) if lost else [])
    assert found.lost == lost
    assert found.ready == (state == "ACTIVE")
    if lost:
        assert state in found.describe()
        assert not found.stands


@pytest.mark.parametrize("state", [one.name for one in tpu_v2.Node.State][1:])
def test_every_state_of_a_node_has_a_meaning(state: str):
    known = state != "UNKNOWN"
    assert (states.node(state) is not Meaning.UNKNOWN) == known
    found = report(replace(WHOLE, nodes={**NODES, NAMES[1]: node(NAMES[1], state)}))
    assert found.ready == (state == "READY")
    assert found.stands == (state == "READY")
    assert f"{state}" in f"{found.fatal}{found.describe()}" or found.ready
    comes_back = state in ("CREATING", "READY", "RESTARTING", "REIMAGING", "REPAIRING", "STARTING", "UNKNOWN")
    assert found.lost == (not comes_back)
    assert found.fatal is None


@pytest.mark.parametrize("word", ["RESIZING", "99"])
def test_a_word_that_is_not_known_is_neither_good_nor_bad(word: str):
    for seen in (
        replace(WHOLE, queued=replace(QUEUED, state=word)),
        replace(WHOLE, nodes={**NODES, NAMES[0]: node(NAMES[0], word)}),
    ):
        found = report(seen)
        assert not found.ready
        assert found.fatal is None
        assert word in found.describe()


def test_a_queue_has_its_own_phase_and_clock():
    """F10."""
    found = report(Seen(replace(QUEUED, state="WAITING_FOR_RESOURCES")))
    assert (found.phase, found.since) == (Phase.QUEUED, BEGUN)
    assert "queued resource lease in us-central2-b is WAITING_FOR_RESOURCES" in found.describe()
    assert not found.broken


def test_hosts_that_come_up_have_theirs():
    """F10."""
    nodes = {NAMES[0]: node(NAMES[0], "CREATING")}
    found = report(Seen(replace(QUEUED, state="PROVISIONING"), nodes))
    assert (found.phase, found.since) == (Phase.PROVISIONING, MADE)
    assert f"node {NAMES[0]} is CREATING" in found.describe()
    assert f"node {NAMES[1]} is not made yet" in found.describe()


def test_a_node_that_google_mends_is_waited_for_and_its_work_is_lost():
    found = report(replace(WHOLE, nodes={**NODES, NAMES[1]: node(NAMES[1], "REPAIRING")}))
    assert found.fatal is None
    assert found.phase is Phase.PROVISIONING
    assert not found.stands


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: {NAMES[0]: NODES[NAMES[0]]}, f"slice {NAMES[1]} does not exist any more"),
        (lambda: {**NODES, NAMES[1]: node(NAMES[1], "PREEMPTED")}, f"slice {NAMES[1]} is PREEMPTED"),
    ],
)
def test_a_slice_that_is_gone_takes_all_others_with_it(change: Callable[[], dict[str, NodeView]], told: str):
    """F13."""
    found = report(replace(WHOLE, nodes=change()))
    assert told in found.describe()
    assert "does not replace" in found.describe()
    assert found.broken == list(NAMES)
    assert found.lost
    assert not found.stands


def test_where_nothing_is_there_a_repair_may_find_what_comes_in_its_place():
    found = report(Seen(None))
    assert f"queued resource {LEASE.id} does not exist any more" in found.describe()
    assert found.lost
    assert (found.fatal, found.broken) == (None, list(NAMES))


def test_slices_that_were_granted_anew_are_not_those_of_an_older_lease():
    anew = replace(QUEUED, node_ids=("lease-cd34-0", "lease-cd34-1"))
    found = report(replace(WHOLE, queued=anew))
    assert found.lost
    assert found.fatal is None
    assert "was granted anew since, as lease-cd34-0, lease-cd34-1" in found.describe()


def test_a_host_that_is_missing_is_named_with_the_way_to_its_log():
    """F14."""
    found = report(replace(WHOLE, ray=RAY[:3]))
    assert not found.ready
    (missing,) = [one for one in found.slices if one.name == NAMES[1]]
    assert "worker 1 of 2 not there yet" in missing.missing
    assert f"ssh {NAMES[1]} --zone us-central2-b --worker 1" in found.describe()
    assert "raytpu.log" in found.describe()


def test_what_a_vm_says_is_part_of_the_report():
    said = {NAMES[1]: ["", "ended with 1 and is tried again; its last lines: no space left"]}
    found = report(replace(WHOLE, ray=RAY[:3], said=said))
    assert "worker 1 says: ended with 1 and is tried again; its last lines: no space left" in found.describe()


def test_a_host_whose_ray_died_breaks_its_slice_and_is_no_end():
    found = report(replace(WHOLE, ray=[*RAY[:3], ray_node(NAMES[1], 1, alive=False)]))
    assert found.broken == [NAMES[1]]
    assert found.fatal is None
    assert not found.stands


def test_maintenance_is_told_where_something_is_missing():
    unwell = node(NAMES[1], health="UNHEALTHY_MAINTENANCE (host maintenance)")
    found = report(replace(WHOLE, ray=RAY[:3], nodes={**NODES, NAMES[1]: unwell}))
    assert "READY, health UNHEALTHY_MAINTENANCE (host maintenance)" in found.describe()


def test_a_ray_that_does_not_answer_is_not_ready():
    found = report(replace(WHOLE, ray=None, silence="connection refused"))
    assert not found.ready
    assert not found.head_alive
    assert "Ray does not answer: connection refused" in found.describe()
    assert found.phase is Phase.LABELLED


def test_the_token_is_in_no_repr():
    assert "secret" not in repr(WHOLE)
