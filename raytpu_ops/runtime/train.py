"""Training: from the work to Ray's JaxTrainer, and from its end to a result or one of our errors.

Ray Train waits for ever for slices that it cannot get and starts again by itself; here a run has a
deadline for its start, and every failure ends it: Airflow retries, on slices that are whole.
Metrics and checkpoints do not go through ``ray.train.report``: each report would wait for the
controller's next look, and orbax keeps the hosts in step already. A loop may still use it.
Not here: what happens on the workers (``loop.py``).
"""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime
from typing import Any

from raytpu_ops.runtime.cluster import Host, holdings, tpu_hosts, whole_slices
from raytpu_ops.runtime.console import emit, say
from raytpu_ops.runtime.failures import Died, Raised, judge
from raytpu_ops.runtime.reserve import not_reserved
from raytpu_ops.runtime.session import Session
from raytpu_ops.tpu.errors import DeadlineExceeded, Misconfigured, Preempted, RayTpuError, RemoteUnavailable
from raytpu_ops.tpu.work import Event, TrainWork, dump_work

#: Pause between two looks at who has begun.
_LOOK_S = 0.2
#: Settings of Ray Train, as far as the user has not made them.
_SETTINGS = {
    # Its print() writes each line twice where stdout is not Python's own, as on every Ray worker (2.60).
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # How soon the end of a worker is noticed.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # Files beside the user's code are found by their relative paths.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


def run_train(work: TrainWork, session: Session) -> dict[str, Any]:
    """Run the loop on every host of the slices, to its end.

    :return: the result, as plain JSON.
    :raises RayTpuError: of the class that says why it failed.
    """
    # Made before anything is waited for: what is wrong with the settings shows at once.
    fit = _Fit(_trainer(work, session))
    workers: list[dict[str, Any]] = []
    while not fit.over.wait(None if workers else _LOOK_S):
        if session.ledger.count("worker") == work.spec.hosts:
            workers = _say_started(session)
        elif session.waited_s > work.start_timeout_s:
            session.last_lines(work.spec.hosts)
            raise _not_started(work, session)
    session.last_lines(work.spec.hosts)
    if fit.error is not None:
        raise _judged(fit.error, work, session) from fit.error
    return _result(work, session, workers or _say_started(session))


class _Fit:
    """``trainer.fit()`` in a thread of its own, because nothing can interrupt it."""

    def __init__(self, trainer: Any) -> None:
        self.over = threading.Event()
        self.error: BaseException | None = None
        self._trainer = trainer
        threading.Thread(target=self._run, name="fit", daemon=True).start()

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self.error = error
        finally:
            self.over.set()


def _trainer(work: TrainWork, session: Session) -> Any:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if work.env.get("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS")) == "cpu":
        # Nobody drains a host that a CPU machine plays, and the watcher is one process more to start.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", f"{work.start_timeout_s:.0f}")

    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    from raytpu_ops.runtime.attendant import Attendant
    from raytpu_ops.runtime.loop import run_loop

    shape = work.spec.shape
    shape.check_reserved()
    return JaxTrainer(
        run_loop,
        train_loop_config={"work": dump_work(work), "run": session.run},
        scaling_config=ScalingConfig(
            use_tpu=True,
            topology=shape.topology,
            accelerator_type=shape.ray_accelerator,
            num_workers=work.spec.hosts,
            # No CPU is asked for, see reserve.py.
            resources_per_worker={"TPU": shape.chips_per_host, "CPU": 0},
        ),
        run_config=RunConfig(
            # Ray Train's own folder, for a loop that reports checkpoints to it; found again by a retry.
            name="ray" if work.resume else f"ray-{session.run}",
            storage_path=f"{work.storage}/{work.run_name}",
            checkpoint_config=CheckpointConfig(num_to_keep=work.keep_checkpoints),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
            worker_runtime_env={"env_vars": work.env} if work.env else None,
            callbacks=[Attendant(session.run, work.spec, work.start_timeout_s)],
        ),
    )


def _workers(session: Session) -> list[dict[str, Any]]:
    return sorted(session.ledger.read("worker").values(), key=lambda record: int(record["rank"]))


def _say_started(session: Session) -> list[dict[str, Any]]:
    workers = _workers(session)
    emit(Event(event="started", data={"at": datetime.now(UTC).isoformat(), "workers": _public(workers)}))
    return workers


def _public(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in ("node_id", "pid")} for record in workers]


def _result(work: TrainWork, session: Session, workers: list[dict[str, Any]]) -> dict[str, Any]:
    progress = session.ledger.get("progress", "0") or {}
    returned = session.ledger.get("returned", "0") or {}
    return {
        "metrics": {},
        "step": None,
        "history": [],
        "checkpoint": None,
        "resumed_from_step": None,
        **progress,
        **({"returned": returned["value"]} if returned else {}),
        "run_name": work.run_name,
        "workers": _public(workers),
        "slices": sorted({record["slice"] for record in workers}),
        "started_at": session.started_at.isoformat(),
        "finished_at": datetime.now(UTC).isoformat(),
    }


def _not_started(work: TrainWork, session: Session) -> RayTpuError:
    """Why the loop does not run on every host at the deadline."""
    import ray

    job = ray.get_runtime_context().get_job_id()
    mine = {holding.node_id for holding in holdings(session.address) if holding.job_id == job}
    if len(whole_slices(work.spec.shape)) < work.spec.num_slices or len(mine) < work.spec.hosts:
        return _not_reserved(work, session)
    begun = {record["node_id"] for record in _workers(session)}
    missing = [str(host) for host in tpu_hosts(work.spec.shape.pod_type) if host.node_id in mine - begun]
    return DeadlineExceeded(
        f"{work.train_loop}: reserved all {work.spec.hosts} hosts, but after {session.waited_s:.0f} s it does not run "
        f"on {', '.join(missing)}: its process or JAX does not come up there, see the log above"
    )


def _not_reserved(work: TrainWork, session: Session) -> RayTpuError:
    import ray

    job = ray.get_runtime_context().get_job_id()
    return not_reserved(work.spec, session.waited_s, session.address, lambda holding: holding.job_id == job)


def _judged(error: BaseException, work: TrainWork, session: Session) -> RayTpuError:
    """Ray Train's failure as ours."""
    from ray.train import WorkerGroupError
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
    from ray.train.v2.api.exceptions import ControllerError, PreemptionError

    workers = {str(record["rank"]): record for record in _workers(session)}
    hosts = _hosts(work, workers)
    names = {rank: f"{record['slice']} worker {record['worker_id']}" for rank, record in workers.items()}
    failures = session.ledger.read("failure")
    raised = [Raised(host=names.get(rank, f"rank {rank}"), **record) for rank, record in failures.items()]
    if isinstance(error, PreemptionError):
        gone = ", ".join(names.get(str(rank), f"rank {rank}") for rank in error.preemption_info.preempted_ranks)
        return Preempted(f"{work.train_loop}: {gone} was taken back while it ran")
    if isinstance(error, WorkerGroupError):
        died = [
            Died(host=names.get(str(rank), f"rank {rank}"), how=_how(failure))
            for rank, failure in error.worker_failures.items()
            if str(rank) not in failures
        ]
        return judge(work.train_loop, hosts, raised, died)
    cause = error.controller_failure if isinstance(error, ControllerError) else error
    if isinstance(cause, WorkerGroupStartupTimeoutError):
        return _not_started(work, session)
    if len(whole_slices(work.spec.shape)) < work.spec.num_slices:
        return _not_reserved(work, session)
    say(f"Ray Train failed before the loop ran: {type(cause).__name__}: {cause}")
    if raised or "died" in str(cause).lower():
        error = judge(work.train_loop, hosts, raised, [Died(host="a host", how=_how(cause))])
        if raised or workers or isinstance(error, Preempted):
            return error
        # Nothing of the user's ran: JAX ends its processes where they do not find together, as when the port that
        # was free for its coordinator a moment ago no longer is.
        return RemoteUnavailable(
            f"{work.train_loop}: the processes on the hosts died before it ran, while every host lives on; a retry "
            f"starts them anew. {_how(cause)}"
        )
    return Misconfigured(f"{work.train_loop}: Ray Train did not start it: {_how(cause)}")


def _hosts(work: TrainWork, workers: dict[str, dict[str, Any]]) -> list[Host]:
    """Hosts of the run; where no worker came so far, every host that it could have had."""
    nodes = {record["node_id"] for record in workers.values()}
    there = tpu_hosts(work.spec.shape.pod_type)
    return [host for host in there if (host.node_id in nodes if nodes else host.alive)]


def _how(error: BaseException) -> str:
    """The part of Ray's message that says something, on one line."""
    text = str(getattr(error, "health_check_failure", error))
    about = text.find("Worker exit detail")
    return " ".join((text[about:] if about >= 0 else text).split())[:400]
