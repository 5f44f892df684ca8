"""What is seen of a queued resource that is waited for: granted, still to come, or an error.

Pure. Not here: how it is asked for and looked at (``granting.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raytpu_ops.backends.google.refusals import ended
from raytpu_ops.backends.tpu_vm.objects import NodeView, QueuedView
from raytpu_ops.backends.tpu_vm.states import Meaning
from raytpu_ops.tpu.errors import CapacityUnavailable
from raytpu_ops.waits import Done, Pending


class Granted(NamedTuple):
    """What was granted.

    :param queued: the queued resource.
    :param nodes: all its nodes, in the order of the slices.
    """

    queued: QueuedView
    nodes: Sequence[NodeView]


Found = tuple[QueuedView, Sequence[NodeView]]


def judged(view: QueuedView, nodes: Sequence[NodeView]) -> Pending | Done[Granted]:
    """What a queued resource that is waited for means.

    :param view: nobody deletes it.
    :param nodes: those of its nodes that exist.
    :raises CapacityUnavailable: it is not granted, or was taken back before it was whole.
    :raises Misconfigured: it can never be granted.
    """
    match view.meaning:
        case Meaning.REFUSED:
            raise ended(view.failure, str(view)) or CapacityUnavailable(
                f"{view} is {view.state}, and Google gives no reason"
            )
        case Meaning.LOST:
            raise CapacityUnavailable(f"{view} is {view.state}: Google took the slices back before they were whole")
        case Meaning.QUEUED | Meaning.UNKNOWN:
            return Pending(view.state)
    taken = [f"{node} is {node.words()}" for node in nodes if node.meaning in (Meaning.LOST, Meaning.GOING)]
    if taken:
        raise CapacityUnavailable(f"{view}: {', '.join(taken)} before all were there")
    ready = [node for node in nodes if node.meaning is Meaning.THERE and node.address]
    if view.meaning is Meaning.THERE and len(ready) == len(view.node_ids):
        return Done(Granted(view, ready))
    return Pending(f"{view.state}, {len(ready)} of {len(view.node_ids)} nodes are READY")
