"""The backend that a command's options name. Not here: what the commands do with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from raytpu_ops.backends.base import Backend, Patience, backend_names, make_backend
from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.local import LocalBackend
from raytpu_ops.backends.tpu_vm import TpuVmBackend
from raytpu_ops.demo.leases import local_backend
from raytpu_ops.tpu.errors import InvalidSpec, RemoteUnavailable

if TYPE_CHECKING:
    from raytpu_ops.backends.google.access import CloudAccess
    from raytpu_ops.hooks.ray_tpu import RayTpuHook
#: How long a far side that is away is asked again.
PATIENCE = timedelta(seconds=30)
#: What to do where a lease is not found.
ELSEWHERE = "--conn-id or --backend looks elsewhere"
#: Option -> the backends that it is for.
_FOR = {
    "--root": ("local",),
    "--kubeconfig": ("gke",),
    "--context": ("gke",),
    "--namespace": ("gke",),
    "--project": ("tpu_vm", "gke"),
    "--zone": ("tpu_vm", "gke"),
    "--cluster": ("gke",),
}


def refuse_others(backend: str, given: Mapping[str, object]) -> None:
    """Refuse options that a command would not use.

    :param backend: that is asked.
    :param given: values by the options' names.
    :raises InvalidSpec: naming them.
    """
    strange = {name for name, value in given.items() if value and backend not in _FOR[name]}
    if strange and backend in backend_names():
        [first, *_] = sorted(strange)
        raise InvalidSpec(
            f"{', '.join(sorted(strange))}: not for --backend {backend}, but for {' and '.join(_FOR[first])}"
        )


def backend_name(backend: str | None, conn_id: str | None, default: str) -> str:
    """The backend that a command is for.

    :param backend: what ``--backend`` says.
    :param conn_id: what ``--conn-id`` says; the connection may name the backend.
    :param default: of the command.
    :raises InvalidSpec: nobody names one, or they disagree.
    :raises Misconfigured: there is no such connection.
    """
    if not conn_id:
        return backend or default
    with _quiet_airflow():
        from raytpu_ops.hooks.ray_tpu import RayTpuHook

        said = RayTpuHook(conn_id).options.get("backend")
    if said and backend and said != backend:
        raise InvalidSpec(
            f"--backend {backend}: connection {conn_id!r} is for {said!r}: leave --backend out, or name another "
            "connection in --conn-id"
        )
    if not (said or backend):
        raise InvalidSpec(f"--backend: is missing, connection {conn_id!r} does not say which one it is for")
    return str(said or backend)


def _of_tasks(backend: str | None) -> str | None:
    """The connection of tasks that name none; None where Airflow does not have it. Where that leads is said.

    :param backend: what ``--backend`` says: None as well where the connection is for another.
    :raises InvalidSpec: ``$KUBECONFIG`` may lead to another cluster: nobody shall take one for the other.
    :raises Misconfigured: it is there and cannot be read.
    :raises RemoteUnavailable: a place where Airflow keeps connections does not answer.
    """
    with _quiet_airflow():
        from raytpu_ops.hooks.kubernetes import CLUSTER_KEYS
        from raytpu_ops.hooks.ray_tpu import RayTpuHook

        name, found = RayTpuHook.default_conn_name, None
        hook = RayTpuHook(name)
        if hook.connection is None:
            if backend != "local":  # nothing bills there
                _check_absent(name)
            why = f"since no connection {name!r} was found"
            where = f"by the options alone, {why}" if backend else f"on this machine (local), {why}: {ELSEWHERE}"
        elif backend and (said := hook.options.get("backend", backend)) != backend:
            where = f"not by connection {name!r}, which is for {said!r}"
        elif backend == "gke" and "KUBECONFIG" in os.environ and any(map(hook.options.get, CLUSTER_KEYS)):
            raise InvalidSpec(
                f"--backend gke: $KUBECONFIG names a cluster, and so does connection {name!r}, by which tasks go: say "
                f"--conn-id {name} or --kubeconfig"
            )
        else:
            found, where = name, f"by connection {name!r}, as tasks that name none"
        print(f"raytpu: {where}", file=sys.stderr)
        return found


def _check_absent(conn_id: str) -> None:
    """Look once more for a connection that Airflow calls not defined, which it says of places that are away, too (3.3).

    :raises RemoteUnavailable: one of them does not answer; an Airflow without tables has no connection.
    """
    from airflow.sdk.execution_time.supervisor import ensure_secrets_backend_loaded
    from airflow.secrets.metastore import MetastoreBackend

    for place in ensure_secrets_backend_loaded():
        try:
            if not isinstance(place, MetastoreBackend) or _has_tables():
                place.get_connection(conn_id=conn_id)
        except Exception as error:
            # Not its words: they may have a password in them.
            raise RemoteUnavailable(
                f"connection {conn_id!r}: Airflow's {type(place).__name__} does not say whether there is one "
                f"({type(error).__name__}): try again once it answers, or say where to look with --conn-id, --root, "
                "--kubeconfig or --context"
            ) from error


def _has_tables() -> bool:
    from airflow.models import Connection
    from airflow.utils.session import create_session
    from sqlalchemy import inspect

    with create_session() as session:
        return inspect(session.connection()).has_table(Connection.__tablename__)


@contextmanager
def _quiet_airflow() -> Iterator[None]:
    # As `airflow connections` does it; otherwise Airflow looks only into the environment (3.3).
    os.environ.setdefault("_AIRFLOW_PROCESS_CONTEXT", "server")
    # Airflow's log goes to stdout here, which belongs to the answer.
    with redirect_stdout(sys.stderr):
        yield


@dataclass(frozen=True)
class Where:
    """What ``--backend`` and the options beside it say.

    :param backend: its name.
    :param root: of the local backend; None for the user's own.
    :param kubeconfig: gke: the file; None for ``$KUBECONFIG`` or ``~/.kube/config``.
    :param context: gke: of the kubeconfig; None for its current one.
    :param namespace: gke: of the RayClusters; None for ``default``.
    :param conn_id: an Airflow connection that says the rest; None for the options alone.
    :param project: tpu_vm: its id; None for the credentials' own.
    :param zones: tpu_vm: where slices may be; none for the connection's. Leases are seen in all zones.
    """

    backend: str
    root: Path | None = None
    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None
    conn_id: str | None = None
    project: str | None = None
    zones: Sequence[str] = ()

    @classmethod
    def of_leases(
        cls,
        backend: str | None,
        root: Path | None,
        kubeconfig: str | None,
        context: str | None,
        namespace: str | None,
        conn_id: str | None,
        project: str | None,
        zones: Sequence[str] | None,
    ) -> Self:
        """For the commands about leases, which look where tasks do that name no connection.

        :raises InvalidSpec: ``--backend`` and the connection disagree, or neither says one.
        """
        if not (conn_id or root or kubeconfig or context):
            conn_id = _of_tasks(backend)
        name = backend_name(backend, conn_id, "local")
        return cls(name, root, kubeconfig, context, namespace, conn_id, project, zones or ())

    def open(self) -> Backend:
        """The backend, with the patience of somebody at a terminal.

        :raises InvalidSpec: for a name that is none, or options that are not for this one.
        """
        given = {
            "--root": self.root,
            "--kubeconfig": self.kubeconfig,
            "--context": self.context,
            "--namespace": self.namespace,
            "--project": self.project,
        }
        refuse_others(self.backend, given)
        if self.backend != "tpu_vm" and self.zones:
            raise InvalidSpec(f"--zone: not for --backend {self.backend} here, but for tpu_vm")
        if self.backend == "gke" and self.project and not self.conn_id:
            raise InvalidSpec("--project: for --backend gke only with --conn-id; a kubeconfig says which cluster it is")
        if self.conn_id and (self.kubeconfig or self.context):
            raise InvalidSpec("--conn-id says which cluster it is: leave --kubeconfig and --context out")
        backend = self._made()
        if isinstance(backend, LocalBackend):
            backend.root.check_ours()
        if isinstance(backend, GkeBackend | TpuVmBackend):
            backend.patience = Patience(PATIENCE, lambda line: print(f"raytpu: {line}", file=sys.stderr))
        return backend

    def _made(self) -> Backend:
        if self.conn_id:
            over = {
                "root": self.root and str(self.root),
                "namespace": self.namespace,
                "project_id": self.project,
                "zones": ",".join(self.zones),
            }
            return by_connection(self.conn_id, self.backend, **{key: value for key, value in over.items() if value})
        if self.backend == "tpu_vm":
            from raytpu_ops.backends.google.access import DefaultAccess

            return make_backend("tpu_vm", cloud=DefaultAccess(self.project), zones=list(self.zones))
        if self.backend == "gke":
            from raytpu_ops.backends.gke.access import KubeconfigAccess

            access = KubeconfigAccess(self.kubeconfig, self.context)
            return make_backend("gke", access=access, **({"namespace": self.namespace} if self.namespace else {}))
        return local_backend(self.root) if self.backend == "local" else make_backend(self.backend)


async def looked(backend: Backend) -> str:
    """Where a backend's leases were looked for, so that nobody takes another place for empty.

    :param backend: that was asked.
    """
    if isinstance(backend, LocalBackend):
        return f"on {backend.name} below {backend.root.path}"
    if isinstance(backend, TpuVmBackend):
        return f"on {backend.name} in project {await backend.cloud.project()}"
    if isinstance(backend, GkeBackend):
        cluster = ", ".join(f"{key} {value}" for key, value in backend.access.selectors.items())
        return f"in namespace {backend.settings.namespace} of {cluster or 'the cluster that this pod is in'}"
    return f"on {backend.name}"


def by_connection(conn_id: str, backend: str, **options: str) -> Backend:
    """The backend of an Airflow connection, from wherever this Airflow keeps those: its database too.

    :param conn_id: of type ``ray_tpu``.
    :param backend: its name, which the connection may not contradict.
    :param options: over the connection's.
    :raises Misconfigured: there is no such connection.
    """
    return hook_of(conn_id, backend, options).backend


def hook_of(conn_id: str, backend: str | None, options: dict[str, Any], cloud: CloudAccess | None = None) -> RayTpuHook:
    """The hook of an Airflow connection, with its backend made.

    :param conn_id: of type ``ray_tpu``.
    :param backend: its name, which the connection may not contradict; None for the connection's.
    :param options: over the connection's.
    :param cloud: who acts at Google, where it is not the connection's account.
    :raises Misconfigured: there is no such connection.
    """
    with _quiet_airflow():
        from raytpu_ops.hooks.ray_tpu import RayTpuHook

        hook = RayTpuHook(conn_id, backend, options=options, cloud=cloud)
        _ = hook.backend
        return hook
