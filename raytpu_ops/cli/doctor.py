"""What ``raytpu doctor`` shows: one row for each thing that was looked at, and what to do about it.

Not here: what is looked at. ``doctor_local.py`` knows what this machine needs to play TPU hosts,
``doctor_gke.py`` what a cluster needs for the ``gke`` backend, ``doctor_tpu_vm.py`` what Google says of TPU VMs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from raytpu_ops.tpu.errors import InvalidSpec

if TYPE_CHECKING:
    from raytpu_ops.backends.gke.access import KubeAccess
    from raytpu_ops.backends.gke.settings import Settings
    from raytpu_ops.backends.google.access import CloudAccess


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    :param name: what.
    :param ok: whether it is as it must be.
    :param found: what was found.
    :param help: what to do; empty where all is well.
    :param needed: False where things work without it, only worse.
    :param seen: False where it could not be looked at: neither good nor bad.
    """

    name: str
    ok: bool
    found: str
    help: str = ""
    needed: bool = True
    seen: bool = True

    @property
    def missing(self) -> bool:
        """Whether nothing will work until it is mended."""
        return self.needed and self.seen and not self.ok


def unseen(name: str, found: str, help_: str = "") -> Check:
    """The row for something that could not be looked at.

    :param name: what.
    :param found: why not.
    :param help_: how it could be.
    """
    return Check(name, False, found, help_, needed=False, seen=False)


def package(name: str, oldest: tuple[int, ...], how: str) -> Check:
    """Whether a package is installed, and new enough.

    :param name: of the distribution.
    :param oldest: the oldest version that does what we need.
    :param how: the command that gets it.
    """
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, False, "not installed", how)
    ok = numbers(found) >= oldest
    wanted = ".".join(str(part) for part in oldest)
    return Check(name, ok, found, "" if ok else f"{wanted} or newer is needed: {how}")


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers that compare: ``2.60.0rc1`` is (2, 60, 1) here, which is near enough for a minimum.

    :param version: of a package.
    """
    parts = []
    for part in version.split("."):
        digits = "".join(char for char in part if char.isdigit())
        if not part[:1].isdigit():
            break
        parts.append(int(digits))
    return tuple(parts)


def look(
    backend: str,
    *,
    root: Path | None = None,
    conn_id: str | None = None,
    kubeconfig: str | None = None,
    context: str | None = None,
    namespace: str | None = None,
    project: str | None = None,
    zones: Sequence[str] = (),
) -> list[Check]:
    """Look at everything that a backend needs; nothing is changed.

    :param backend: ``local``, ``gke`` or ``tpu_vm``.
    :param root: root folder of the local backend; None for the user's own.
    :param conn_id: an Airflow connection to the cluster, by which the tasks of this Airflow reach it.
    :param kubeconfig: of the cluster; None for ``$KUBECONFIG`` or ``~/.kube/config``.
    :param context: of the kubeconfig; None for its current one.
    :param namespace: of the RayClusters; None for the connection's, else ``default``.
    :param project: tpu_vm: its id; None for the credentials' own.
    :param zones: tpu_vm: where slices may be; none for the connection's.
    :raises InvalidSpec: for another backend, or options that are not for this one.
    """
    from raytpu_ops.cli.backends import refuse_others

    given = {"--kubeconfig": kubeconfig, "--context": context, "--namespace": namespace, "--project": project}
    refuse_others(backend, {**given, "--root": root})
    if conn_id and backend == "local":
        raise InvalidSpec("--conn-id: not for --backend local: this machine is looked at, with --root")
    if backend == "gke" and project:
        raise InvalidSpec("--project: not for --backend gke here, but for tpu_vm")
    if zones and backend != "tpu_vm":
        raise InvalidSpec(f"--zone: not for --backend {backend} here, but for tpu_vm")
    if backend == "gke":
        from raytpu_ops.cli import doctor_gke

        return asyncio.run(doctor_gke.checks(*_cluster(conn_id, kubeconfig, context, namespace)))
    if backend == "tpu_vm":
        from raytpu_ops.cli import doctor_tpu_vm

        return asyncio.run(doctor_tpu_vm.checks(*_google(conn_id, project, zones)))
    if backend != "local":
        raise InvalidSpec(f"backend {backend!r} has no doctor; there are gke, local, tpu_vm")
    from raytpu_ops.cli import doctor_local

    return doctor_local.checks(root)


def _cluster(
    conn_id: str | None, kubeconfig: str | None, context: str | None, namespace: str | None
) -> tuple[KubeAccess, Settings]:
    """The way to the API server, and the backend's settings, of which a kubeconfig knows none but the namespace."""
    from raytpu_ops.backends.gke.access import KubeconfigAccess
    from raytpu_ops.backends.gke.settings import Settings

    said = {"namespace": namespace} if namespace else {}
    if conn_id is None:
        return KubeconfigAccess(kubeconfig, context), Settings.of(said)
    if kubeconfig or context:
        raise InvalidSpec("--conn-id says which cluster it is: leave --kubeconfig and --context out")
    from raytpu_ops.backends.gke import GkeBackend
    from raytpu_ops.cli.backends import by_connection

    found = by_connection(conn_id, "gke", **said)
    assert isinstance(found, GkeBackend), "that is what the name stands for"
    return found.access, found.settings


def _google(conn_id: str | None, project: str | None, zones: Sequence[str]) -> tuple[CloudAccess, Sequence[str]]:
    """Who asks Google, and where slices may be.

    :raises InvalidSpec: nobody says where.
    """
    from raytpu_ops.backends.tpu_vm import TpuVmBackend
    from raytpu_ops.cli.backends import Where

    found = Where("tpu_vm", conn_id=conn_id, project=project, zones=zones).open()
    assert isinstance(found, TpuVmBackend), "that is what the name stands for"
    if not found.settings.zones:
        raise InvalidSpec("--zone: is missing, and no connection says where slices may be; repeat it for several zones")
    return found.cloud, found.settings.zones


def report(found: Sequence[Check], *, as_json: bool) -> int:
    """Print every check; the exit code: 1 when something that is needed is missing.

    :param found: the checks, in the order in which they are shown.
    :param as_json: JSON instead of a table.
    """
    if as_json:
        print(json.dumps([asdict(check) for check in found], indent=2))
    else:
        _print(found)
    return 1 if any(check.missing for check in found) else 0


def _print(found: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("", "check", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for check in found:
        sign, style = _sign(check)
        table.add_row(Text(sign, style=style), Text(check.name), Text(check.found), Text(check.help))
    console = Console()
    console.print(table)
    missing = [check.name for check in found if check.missing]
    unread = [check.name for check in found if not check.seen]
    good = "nothing is missing of what was looked at" if unread else "all that is needed is here"
    console.print(f"missing: {', '.join(missing)}" if missing else good, highlight=False)
    if unread:
        console.print(f"not looked at: {', '.join(unread)}", highlight=False)


def _sign(check: Check) -> tuple[str, str]:
    if check.ok:
        return "ok", "green"
    if not check.seen:
        return "unread", "dim"
    return ("missing", "red") if check.needed else ("better", "yellow")
