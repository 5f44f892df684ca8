"""The sensor that waits until a lease is whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raytpu_ops.hooks.ray_tpu import RayTpuHook
from raytpu_ops.links.ray_dashboard import DASHBOARD_KEY, RayDashboardLink
from raytpu_ops.operators.base import RayTpuOperator, in_scope, owner_of, slices_of
from raytpu_ops.tpu.deadlines import Phase, Schedule, as_poll
from raytpu_ops.tpu.lease import SliceLease

if TYPE_CHECKING:
    from airflow.sdk import Context

    from raytpu_ops.triggers.leases import SlicesReadyTrigger

#: Where the report lies in XCom, beside the lease.
READINESS_KEY = "readiness"


class TpuSlicesReadySensor(RayTpuOperator):
    """Waits until KubeRay and Ray have labelled every host of every slice; hands the lease on.

    Whole means: the wanted hosts are there, each with its own worker id, the right topology and pod
    type, all its chips. A slice that loses a host on the way is replaced whole. The report goes to
    XCom under the key ``readiness``.

    A sensor by name and use, but no ``BaseSensorOperator``: that one's ``timeout`` starts afresh in
    every deferral and its ``soft_fail`` would hide chips that bill.

    :param lease: the output of ``ProvisionTpuSlicesOperator``. (templated)
    :param deadlines: ``queued``, ``provisioning`` and ``labelled``, each a ``timedelta`` or seconds; each
        counts from when its phase began.
    :param poke_interval: seconds between two looks, at most 600.
    :return: the lease, as plain JSON.
    """

    template_fields: Sequence[str] = ("lease",)
    ui_color = "#e6f1f2"
    operator_extra_links = [RayDashboardLink()]  # noqa: RUF012 - typed so by Airflow
    phases = (Phase.QUEUED, Phase.PROVISIONING, Phase.LABELLED)

    def __init__(
        self,
        *,
        lease: Any,
        poke_interval: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.lease = in_scope(self.task_id, lease)
        self.slices_handed_on = slices_of(lease)
        self.poke_interval = as_poll(poke_interval, "poke_interval")

    def begin(self, context: Context) -> dict[str, Any]:
        """Look, and wait where it is not whole yet."""
        from raytpu_ops.flows.leases import wait_whole

        lease = SliceLease.from_xcom(self.lease)
        backend = RayTpuHook.for_lease(lease).backend
        schedule = Schedule.start(self.deadlines)
        context["ti"].xcom_push(key=DASHBOARD_KEY, value=lease.ray.address)
        report = self.run_flow(backend.observe(lease))

        async def flow() -> dict[str, Any]:
            whole, readiness = await wait_whole(
                backend, lease, schedule=schedule, say=self.log.info, poll_s=self.poke_interval
            )
            return {"lease": whole.to_xcom(), "readiness": readiness.model_dump(mode="json")}

        def trigger() -> SlicesReadyTrigger:
            from raytpu_ops.triggers.leases import SlicesReadyTrigger

            return SlicesReadyTrigger(
                lease=lease.to_xcom(),
                owner=owner_of(context).model_dump(mode="json"),
                schedule=schedule.model_dump(mode="json"),
                poll_s=self.poke_interval,
            )

        return self.carry(context, flow=flow, trigger=trigger, deferred=self.deferrable and not report.ready)

    def finish(self, context: Context, result: dict[str, Any]) -> dict[str, Any]:
        """Store the report, name the slices, hand the lease on."""
        from raytpu_ops.tpu.readiness import Readiness

        report = Readiness.model_validate(result["readiness"])
        context["ti"].xcom_push(key=READINESS_KEY, value=result["readiness"])
        for one in report.slices:
            hosts = ", ".join(f"worker {host.worker_id} at {host.address}" for host in one.hosts)
            self.log.info("Slice %s is whole: %s", one.name, hosts)
        lease: dict[str, Any] = result["lease"]
        return lease
