"""The gke backend: a lease is one RayCluster of KubeRay, whose hosts come with their slices.

Nodes exist already or are brought by the cluster's autoscaler when the pods ask for them. Everything
is found again from the RayCluster itself: its name follows from the owner, its annotation holds the
rest. KubeRay makes Ray's token and takes it away with the RayCluster.

Not here: manifests (``manifest.py``), requests (``api.py``), what the answers mean (``health.py``).
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from raytpu_ops.backends.base import Plan, Released, Say, silent
from raytpu_ops.backends.gke import manifest as manifests
from raytpu_ops.backends.gke.access import KubeAccess, KubeconfigAccess
from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.backends.gke.health import Seen, judged
from raytpu_ops.backends.gke.objects import ClusterView, PodView, WorkloadView
from raytpu_ops.backends.gke.reach import ProxyCredentials, RayCredentials, addresses, through_proxy
from raytpu_ops.backends.gke.record import OWNER, RECORD, Record, owned_by, read_record, written
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.capacity import AnyCapacity
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, RayTpuError, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.waits import Done, Pending, Wait, utc_now, wait_async

if TYPE_CHECKING:
    from raytpu_ops.ray.client import RayClient
    from raytpu_ops.ray.credentials import Credentials

Answer = TypeVar("Answer")
Json = dict[str, Any]

#: How long an API server, or a webhook in front of it, may be away before a call is given up.
ANSWER_WITHIN = timedelta(minutes=5)
#: A pod whose host should have ended it so long ago has no host any more.
_LOST_AFTER = timedelta(seconds=30)
#: Pods that end again and again whose last words are read, in one look.
_READ_LOGS = 2


class GkeBackend:
    """Grants slices by KubeRay on a Kubernetes cluster.

    :param access: the way to the API server; default a kubeconfig, or inside a pod its service account.
    :param clock: the time, UTC.
    :param sleep: takes seconds, between two tries.
    :param options: see :class:`~raytpu_ops.backends.gke.settings.Settings`.
    :raises InvalidSpec: an option is not right.
    """

    name = "gke"
    acquires_in_task = True

    def __init__(
        self,
        access: KubeAccess | None = None,
        *,
        clock: Callable[[], datetime] = utc_now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        **options: Any,
    ) -> None:
        self.settings = Settings.of(options)
        self.access = access if access is not None else KubeconfigAccess()
        self._clock, self._sleep = clock, sleep
        self._tokens: dict[tuple[str, datetime], RayCredentials] = {}
        #: Leases of which nothing is known at the moment, and since when.
        self._silent: dict[str, datetime] = {}

    @property
    def ships_runtime(self) -> bool:
        """The image may lack this package's code for the cluster: it is uploaded."""
        return self.settings.runtime == "upload"

    async def plan(self, spec: SliceSpec, ladder: Sequence[AnyCapacity], *, lease_for: timedelta) -> Plan:
        """Check what can be checked without asking anybody.

        :raises InvalidSpec: a kind of capacity that this backend does not have, or a template that breaks it.
        :raises Misconfigured: the extra ``gke`` is not installed.
        """
        if importlib.util.find_spec("kubernetes_asyncio") is None:
            raise Misconfigured("backend 'gke' needs a Kubernetes client; pip install 'raytpu-ops[gke]'")
        if len(ladder) > 1:
            raise InvalidSpec(
                f"capacity: backend 'gke' takes one kind, {len(ladder)} were given; a ComputeClass can hold a "
                "ladder of its own, name it in compute_class"
            )
        rung = ladder[0]
        if rung.kind == "queued":
            raise InvalidSpec("capacity[0]: backend 'gke' queues by Kueue: name a LocalQueue in its option queue")
        settings, shape = self.settings, spec.shape
        manifests.ray_cluster("plan", spec, rung, settings)  # refuses what cannot work
        addresses(settings, "plan", "https://kubernetes")  # and URLs that are none
        notes = [f"waits in Kueue's LocalQueue {settings.queue}"] if settings.queue else []
        if rung.kind != "on_demand":
            notes.append(f"{rung.kind} nodes are chosen by label: they exist, or the autoscaler brings them")
        return Plan(
            backend=self.name,
            spec=spec,
            ladder=list(ladder),
            lease_for=lease_for,
            creates=[
                f"1 RayCluster in namespace {settings.namespace} with {settings.image}",
                "1 head pod",
                f"{spec.hosts} host pods: {spec.num_slices} x {shape}, {shape.chips_per_host} chips on each host",
            ],
            notes=notes,
        )

    async def acquire(self, plan: Plan, owner: Owner, *, say: Say = silent) -> SliceLease:
        """Make or adopt the owner's RayCluster; returns once Kubernetes has it, :meth:`observe` tells the rest.

        :raises Misconfigured: somebody else's RayCluster has the name, or the owner's has another spec.
        :raises CapacityUnavailable: the namespace's ResourceQuota is used up.
        :raises DeadlineExceeded: Kubernetes did not take it within :data:`ANSWER_WITHIN`.
        """
        try:
            return await self._waiting(
                f"RayCluster {self.settings.namespace}/{naming.lease_id(owner)}", lambda: self._acquired(plan, owner)
            )
        except RayTpuError as error:
            if left := await self._roll_back(owner, error):
                raise type(error)(f"{error}; {left}") from error
            raise

    async def _acquired(self, plan: Plan, owner: Owner) -> Pending | Done[SliceLease]:
        name, rung = naming.lease_id(owner), plan.ladder[0]
        wanted = manifests.ray_cluster(name, plan.spec, rung, self.settings)
        digest = manifests.digest(wanted)
        async with self._api() as api:
            there = await api.ray_cluster(name)
            if there is not None:
                return self._adopted(there, owner, digest)
            now = self._clock()
            server = (await self.access.configuration()).host or ""
            dashboard, serve = addresses(self.settings, name, server)
            record = Record(
                owner=owner,
                spec=plan.spec,
                capacity=rung.model_dump(mode="json"),
                digest=digest,
                granted_at=now,
                expires_at=now + plan.lease_for,
                dashboard=dashboard,
                serve=serve,
            )
            await api.apply_ray_cluster(written(wanted, record))
            return Done(self._lease(name, record))

    def _adopted(self, there: Json, owner: Owner, digest: str) -> Pending | Done[SliceLease]:
        view, record = ClusterView.of(there), read_record(there)
        what = f"RayCluster {self.settings.namespace}/{view.name}"
        if not owned_by(there, owner):
            whose = f"belongs to {record.owner.key}" if record else "was not made by raytpu-ops"
            raise Misconfigured(f"{what} exists and {whose}: delete or rename it")
        if view.deleting:
            return Pending(f"the one before is still being deleted; it is held by {_held(view)}")
        if record is None:
            raise Misconfigured(
                f"{what} exists for {owner.key}, but somebody wrote over its annotation {RECORD!r}: delete it, by "
                f"`kubectl delete raycluster {view.name} --namespace {self.settings.namespace}`"
            )
        if record.digest != digest:
            raise Misconfigured(
                f"{what} exists for {owner.key} with another spec or other options ({record.spec}): release it first, "
                "by the run's release task or `raytpu release`"
            )
        return Done(self._lease(view.name, record))

    async def _roll_back(self, owner: Owner, error: RayTpuError) -> str:
        """A create whose answer got lost may have gone through; a teardown never follows a failed setup.

        :return: what is left and why, in words (F32).
        """
        name = naming.lease_id(owner)
        try:
            async with self._api() as api:
                there = await api.ray_cluster(name)
                # A misconfigured request made nothing: what is there was there before.
                if there is not None and owned_by(there, owner) and not isinstance(error, Misconfigured):
                    await api.delete_ray_cluster(name, there["metadata"]["uid"])
        except RayTpuError as second:
            return f"RayCluster {self.settings.namespace}/{name} may be left: {second}"
        return ""

    async def find(self, owner: Owner) -> SliceLease | None:
        """The owner's lease, read from its RayCluster; None where there is none."""
        name = naming.lease_id(owner)

        async def look() -> Done[SliceLease | None]:
            async with self._api() as api:
                there = await api.ray_cluster(name)
            record = read_record(there) if there else None
            return Done(self._lease(name, record) if record is not None and record.owner == owner else None)

        return await self._waiting(f"RayCluster {self.settings.namespace}/{name}", look)

    async def observe(self, lease: SliceLease) -> Readiness:
        """What KubeRay, Kubernetes, Kueue and Ray say of the lease."""
        try:
            async with self._api() as api:
                seen = await self._looked(api, lease)
        except RemoteUnavailable as error:
            # Whether it queues or comes up is not known now, so only the silence itself may be too long.
            return Readiness(problems=[str(error)], since=self._silent.setdefault(lease.id, self._clock()))
        self._silent.pop(lease.id, None)
        return judged(lease.spec, lease.id, seen)

    async def _looked(self, api: KubeApi, lease: SliceLease) -> Seen:
        there = await api.ray_cluster(lease.id)
        if there is None or not owned_by(there, lease.owner):
            return Seen(None)
        cluster = ClusterView.of(there)
        pods = [PodView.of(pod) for pod in await api.pods(lease.id)]
        workload = await api.workload(cluster.uid) if cluster.queue else None
        failing = [pod for pod in pods if pod.restarts_again_and_again][:_READ_LOGS]
        seen = Seen(
            cluster=cluster,
            pods=pods,
            workload=WorkloadView.of(workload) if workload else None,
            last_lines={pod.name: await self._last_lines(api, pod) for pod in failing},
        )
        return await self._asked(lease, seen) if seen.answering and not cluster.suspended else seen

    async def _last_lines(self, api: KubeApi, pod: PodView) -> list[str]:
        """A log that can't be read, such as on a host that is gone, does not take the rest of the report away."""
        try:
            return await api.last_lines(pod.name, pod.container)
        except RayTpuError as error:
            return [f"(not to be had: {error})"]

    async def _asked(self, lease: SliceLease, seen: Seen) -> Seen:
        """With what Ray says."""
        from dataclasses import replace

        try:
            async with self.ray(lease) as ray:
                seen = replace(seen, nodes=await ray.nodes())
                if not judged(lease.spec, lease.id, seen).ready:
                    return seen  # who holds which chips matters later, and a head that starts has enough to do
                return replace(seen, holders=await ray.holders(), usage=await ray.usage())
        except RemoteUnavailable as error:
            return replace(seen, silence=str(error)) if seen.nodes is None else seen

    async def repair(self, lease: SliceLease) -> SliceLease:
        """Take the pods of each broken slice away; KubeRay makes the slice anew, as a whole."""
        report = await self.observe(lease)
        if not report.broken:
            return lease

        async def act() -> Done[None]:
            async with self._api() as api:
                pods = [PodView.of(pod) for pod in await api.pods(lease.id)]
                for pod in pods:
                    if pod.is_head or _slice_of(pod) not in report.broken or (pod.deleting and not self._is_lost(pod)):
                        continue
                    # A host that is gone never says that its pod has ended.
                    await api.delete_pod(pod.name, pod.uid, at_once=not pod.ready)
            return Done(None)

        await self._waiting(f"pods of lease {lease.id}", act)
        return lease

    async def release(self, lease: SliceLease) -> Released:
        """Delete the RayCluster and, without waiting for the garbage collector, its pods (F25)."""
        removed: list[str] = []
        left: list[str] = []
        async with self._api() as api:
            await self._try(left, self._release_cluster(api, lease, removed, left))
            await self._try(left, self._release_pods(api, lease, removed, left))
        return Released(removed=removed, left=left)

    async def _try(self, left: list[str], step: Awaitable[None]) -> None:
        """Every step is tried, whatever the others did."""
        try:
            await step
        except RayTpuError as error:
            left.append(str(error))

    async def _release_cluster(self, api: KubeApi, lease: SliceLease, removed: list[str], left: list[str]) -> None:
        there = await api.ray_cluster(lease.id)
        if there is None or not owned_by(there, lease.owner):
            return  # ours is gone
        what, view = f"RayCluster {self.settings.namespace}/{lease.id}", ClusterView.of(there)
        if view.deleting:
            left.append(f"{what} is being deleted; it is held by {_held(view)}")
            return
        await api.delete_ray_cluster(lease.id, view.uid)
        removed.append(what)
        left.append(f"{what} was told to go")

    async def _release_pods(self, api: KubeApi, lease: SliceLease, removed: list[str], left: list[str]) -> None:
        for pod in [PodView.of(one) for one in await api.pods(lease.id) if owned_by(one, lease.owner)]:
            await self._try(left, self._release_pod(api, pod, removed))
            left.append(f"pod {pod.name} is ending")

    async def _release_pod(self, api: KubeApi, pod: PodView, removed: list[str]) -> None:
        lost = self._is_lost(pod)
        if not pod.deleting or lost:
            await api.delete_pod(pod.name, pod.uid, at_once=lost)
            removed.append(f"pod {pod.name}{', whose host is gone' if lost else ''}")

    def _is_lost(self, pod: PodView) -> bool:
        """Its host should have ended it long ago, and is not there any more."""
        return pod.gone_by is not None and self._clock() > pod.gone_by + _LOST_AFTER

    async def list_leases(self, **labels: str) -> list[SliceLease]:
        """Leases in the namespace.

        :param labels: narrow by ``dag_id``, ``run_id``, ``task_id``.
        :raises InvalidSpec: for any other label.
        """
        keys = {"dag_id": "dag", "run_id": "run", "task_id": "task"}
        if unknown := set(labels) - set(keys):
            raise InvalidSpec(f"leases can't be narrowed by {', '.join(sorted(unknown))}: use dag_id, run_id, task_id")
        narrowed = {f"{naming.LABEL_PREFIX}{keys[key]}": naming.label_value(value) for key, value in labels.items()}
        selector = ",".join([OWNER, *(f"{key}={value}" for key, value in narrowed.items())])

        async def look() -> Done[list[SliceLease]]:
            async with self._api() as api:
                found = await api.ray_clusters(selector)
            read = [(one["metadata"]["name"], read_record(one)) for one in found]
            # A copy that somebody made of one carries its record, but has a name of its own.
            ours = [(name, one) for name, one in read if one is not None and name == naming.lease_id(one.owner)]
            return Done([self._lease(name, record) for name, record in ours])

        return await self._waiting(f"RayClusters in {self.settings.namespace}", look)

    def ray(self, lease: SliceLease) -> RayClient:
        """A client for the lease's Ray; its token is read when the client is used."""
        from raytpu_ops.ray.client import RayClient

        # A lease that is granted anew has its former one's name, and another token.
        key = (lease.id, lease.granted_at)
        token = self._tokens.setdefault(key, RayCredentials(lambda: self._read_token(lease.id)))
        address = lease.ray.address
        credentials = ProxyCredentials(self.access, token) if through_proxy(address) else token
        return RayClient(address, credentials=credentials, sleep=self._sleep)

    def serve_credentials(self, lease: SliceLease) -> Credentials | None:
        """What Serve's address asks for: the API server's own credentials where it leads through it."""
        return ProxyCredentials(self.access) if through_proxy(lease.ray.serve_address or "") else None

    async def _read_token(self, name: str) -> str | None:
        async with self._api() as api:
            return await api.token(name)

    def _lease(self, name: str, record: Record) -> SliceLease:
        slices = [f"{manifests.GROUP}-{number}" for number in range(record.spec.num_slices)]
        return SliceLease(
            id=name,
            owner=record.owner,
            backend=self.name,
            spec=record.spec,
            capacity=record.capacity,
            created={"RayCluster": [name], "slice": slices},
            place=self._place(),
            ray=RayEndpoint(
                address=record.dashboard,
                serve_address=record.serve,
                serve_listens=f"0.0.0.0:{manifests.PORTS['serve']}",  # in the head's pod, behind its service
                token=f"Secret {self.settings.namespace}/{name}",
            ),
            granted_at=record.granted_at,
            expires_at=record.expires_at,
        )

    def _place(self) -> dict[str, str]:
        """What a later task needs to find the lease the same way; each is an option of this backend."""
        chosen: Mapping[str, str] = {"namespace": self.settings.namespace, "runtime": self.settings.runtime}
        return {**chosen, **self.access.selectors}

    def _api(self) -> KubeApi:
        return KubeApi(self.access, self.settings.namespace)

    async def _waiting(self, what: str, look: Callable[[], Awaitable[Pending | Done[Answer]]]) -> Answer:
        """Do something that is safe to do again until it is through, as long as the server may be away."""
        decider: Wait[Pending | Done[Answer], Answer] = Wait(
            what, lambda seen: seen, deadline=self._clock() + ANSWER_WITHIN, max_backoff_s=5.0, clock=self._clock
        )
        return await wait_async(look, decider, sleep=self._sleep)


def _held(view: ClusterView) -> str:
    return f"finalizers {', '.join(view.finalizers)}" if view.finalizers else "nothing but its pods"


def _slice_of(pod: PodView) -> str:
    return pod.slice_name or f"{manifests.GROUP}-{pod.replica}"
