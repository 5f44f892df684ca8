"""How a training run's end becomes a result or one of our errors, without a cluster."""

from __future__ import annotations

import warnings
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what libraries below Ray Train warn of at import is not ours
    from ray.train import WorkerGroupError
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError
    from ray.train.v2.api.exceptions import ControllerError, PreemptionError

from raytpu_ops.runtime import train
from raytpu_ops.runtime.cluster import Holding, Host
from raytpu_ops.tpu.errors import (
    DeadlineExceeded,
    Misconfigured,
    Preempted,
    RayTpuError,
    RemoteUnavailable,
    UserCodeFailed,
)
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.tpu.work import TrainWork

SPEC = SliceSpec.of("v4", "2x2x2")
WORK = TrainWork.of(spec=SPEC, train_loop="a.b:loop", storage="/x", run_name="r")
HOSTS = [Host(f"n{w}", f"127.0.0.{w + 2}", 1, "s0", w, "v4-16", 4, alive=True) for w in (0, 1)]


class Ledger:
    """Records that workers left."""

    def __init__(self, workers: int = 2, **kinds: dict[str, Any]) -> None:
        # Rank 0 is on worker 1: ranks and worker ids are different things.
        records = {
            str(rank): {"rank": rank, "slice": "s0", "worker_id": 1 - rank, "node_id": f"n{1 - rank}", "pid": 7}
            for rank in range(workers)
        }
        self._kinds = {"worker": records, **kinds}

    def read(self, kind: str) -> dict[str, Any]:
        return self._kinds.get(kind, {})

    def get(self, kind: str, who: str) -> Any:
        return self.read(kind).get(who)


def session(**options: Any) -> Any:
    return SimpleNamespace(
        ledger=Ledger(**options), address="head:1", waited_s=61.0, started_at=datetime(2026, 1, 1, tzinfo=UTC)
    )


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A whole slice that this job holds; tests take away from it."""
    seen = SimpleNamespace(whole={"s0": HOSTS}, held=[Holding(h.node_id, 4, "4 chips", "mine") for h in HOSTS])
    monkeypatch.setattr(train, "tpu_hosts", lambda _pod_type=None: HOSTS)
    monkeypatch.setattr(train, "whole_slices", lambda _shape: seen.whole)
    monkeypatch.setattr(train, "holdings", lambda _address: seen.held)
    monkeypatch.setattr(train, "_not_reserved", lambda *_: Preempted("not reserved"))
    monkeypatch.setattr("raytpu_ops.runtime.failures.lost_hosts", lambda _hosts, _grace: [])
    context = SimpleNamespace(get_job_id=lambda: "mine")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    return seen


def judged(error: BaseException, **options: Any) -> RayTpuError:
    return train._judged(error, WORK, session(**options))


def failure(at: float, error: str, ours: str = "") -> dict[str, Any]:
    return {"at": at, "error": error, "kind": "builtins.X", "ours": ours}


def test_the_first_exception_is_named_with_its_host_not_its_rank() -> None:
    error = judged(
        WorkerGroupError("x", {0: ValueError("a"), 1: ValueError("b")}),
        failure={"0": failure(2.0, "ValueError: a"), "1": failure(1.0, "ValueError: b")},
    )
    assert isinstance(error, UserCodeFailed)
    assert str(error) == "a.b:loop raised on s0 worker 0: ValueError: b"


def test_a_worker_that_died_without_a_word_is_named_with_what_ray_knows() -> None:
    died = WorkerHealthCheckFailedError("x", RuntimeError("class_name: X\nWorker exit detail: OOM\n killer"))
    error = judged(WorkerGroupError("x", {0: died}))
    assert isinstance(error, UserCodeFailed)
    assert "its process died on s0 worker 1" in str(error)
    assert str(error).endswith("Worker exit detail: OOM killer")


def test_a_drained_host_is_a_preemption() -> None:
    error = judged(PreemptionError(SimpleNamespace(preempted_ranks=[0])))  # type: ignore[arg-type]
    assert isinstance(error, Preempted)
    assert "s0 worker 1 was taken back" in str(error)


def test_a_start_that_timed_out_names_the_hosts_where_it_does_not_run() -> None:
    error = judged(ControllerError(WorkerGroupStartupTimeoutError(2)), workers=1)
    assert isinstance(error, DeadlineExceeded)
    assert "does not run on s0 worker 0 (127.0.0.2): its process or JAX does not come up" in str(error)


@pytest.mark.parametrize("lacks", ["whole", "held"])
def test_a_start_without_its_slices_is_about_the_slices(world: SimpleNamespace, lacks: str) -> None:
    """Also where JAX hangs because a host is gone and the variables of its slice are stale."""
    getattr(world, lacks).clear()
    assert str(judged(ControllerError(WorkerGroupStartupTimeoutError(2)), workers=0)) == "not reserved"


def test_a_start_that_failed_on_lost_slices_is_about_the_slices(world: SimpleNamespace) -> None:
    world.whole.clear()
    assert str(judged(ControllerError(RuntimeError("the actor died")), workers=0)) == "not reserved"


def test_processes_that_die_before_the_users_code_ran_are_not_the_users_fault() -> None:
    """JAX ends them where they do not find together; a retry starts them anew."""
    died = ControllerError(RuntimeError("The actor died. Worker exit detail: SIGABRT"))
    error = judged(died, workers=0)
    assert isinstance(error, RemoteUnavailable)
    assert "died before it ran" in str(error)
    assert str(error).endswith("Worker exit detail: SIGABRT")
    assert isinstance(judged(died), UserCodeFailed)


def test_any_other_failure_of_the_controller_is_misconfigured() -> None:
    error = judged(ControllerError(PermissionError("no access to\nthe bucket")), workers=0)
    assert isinstance(error, Misconfigured)
    assert "Ray Train did not start it: no access to the bucket" in str(error)


def test_a_result_of_a_loop_that_reported_nothing_has_every_field() -> None:
    made = session()
    result = train._result(WORK, made, train._workers(made))
    assert result | {"finished_at": ""} == {
        "metrics": {},
        "step": None,
        "history": [],
        "checkpoint": None,
        "resumed_from_step": None,
        "run_name": "r",
        "workers": [{"rank": rank, "slice": "s0", "worker_id": 1 - rank} for rank in (0, 1)],
        "slices": ["s0"],
        "started_at": "2026-01-01T00:00:00+00:00",
        "finished_at": "",
    }
