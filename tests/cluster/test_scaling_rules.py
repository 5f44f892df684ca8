"""What the testbed's autoscaler decides, by objects alone: who waits, what would help, in which words."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.cluster.manifests import host_pod, plain_pod
from tests.testbed import scaling_rules as rules

_NUMBERS = itertools.count()
_V4, _V6E = rules.limits(["v4-2x2x2*2", "v6e-2x4@ct6e-standard-8t"])


def pending(pod: dict[str, Any], reason: str = "Unschedulable") -> dict[str, Any]:
    number = next(_NUMBERS)
    pod["metadata"] |= {"uid": f"uid-{number}", "creationTimestamp": f"2026-01-01T00:00:{number:02}Z"}
    condition = {"type": "PodScheduled", "status": "False", "reason": reason}
    return {**pod, "status": {"phase": "Pending", "conditions": [condition]}}


def with_selector(pod: dict[str, Any], **selector: str) -> dict[str, Any]:
    pod["spec"]["nodeSelector"] |= {f"cloud.google.com/{key.replace('_', '-')}": one for key, one in selector.items()}
    return pod


def test_a_word_is_a_kind_of_pool_and_how_many() -> None:
    assert (_V4.pool, _V4.shape.hosts, _V4.most) == ("v4-2x2x2", 2, 2)
    assert (_V6E.pool, _V6E.shape.hosts, _V6E.most) == ("v6e-2x4@ct6e-standard-8t", 1, 1)
    with pytest.raises(ValueError, match="has no TPUs"):
        rules.limits(["cpu*2"])


def test_hosts_of_one_slice_wait_together_and_hosts_of_two_do_not() -> None:
    pods = [pending(host_pod(f"h{r}{h}", replica=r, host=h)) for r, h in ((1, 0), (0, 0), (0, 1))]
    groups = [[one["metadata"]["name"] for one in group] for group in rules.waiting(pods).values()]
    assert groups == [["h10"], ["h00", "h01"]]  # the oldest slice first


def test_slices_are_told_apart_by_the_webhooks_own_label_where_kuberay_gives_no_index() -> None:
    pods = []
    for replica in ("slices-0", "slices-1"):
        pod = host_pod("legacy")
        labels = pod["metadata"]["labels"]
        pod["metadata"]["labels"] = {"ray.io/cluster": labels["ray.io/cluster"], "replicaIndex": replica}
        pods.append(pending(pod))
    assert list(rules.waiting(pods)) == ["default/by-hand/slices-0", "default/by-hand/slices-1"]


def test_who_does_not_wait_for_chips_is_none_of_its_business() -> None:
    leaving, running = pending(host_pod("leaving")), pending(host_pod("running"))
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    running["spec"]["nodeName"] = "somewhere"
    pods = [leaving, running, pending(plain_pod("plain")), pending(host_pod("gated"), "SchedulingGated")]
    assert rules.waiting(pods) == {}


def test_a_node_belongs_to_the_slices_whose_pods_have_not_ended() -> None:
    running, done = pending(host_pod("running")), pending(host_pod("done"))
    for pod, phase in ((running, "Running"), (done, "Succeeded")):
        pod["spec"]["nodeName"] = f"node-{phase}"
        pod["status"]["phase"] = phase
    assert rules.placed([running, done]) == {"node-Running": {"default/by-hand/slices-0"}}


@pytest.mark.parametrize(
    ("pod", "against_v4"),
    [
        (host_pod("fits"), None),
        (host_pod("other", topology="2x2x4"), rules.NO_MATCH),
        (with_selector(host_pod("pinned"), gke_nodepool="mine"), rules.NO_MATCH),
        (with_selector(host_pod("class"), compute_class="tpus"), None),
        (with_selector(host_pod("reserved"), reservation_name="ours", reservation_affinity="specific"), None),
    ],
    ids=lambda one: one["metadata"]["name"] if isinstance(one, dict) else str(one),
)
def test_selectors_must_be_met_by_the_shape_or_be_what_gke_can_make(
    pod: dict[str, Any], against_v4: str | None
) -> None:
    assert rules.refusal(pod, _V4) == against_v4
    assert rules.refusal(pod, _V6E) == rules.NO_MATCH


def test_taints_must_be_tolerated_that_of_spot_too() -> None:
    pod = host_pod("bare")
    pod["spec"]["tolerations"] = []
    assert rules.refusal(pod, _V4) == rules.UNTOLERATED
    spot = with_selector(host_pod("spot"), gke_spot="true")
    assert rules.refusal(spot, _V4) == rules.UNTOLERATED
    tolerated = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    spot["spec"]["tolerations"].append(tolerated)
    assert rules.refusal(spot, _V4) is None
    assert rules.asked_labels(spot) == {"cloud.google.com/gke-spot": "true"}
    assert [one["key"] for one in rules.taints_of(rules.asked_labels(spot))] == [
        "google.com/tpu",
        "cloud.google.com/gke-spot",
    ]


def test_a_host_has_only_so_many_chips() -> None:
    pod = host_pod("greedy")
    pod["spec"]["containers"][0]["resources"]["limits"]["google.com/tpu"] = "8"
    assert rules.refusal(pod, _V4) == rules.TOO_FEW_CHIPS


def test_one_topology_of_two_machine_types_is_told_apart_by_the_chips_of_a_host() -> None:
    [four] = rules.limits(["v6e-2x4@ct6e-standard-4t"])
    pod = host_pod("half", topology="2x4")
    pod["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] = "tpu-v6e-slice"
    assert rules.refusal(pod, four) is None
    assert rules.refusal(pod, _V6E) == rules.NO_MATCH


def test_reasons_are_counted_as_the_real_one_counts_them() -> None:
    assert rules.not_triggered([rules.NO_MATCH, rules.AT_MOST, rules.NO_MATCH]) == (
        "pod didn't trigger scale-up: 1 max node group size reached, "
        "2 node(s) didn't match Pod's node affinity/selector"
    )
