"""Why work on the hosts failed: one judgement for training and for functions.

When a host dies, its peers fail first and louder: JAX ends their processes, collectives raise in
the user's code. So every failure begins with the question whether all hosts are still there; then
the first exception counts; a process that died while its host lives is the last to be blamed.
Not here: how Ray words it (``train.py``, ``hosts.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raytpu_ops.runtime.cluster import Host, lost_hosts
from raytpu_ops.runtime.console import say
from raytpu_ops.tpu.errors import FailureClass, Preempted, RayTpuError, UserCodeFailed, error_for

#: How long a host may take to die after the first sign of it, in seconds.
GRACE_S = 15.0
#: Exceptions that a dead peer causes in living ones: jax's own, and gloo's, which are plain ValueErrors.
_PEER_KINDS = ("jaxlib.", "jax.")
_PEER_WORDS = ("Gloo", "Connection reset by peer", "Socket closed", "coordination service", "heartbeat")
#: Status words of jax's errors that no peer causes.
_OWN_FAULTS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "OUT_OF_RANGE")


@dataclass(frozen=True)
class Raised:
    """An exception in the user's code.

    :param host: name of the host that it was raised on.
    :param at: when, as that host's clock tells.
    :param error: the last line of its traceback.
    :param kind: its class, with the module.
    :param ours: the failure class, where this package raised it.
    """

    host: str
    at: float
    error: str
    kind: str
    ours: str = ""

    @property
    def by_a_peer(self) -> bool:
        """It may be what a living host sees when another one is gone."""
        sounds = self.kind.startswith(_PEER_KINDS) or any(word in self.error for word in _PEER_WORDS)
        return sounds and not any(word in self.error for word in _OWN_FAULTS)


@dataclass(frozen=True)
class Died:
    """A process on a host that ended without an exception of ours.

    :param host: name of the host.
    :param how: what Ray knows of its end, on one line.
    """

    host: str
    how: str


def judge(what: str, hosts: Iterable[Host], raised: Iterable[Raised], died: Iterable[Died]) -> RayTpuError:
    """The one error for everything that went wrong.

    :param what: the work, in words.
    :param hosts: every host that it ran on.
    :param raised: exceptions of the user's code, from every host that had one.
    :param died: processes that ended without one.
    """
    hosts = list(hosts)
    first = min(raised, key=lambda one: (one.by_a_peer, one.at), default=None)
    ends = list(died)
    suspect = first is None or first.by_a_peer
    if suspect:
        say(f"looking whether a host died: waiting up to {GRACE_S:.0f} s for signs of it")
    if lost := lost_hosts(hosts, GRACE_S if suspect else 0.0):
        return Preempted(
            f"{what}: {', '.join(str(host) for host in lost)} died while it ran. "
            "A slice with a lost host is broken as a whole: replace it, then try again."
        )
    if first is not None and not (first.by_a_peer and ends):
        if first.ours:
            return error_for(FailureClass(first.ours), f"{first.error.partition(': ')[2]} ({first.host})")
        return UserCodeFailed(f"{what} raised on {first.host}: {first.error}")
    if ends:
        where = ", ".join(sorted(end.host for end in ends))
        after = ", one of them first and its peers for lack of it" if len(ends) > 1 else ""
        return UserCodeFailed(
            f"{what}: its process died on {where}{after}, while every host lives on: out of memory, a crash in "
            f"native code, or an exit of its own. {ends[0].how}"
        )
    return UserCodeFailed(f"{what} failed, no host says why; see the log above")
