"""The hook: an Airflow connection becomes a backend, a lease becomes a client for its Ray.

Not here: anything that decides; operators and triggers run the flows with what the hook gives.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.words import shown

if TYPE_CHECKING:
    import httpx
    from airflow.sdk import Connection

    from raytpu_ops.backends.base import Backend
    from raytpu_ops.backends.google.access import CloudAccess
    from raytpu_ops.ray.client import BlockingRayClient


class RayTpuHook(BaseHook):
    """Reaches a backend by an Airflow connection.

    The connection's extra holds the ``backend`` and its options: for ``local`` the ``root`` folder, for
    ``gke`` which cluster that is (``kubernetes.py``) and what is made there (``backends/gke/settings.py``), for
    ``tpu_vm`` who acts at Google (``google_cloud.py``) and what is made there (``backends/tpu_vm/settings.py``).
    The default connection may be absent; then a backend runs with its defaults.

    :param ray_tpu_conn_id: the connection; its extra may name the ``backend``.
    :param backend: the backend, where it is not the connection that says so.
    :param options: options of the backend that go over the connection's: a dict, or its JSON, as a template renders it.
    :param cloud: who acts at Google, where it is not the account that the options name.
    :raises InvalidSpec: ``options`` is something else.
    """

    conn_name_attr = "ray_tpu_conn_id"
    default_conn_name = "ray_tpu_default"
    conn_type = "ray_tpu"
    hook_name = "Ray on TPU"

    def __init__(
        self,
        ray_tpu_conn_id: str | None = None,
        backend: str | None = None,
        *,
        options: Mapping[str, Any] | str | None = None,
        cloud: CloudAccess | None = None,
    ) -> None:
        super().__init__()
        self.ray_tpu_conn_id = ray_tpu_conn_id or self.default_conn_name
        self.backend_name = backend
        self._over = {key: value for key, value in _read_options(options).items() if value is not None}
        self._cloud = cloud
        #: Who acts at Google; None where nobody has to, and before there is a backend.
        self.cloud: CloudAccess | None = None
        #: Of the lease that this hook is for: which cluster it is on.
        self._place: Mapping[str, str] = {}

    @classmethod
    def for_lease(cls, lease: SliceLease | Mapping[str, Any]) -> RayTpuHook:
        """The hook by which that lease was granted; it finds the same cluster again.

        :param lease: what the provisioning task handed on.
        """
        lease = SliceLease.from_xcom(lease)
        hook = cls(lease.conn_id, lease.backend)
        hook._place = lease.place
        return hook

    @cached_property
    def connection(self) -> Connection | None:
        """The connection; None where it is the default one and Airflow does not have it.

        :raises Misconfigured: it was named and is not there, or it is there and cannot be read.
        """
        from airflow.sdk.exceptions import AirflowNotFoundException

        try:
            return self.get_connection(self.ray_tpu_conn_id)
        except AirflowNotFoundException:
            # Airflow says so, too, of one that it cannot read; what would be made without it is somewhere else.
            if (variable := f"AIRFLOW_CONN_{self.ray_tpu_conn_id.upper()}") in os.environ:
                raise Misconfigured(
                    f"connection {self.ray_tpu_conn_id!r}: {variable} is set, and Airflow cannot read it; is it JSON?"
                ) from None
            if self.ray_tpu_conn_id != self.default_conn_name:
                raise Misconfigured(
                    f"connection {self.ray_tpu_conn_id!r} does not exist: add it with type {self.conn_type!r}, "
                    f"or leave ray_tpu_conn_id out to use {self.default_conn_name!r}"
                ) from None
            return None

    @cached_property
    def options(self) -> dict[str, Any]:
        """What the connection's extra says, without what a form leaves empty or unticked for other backends."""
        if self.connection is None:
            return {}
        try:
            extra = json.loads(self.connection.extra or "{}")
        except ValueError:  # which Airflow's own `extra_dejson` takes for an empty one
            raise InvalidSpec(f"connection {self.ray_tpu_conn_id!r}: its extra is not JSON") from None
        if not isinstance(extra, dict):
            raise InvalidSpec(
                f"connection {self.ray_tpu_conn_id!r}: its extra must be a JSON object, got {shown(extra)}"
            )
        return {key: value for key, value in extra.items() if value not in (None, "") and value is not False}

    @cached_property
    def backend(self) -> Backend:
        """The backend; while a far side is away, it says so in the log.

        :raises InvalidSpec: when neither the task nor the connection names one, or they disagree.
        """
        from raytpu_ops.backends.base import Patient

        made = self._made()
        if isinstance(made, Patient):
            made.patience = made.patience._replace(say=self.log.warning)
        return made

    def _made(self) -> Backend:
        from raytpu_ops.backends.base import backend_names, make_backend

        said = self.options.get("backend")
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
        options = {key: value for key, value in self.options.items() if key != "backend"}
        if name == "tpu_vm":
            from raytpu_ops.hooks.google_cloud import cloud_from, vms_found_again

            cloud, rest = cloud_from(vms_found_again(options, self._place) | self._over, name)
            self.cloud = self._cloud or cloud
            return make_backend(name, cloud=self.cloud, **rest)
        if name != "gke":
            return make_backend(name, **options | self._over)
        from raytpu_ops.hooks.kubernetes import access_from, found_again, overlaid

        told, over, pools = self._apart(found_again(options, self._place))
        access, rest = access_from(_without_no_pools(overlaid(told, over)))
        return make_backend(name, access=access, **rest, **pools)

    def _apart(self, options: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, Any]]:
        """Options that say who makes node pools at Google, apart from those that lead to the API server.

        Where the server is a GKE cluster by its name, one account does both.

        :return: the connection's options and the task's, for the server, and what the backend gets beside them.
        """
        from raytpu_ops.hooks.google_cloud import CLOUD_KEYS, cloud_from

        both = {**options, **self._over}
        if "node_pools" not in both:
            return options, self._over, {}
        mine = {"google_endpoints"} if both.get("cluster_name") else CLOUD_KEYS
        told, over = ({key: one[key] for key in one if key not in mine} for one in (options, self._over))
        if "node_pools" not in _without_no_pools(both):
            return told, over, {}  # whoever would have made them has nothing to do
        cloud, _ = cloud_from(both, "gke")
        self.cloud = self._cloud or cloud
        return told, over, {"cloud": self.cloud}

    def ray(self, lease: SliceLease | Mapping[str, Any]) -> BlockingRayClient:
        """A blocking client for the lease's Ray, for code of one's own in a ``@task``.

        :param lease: what the provisioning task handed on.
        """
        from raytpu_ops.ray.client import BlockingRayClient

        return BlockingRayClient(self.backend.ray(self.current(lease)))

    def current(self, lease: SliceLease | Mapping[str, Any]) -> SliceLease:
        """The lease as it is now: slices that were taken back may have been replaced since, at other addresses.

        :param lease: what the provisioning task handed on.
        :return: the same where nothing is left of it.
        """
        import asyncio

        lease = SliceLease.from_xcom(lease)
        found = asyncio.run(self.backend.find(lease.owner))
        return lease if found is None else found.model_copy(update={"conn_id": lease.conn_id})

    def serve_client(self, lease: SliceLease | Mapping[str, Any], *, timeout_s: float = 60.0) -> httpx.Client:
        """A blocking HTTP client for what the lease serves: ``client.post("/digits", json=…)`` in a ``@task``.

        It brings what the way there asks for. Use it with ``with``.

        :param lease: what the provisioning task handed on.
        :param timeout_s: seconds until one request counts as unanswered.
        :raises Misconfigured: the lease's backend cannot serve.
        """
        from raytpu_ops.ray.http import serve_client

        lease = self.current(lease)
        address = lease.ray.serve_address
        if address is None:
            raise Misconfigured(
                f"lease {lease.id} has no address for Serve: its backend {lease.backend!r} cannot serve"
            )
        return serve_client(address, self.backend.serve_credentials(lease), timeout_s)

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


def _read_options(options: object) -> Mapping[str, Any]:
    """A dict, its JSON, or nothing.

    :raises InvalidSpec: it is something else.
    """
    found = options
    if isinstance(options, str):
        if not options.strip():
            return {}
        try:
            found = json.loads(options)
        except ValueError:
            found = None
    elif options is None:
        return {}
    if not isinstance(found, Mapping):
        # Not the value: it may hold a token.
        what = "other text" if isinstance(options, str) else type(options).__name__
        raise InvalidSpec(f"backend_options: must be a dict of the backend's options or its JSON, got {what}")
    return found


def _without_no_pools(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, without ``node_pools`` where that says that none are to be made; a lone ``{}`` asks for some."""
    if options.get("node_pools") not in (None, False, "", "false"):
        return options
    return {key: value for key, value in options.items() if key != "node_pools"}
