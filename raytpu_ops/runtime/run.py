"""What a training loop has at hand: its place, its checkpoints, a mesh over all hosts.

    def loop(config):
        run = current_run()
        state = ...
        if (found := run.restore(state)) is not None:
            step, state = found
        ...
        run.report({"loss": loss}, step=step, state=state)

Not here: how the loop got onto the hosts (``train.py``, ``loop.py``).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from raytpu_ops.runtime.checkpoints import abstract, make_manager
from raytpu_ops.runtime.ledger import Ledger
from raytpu_ops.runtime.place import CurrentHost
from raytpu_ops.runtime.targets import plain
from raytpu_ops.tpu.errors import Misconfigured

#: Steps of the history that the result keeps: it travels through XCom.
_HISTORY = 200


class CurrentRun:
    """The training run that this code is part of. The same methods must be called on every host.

    :param host: where this code runs.
    :param directory: folder or URL of the run's checkpoints.
    :param keep: how many checkpoints stay.
    :param resume: go on from the last checkpoint where there is one.
    :param ledger: where the driver reads how far it is.
    """

    def __init__(self, host: CurrentHost, directory: str, keep: int, resume: bool, ledger: Ledger) -> None:
        self.host = host
        self.directory = directory
        self.resumed_from: int | None = None
        self._keep = keep
        self._resume = resume
        self._ledger = ledger
        self._history: list[dict[str, Any]] = []
        self._saved: int | None = None

    @cached_property
    def checkpoints(self) -> Any:
        """Orbax's ``CheckpointManager`` of this run."""
        return make_manager(self.directory, self._keep, fresh=not self._resume)

    def restore(self, template: Any) -> tuple[int, Any] | None:
        """The last checkpoint, None where the run begins from the start.

        :param template: a tree of arrays of the form that was saved; each array comes back sharded
            like the one that stands in its place.
        :return: the step that it was saved at, and the tree.
        """
        import orbax.checkpoint as ocp

        step = self.checkpoints.latest_step()
        if step is None:
            return None
        state = self.checkpoints.restore(step, args=ocp.args.StandardRestore(abstract(template)))
        self.resumed_from = self._saved = step
        self._tell()
        return step, state

    def report(self, metrics: dict[str, Any], *, step: int, state: Any = None) -> None:
        """Say how far the run is, and save it.

        :param metrics: numbers; the last ones are the result's metrics.
        :param step: any number that grows from report to report.
        :param state: a tree of arrays to save as the checkpoint of this step; nothing is saved
            without it. It is whole on storage when this returns.
        """
        if state is not None:
            import orbax.checkpoint as ocp

            if not self.checkpoints.save(step, args=ocp.args.StandardSave(state)):
                last = self.checkpoints.latest_step()
                raise Misconfigured(f"step {step} was not saved: step {last} is, and steps must grow")
            self._saved = step
        self._history = [*self._history, {"step": step, **plain(metrics, "metrics")}][-_HISTORY:]
        self._tell()

    def finish(self) -> None:
        """Called after the loop: everything is on storage."""
        if "checkpoints" in self.__dict__:
            self.checkpoints.wait_until_finished()
            self.checkpoints.close()
        self._tell()

    def _tell(self) -> None:
        if self.host.rank == 0:
            self._ledger.put("progress", "0", self.summary())

    def summary(self) -> dict[str, Any]:
        """How far the run is, as the result says it."""
        last = self._history[-1] if self._history else {}
        return {
            "metrics": {name: value for name, value in last.items() if name != "step"},
            "step": last.get("step", self.resumed_from),
            "history": self._history,
            "checkpoint": None if self._saved is None else f"{self.directory}/{self._saved}",
            "resumed_from_step": self.resumed_from,
        }

    @cached_property
    def mesh(self) -> Any:
        """A mesh with one axis, ``data``, over every chip of every host."""
        import jax
        import numpy as np

        return jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))

    @property
    def replicated(self) -> Any:
        """The sharding of what every chip holds whole, such as parameters in data-parallel training."""
        import jax

        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())

    @property
    def sharded(self) -> Any:
        """The sharding of what is split over all chips along its first dimension, such as a batch."""
        import jax

        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec("data"))

    def shard(self, batch: Any) -> Any:
        """One global batch out of the part that each host brings.

        :param batch: a tree of arrays: this host's rows; as many on each host, a multiple of its chips.
        """
        import jax

        return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(self.sharded, rows), batch)

    def rows(self, count: int) -> slice:
        """Which of ``count`` rows this host works on: as many on each host, the remainder is left out."""
        share = count // self.host.num_hosts
        return slice(self.host.rank * share, (self.host.rank + 1) * share)


_current: CurrentRun | None = None


def current_run() -> CurrentRun:
    """The training run that this code is part of.

    :raises Misconfigured: anywhere else than in a training loop that this package runs.
    """
    if _current is None:
        raise Misconfigured("current_run() works only in a training loop that RayTrainOperator runs")
    return _current


def enter(run: CurrentRun) -> None:
    """Make ``run`` what :func:`current_run` answers in this process."""
    global _current
    _current = run
