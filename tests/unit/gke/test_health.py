"""When a lease on KubeRay is whole, and what is said while it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raytpu_ops.backends.gke.health import Seen, judged
from raytpu_ops.backends.gke.queued import RequestView
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.readiness import Readiness
from tests.unit.gke.seen import (
    HOSTS,
    NAME,
    NODES,
    PODS,
    SPEC,
    address,
    at,
    cluster,
    condition,
    node,
    pod,
    seen,
    text,
    waiting,
    with_pods,
    workload,
)


def report(*args: Any, **changes: Any) -> Readiness:
    return judged(SPEC, NAME, seen(*args, **changes))


def held_back(reason: str) -> dict[str, Any]:
    """A head whose container Kubernetes does not run."""
    state = {"name": "ray-head", "state": {"waiting": {"reason": reason, "message": "x"}}}
    return pod(None, status={"conditions": [condition("PodScheduled", seconds=5)], "containerStatuses": [state]})


def test_all_conditions_pods_and_labels_together_are_whole():
    found = report()

    assert found.ready, found.describe()
    assert [one.name for one in found.slices] == ["slice-0", "slice-1"]
    assert (found.phase, found.since) == (Phase.LABELLED, at(5))


def test_a_raycluster_that_is_gone_is_fatal():
    assert judged(SPEC, NAME, Seen(None, at=at(60))).fatal == f"RayCluster {NAME} does not exist any more"


def test_a_raycluster_that_is_being_deleted_is_fatal():
    found = report(cluster(metadata={"deletionTimestamp": text(30)}))

    assert found.fatal is not None
    assert "is being deleted" in found.fatal


@pytest.mark.parametrize(
    ("the_cluster", "said"),
    [
        (cluster(metadata={"generation": 2}), "KubeRay has not looked at the RayCluster yet"),
        (cluster(status={"conditions": [condition("RayClusterProvisioned")]}), "head's pod as ready"),
        (cluster(status={"conditions": [condition("HeadPodReady")]}), "as provisioned"),
        (cluster(status={"readyWorkerReplicas": 3}), "3 of 4 host pods as ready"),
        (cluster(status={"desiredWorkerReplicas": 3}), "KubeRay wants 3 host pods, the lease 4"),
        (cluster(status={"reason": "invalid RayCluster"}), "KubeRay: invalid RayCluster"),
    ],
)
def test_each_of_kuberays_conditions_is_needed(the_cluster, said):
    """kuberay#2188: ``state: ready`` alone has been true with pods pending."""
    found = report(the_cluster)

    assert not found.ready
    assert said in found.describe()


def test_a_pod_that_waits_for_a_node_is_named_with_the_schedulers_reason():
    """F14: 3 of 4 hosts are there."""
    message = "0/5 nodes are available: 5 node(s) didn't match Pod's node affinity/selector."
    found = report(pods=with_pods(waiting(1, 1, message)), nodes=NODES[:-1])

    assert not found.ready
    assert f"pod slice-1-host-1 (worker 1) waits for a node: {message}" in found.describe()
    assert "1 of 2 slices whole, 3 of 4 hosts labelled" in found.describe()
    assert (found.phase, found.since) == (Phase.PROVISIONING, at(1))


def test_pods_that_kuberay_has_not_made_yet_are_counted():
    found = report(pods=PODS[:3], nodes=NODES[:3])

    assert "slice-1: KubeRay has made 0 of its 2 pods" in found.describe()
    assert found.phase is Phase.PROVISIONING


def test_two_pods_with_one_worker_id_are_named():
    """F19: ai-on-gke#859."""
    twin = pod(1, 1, env=[{"name": "TPU_WORKER_ID", "value": "0"}, {"name": "TPU_NAME", "value": "slice-1"}])
    labels = {**NODES[4].labels, "ray.io/tpu-worker-id": "0"}
    found = report(pods=with_pods(twin), nodes=[*NODES[:4], node(1, 1, labels=labels)])

    assert not found.ready
    assert "pods slice-1-host-0 and slice-1-host-1 all have TPU_WORKER_ID 0" in found.describe()
    assert not found.broken


def test_pods_that_are_ready_long_before_ray_has_labelled_them_are_not_whole():
    found = report(nodes=[NODES[0]])

    assert not found.ready
    assert "pod slice-0-host-0 (worker 0) runs, and Ray has not labelled it yet" in found.describe()
    assert found.stands  # late, not lost


def test_a_head_that_does_not_answer_is_no_head():
    found = report(nodes=None, silence="503 no endpoints available")

    assert not found.head_alive
    assert "Ray does not answer: 503 no endpoints available" in found.describe()


def test_a_head_that_crashes_again_and_again_says_why():
    """F21: the container's reason and its last words."""
    state = {
        "name": "ray-head",
        "restartCount": 3,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting"}},
        "lastState": {"terminated": {"reason": "Error", "exitCode": 13}},
    }
    head = pod(None, status={"conditions": [condition("PodScheduled")], "containerStatuses": [state]})
    found = report(pods=with_pods(head), nodes=None, last_lines={"head": ["cannot bind", "giving up"]})

    assert "head pod head CrashLoopBackOff: back-off 40s restarting" in found.describe()
    assert "ended 3 times, last with Error, exit code 13" in found.describe()
    assert "its last words: cannot bind | giving up" in found.describe()


AWAY = {
    "waits for a node": waiting(None, 0, "0/3 nodes are available"),
    "is being deleted": pod(None, metadata={"deletionTimestamp": text(40)}),
    "has ended": pod(None, status={"phase": "Failed", "conditions": [condition("PodScheduled", seconds=5)]}),
    "CrashLoopBackOff": held_back("CrashLoopBackOff"),
    "ErrImagePull": held_back("ErrImagePull"),
}


@pytest.mark.parametrize("words", AWAY)
def test_nothing_stands_without_a_head_that_runs(words):
    """Jobs go with it: nobody waits for what ran until the deadline for running has passed (F22)."""
    found = report(pods=with_pods(AWAY[words]), nodes=None)

    assert not found.stands
    assert found.lost
    assert not found.broken  # the hosts are there, and come back to the head that KubeRay brings
    assert f"head pod head {words}" in found.describe()


def test_a_head_that_is_not_there_is_no_head_and_waits_for_kuberay():
    found = report(pods=PODS[1:], nodes=None)

    assert not found.stands
    assert found.lost
    assert found.phase is Phase.PROVISIONING


def test_a_head_that_waits_for_a_node_counts_from_when_it_was_made():
    head = waiting(None, 0, "0/3 nodes are available")
    head["metadata"]["creationTimestamp"] = text(500)
    found = report(pods=with_pods(head), nodes=None)

    assert (found.phase, found.since) == (Phase.PROVISIONING, at(500))


def test_a_head_that_runs_and_is_only_not_ready_may_be_busy():
    busy = pod(None, status={"conditions": [condition("PodScheduled", seconds=5), condition("Ready", False)]})
    found = report(pods=with_pods(busy), nodes=None)

    assert found.stands
    assert not found.lost


def test_an_image_that_cannot_be_pulled_is_named():
    state = {"name": "ray-worker", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found: x/y:1"}}}
    host = pod(0, 1, status={"conditions": [condition("PodScheduled")], "containerStatuses": [state]})
    found = report(pods=with_pods(host), nodes=[*NODES[:2], *NODES[3:]])

    assert "pod slice-0-host-1 (worker 1) ErrImagePull: not found: x/y:1" in found.describe()


def test_an_init_container_that_waits_is_named():
    init = [{"name": "wait-gcs-ready", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "x"}}}]
    status = {"conditions": [condition("PodScheduled")], "initContainerStatuses": init, "containerStatuses": []}
    found = report(pods=with_pods(pod(0, 1, status=status)), nodes=[*NODES[:2], *NODES[3:]])

    assert "pod slice-0-host-1 (worker 1) ImagePullBackOff: x" in found.describe()


def test_a_host_that_vanished_breaks_its_slice():
    """F13: the pod's host does not answer, so the pod still looks as if it ran."""
    found = report(nodes=[*NODES[:4], node(1, 1, alive=False, state_message="health check failed")])

    assert found.broken == ["slice-1"]
    assert not found.stands


@pytest.mark.parametrize("now", [229, 231])
def test_a_host_that_never_ends_its_pod_is_gone_and_breaks_its_slice(now):
    """F13: its Node object stays, so Kubernetes waits for it for ever, and KubeRay for the pod."""
    gone = pod(1, 1, metadata={"deletionTimestamp": text(200)})
    found = report(pods=with_pods(gone), nodes=[*NODES[:4], node(1, 1, alive=False)], now=now)

    assert not found.ready
    assert found.broken == (["slice-1"] if now > 230 else [])
    assert ("slice-1-host-1 (worker 1) is being deleted, and its host is gone" in found.describe()) == (now > 230)


def test_a_head_whose_host_is_gone_breaks_every_slice():
    """KubeRay makes no other head while its pod is there, and the hosts' Ray ends without one."""
    gone = pod(None, metadata={"deletionTimestamp": text(200)})
    found = report(pods=with_pods(gone), nodes=None, now=231)

    assert found.broken == ["slice-0", "slice-1"]
    assert found.lost
    assert "head pod head is being deleted, and its host is gone" in found.describe()
    assert not report(pods=with_pods(gone), nodes=None, now=229).broken


def test_a_pod_that_ended_breaks_its_slice():
    found = report(pods=with_pods(pod(0, 1, status={"phase": "Failed"})), nodes=[*NODES[:2], *NODES[3:]])

    assert found.broken == ["slice-0"]
    assert "pod slice-0-host-1 (worker 1) has ended" in found.describe()


def test_a_container_that_starts_again_breaks_nothing():
    """Its raylet died with it and a new one comes: the dead node is of the container's earlier run."""
    state = {"name": "ray-worker", "restartCount": 1, "state": {"running": {"startedAt": text(60)}}}
    again = pod(1, 1, status={"containerStatuses": [state]})
    found = report(pods=with_pods(again), nodes=[*NODES[:4], node(1, 1, alive=False)])

    assert not found.ready
    assert not found.broken


def test_a_slice_that_was_made_anew_is_no_slice_until_its_own_hosts_are_labelled():
    """A replica recreated under us: Ray still shows the hosts of the old one, alive even."""
    fresh = [pod(1, host, metadata={"creationTimestamp": text(90)}) for host in (0, 1)]
    for host, one in enumerate(fresh):
        one["status"]["podIP"] = f"10.0.9.{host}"
        one["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = text(100)
    found = report(pods=with_pods(*fresh))

    assert not found.ready
    assert not found.broken
    assert f"Ray has not noticed yet that slice-1 worker 0 at {address(1, 0)} is gone" in found.describe()


def test_an_address_that_is_used_again_is_not_mistaken_for_its_former_host():
    state = {"name": "ray-worker", "restartCount": 0, "state": {"running": {"startedAt": text(100)}}}
    fresh = pod(1, 1, metadata={"creationTimestamp": text(90)}, status={"containerStatuses": [state]})
    dead = node(1, 1, alive=False)
    found = report(pods=with_pods(fresh), nodes=[*NODES[:4], dead, node(1, 1, node_id="new", started_at=at(101))])

    assert found.ready, found.describe()


def test_a_slice_under_a_new_number_takes_the_place_of_the_old_one():
    old = [pod(1, host, metadata={"deletionTimestamp": text(200)}) for host in (0, 1)]
    new = [pod(2, host) for host in (0, 1)]
    nodes = [*NODES[:3], *(node(2, host) for host in (0, 1))]
    found = report(pods=[*PODS[:3], *old, *new], nodes=nodes)

    assert [one.name for one in found.slices] == ["slice-0", "slice-2"]
    assert found.ready, found.describe()


@pytest.mark.parametrize("legacy", ["slice-1", "1"])
def test_pods_that_only_the_webhook_has_numbered_are_of_their_slice(legacy):
    hosts = []
    for host in (0, 1):
        one = pod(1, host)
        one["metadata"]["labels"] = {"ray.io/node-type": "worker", "replicaIndex": legacy}
        hosts.append(one)

    assert report(pods=with_pods(*hosts)).ready


def test_a_cluster_over_quota_is_queued_and_says_so_in_kueues_words():
    """F10."""
    message = "couldn't assign flavors to pod set slice: insufficient quota for google.com/tpu in flavor v4"
    suspended = cluster(labels={"kueue.x-k8s.io/queue-name": "team"}, suspend=True)
    found = report(
        suspended, pods=[], nodes=None, the_workload=workload(condition("QuotaReserved", False, "Pending", message, 7))
    )

    assert (found.phase, found.since) == (Phase.QUEUED, at(0))
    assert f"queued by Kueue in LocalQueue team: {message}" in found.describe()
    assert not found.ready
    assert not found.broken
    assert not found.stands


def test_one_that_kueue_preempted_is_queued_again_since_then():
    suspended = cluster(labels={"kueue.x-k8s.io/queue-name": "team"}, suspend=True)
    found = report(
        suspended,
        pods=[],
        nodes=None,
        the_workload=workload(
            condition("QuotaReserved", False, "Pending", "no quota"),
            condition("Evicted", True, "Preempted", "Preempted to accommodate a workload", 300),
        ),
    )

    assert (found.phase, found.since) == (Phase.QUEUED, at(300))
    assert "lost its quota: Preempted: Preempted to accommodate a workload" in found.describe()
    assert not found.stands


def test_what_kueue_has_admitted_counts_from_its_admission():
    """F10."""
    queued = cluster(labels={"kueue.x-k8s.io/queue-name": "team"})
    admitted = workload(condition("QuotaReserved"), condition("Admitted", seconds=3600))
    found = report(queued, pods=PODS[:1], nodes=NODES[:1], the_workload=admitted)

    assert (found.phase, found.since) == (Phase.PROVISIONING, at(3600))


def test_a_queue_that_does_not_exist_is_asked_about():
    suspended = cluster(labels={"kueue.x-k8s.io/queue-name": "team"}, suspend=True)

    assert "is there such a LocalQueue in the namespace?" in report(suspended, pods=[], nodes=None).describe()


def test_one_that_somebody_suspended_says_so():
    found = report(cluster(suspend=True), pods=[], nodes=None)

    assert found.phase is Phase.QUEUED
    assert "somebody set spec.suspend" in found.describe()


# Nodes that Google queues


def asked(name: str, *said: str, since: float = 0) -> RequestView:
    rows = [condition(one, message="ETA: soon", seconds=since) for one in said]
    return RequestView.of(
        {
            "metadata": {"name": name, "creationTimestamp": text(since)},
            "spec": {"podSets": [{"podTemplateRef": {"name": name}}]},
            "status": {"conditions": rows},
        }
    )


WAITS = [pod(None), *(waiting(*place, "0/3 nodes") for place in HOSTS)]


def test_hours_in_googles_queue_are_a_phase_of_their_own():
    """F10."""
    found = judged(
        SPEC, NAME, seen(pods=WAITS, requests=[asked("a", "Provisioned"), asked("b", "Accepted", since=900)])
    )
    assert (found.phase, found.since) == (Phase.QUEUED, at(900))
    assert "ProvisioningRequest b is Accepted: ETA: soon" in found.describe()
    assert not found.broken


def test_a_start_up_begins_when_the_nodes_came():
    found = judged(SPEC, NAME, seen(pods=WAITS, requests=[asked("a", "Provisioned", since=50000)]))
    assert (found.phase, found.since) == (Phase.PROVISIONING, at(50000))


def test_a_queue_does_not_hide_a_slice_that_is_lost():
    found = judged(SPEC, NAME, seen(pods=WAITS, requests=[asked("a", "Accepted")], lost_pools=["pool b is gone"]))
    assert found.phase is Phase.PROVISIONING
    assert len(found.broken) == 1


def test_flex_start_nodes_are_queued_for_until_each_slice_has_a_first_one():
    """F10: hours until then are no start-up, and those of another slice are no sign."""
    head, flex = pod(None), replace(seen().cluster, flex_start=True)
    first = pod(0, 0, status={"conditions": [condition("PodScheduled", seconds=9000)]})
    last = pod(1, 0, status={"conditions": [condition("PodScheduled", seconds=9500)]})
    for there in ([], [first]):
        rest = [waiting(*place, "0/3 nodes") for place in HOSTS[len(there) :]]
        found = judged(SPEC, NAME, replace(seen(pods=[head, *there, *rest]), cluster=flex))
        assert (found.phase, found.since) == (Phase.QUEUED, at(1))
    rest = [waiting(0, 1, "0/3 nodes"), waiting(1, 1, "0/3 nodes")]
    found = judged(SPEC, NAME, replace(seen(pods=[head, first, last, *rest]), cluster=flex))
    assert (found.phase, found.since) == (Phase.PROVISIONING, at(9500))


@pytest.mark.parametrize("once", [True, False])
def test_hosts_without_nodes_were_taken_back_where_all_were_there_once(once: bool):
    """F12."""
    found = report(cluster(status={"conditions": [condition("RayClusterProvisioned", once)]}), pods=WAITS, nodes=None)
    assert found.taken_back is once
    assert not report().taken_back
