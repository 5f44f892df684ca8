"""The gke backend: a lease is one RayCluster of KubeRay, whose hosts come with their slices.

Nodes exist already, are brought by the cluster's autoscaler when the pods ask for them, or are node pools that
are made for the lease (option ``node_pools``; ``pool_leases.py``). Everything is found again from the
RayCluster itself: its name follows from the owner, its annotation holds the rest; node pools carry the same.
KubeRay makes Ray's token and takes it away with the RayCluster.

Not here: manifests (``manifest.py``), requests (``api.py``), what the answers mean (``health.py``).
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from raytpu_ops.backends.base import Patience, Plan, Released, Say, check_narrowing, silent
from raytpu_ops.backends.gke import manifest as manifests
from raytpu_ops.backends.gke.access import KubeAccess, KubeconfigAccess
from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.backends.gke.claim import Claim, unread
from raytpu_ops.backends.gke.giving_back import GivingBack
from raytpu_ops.backends.gke.health import judged
from raytpu_ops.backends.gke.looking import looked
from raytpu_ops.backends.gke.node_pools import own_nodes
from raytpu_ops.backends.gke.objects import PodView, lease_record
from raytpu_ops.backends.gke.planning import manifest_of, one_by_one, planned
from raytpu_ops.backends.gke.pool_leases import PoolLeases
from raytpu_ops.backends.gke.pool_settings import NodePools
from raytpu_ops.backends.gke.queued import RequestView
from raytpu_ops.backends.gke.reach import ProxyCredentials, RayCredentials, addresses, server_of, through_proxy
from raytpu_ops.backends.gke.record import OWNER, Record, as_lease, owned_by
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.backends.google.access import CloudAccess, DefaultAccess
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.capacity import AnyCapacity
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.errors import Misconfigured, RayTpuError, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.waits import Done, Pending, Wait, utc_now, wait_async

if TYPE_CHECKING:
    from raytpu_ops.ray.client import RayClient
    from raytpu_ops.ray.credentials import Credentials

Answer = TypeVar("Answer")

#: How long an API server, or a webhook in front of it, may be away before a call is given up.
ANSWER_WITHIN = timedelta(minutes=5)


class GkeBackend:
    """Grants slices by KubeRay on a Kubernetes cluster.

    :param access: the way to the API server; default a kubeconfig, or inside a pod its service account.
    :param cloud: whose word counts at Google, for node pools; default what this machine or pod is there.
    :param clock: the time, UTC.
    :param sleep: takes seconds, between two tries.
    :param options: see :class:`~raytpu_ops.backends.gke.settings.Settings`.
    :raises InvalidSpec: an option is not right.
    """

    name = "gke"

    def __init__(
        self,
        access: KubeAccess | None = None,
        *,
        cloud: CloudAccess | None = None,
        clock: Callable[[], datetime] = utc_now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        **options: Any,
    ) -> None:
        self.settings = Settings.of(options)
        self.access = access if access is not None else KubeconfigAccess()
        #: With everything but an acquire, which has deadlines of its own.
        self.patience = Patience(ANSWER_WITHIN)
        self._clock, self._sleep = clock, sleep
        self._tokens: dict[tuple[str, datetime], RayCredentials] = {}
        #: Leases of which nothing is known at the moment, and since when.
        self._silent: dict[str, datetime] = {}
        self._cloud: CloudAccess = cloud if cloud is not None else DefaultAccess()
        options_of_pools = self.settings.node_pools
        self._pools = None if options_of_pools is None else self._pool_leases(options_of_pools)
        #: By the options with which pools were made: a reaper's connection says nothing of them, or names others.
        self._made_with: dict[str, PoolLeases] = {}

    @property
    def acquires_in_task(self) -> bool:
        """Kubernetes answers within seconds, and Google takes its time to make node pools."""
        return self._pools is None

    def _pool_leases(self, options: NodePools) -> PoolLeases:
        return PoolLeases(options, self.access, self._cloud, self._api, clock=self._clock, sleep=self._sleep)

    def _pools_of(self, lease: SliceLease) -> PoolLeases | None:
        """Where the lease's own node pools are; None where it has none."""
        if "node pool" not in lease.created:
            return None
        told = lease.place["node_pools"]
        if told not in self._made_with:
            self._made_with[told] = self._pool_leases(Settings.of({"node_pools": told}).node_pools or NodePools())
        return self._made_with[told]

    @property
    def ships_runtime(self) -> bool:
        """The image may lack this package's code for the cluster: it is uploaded."""
        return self.settings.runtime == "upload"

    async def plan(
        self, spec: SliceSpec, ladder: Sequence[AnyCapacity], *, lease_for: timedelta, owner: Owner | None = None
    ) -> Plan:
        """Check what can be checked; Google is asked where node pools are to be made, and Kubernetes is not.

        :param owner: whose node pools they will be: somebody else's of their names are looked for.
        :raises InvalidSpec: a kind of capacity that this backend does not have, or a template that breaks it.
        :raises Misconfigured: an extra is not installed, or Google says already that it can't be had.
        """
        if importlib.util.find_spec("kubernetes_asyncio") is None:
            raise Misconfigured("backend 'gke' needs a Kubernetes client; pip install 'raytpu-ops[gke]'")
        found = planned(spec, ladder, self.settings, lease_for, owner)
        addresses(self.settings, "plan", "https://kubernetes")  # refuses URLs that are none
        if self._pools is None:
            return found
        notes = await self._pools.preflight(found, manifest_of(spec, ladder, self.settings), owner)
        return found.model_copy(update={"notes": [*found.notes, *notes]})

    async def acquire(self, plan: Plan, owner: Owner, *, say: Say = silent) -> SliceLease:
        """Make or adopt the owner's RayCluster, and the node pools for it where it is to have some.

        Without node pools it returns once Kubernetes has it, else once all hosts are granted.
        :meth:`observe` tells the rest.

        :raises Misconfigured: somebody else's RayCluster has the name, or the owner's has another spec.
        :raises CapacityUnavailable: no rung of the ladder had the chips, or a ResourceQuota is used up.
        :raises DeadlineExceeded: Kubernetes did not take it within the deadline of ``provisioning``, and never
            later than :data:`ANSWER_WITHIN`.
        """
        pools = self._pools
        if pools is None or pools.options.reuse:
            nodes = await pools.reused(plan.spec) if pools else None
            claim = self._claim(plan, owner, nodes)
            record = await self._taken(claim, plan)
        else:
            counted = [pools.options.asked(), *(rung.model_dump(mode="json") for rung in plan.ladder)]
            claim = self._claim(plan, owner, own_nodes(naming.lease_id(owner), plan.ladder), *counted)
            by = self._clock() + min(ANSWER_WITHIN, plan.deadlines.provisioning)
            record = await pools.grant(claim, plan, lambda: self._record(claim, plan), self._finished, by, say)
        return self._lease(record)

    def _claim(self, plan: Plan, owner: Owner, nodes: manifests.Nodes | None, *counted: object) -> Claim:
        manifest = manifests.ray_cluster(naming.lease_id(owner), plan.spec, plan.ladder[0], self.settings, nodes)
        return Claim(owner, self.settings.namespace, manifest, manifests.digest(manifest, *counted))

    async def _record(self, claim: Claim, plan: Plan) -> Record:
        """Of a lease that is granted now."""
        server = server_of(await self.access.configuration(), self.settings)
        dashboard, serve = addresses(self.settings, claim.name, server)
        now = self._clock()
        return Record(
            owner=claim.owner,
            spec=plan.spec,
            capacity=plan.ladder[0].model_dump(mode="json"),
            digest=claim.digest,
            granted_at=now,
            expires_at=now + plan.lease_for,
            dashboard=dashboard,
            serve=serve,
            deadlines=plan.deadlines,
        )

    async def _finished(self, record: Record) -> Released:
        """One more round of the release of a lease."""
        return await self._released(self._lease(record))

    async def _taken(self, claim: Claim, plan: Plan) -> Record:
        """The RayCluster of a lease that brings no nodes."""

        asked = False

        async def look() -> Pending | Done[Record]:
            nonlocal asked
            async with self._api() as api:
                there = await api.ray_cluster(claim.name)
                if there is not None:
                    return claim.adopt(there)
                record, asked = await self._record(claim, plan), True
                made = await api.apply_ray_cluster(claim.written(record))
                return Done(lease_record(made) or record)

        within = min(ANSWER_WITHIN, plan.deadlines.provisioning)
        try:
            return await self._waiting(claim.what, look, within=within, phase=Phase.PROVISIONING)
        except RayTpuError as error:
            if asked and (left := await self._roll_back(claim, error)):
                raise type(error)(f"{error}; {left}") from error
            raise

    async def _roll_back(self, claim: Claim, error: RayTpuError) -> str:
        """A create whose answer got lost may have gone through; a teardown never follows a failed setup.

        :return: what is left and why, in words (F32).
        """
        try:
            async with self._api() as api:
                there = await api.ray_cluster(claim.name)
                # A misconfigured request made nothing: what is there was there before.
                if there is not None and owned_by(there, claim.owner) and not isinstance(error, Misconfigured):
                    await api.delete_ray_cluster(claim.name, there["metadata"]["uid"])
        except RayTpuError as second:
            return f"{claim.what} may be left: {second}"
        return ""

    async def find(self, owner: Owner) -> SliceLease | None:
        """The owner's lease, read from its RayCluster, else from its node pools; None where there is none.

        :raises Misconfigured: there is one, and it can't be read.
        """
        name = naming.lease_id(owner)

        async def look() -> Done[SliceLease | None]:
            async with self._api() as api:
                there = await api.ray_cluster(name)
            record = lease_record(there) if there else None
            if record is None and self._pools is not None:
                record = next(iter(await self._pools.records({OWNER: owner.digest})), None)
            if record is None and there is not None and owned_by(there, owner):
                raise Misconfigured(unread(there))
            return Done(self._lease(record) if record is not None and record.owner == owner else None)

        return await self._waiting(f"RayCluster {self.settings.namespace}/{name}", look)

    async def observe(self, lease: SliceLease) -> Readiness:
        """What KubeRay, Kubernetes, Kueue, GKE and Ray say of the lease."""

        async def lost(record: Record, requests: Sequence[RequestView]) -> tuple[list[str], str]:
            pools = self._pools_of(lease)
            return await pools.lost(lease, record, requests) if pools is not None else ([], "")

        try:
            async with self._api() as api:
                seen = await looked(api, lease, lambda: self.ray(lease), lost, self._clock())
        except RemoteUnavailable as error:
            # Whether it queues or comes up is not known now, so only the silence itself may be too long.
            return Readiness(problems=[str(error)], since=self._silent.setdefault(lease.id, self._clock()))
        self._silent.pop(lease.id, None)
        return judged(lease.spec, lease.id, seen)

    async def repair(self, lease: SliceLease, *, say: Say = silent) -> SliceLease:
        """Take the pods of each broken slice away, and those whose host is gone; KubeRay makes all of them anew.

        A node pool that is lost is made anew first, under another name.
        """
        report = await self.observe(lease)
        if not report.broken:
            return lease

        async def act() -> Done[None]:
            async with self._api() as api:
                pods = [PodView.of(pod) for pod in await api.pods(lease.id)]
                for pod in pods:
                    gone = pod.is_lost(self._clock())
                    if not gone and (pod.is_head or pod.deleting or _slice_of(pod) not in report.broken):
                        continue
                    # A host that is gone never says that its pod has ended.
                    await api.delete_pod(pod.name, pod.uid, at_once=gone or not pod.ready)
            return Done(None)

        await self._waiting(f"pods of lease {lease.id}", act)
        pools = self._pools_of(lease)
        record = await pools.mend(lease, say) if pools is not None else None
        return lease if record is None else self._lease(record).model_copy(update={"conn_id": lease.conn_id})

    async def release(self, lease: SliceLease) -> Released:
        """Tell the RayCluster and its pods to go, then the node pools that were made for it (F25)."""
        done, pools = await self._released(lease), len(lease.created.get("node pool", []))
        return done.model_copy(update={"held": done.held + one_by_one(pools)})

    async def _released(self, lease: SliceLease) -> Released:
        giving = GivingBack(lease.owner, lease.id, self.settings.namespace, self._clock)
        pools = self._pools_of(lease)
        if pools is None:
            async with self._api() as api:
                await giving.kubernetes(api)
        else:
            if lease.capacity.get("kind") == "queued":
                await giving.tried(pools.requests(giving))
            await giving.tried(pools.kubernetes(giving))
            await giving.tried(pools.give_back(giving, lease))
        return giving.released

    async def list_leases(self, say: Say = silent, /, **labels: str) -> list[SliceLease]:
        """Leases in the namespace, and those that only node pools are left of.

        :param say: takes a line for each RayCluster of ours that can't be read.
        :param labels: narrow by ``dag_id``, ``run_id``, ``task_id``.
        :raises InvalidSpec: for any other label.
        """
        check_narrowing(labels)
        keys = {"dag_id": "dag", "run_id": "run", "task_id": "task"}
        narrowed = {f"{naming.LABEL_PREFIX}{keys[key]}": naming.label_value(value) for key, value in labels.items()}
        selector = ",".join([OWNER, *(f"{key}={value}" for key, value in narrowed.items())])

        async def look() -> Done[list[SliceLease]]:
            async with self._api() as api:
                found = await api.ray_clusters(selector)
            read = {one["metadata"]["name"]: lease_record(one) for one in found}
            # A copy that somebody made of one carries its record, but has a name of its own.
            ours = {name: one for name, one in read.items() if one is not None and name == naming.lease_id(one.owner)}
            if self._pools is not None:
                left = {naming.lease_id(one.owner): one for one in await self._pools.records(narrowed)}
                ours = {**left, **ours}
            for one in found:
                name = one["metadata"]["name"]
                if read[name] is None and name not in ours:
                    say(unread(one))
            return Done([self._lease(record) for record in ours.values()])

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

    def _lease(self, record: Record) -> SliceLease:
        return as_lease(record, self.settings.namespace, self._place(record))

    def _place(self, record: Record) -> dict[str, str]:
        """What a later task needs to find the lease the same way; each is an option of this backend."""
        chosen = {"namespace": self.settings.namespace, "runtime": self.settings.runtime, **self.access.selectors}
        if record.pools is not None:
            options = record.pools.options.model_copy(update={"cluster": record.pools.cluster})
            return {**chosen, **self._cloud.selectors, "node_pools": options.to_text(), "zone": record.pools.zone}
        return {**chosen, "node_pools": self.settings.node_pools.to_text()} if self.settings.node_pools else chosen

    def _api(self) -> KubeApi:
        return KubeApi(self.access, self.settings.namespace)

    async def _waiting(
        self,
        what: str,
        look: Callable[[], Awaitable[Pending | Done[Answer]]],
        *,
        within: timedelta | None = None,
        phase: str = "",
    ) -> Answer:
        """Do something that is safe to do again until it is through, as long as the server may be away."""
        deadline = self._clock() + (self.patience.within if within is None else within)
        decider: Wait[Pending | Done[Answer], Answer] = Wait(
            what,
            lambda seen: seen,
            deadline=deadline,
            phase=phase,
            on_progress=lambda line: self.patience.say(f"{line}; given up at {deadline:%H:%M:%S} UTC"),
            max_backoff_s=5.0,
            clock=self._clock,
        )
        return await wait_async(look, decider, sleep=self._sleep)


def _slice_of(pod: PodView) -> str:
    return pod.slice_name or f"{manifests.GROUP}-{pod.replica}"
