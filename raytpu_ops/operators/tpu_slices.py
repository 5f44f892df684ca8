"""Operators that plan slices, acquire them and give them back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowTaskTimeout

from raytpu_ops.hooks.ray_tpu import RayTpuHook
from raytpu_ops.links.ray_dashboard import DASHBOARD_KEY, RayDashboardLink
from raytpu_ops.operators.base import (
    RayTpuOperator,
    as_written,
    by_hand,
    has_template,
    owner_of,
    settled,
    whole_number,
)
from raytpu_ops.tpu.capacity import ladder
from raytpu_ops.tpu.deadlines import Deadlines, Phase, as_duration
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.generations import generation_of
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.spec import SliceSpec

if TYPE_CHECKING:
    from airflow.sdk import Context

    from raytpu_ops.backends.base import Backend, Plan
    from raytpu_ops.tpu.capacity import AnyCapacity
    from raytpu_ops.triggers.leases import ProvisionSlicesTrigger, ReleaseSlicesTrigger


class _WantsSlices(RayTpuOperator):
    """What planning and provisioning share: what is wanted, of whom, and for how long.

    The parameters are told in :class:`ProvisionTpuSlicesOperator`.
    """

    template_fields: Sequence[str] = (
        "generation",
        "topology",
        "num_slices",
        "machine_type",
        "capacity",
        "backend",
        "backend_options",
        "ray_tpu_conn_id",
    )
    ui_color = "#c8f0d0"
    phases = (Phase.QUEUED, Phase.PROVISIONING, Phase.RELEASING)

    def __init__(
        self,
        *,
        generation: str,
        topology: str | None = None,
        num_slices: int | str = 1,
        machine_type: str | None = None,
        capacity: Any = None,
        backend: str | None = None,
        backend_options: dict[str, Any] | None = None,
        ray_tpu_conn_id: str | None = None,
        lease_for: timedelta | float = timedelta(hours=24),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.generation = generation
        self.topology = topology
        self.num_slices = num_slices
        self.machine_type = machine_type
        self.capacity = capacity
        self.backend = backend
        self.backend_options = backend_options
        self.ray_tpu_conn_id = ray_tpu_conn_id
        self.lease_for = lease_for
        self._check_written()

    def _check_written(self) -> None:
        """Check what no template decides: a mistake shows when the DAG file is parsed, not in the first run."""
        as_duration(self.lease_for, "lease_for")
        if not has_template(self.capacity):
            ladder(self.capacity)
        shape = self.generation, self.topology or None, self.machine_type or None
        if has_template(shape) and not has_template(self.generation):
            generation_of(self.generation)
        # One that exists, in the place of what a template decides: the number of slices can be judged alone.
        generation, topology, machine_type = ("v4", "2x2x1", None) if has_template(shape) else shape
        number = settled(whole_number(self.num_slices), 1)
        spec = SliceSpec.of(generation, topology, num_slices=number, machine_type=machine_type)
        spec.shape.check_reserved()
        self.slices_handed_on = None if has_template(self.num_slices) else spec.num_slices

    def _open(self) -> Backend:
        return RayTpuHook(self.ray_tpu_conn_id, self.backend or None, options=self.backend_options).backend

    def _plan(self, backend: Backend, owner: Owner | None) -> Plan:
        """The plan, told to the log before anything is made."""
        spec, rungs, lease_for = self._wanted()
        plan = self.run_flow(backend.plan(spec, rungs, lease_for=lease_for, owner=owner))
        names = [f"names: {', '.join(plan.names)}"] if plan.names else []
        for line in (*plan.creates, *names, *plan.notes):
            self.log.info("Plan: %s", line)
        return plan.model_copy(update={"deadlines": Deadlines.of(self.deadlines).over(plan.deadlines)})

    def _wanted(self) -> tuple[SliceSpec, list[AnyCapacity], timedelta]:
        spec = SliceSpec.of(
            self.generation,
            self.topology or None,
            num_slices=whole_number(self.num_slices),
            machine_type=self.machine_type or None,
        )
        return spec, ladder(self.capacity), as_duration(self.lease_for, "lease_for")


class PlanTpuSlicesOperator(_WantsSlices):
    """Checks what is wanted before anything is made: shape, names, options, rights, quota where that can be told.

    ``tpu_slices`` puts it before provisioning as a setup of its own, for two reasons: what cannot work is
    refused while it costs nothing, and Airflow runs a teardown only where a setup succeeded, so the slices
    are released also where provisioning failed or was ended half way.

    The parameters are those of :class:`ProvisionTpuSlicesOperator`, and:

    :param provision_task_id: the task of this DAG that will provision: the plan has its names, and refuses where
        somebody else's node pool has one of them; without it names are not looked at. (templated)
    """

    template_fields: Sequence[str] = (*_WantsSlices.template_fields, "provision_task_id")
    not_by_default = {}  # noqa: RUF012 - typed by the base

    def __init__(self, *, provision_task_id: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.provision_task_id = provision_task_id

    def begin(self, context: Context) -> dict[str, Any]:
        """Plan.

        :return: ``spec`` in words, ``creates`` and ``notes``, one line each.
        """
        backend, task_id = self._open(), self.provision_task_id
        plan = self._plan(backend, owner_of(context, task_id) if task_id else None)
        # Who cannot be asked whether there is a lease can neither grant one nor take one back.
        self.run_flow(backend.find(owner_of(context, task_id)))
        return {"spec": str(plan.spec), "creates": plan.creates, "notes": plan.notes}


class ProvisionTpuSlicesOperator(_WantsSlices):
    """Acquires whole TPU slices with Ray on them; its output is the lease that later tasks take.

    Safe to run again: a retry adopts what an earlier try made and finishes what it left half made.
    A try that fails or is told to end gives everything back before it ends, because Airflow runs a
    teardown only after a setup has succeeded. One whose process is killed outright cannot: the
    next try adopts what it made, and after the last try the release task of ``tpu_slices`` takes it, or
    the reaper, see :class:`~raytpu_ops.operators.reaping.ReapTpuSlicesOperator`.

    Where a backend waits for a cloud, the task waits in the triggerer, unless ``deferrable`` is off.

    :param generation: ``v4``, ``v5e``, ``v5p``, ``v6e`` or ``7x`` in any usual spelling, or a pod type
        such as ``v6e-16``.
    :param topology: ``4x4``, ``2x2x2``. (templated)
    :param num_slices: how many slices, each whole. (templated)
    :param machine_type: where generation and topology leave a choice. (templated)
    :param capacity: one rung or a list of rungs that are tried in order: ``OnDemand()``, ``Spot()``,
        ``Reservation(name)``, ``FlexStart(…)``, ``Queued(…)``; each may say how long it is waited for, by
        ``within``. (templated)
    :param backend: ``local``, ``gke`` or ``tpu_vm``; may be left to the connection. (templated)
    :param backend_options: options of the backend for this lease, over those of the connection: for ``gke``
        an ``image``, a Kueue ``queue``, pod templates and so on. (templated)
    :param ray_tpu_conn_id: the connection to the backend. (templated)
    :param lease_for: after this long the reaper takes the slices, where one runs: ``dags/tpu_reaper.py`` or
        ``raytpu reap`` (``timedelta`` or seconds).
    :param deadlines: ``queued`` and ``provisioning``, each a ``timedelta`` or seconds: how long a rung that
        does not say it itself is waited for; and ``releasing``, until what a try that failed has made is gone.
    """

    operator_extra_links = [RayDashboardLink()]  # noqa: RUF012 - typed so by Airflow

    def begin(self, context: Context) -> dict[str, Any]:
        """Plan, then acquire.

        :return: the lease, as plain JSON.
        """
        backend, owner = self._open(), owner_of(context)
        plan = self._plan(backend, owner)

        async def flow() -> dict[str, Any]:
            return (await backend.acquire(plan, owner, say=self.log.info)).to_xcom()

        def trigger() -> ProvisionSlicesTrigger:
            from raytpu_ops.triggers.leases import ProvisionSlicesTrigger

            return ProvisionSlicesTrigger(
                plan=plan.model_dump(mode="json"),
                owner=owner.model_dump(mode="json"),
                ray_tpu_conn_id=self.ray_tpu_conn_id,
                options=self.backend_options,
            )

        try:
            return self.carry(
                context, flow=flow, trigger=trigger, deferred=self.deferrable and not backend.acquires_in_task
            )
        except (asyncio.CancelledError, AirflowTaskTimeout):
            # A kill, or `execution_timeout`. The flow could not roll back by itself: in a triggerer it must not.
            self._take_back(backend, owner)
            raise

    def finish(self, context: Context, result: dict[str, Any]) -> dict[str, Any]:
        """Say what was granted, and hand it on."""
        lease = SliceLease.from_xcom(result).model_copy(update={"conn_id": self.ray_tpu_conn_id})
        for line in lease.attempts:
            self.log.info("Tried before: %s", line)
        self.log.info("Granted lease %s to %s: %s until %s", lease.id, lease.owner.key, lease.spec, lease.expires_at)
        if lease.expires_at <= datetime.now(UTC):
            self.log.warning(
                "Lease %s was adopted as it is, its time is over: the reaper may take it at any moment. To have it for "
                "longer, release it (%s) and clear this task",
                lease.id,
                by_hand(lease.id, lease.conn_id),
            )
        context["ti"].xcom_push(key=DASHBOARD_KEY, value=lease.ray.address)
        return lease.to_xcom()

    def _take_back(self, backend: Backend, owner: Owner) -> None:
        from raytpu_ops.flows.leases import take_back

        for line in asyncio.run(take_back(backend, owner)):
            self.log.warning("Still there, until the release task or the reaper takes it: %s", line)


class ReleaseTpuSlicesOperator(RayTpuOperator):
    """Gives a lease back, until nothing of it is left; the teardown of a pipeline.

    Works from the lease, and where that never arrived (the provisioning task was marked success
    by hand, say) from the owner's labels on the real objects.

    An ``execution_timeout`` of ``default_args`` does not reach it, only one of its own: a release that is ended
    half way leaves chips that bill.

    :param lease: the output of the provisioning task. (templated)
    :param provision_task_id: the task whose slices are released when there is no lease in XCom. (templated)
    :param backend: where to look in that case. (templated)
    :param backend_options: options of the backend in that case. (templated)
    :param ray_tpu_conn_id: the connection to use in that case. (templated)
    :param deadlines: ``{"releasing": …}``: after this long what is left is an error that names it; later where Google
        does not let go of what it is still making, by an hour for node pools and two for queued resources at most.
    :raises InvalidSpec: ``lease`` can be no lease, or neither it nor ``provision_task_id`` is there.
    """

    template_fields: Sequence[str] = ("lease", "provision_task_id", "backend", "backend_options", "ray_tpu_conn_id")
    ui_color = "#f3dcc4"
    phases = (Phase.RELEASING,)
    not_by_default = {"execution_timeout": None}  # noqa: RUF012 - typed by the base

    def __init__(
        self,
        *,
        lease: Any = None,
        provision_task_id: str | None = None,
        backend: str | None = None,
        backend_options: dict[str, Any] | None = None,
        ray_tpu_conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if lease is None and not provision_task_id:
            raise InvalidSpec(
                f"{self.task_id}: has neither lease nor provision_task_id, and could release nothing: pass "
                "lease=provision.output"
            )
        self.lease = None if lease is None else as_written(self.task_id, lease)
        self.provision_task_id = provision_task_id
        self.backend = backend
        self.backend_options = backend_options
        self.ray_tpu_conn_id = ray_tpu_conn_id

    def begin(self, context: Context) -> dict[str, Any]:
        """Release.

        :return: ``removed`` and ``left`` (empty), in words.
        """
        from raytpu_ops.flows.leases import give_back

        by = Deadlines.of(self.deadlines).at(Phase.RELEASING)
        lease, backend = self._find(context, by)
        if lease is None:
            self.log.info("Nothing to release")
            return {"removed": [], "left": []}
        owner = owner_of(context).model_dump(mode="json")

        async def flow() -> dict[str, Any]:
            released = await give_back(backend, lease, by=by, say=self.log.info)
            return released.model_dump(mode="json")

        def trigger() -> ReleaseSlicesTrigger:
            from raytpu_ops.triggers.leases import ReleaseSlicesTrigger

            return ReleaseSlicesTrigger(lease=lease.to_xcom(), owner=owner, by=by.isoformat())

        return self.carry(
            context, flow=flow, trigger=trigger, deferred=self.deferrable and not backend.acquires_in_task
        )

    def finish(self, context: Context, result: dict[str, Any]) -> dict[str, Any]:
        """Say what is gone."""
        self.log.info("Released: %s", "; ".join(result["removed"]) or "nothing was left")
        return result

    def _find(self, context: Context, by: datetime) -> tuple[SliceLease | None, Backend]:
        if self.lease is not None:
            lease = SliceLease.from_xcom(self.lease)
            return lease, RayTpuHook.for_lease(lease).backend
        from raytpu_ops.flows.leases import found

        if self.provision_task_id is None:
            raise InvalidSpec("lease is None and provision_task_id is not set: pass lease=provision.output")
        backend = RayTpuHook(self.ray_tpu_conn_id, self.backend or None, options=self.backend_options).backend
        owner = owner_of(context, self.provision_task_id)
        return self.run_flow(found(backend, owner, by=by)), backend
