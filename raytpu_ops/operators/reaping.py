"""The operator of a maintenance DAG that gives back what no run gives back any more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from raytpu_ops.hooks.ray_tpu import RayTpuHook
from raytpu_ops.operators.base import RayTpuOperator, deployment, has_template
from raytpu_ops.tpu.deadlines import Deadlines, Phase
from raytpu_ops.tpu.errors import DeadlineExceeded, InvalidSpec
from raytpu_ops.tpu.words import shown

if TYPE_CHECKING:
    from airflow.sdk import Context

    from raytpu_ops.tpu.lease import Owner


class ReapTpuSlicesOperator(RayTpuOperator):
    """Releases leases of a backend that have expired or whose DAG run is over.

    Made for a DAG of its own that runs every few minutes: for what Airflow never tears down, which is
    a run beyond its ``dagrun_timeout`` and a provisioning task whose process was killed outright in
    its last try. A lease that shall outlive its run has no place on a backend that this looks after.

    It takes nothing before its time while this Airflow does not say that the run is over: a run that
    it does not know may be another Airflow's, on the same cluster.

    An ``execution_timeout`` of ``default_args`` does not reach it, only one of its own: a release that is cut off
    leaves chips that bill.

    :param backend: ``local``, ``gke`` or ``tpu_vm``; may be left to the connection. (templated)
    :param backend_options: options of the backend, over those of the connection. (templated)
    :param ray_tpu_conn_id: the connection to the backend. (templated)
    :param dry_run: release nothing, log what would be. (templated)
    :param unknown_runs: take leases of runs that this Airflow does not know, too: runs that were
        deleted. Only where no other Airflow has leases on this backend. (templated)
    :param deadlines: ``{"releasing": …}``: after this long what is still there is an error that names it,
        be it that Google does not let go of it yet: the next run tells it again.
    :return: ``released``, ``kept`` and ``left`` (empty), in words.
    """

    template_fields: Sequence[str] = ("backend", "backend_options", "ray_tpu_conn_id", "only_look", "unknown_runs")
    ui_color = "#f3dcc4"
    phases = (Phase.RELEASING,)
    not_by_default = {"execution_timeout": None}  # noqa: RUF012 - typed by the base

    def __init__(
        self,
        *,
        backend: str | None = None,
        backend_options: dict[str, Any] | None = None,
        ray_tpu_conn_id: str | None = None,
        dry_run: bool | str = False,
        unknown_runs: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.backend = backend
        self.backend_options = backend_options
        self.ray_tpu_conn_id = ray_tpu_conn_id
        # BaseOperator.dry_run is a method.
        self.only_look = dry_run
        self.unknown_runs = unknown_runs
        for name, switch in {"dry_run": dry_run, "unknown_runs": unknown_runs}.items():
            if not has_template(switch):
                _truth(switch, name)

    def begin(self, context: Context) -> dict[str, Any]:
        """Look at every lease, and release what is due until nothing of it is left.

        :raises DeadlineExceeded: naming what is left, which still bills.
        """
        from raytpu_ops.flows.reaping import reap

        backend = RayTpuHook(self.ray_tpu_conn_id, self.backend or None, options=self.backend_options).backend
        ti, unknown_is_over = context["ti"], _truth(self.unknown_runs, "unknown_runs")

        async def is_over(owner: Owner) -> bool | None:
            return await asyncio.to_thread(_is_over, ti, owner, unknown_is_over)

        done = self.run_flow(
            reap(
                backend,
                is_over,
                datetime.now(UTC),
                by=Deadlines.of(self.deadlines).at(Phase.RELEASING),
                say=self.log.info,
                dry_run=_truth(self.only_look, "dry_run"),
            )
        )
        if done.left:
            raise DeadlineExceeded(f"still there and billing: {'; '.join(done.left)}")
        return done.model_dump(mode="json")


def _is_over(ti: Any, owner: Owner, unknown_is_over: bool) -> bool | None:
    """Whether this Airflow says that the owner's run is over; None where it does not know the run.

    A run of another deployment it never knows, whatever its own run of that name has come to.
    """
    if owner.deployment != deployment():
        return None
    run = {"dag_id": owner.dag_id, "run_ids": [owner.run_id]}
    if ti.get_dr_count(**run, states=["success", "failed"]):
        return True
    if ti.get_dr_count(**run):
        return False
    return True if unknown_is_over else None


def _truth(value: object, what: str) -> bool:
    """A switch, also where a template rendered it as text.

    :raises InvalidSpec: for what is neither.
    """
    word = str(value).strip().lower()
    if word not in ("true", "false"):
        raise InvalidSpec(f"{what}: must be true or false, got {shown(value)}")
    return word == "true"
