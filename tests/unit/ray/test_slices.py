"""Claims of readiness.py: a slice is whole only with every host, once, labelled, with all its chips."""

from __future__ import annotations

from typing import Any

import pytest

from raytpu_ops.ray.readiness import busy_hosts, slices_report
from raytpu_ops.ray.states import ChipUsage, Holder, RayNode
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.tpu.spec import SliceSpec

V4 = SliceSpec.of("v4", "2x2x2")
V4_TWO = SliceSpec.of("v4", "2x2x2", num_slices=2)
HEAD = RayNode("head", "10.0.0.1", True, is_head=True)


def host(name: str | None, worker: int | str | None, spec: SliceSpec = V4, **changes: Any) -> RayNode:
    """A host as Ray shows it; ``changes`` are fields, or labels by their last word (``topology``)."""
    labels = dict(spec.shape.ray_labels)
    if name is not None:
        labels["ray.io/tpu-slice-name"] = name
    if worker is not None:
        labels["ray.io/tpu-worker-id"] = str(worker)
    for word in ("topology", "pod-type", "accelerator-type"):
        if word in changes:
            key = next(key for key in labels if key.endswith(word))
            value = changes.pop(word)
            labels = {k: v for k, v in labels.items() if k != key} | ({} if value is None else {key: value})
    number = changes.pop("number", worker)
    return RayNode(
        node_id=changes.pop("node_id", f"{name}-{number}".ljust(20, "x")),
        address=changes.pop("address", f"10.1.0.{number}"),
        alive=changes.pop("alive", True),
        labels=labels,
        resources={"TPU": float(changes.pop("chips", spec.shape.chips_per_host))},
        **changes,
    )


def report(*nodes: RayNode, spec: SliceSpec = V4, names: list[str] | None = None, **more: Any) -> Readiness:
    return slices_report(spec, names, [HEAD, *nodes], **more)


def test_a_slice_with_every_host_is_whole():
    found = report(host("s", 0), host("s", 1), names=["s"])
    assert found.ready
    assert [(one.worker_id, one.chips, one.chips_free) for one in found.slices[0].hosts] == [(0, 4, 4), (1, 4, 4)]
    assert found.slices[0].free
    assert found.describe() == "1 of 1 slices whole, 2 of 2 hosts labelled"


def test_a_missing_host_is_named():
    found = report(host("s", 1), names=["s"])
    assert not found.ready
    assert found.slices[0].missing == ["worker 0 of 2 not there yet"]
    assert not found.slices[0].broken


def test_seven_of_eight_hosts_are_not_ready():
    """kuberay#1913 (F14)."""
    spec = SliceSpec.of("v6e", "4x8")
    hosts = [host("s", number, spec) for number in range(8) if number != 3]
    found = slices_report(spec, ["s"], [HEAD, *hosts])
    assert (found.ready, found.slices[0].missing) == (False, ["worker 3 of 8 not there yet"])
    assert slices_report(spec, ["s"], [HEAD, *hosts, host("s", 3, spec)]).ready


def test_many_missing_hosts_are_counted_not_listed():
    spec = SliceSpec.of("v5p", "8x8x8")
    found = slices_report(spec, ["s"], [HEAD, host("s", 5, spec)])
    assert found.slices[0].missing == ["workers 0, 1, 2, 3, 4, 6, 7, 8 and 119 more of 128 not there yet"]


def test_a_slice_of_which_nothing_has_joined():
    assert report(names=["s"]).slices[0].missing == ["none of its hosts has joined Ray"]
    single = SliceSpec.of("v6e", "2x2")
    assert slices_report(single, ["s"], [HEAD]).slices[0].missing == ["its host has not joined Ray"]


def test_two_hosts_with_the_same_worker_id_are_both_named():
    """ai-on-gke#859 (F19)."""
    found = report(host("s", 0), host("s", 0, number=7), host("s", 1), names=["s"])
    assert not found.ready
    (reason,) = found.slices[0].missing
    assert reason == "worker id 0 is claimed by 10.1.0.0 (node s-0xxxxxxxxx) and 10.1.0.7 (node s-7xxxxxxxxx)"


def test_a_duplicate_in_the_place_of_another_says_both():
    found = report(host("s", 0), host("s", 0, number=7), names=["s"])
    assert len(found.slices[0].missing) == 2
    assert "worker 1 of 2 not there yet" in found.slices[0].missing


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topology": "2x2x4"}, "worker 0 at 10.1.0.0 has ray.io/tpu-topology=2x2x4, 2x2x2 is wanted"),
        ({"pod-type": "v4-8"}, "worker 0 at 10.1.0.0 has ray.io/tpu-pod-type=v4-8, v4-16 is wanted"),
        ({"accelerator-type": "TPU-V5P"}, "worker 0 at 10.1.0.0 has ray.io/accelerator-type=TPU-V5P, TPU-V4 is wanted"),
        ({"topology": None}, "worker 0 at 10.1.0.0 has ray.io/tpu-topology=None, 2x2x2 is wanted"),
        ({"chips": 3}, "worker 0 at 10.1.0.0 shows 3 chips, 4 are wanted"),
        ({"chips": 1}, "worker 0 at 10.1.0.0 shows 1 chip, 4 are wanted"),
        ({"chips": 8}, "worker 0 at 10.1.0.0 shows 8 chips, 4 are wanted"),
    ],
)
def test_a_host_that_is_not_of_the_shape_is_named(changes, words):
    found = report(host("s", 0, **changes), host("s", 1), names=["s"])
    assert (found.ready, found.slices[0].missing) == (False, [words])


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (None, "the host at 10.1.0.9 has no worker id"),
        ("x", "the host at 10.1.0.9 has the worker id 'x'"),
        (2, "worker 2 at 10.1.0.9: a 2x2x2 slice has workers 0 to 1 only"),
    ],
)
def test_a_host_without_a_place_in_the_slice_is_named(worker, words):
    found = report(host("s", 0), host("s", 1), host("s", worker, number=9), names=["s"])
    assert (found.ready, found.slices[0].missing) == (False, [words])


def test_a_host_that_died_breaks_its_slice():
    """The slice is broken as a whole (F13)."""
    found = report(host("s", 0), host("s", 1, alive=False, state_message="it was preempted"), names=["s"])
    assert found.broken == ["s"]
    assert found.slices[0].missing == ["worker 1 at 10.1.0.1 was there and has died (it was preempted)"]


def test_a_slice_of_which_all_hosts_died_is_broken():
    assert report(host("s", 0, alive=False), host("s", 1, alive=False), names=["s"]).broken == ["s"]


def test_a_host_that_came_back_under_its_worker_id_is_not_missed():
    found = report(host("s", 0), host("s", 1, alive=False), host("s", 1, number=8), names=["s"])
    assert found.ready


def test_a_dead_head_is_not_ready_whatever_the_hosts_say():
    found = slices_report(V4, ["s"], [host("s", 0), host("s", 1)])
    assert (found.ready, found.head_alive, found.problems) == (False, False, ["Ray's head node is not alive"])
    assert not slices_report(V4, None, []).ready


def test_hosts_without_labels_are_named_while_something_is_missed():
    stray = RayNode("n", "10.1.0.9", True, resources={"TPU": 4.0})
    found = report(host("s", 0), stray, names=["s"])
    assert "the host at 10.1.0.9 has 4 chips and no slice name: TPU_NAME" in found.problems[0]
    assert report(host("s", 0), host("s", 1), stray, names=["s"]).ready, "on a shared cluster it may be anybody's"


def test_slices_are_found_by_their_labels():
    nodes = [host(name, worker) for name in ("b", "a") for worker in (0, 1)]
    found = report(*nodes, spec=V4_TWO)
    assert found.ready
    assert [one.name for one in found.slices] == ["a", "b"]


def test_slices_that_have_not_shown_up_are_counted():
    found = report(host("a", 0), host("a", 1), spec=V4_TWO)
    assert (found.ready, found.problems) == (False, ["1 of 2 slices have shown up in Ray"])


def test_a_slice_of_another_shape_is_not_taken_and_is_named():
    small = SliceSpec.of("v4", "2x2x1")
    found = report(host("other", 0, small), names=None)
    assert found.slices == []
    assert found.problems == ["0 of 1 slices have shown up in Ray; v4-16 2x2x2 is wanted, other is v4-8 2x2x1"]


def test_of_more_slices_than_asked_for_the_complete_ones_count():
    nodes = [host("a", 0), host("b", 0), host("b", 1), host("c", 0), host("c", 1)]
    found = report(*nodes, spec=V4_TWO)
    assert found.ready
    assert [one.name for one in found.slices] == ["b", "c"]


def test_single_host_slices_are_slices_too():
    spec = SliceSpec.of("v6e", "2x2", num_slices=3)
    nodes = [host(name, 0, spec, number=number) for number, name in enumerate(["a", "b", "c"])]
    assert slices_report(spec, None, [HEAD, *nodes]).ready
    assert slices_report(spec, ["a", "b", "c"], [HEAD, *nodes[:2]]).slices[2].missing == ["its host has not joined Ray"]


def test_the_two_forms_of_2x4_are_told_apart_by_chips():
    one = SliceSpec.of("v6e", "2x4", machine_type="ct6e-standard-8t")
    two = SliceSpec.of("v6e", "2x4", machine_type="ct6e-standard-4t")
    assert slices_report(one, ["s"], [HEAD, host("s", 0, one)]).ready
    assert slices_report(two, ["s"], [HEAD, host("s", 0, two), host("s", 1, two)]).ready
    assert not slices_report(two, ["s"], [HEAD, host("s", 0, one), host("s", 1, one)]).ready


# --- who holds what ---


def test_a_busy_host_is_whole_but_not_free_and_says_who_holds_it():
    zero = host("s", 0)
    holders = [Holder(zero.node_id, 4, "placement group x of job a", "a")]
    found = report(zero, host("s", 1), names=["s"], holders=holders)
    assert found.ready
    assert not found.slices[0].free
    first, second = found.slices[0].hosts
    assert (first.chips_free, first.held_by) == (0, ["4 chips by placement group x of job a"])
    assert (second.chips_free, second.held_by) == (4, [])


def test_chips_that_only_the_monitor_counts_are_held_by_somebody_unnamed():
    zero = host("s", 0)
    holders = [Holder(zero.node_id, 1, "actor A", None)]
    usage = {zero.node_id: ChipUsage(3.0, 4.0)}
    found = report(zero, host("s", 1), names=["s"], holders=holders, usage=usage)
    assert found.slices[0].hosts[0].chips_free == 1
    assert found.slices[0].hosts[0].held_by == ["1 chip by actor A", "2 chips by somebody whom Ray does not name"]


def test_part_of_a_chip_is_not_free():
    zero = host("s", 0)
    found = report(zero, host("s", 1), names=["s"], holders=[Holder(zero.node_id, 0.5, "task t")])
    assert found.slices[0].hosts[0].chips_free == 3


def test_more_is_held_than_there_is_while_a_group_moves():
    zero = host("s", 0)
    holders = [Holder(zero.node_id, 4, "old"), Holder(zero.node_id, 4, "new")]
    assert report(zero, host("s", 1), names=["s"], holders=holders).slices[0].hosts[0].chips_free == 0


def test_busy_hosts_are_named_without_what_the_asking_job_holds():
    """Head free, another host busy (F46): the message must point at the other host."""
    nodes = [HEAD, host("s", 0), host("s", 1), host("t", 0, alive=False), RayNode("n", "10.1.0.9", True)]
    holders = [
        Holder(nodes[1].node_id, 0, "placement group head of job mine (reserves the slice)", "mine"),
        Holder(nodes[2].node_id, 4, "actor Idle of job yours", "yours"),
        Holder(nodes[3].node_id, 4, "actor Dead of job yours", "yours"),
        Holder("n", 1, "task x"),
    ]
    assert busy_hosts(nodes, holders, besides="mine") == [
        "the host at 10.1.0.9: 1 chip by task x",
        "s worker 1 at 10.1.0.1: 4 chips by actor Idle of job yours",
    ]
    assert len(busy_hosts(nodes, holders)) == 3
