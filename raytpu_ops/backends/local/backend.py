"""The local backend: this machine plays the TPU hosts, each a real ``ray start`` with GKE's variables.

For a laptop, the demo and the tests. Labels, reservations, training and serving are Ray's own; only the
chips are missing. Ray opens its own ports (GCS, raylets) on all interfaces unless a node is 127.0.0.1
itself; what keeps strangers out there is Ray's token, which every one of them asks for. The dashboard,
which runs whatever it is sent, and Serve listen on loopback alone.

Not here: the steps (``cluster.py``) and what is read out of them (``health.py``).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from raytpu_ops.backends.base import Plan, Released, Say, belongs, check_narrowing, silent
from raytpu_ops.backends.local import health
from raytpu_ops.backends.local.cluster import Cluster
from raytpu_ops.backends.local.commands import RAY_START, Commands
from raytpu_ops.backends.local.layout import HEAD, Root, check_words
from raytpu_ops.backends.local.record import LeaseRecord, read_token
from raytpu_ops.backends.ray_options import OLDEST_RAY
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.capacity import AnyCapacity
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.tpu.spec import SliceSpec

if TYPE_CHECKING:
    from raytpu_ops.ray.client import RayClient

log = logging.getLogger(__name__)

#: Measured with 2.60: an idle host takes about half a gigabyte, the head somewhat more.
_HOST_BYTES, _HEAD_BYTES = 550 * 2**20, 1000 * 2**20


class LocalBackend:
    """Grants slices that this machine plays.

    :param root: the folder under which leases live, which must be short (Ray's sockets are below it);
        default ``$RAYTPU_LOCAL_ROOT``, else a folder of the user's below the system's temp folder.
    :param head_cpus: logical CPUs of the head: drivers and Serve's controller run there.
    :param host_cpus: logical CPUs of each host.
    :param max_hosts: more hosts than this are refused before anything starts.
    :param pass_env: names of environment variables that hosts get from the caller's environment, beside
        the few that every program needs.
    :param ray_start: what starts Ray; tests put another program here.
    :raises InvalidSpec: for numbers that make no sense.
    """

    name = "local"
    acquires_in_task = True
    ships_runtime = False  # the hosts run with this very interpreter

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        head_cpus: int = 4,
        host_cpus: int = 1,
        max_hosts: int = 64,
        pass_env: Collection[str] = (),
        ray_start: Sequence[str] = RAY_START,
    ) -> None:
        for what, value in {"head_cpus": head_cpus, "host_cpus": host_cpus, "max_hosts": max_hosts}.items():
            if type(value) is not int or value < 1:
                raise InvalidSpec(f"backend 'local': {what} must be a whole number from 1, got {value!r}")
        # Text is a collection too, of letters. What somebody wrote in place of names may be a secret.
        if not isinstance(pass_env, list | tuple | set | frozenset) or not all(isinstance(n, str) for n in pass_env):
            raise InvalidSpec(
                "backend 'local': pass_env must be a list of names of variables, such as ['MY_VARIABLE'], got "
                f"{type(pass_env).__name__}"
            )
        self.root = Root(root)
        self._max_hosts = max_hosts
        self._needs_ray = tuple(ray_start) == RAY_START
        commands = Commands(ray_start, head_cpus, host_cpus, tuple(pass_env))
        self._cluster = Cluster(self.root, commands)

    async def plan(
        self, spec: SliceSpec, ladder: Sequence[AnyCapacity], *, lease_for: timedelta, owner: Owner | None = None
    ) -> Plan:
        """Check Ray, the root folder and this machine's size; nothing is touched.

        :raises InvalidSpec: more hosts than this machine may play, a shape that Ray can't reserve, or a root that is
            too long.
        :raises Misconfigured: Ray is missing or too old, the root is not ours, or a path has a space in it.
        """
        if self._needs_ray:
            _check_ray()
            check_words("this Python", sys.executable)
        self.root.check()
        spec.shape.check_reserved()
        if spec.hosts > self._max_hosts:
            raise InvalidSpec(
                f"backend 'local': {spec} are {spec.hosts} hosts, this machine plays at most {self._max_hosts}; take a "
                "smaller topology or fewer slices, or raise max_hosts"
            )
        shape = spec.shape
        slices = "slice" if spec.num_slices == 1 else "slices"
        notes = [f"{spec.chips} chips exist in name only: JAX runs on this machine's CPUs"]
        needed, there = _HEAD_BYTES + spec.hosts * _HOST_BYTES, psutil.virtual_memory().available
        if needed > there:
            notes.append(f"memory is short: about {needed / 2**30:.1f} GiB needed, {there / 2**30:.1f} GiB available")
        if any(rung.kind != "on_demand" for rung in ladder):
            notes.append("every kind of capacity is granted at once here, unless a fault refuses it")
        return Plan(
            backend=self.name,
            spec=spec,
            ladder=list(ladder),
            lease_for=lease_for,
            creates=[
                f"a folder below {self.root.path}",
                "1 Ray head on a loopback address of its own",
                f"{spec.num_slices} {slices} of {shape}: {spec.hosts} Ray nodes, {shape.chips_per_host} TPU chips each",
            ],
            notes=notes,
            names=naming.with_room(owner) if owner else [],
        )

    async def acquire(self, plan: Plan, owner: Owner, *, say: Say = silent) -> SliceLease:
        """Start or adopt the owner's head and hosts; returns at once, :meth:`observe` tells when they are labelled.

        :raises CapacityUnavailable: a fault says so.
        :raises Misconfigured: the owner's hosts run with another spec.
        """
        self.root.check()
        return (await asyncio.to_thread(self._cluster.acquire, plan, owner)).lease()

    async def find(self, owner: Owner) -> SliceLease | None:
        """The owner's lease; also when only its processes or only its folder are left."""
        wanted = naming.lease_id(owner)
        return next((lease for lease in await asyncio.to_thread(self._cluster.leases) if lease.id == wanted), None)

    async def observe(self, lease: SliceLease) -> Readiness:
        """What Ray says of the lease's slices, and what the machine says of its processes."""
        from raytpu_ops.ray.readiness import slices_report

        cluster = self._cluster_of(lease)
        record = cluster.read(lease.id)
        if record is None:
            return Readiness(fatal=f"lease {lease.id} is not under {cluster.root.path} any more: provision again")
        parts = {part: cluster.part(record, part) for part in record.parts}
        report = await self._asked(record) if parts[HEAD].alive else None
        if report is None:
            report = slices_report(record.spec, [item.name for item in record.slices], [])
        return health.with_processes(report, record, parts)

    async def repair(self, lease: SliceLease, *, say: Say = silent) -> SliceLease:
        """Replace each broken slice whole, under a fresh name; where the head is dead, it too and every slice.

        :raises Preempted: the lease was released; provision again.
        """
        report = await self.observe(lease)
        record = await asyncio.to_thread(self._cluster_of(lease).repair, lease.id, report.broken)
        return record.lease()

    async def release(self, lease: SliceLease) -> Released:
        """End every process of the lease and remove its folder."""
        return await asyncio.to_thread(self._cluster_of(lease).release, lease.id)

    async def list_leases(self, say: Say = silent, /, **labels: str) -> list[SliceLease]:
        """Leases under the root.

        :param say: is told nothing: what can't be read there costs nothing.
        :param labels: narrow by ``dag_id``, ``run_id``, ``task_id``.
        :raises InvalidSpec: for any other label.
        """
        check_narrowing(labels)
        leases = await asyncio.to_thread(self._cluster.leases)
        return [lease for lease in leases if belongs(lease, labels)]

    def ray(self, lease: SliceLease) -> RayClient:
        """A client for the lease's Ray.

        :raises Misconfigured: the lease was released, and its token with it.
        """
        cluster = self._cluster_of(lease)
        record = cluster.read(lease.id)
        token = None if record is None else read_token(record.folder)
        if record is None or token is None:
            raise Misconfigured(f"lease {lease.id} is not under {cluster.root.path} any more: provision again")
        return self._client(record, token)

    def serve_credentials(self, lease: SliceLease) -> None:
        """None: Serve listens on loopback and lets everybody through."""

    async def _asked(self, record: LeaseRecord) -> Readiness | None:
        """What Ray says of the slices; None while it does not answer."""
        from raytpu_ops.ray.readiness import slices_report

        token = read_token(record.folder)
        if token is None:
            return None
        names = [item.name for item in record.slices]
        try:
            async with self._client(record, token) as ray:
                nodes = await ray.nodes()
                report = slices_report(record.spec, names, nodes)
                # Until Ray has noticed that a replaced slice is gone, it would reserve that one for the next job.
                gone = sorted({node.slice_name or "" for node in nodes if node.alive} - {"", *names})
                if gone:
                    problem = f"Ray has not noticed yet that {', '.join(gone)} is gone and was replaced"
                    report = report.model_copy(update={"problems": [*report.problems, problem]})
                if not report.ready:
                    return report  # who holds which chips matters later, and a head that starts has enough to do
                return slices_report(record.spec, names, nodes, await ray.holders(), await ray.usage())
        except RemoteUnavailable as error:
            log.debug("lease %s: %s", record.id, error)  # it starts, or it is dead: its process says which
            return None

    def _client(self, record: LeaseRecord, token: str) -> RayClient:
        from raytpu_ops.ray.client import RayClient

        return RayClient(record.lease().ray.address, token=token)

    def _cluster_of(self, lease: SliceLease) -> Cluster:
        """The lease's own root decides: a task may run with other settings than the one that acquired.

        Only a folder that :meth:`Root.check` trusts is ever written to or removed, whatever a lease says.
        """
        place = lease.place.get("root")
        if place is None or place == str(self.root.path):
            return self._cluster
        root = Root(place)
        root.check()
        return Cluster(root, self._cluster.commands, grace_s=self._cluster.grace_s)


def _check_ray() -> None:
    how = "install it on this machine with: pip install 'raytpu-ops[local]'"
    if importlib.util.find_spec("ray") is None:
        raise Misconfigured(f"backend 'local' needs Ray, and Ray is not installed; {how}")
    version = importlib.metadata.version("ray")
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        raise Misconfigured(f"backend 'local' needs Ray {oldest} or newer, Ray {version} is installed; {how}")
