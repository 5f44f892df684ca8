"""The hook: an Airflow connection becomes a backend, a lease becomes a client for its Ray.

Not here: anything that decides; operators and triggers run the flows with what the hook gives.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured
from raytpu_ops.tpu.lease import SliceLease

if TYPE_CHECKING:
    from raytpu_ops.backends.base import Backend
    from raytpu_ops.ray.client import BlockingRayClient


class RayTpuHook(BaseHook):
    """Reaches a backend by an Airflow connection.

    The connection's extra holds what the backend's class takes: for ``local`` the ``root`` folder.
    The default connection may be absent; then a backend runs with its defaults.

    :param ray_tpu_conn_id: the connection; its extra may name the ``backend``.
    :param backend: the backend, where it is not the connection that says so.
    """

    conn_name_attr = "ray_tpu_conn_id"
    default_conn_name = "ray_tpu_default"
    conn_type = "ray_tpu"
    hook_name = "Ray on TPU"

    def __init__(self, ray_tpu_conn_id: str | None = None, backend: str | None = None) -> None:
        super().__init__()
        self.ray_tpu_conn_id = ray_tpu_conn_id or self.default_conn_name
        self.backend_name = backend

    @classmethod
    def for_lease(cls, lease: SliceLease) -> RayTpuHook:
        """The hook by which that lease was granted."""
        return cls(lease.conn_id, lease.backend)

    @cached_property
    def options(self) -> dict[str, Any]:
        """What the connection's extra says, without empty fields (a form sends those)."""
        from airflow.sdk.exceptions import AirflowNotFoundException

        try:
            extra = self.get_connection(self.ray_tpu_conn_id).extra_dejson
        except AirflowNotFoundException:
            if self.ray_tpu_conn_id != self.default_conn_name:
                raise Misconfigured(
                    f"connection {self.ray_tpu_conn_id!r} does not exist: add it with type {self.conn_type!r}, "
                    f"or leave ray_tpu_conn_id out to use {self.default_conn_name!r}"
                ) from None
            return {}
        return {key: value for key, value in extra.items() if value not in (None, "")}

    @cached_property
    def backend(self) -> Backend:
        """The backend.

        :raises InvalidSpec: when neither the task nor the connection names one, or they disagree.
        """
        from raytpu_ops.backends.base import backend_names, make_backend

        options = dict(self.options)
        said = options.pop("backend", None)
        name = self.backend_name or said
        if name is None:
            raise InvalidSpec(
                f"backend is not set: pass backend=… or put it into connection {self.ray_tpu_conn_id!r}; "
                f"there are {', '.join(backend_names())}"
            )
        if said is not None and said != name:
            raise InvalidSpec(
                f"backend {name!r} was asked for, but connection {self.ray_tpu_conn_id!r} is for {said!r}: "
                "name another connection in ray_tpu_conn_id"
            )
        return make_backend(name, **options)

    def ray(self, lease: SliceLease) -> BlockingRayClient:
        """A blocking client for the lease's Ray, for code of one's own in a ``@task``.

        :param lease: what the provisioning task handed on.
        """
        from raytpu_ops.ray.client import BlockingRayClient

        return BlockingRayClient(self.backend.ray(lease))

    def get_conn(self) -> Backend:
        """The backend: what this hook connects to."""
        return self.backend

    def test_connection(self) -> tuple[bool, str]:
        """List the leases of the backend; what came of it, for the connection form's button."""
        import asyncio

        from raytpu_ops.tpu.errors import RayTpuError

        try:
            leases = asyncio.run(self.backend.list_leases())
        except RayTpuError as error:
            return False, str(error)
        return True, f"{self.backend.name}: {len(leases)} leases"
