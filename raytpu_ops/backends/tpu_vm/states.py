"""What the states of queued resources and of TPU VMs mean: one table for each, and no other place decides.

Sources: ``QueuedResourceState.State`` and ``Node.State`` of Cloud TPU's API v2. Not here: what is done about
it (``granting.py``, ``health.py``).
"""

from __future__ import annotations

from enum import Enum


class Meaning(Enum):
    """What a state is to somebody who waits."""

    #: It stands in a queue; nothing is granted.
    QUEUED = "queued"
    #: Granted, and on its way up or back up.
    COMING = "coming"
    THERE = "there"
    #: It was not granted; nothing of it runs, and its quota is held until it is deleted (F11).
    REFUSED = "refused"
    #: It was there and is taken away; what ran on it is gone (F12).
    LOST = "lost"
    #: It is being deleted.
    GOING = "going"
    #: A word that came after this was written: neither good nor bad.
    UNKNOWN = "unknown"


#: States of a queued resource in which Google refuses to delete it, also by force: it can be deleted in those that
#: come after them. ``DeleteQueuedResource is not supported when state is PROVISIONING`` is what many met.
HELD = frozenset({"CREATING", "PROVISIONING", "SUSPENDING"})
_QUEUED_RESOURCES = {
    "CREATING": Meaning.QUEUED,
    "ACCEPTED": Meaning.QUEUED,
    "WAITING_FOR_RESOURCES": Meaning.QUEUED,
    "PROVISIONING": Meaning.COMING,
    "ACTIVE": Meaning.THERE,
    "FAILED": Meaning.REFUSED,
    "SUSPENDING": Meaning.LOST,
    "SUSPENDED": Meaning.LOST,
    "DELETING": Meaning.GOING,
}
_NODES = {
    "CREATING": Meaning.COMING,
    "READY": Meaning.THERE,
    # Google mends or moves a host and starts it again by itself; the startup script then runs again.
    "RESTARTING": Meaning.COMING,
    "REIMAGING": Meaning.COMING,
    "REPAIRING": Meaning.COMING,
    "STARTING": Meaning.COMING,
    # Nobody of ours stops a node, and one that is stopped comes back only by hand.
    "STOPPING": Meaning.LOST,
    "STOPPED": Meaning.LOST,
    "HIDING": Meaning.LOST,
    "HIDDEN": Meaning.LOST,
    "UNHIDING": Meaning.LOST,
    "PREEMPTED": Meaning.LOST,
    "TERMINATED": Meaning.LOST,
    "DELETING": Meaning.GOING,
}


def queued_resource(state: str) -> Meaning:
    """What a queued resource's state means.

    :param state: the name of the state.
    """
    return _QUEUED_RESOURCES.get(state, Meaning.UNKNOWN)


def node(state: str) -> Meaning:
    """What a node's state means.

    :param state: the name of the state.
    """
    return _NODES.get(state, Meaning.UNKNOWN)
