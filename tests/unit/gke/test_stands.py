"""Which of a lease's work still has its hosts, as KubeRay and Ray show what became of a slice."""

from __future__ import annotations

from typing import Any

import pytest

from raytpu_ops.backends.gke.health import judged
from tests.unit.gke.seen import NAME, NODES, PODS, SPEC, node, pod, seen, text, waiting, with_pods

GOING = {"deletionTimestamp": text(40)}
EVICTED = pod(1, 1, status={"phase": "Failed", "containerStatuses": []})
#: What befell the second slice: pods and Ray's nodes.
LOSSES: dict[str, tuple[list[dict[str, Any]], list[Any]]] = {
    "a pod made anew waits for a node": (with_pods(waiting(1, 1, "0/5 nodes are available")), NODES[:-1]),
    "a pod is not made yet": (PODS[:-1], NODES[:-1]),
    "Ray still counts on a pod that is gone": (PODS[:-1], NODES),
    "none of its pods is left": (PODS[:3], NODES[:3]),
    "its pods are being deleted": (with_pods(*(pod(1, host, metadata=GOING) for host in (0, 1))), NODES[:3]),
    "another has its place": ([*PODS[:3], pod(2, 0), pod(2, 1)], [*NODES[:3], node(2, 0), node(2, 1)]),
    "a pod has ended": (with_pods(EVICTED), NODES[:-1]),
    "Ray lost a host": (PODS, [*NODES[:-1], node(1, 1, alive=False)]),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_befalls_a_slice_takes_only_the_work_that_runs_on_it(loss):
    """F13: the slice is broken as a whole; a job on another one goes on."""
    pods, nodes = LOSSES[loss]
    found = judged(SPEC, NAME, seen(pods=pods, nodes=nodes))

    assert found.stands_under(["slice-0"], 1), found.describe()
    assert found.stands_under([], 1)
    assert not found.stands_under(["slice-1"], 1)
    assert not found.stands_under(["slice-0", "slice-1"], 2)


def test_without_a_head_no_work_stands():
    found = judged(SPEC, NAME, seen(pods=with_pods(waiting(None, 0, "0/3 nodes are available")), nodes=None))

    assert not found.stands_under(["slice-0"], 1)
    assert not found.stands_under([], 1)
