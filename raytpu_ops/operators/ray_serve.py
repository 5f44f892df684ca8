"""The operator that serves from reserved slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raytpu_ops.hooks.ray_tpu import RayTpuHook
from raytpu_ops.links.ray_dashboard import DASHBOARD_KEY, RayDashboardLink
from raytpu_ops.operators.base import RayTpuOperator, in_scope, owner_of, settled
from raytpu_ops.operators.ray_jobs import check_code, path_of, target_of
from raytpu_ops.tpu.deadlines import Phase, Schedule, as_poll
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.problems import read
from raytpu_ops.tpu.work import ServeApp

if TYPE_CHECKING:
    from airflow.sdk import Context

    from raytpu_ops.backends.base import Backend
    from raytpu_ops.flows.serving import ServeRequest
    from raytpu_ops.triggers.ray_work import RayServeTrigger


#: What is right in every field, in the place of what a template decides.
_STAND_INS: dict[str, Any] = {"name": "name", "app": "module:builder", "args": {}, "route_prefix": "/name"}


class RayServeOperator(RayTpuOperator):
    """Deploys a Ray Serve application on a lease and waits until it answers.

    Applications that are there already stay. One that runs with the same configuration is left as it
    is, so a retry changes nothing. It serves until it is deleted or the lease is released.

    :param lease: the output of ``TpuSlicesReadySensor`` or ``ProvisionTpuSlicesOperator``. (templated)
    :param app: ``module:builder`` of the user's code; the builder takes ``args`` and returns a Serve
        application, such as ``raytpu_ops.runtime.serve.slice_app(…)``. (templated)
    :param args: plain JSON for the builder. (templated)
    :param name: the application's name, unique on its lease; by default the task's id, with the index where
        it is mapped. (templated)
    :param route_prefix: the path below which it answers, ``/NAME`` by default. (templated)
    :param working_dir: folder with the user's code, or a URI that Ray takes. (templated)
    :param runtime_env: Ray's runtime environment. (templated)
    :param deadlines: ``starting``, and for slices that have to be replaced ``queued``, ``provisioning`` and
        ``labelled``; each a ``timedelta`` or seconds.
    :param poll_interval: seconds between two looks, at most 600.
    :param multiple_outputs: each field of the result is an XCom too: ``serve.output["url"]``.
    :return: ``application``, ``url``, ``route_prefix``, ``deployments`` and ``lease_id``.
    """

    template_fields: Sequence[str] = (
        "lease",
        "app",
        "args",
        "name",
        "route_prefix",
        "working_dir",
        "runtime_env",
    )
    ui_color = "#fbe7d4"
    operator_extra_links = [RayDashboardLink()]  # noqa: RUF012 - typed so by Airflow
    phases = (Phase.QUEUED, Phase.PROVISIONING, Phase.LABELLED, Phase.STARTING)

    def __init__(
        self,
        *,
        lease: Any,
        app: str,
        args: dict[str, Any] | None = None,
        name: str | None = None,
        route_prefix: str | None = None,
        working_dir: str | None = None,
        runtime_env: dict[str, Any] | None = None,
        poll_interval: float = 1.0,
        multiple_outputs: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(multiple_outputs=multiple_outputs, **kwargs)
        self.lease = in_scope(self.task_id, lease)
        self.app = app
        self.args = args
        self.name = name
        self.route_prefix = route_prefix
        self.working_dir = path_of(working_dir)
        self.runtime_env = runtime_env
        self.poll_interval = as_poll(poll_interval, "poll_interval")
        self._deploying: tuple[Backend, SliceLease, str, str] | None = None
        written = {name: settled(value, _STAND_INS[name]) for name, value in self._asked(self.default_name()).items()}
        read(ServeApp, written, type(self).__name__)
        check_code(self, self.working_dir, self.runtime_env)

    def default_name(self, map_index: int = -1) -> str:
        """What the application is called where the author does not say it."""
        return self.task_id.replace(".", "-") + (f"-{map_index}" if map_index >= 0 else "")

    def _asked(self, default_name: str) -> dict[str, Any]:
        """The application as the author asked for it."""
        name = self.name or default_name
        return {
            "name": name,
            "app": target_of(self.app, "app"),
            "args": self.args or {},
            "route_prefix": self.route_prefix or f"/{name}",
        }

    def begin(self, context: Context) -> dict[str, Any]:
        """Deploy and wait."""
        from raytpu_ops.flows.packages import folder_of

        folder_of(self.working_dir)
        lease = SliceLease.from_xcom(self.lease)
        backend = RayTpuHook.for_lease(lease).backend
        self._checked(context, Schedule.start(self.deadlines))
        return self.proceed(context, self.until_whole(context, backend, lease, self.deadlines))

    def proceed(self, context: Context, lease: SliceLease) -> dict[str, Any]:
        """Hand the user's code to the cluster, deploy and wait."""
        from raytpu_ops.flows.serving import run_serve

        backend = RayTpuHook.for_lease(lease).backend
        request = self._request(context, backend, lease)
        self._deploying = (backend, lease, request.name, request.owner)
        context["ti"].xcom_push(key=DASHBOARD_KEY, value=f"{lease.ray.address}/#/serve")

        def trigger() -> RayServeTrigger:
            from raytpu_ops.triggers.ray_work import RayServeTrigger

            return RayServeTrigger(
                lease=lease.to_xcom(),
                owner=owner_of(context).model_dump(mode="json"),
                request=request.model_dump(mode="json"),
            )

        return self.carry(
            context,
            flow=lambda: run_serve(backend, lease, request, say=self.log.info),
            trigger=trigger,
            deferred=self.deferrable,
        )

    def _checked(self, context: Context, schedule: Schedule) -> ServeRequest:
        from raytpu_ops.flows.serving import ServeRequest

        owner = owner_of(context)
        fields = {
            **self._asked(self.default_name(owner.map_index)),
            # Without the run: the next run of the same task may replace what this one serves.
            "owner": owner.every_run,
            "schedule": schedule,
            "poll_s": self.poll_interval,
        }
        return read(ServeRequest, fields, "RayServeOperator")

    def _request(self, context: Context, backend: Backend, lease: SliceLease) -> ServeRequest:
        from raytpu_ops.flows.packages import runtime_env_with

        schedule, say = Schedule.start(self.deadlines), self.log.info
        request = self._checked(context, schedule)
        runtime_env = self.run_flow(
            runtime_env_with(backend, lease, self.runtime_env, self.working_dir, schedule=schedule, say=say)
        )
        return request.model_copy(update={"runtime_env": runtime_env})

    def finish(self, context: Context, result: dict[str, Any]) -> dict[str, Any]:
        """Say where it answers."""
        self.log.info("Application %s answers at %s", result["application"], result["url"])
        return result

    async def stop_remote(self) -> None:
        """Take the application away: it holds a slice."""
        if self._deploying is None:
            return
        from raytpu_ops.flows.serving import remove_application

        self.log.info("%s", await remove_application(*self._deploying))
