"""The reaper's operator asks Airflow, and takes nothing of a run that Airflow does not call over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException

from raytpu_ops import ReapTpuSlicesOperator
from raytpu_ops.backends.base import Released
from raytpu_ops.tpu.errors import DeadlineExceeded
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.spec import SliceSpec


class Instance:
    """Of this Airflow's runs: one that runs and one that failed."""

    runs = {"running": "running", "failed": "failed"}  # noqa: RUF012 - nobody changes it

    def get_dr_count(self, *, dag_id: str, run_ids: list[str], states: list[str] | None = None) -> int:
        assert dag_id == "d"
        return sum(self.runs.get(one) in (states or list(self.runs.values())) for one in run_ids)


class Backend:
    """A lease of each run, and of one that this Airflow does not know."""

    def __init__(self) -> None:
        now = datetime.now(UTC)
        self.stuck: list[str] = []
        self.leases = {
            run: SliceLease(
                id=run,
                owner=Owner(dag_id="d", run_id=run, task_id="provision"),
                backend="local",
                spec=SliceSpec.of("v4", "2x2x1"),
                ray=RayEndpoint(address="http://127.0.0.1:9"),
                granted_at=now,
                expires_at=now + timedelta(hours=1),
            )
            for run in ("running", "failed", "foreign")
        }

    async def list_leases(self, say: object) -> list[SliceLease]:
        return list(self.leases.values())

    async def release(self, lease: SliceLease) -> Released:
        if not self.stuck:
            del self.leases[lease.id]
        return Released(left=self.stuck)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    made = Backend()
    monkeypatch.setattr("raytpu_ops.hooks.ray_tpu.RayTpuHook.backend", made)
    return made


def run(rendered: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    with DAG("reaper", schedule=None):
        operator = ReapTpuSlicesOperator(task_id="reap", **arguments)
    for field, value in (rendered or {}).items():
        setattr(operator, field, value)
    context: Any = {"ti": Instance()}
    result: dict[str, Any] = type(operator).execute.__wrapped__(operator, context)  # type: ignore[attr-defined]
    return result


def test_only_the_lease_of_a_run_that_is_over_is_taken(backend: Backend) -> None:
    assert len(run()["kept"]) == 2
    assert set(backend.leases) == {"running", "foreign"}


def test_where_no_other_airflow_has_leases_those_of_unknown_runs_are_taken_too(backend: Backend) -> None:
    run(unknown_runs="True")

    assert set(backend.leases) == {"running"}


def test_a_run_of_another_deployment_is_not_ours_even_where_one_of_that_name_is_over_here(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__RAYTPU__DEPLOYMENT", "staging")
    theirs = backend.leases["failed"]
    ours = theirs.model_copy(update={"id": "ours", "owner": theirs.owner.model_copy(update={"deployment": "staging"})})
    backend.leases["ours"] = ours

    run(unknown_runs="True")

    assert set(backend.leases) == {"running", "failed", "foreign"}


def test_a_dry_run_takes_nothing(backend: Backend) -> None:
    assert len(run(dry_run="True")["released"]) == 1
    assert len(backend.leases) == 3


def test_what_is_left_is_an_error_that_names_it(backend: Backend) -> None:
    backend.stuck = ["pod p is ending"]

    with pytest.raises(DeadlineExceeded, match="failed: .*pod p is ending"):
        run(deadlines={"releasing": 0.01})


def test_a_switch_that_is_none_is_refused(backend: Backend) -> None:
    with pytest.raises(AirflowFailException, match="perhaps"):
        run(rendered={"only_look": "perhaps"}, dry_run="{{ params.dry_run }}")
    assert len(backend.leases) == 3
