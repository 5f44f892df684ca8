"""Where a piece of user code finds itself: its host, its slice, its number among all hosts.

World rank, worker id and slice are three different things: Ray orders ranks by slice name, and
within a slice in any order; ``worker_id`` is the host's place in the slice's wiring.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raytpu_ops.tpu.errors import DeadlineExceeded, Misconfigured

#: How long hosts wait for the first of them to say where it listens.
_COORDINATOR_S = 300.0
_LOOK_S = 0.1


@dataclass(frozen=True)
class CurrentHost:
    """The host that this code runs on.

    :param rank: its number among all hosts of the work, from 0.
    :param num_hosts: how many hosts the work runs on.
    :param slice_name: the slice that it is part of.
    :param slice_index: number of that slice in the work, from 0.
    :param num_slices: how many slices the work runs on.
    :param worker_id: its number in its slice, from 0.
    :param address: its IP address.
    """

    rank: int
    num_hosts: int
    slice_name: str
    slice_index: int
    num_slices: int
    worker_id: int
    address: str
    _coordinator: Callable[[], str | None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """How logs call it: ``slice-0 worker 1``."""
        return f"{self.slice_name} worker {self.worker_id}"

    def initialize_jax(self) -> None:
        """Connect JAX on all hosts of the work, so that ``jax.devices()`` shows the chips of every one.

        Each host must call it once, before it uses JAX. In a training loop and in a served model it
        has been done already. On hosts without TPUs ``JAX_PLATFORMS=cpu`` must be in the environment.

        :raises DeadlineExceeded: when the first host does not say where it listens.
        """
        # As Ray Train does: without the word, JAX falls back to the CPU where the TPU does not start.
        os.environ.setdefault("JAX_PLATFORMS", "tpu")
        import jax

        if self.num_hosts == 1 or jax.distributed.is_initialized():
            return
        until = time.monotonic() + _COORDINATOR_S
        while (coordinator := self._coordinator()) is None:
            if time.monotonic() > until:
                raise DeadlineExceeded(f"{self.name}: the first host has not said where it listens")
            time.sleep(_LOOK_S)  # the store on Ray's head cannot be waited on
        hide_kubernetes()
        jax.distributed.initialize(coordinator, num_processes=self.num_hosts, process_id=self.rank)


_current: CurrentHost | None = None


def current_host() -> CurrentHost:
    """The host that this code runs on.

    :raises Misconfigured: anywhere else than in code that this package runs on a host.
    """
    if _current is None:
        raise Misconfigured("current_host() works only in code that runs on a host of a slice, through this package")
    return _current


def hide_kubernetes() -> None:
    """Keep JAX from taking a pod for a cluster of its own.

    Where Kubernetes' variable is set, ``jax.distributed.initialize`` loads the pod's service account
    token before anything else, also when it is told all that it would ask for; our pods have none, and
    should not have one (jax/_src/clusters/k8s_cluster.py, 0.10).
    """
    os.environ.pop("KUBERNETES_SERVICE_HOST", None)


def enter(host: CurrentHost) -> None:
    """Make ``host`` what :func:`current_host` answers in this process."""
    global _current
    _current = host


def labels() -> dict[str, str]:
    """Ray's labels of the node that this process runs on."""
    import ray

    found: dict[str, Any] = ray.get_runtime_context().get_node_labels()
    return {name: value[0] if isinstance(value, list) else str(value) for name, value in found.items()}


def free_port(address: str) -> int:
    """A port of this address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def megascale() -> dict[str, str]:
    """The variables by which slices find each other, as they stand in this process."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("MEGASCALE_")}
