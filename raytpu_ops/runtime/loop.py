"""The worker's side of training: finds its place, runs the user's loop, tells the driver.

One process on each host, started by Ray's JaxTrainer, which has connected JAX before this begins.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from raytpu_ops.runtime import place, run
from raytpu_ops.runtime.checkpoints import FOLDER
from raytpu_ops.runtime.cluster import SLICE_NAME, WORKER_ID
from raytpu_ops.runtime.console import use_whole_lines
from raytpu_ops.runtime.ledger import Ledger
from raytpu_ops.runtime.targets import failure_record, import_target, plain
from raytpu_ops.tpu.work import TrainWork, load_work


def run_loop(payload: dict[str, str]) -> None:
    """What JaxTrainer calls on each worker.

    :param payload: ``work``, the work's JSON, and ``run``, the run's name in the ledger.
    """
    work = load_work(payload["work"])
    assert isinstance(work, TrainWork)
    use_whole_lines()
    ledger = Ledger(payload["run"])
    host = _here(work)
    # Orbax tells thirty lines a save on each host; what goes wrong is louder than that.
    logging.getLogger("absl").setLevel(logging.WARNING)
    try:
        ledger.put("worker", str(host.rank), _record(host))
        place.enter(host)
        this = run.CurrentRun(
            host, f"{work.storage}/{work.run_name}/{FOLDER}", work.keep_checkpoints, work.resume, ledger
        )
        run.enter(this)
        returned = import_target(work.train_loop, "train_loop")(dict(work.config))
        this.finish()
        if host.rank == 0 and returned is not None:
            ledger.put("returned", "0", {"value": plain(returned, f"what {work.train_loop} returned")})
    except BaseException as error:
        ledger.put("failure", str(host.rank), failure_record(error))
        raise


def _here(work: TrainWork) -> place.CurrentHost:
    import ray
    import ray.train

    labels = place.labels()
    rank = ray.train.get_context().get_world_rank()
    return place.CurrentHost(
        rank=rank,
        num_hosts=work.spec.hosts,
        slice_name=labels[SLICE_NAME],
        # Ray gives ranks slice by slice; with one slice it sets no MEGASCALE variables.
        slice_index=int(os.environ.get("MEGASCALE_SLICE_ID", "0")),
        num_slices=work.spec.num_slices,
        worker_id=int(labels[WORKER_ID]),
        address=ray.util.get_node_ip_address(),
    )


def _record(host: place.CurrentHost) -> dict[str, Any]:
    import jax
    import ray

    return {
        "rank": host.rank,
        "slice": host.slice_name,
        "worker_id": host.worker_id,
        "ip": host.address,
        "megascale": place.megascale(),
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
        "devices": jax.device_count(),
        "local_devices": jax.local_device_count(),
        "platform": jax.default_backend(),
        "node_id": ray.get_runtime_context().get_node_id(),
        "pid": os.getpid(),
    }
