"""What rides along inside Ray Train's controller: ends the workers' logs, fixes what it cannot be told.

Only imported where JaxTrainer is: it stands on Ray Train's developer API of callbacks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group import worker_group as ray_worker_group

from raytpu_ops.runtime.ledger import end_log
from raytpu_ops.runtime.reserve import Claim, reserve_together
from raytpu_ops.tpu.spec import SliceSpec

#: How long a worker may take to end its log; one that hangs must not hold the others up.
_END_S = 5.0
#: How long Ray Train waits for JAX to disconnect; with a dead peer it never does.
_JAX_SHUTDOWN = ("JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S", "10")


class Attendant(WorkerGroupCallback, ControllerCallback):
    """Attends one training run.

    :param run: the run, as the ledger calls it.
    :param spec: the slices that it asks for.
    :param within_s: how long they may be waited for, in seconds.
    """

    def __init__(self, run: str, spec: SliceSpec, within_s: float) -> None:
        self._run = run
        self._spec = spec
        self._within_s = within_s

    def after_controller_start(self, train_run_context: Any) -> None:
        """Settings that Ray Train reads in its own process and does not pass there."""
        os.environ.setdefault(*_JAX_SHUTDOWN)

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Reserve exactly these slices, all at once.

        JaxTrainer cannot be told of hosts with fewer chips than Ray guesses, and asks for single hosts by their chips
        alone, which hosts of larger slices have as well. Of several slices it keeps one while it waits for the next:
        two runs with a part each would wait for each other until both are over their deadline.
        """

        def reserved(*, resources_per_bundle: Mapping[str, float], **_asked: Any) -> Claim:
            return reserve_together(self._spec, self._within_s, f"raytpu-{self._run}", resources_per_bundle)

        ray_worker_group.SlicePlacementGroup = reserved

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Have each worker that still can end its log; the driver waits for those lines."""
        asked = [
            worker_group.execute_single_async(rank, end_log, self._run, str(rank)) for rank in range(len(worker_group))
        ]
        ray.wait(asked, num_returns=len(asked), timeout=_END_S)
