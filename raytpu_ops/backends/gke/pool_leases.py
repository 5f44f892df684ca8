"""Leases that have node pools of their own: granted, mended, found and given back at Google.

What ``backend.py`` does with RayClusters alone, this does with the pools beside them. Not here: the climb
itself (``granting.py``), requests (``pools_api.py``), what pools mean (``node_pools.py``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from raytpu_ops.backends.base import Plan, Released, Say, silent
from raytpu_ops.backends.gke.access import KubeAccess
from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.backends.gke.claim import Claim
from raytpu_ops.backends.gke.giving_back import GivingBack
from raytpu_ops.backends.gke.granting import Granting, Tools
from raytpu_ops.backends.gke.manifest import Nodes
from raytpu_ops.backends.gke.mending import Mending, lacking
from raytpu_ops.backends.gke.node_pools import NodePoolView, misfit, node_pool_names, nodes_of, own_policy
from raytpu_ops.backends.gke.pool_settings import NodePools, cluster_parts
from raytpu_ops.backends.gke.pools_api import PoolsApi
from raytpu_ops.backends.gke.queued import RequestView, unasked
from raytpu_ops.backends.gke.reconciling import found_policy, refuse_strangers
from raytpu_ops.backends.gke.record import Record, parsed, read_record
from raytpu_ops.backends.gke.room import head_notes, needs_of
from raytpu_ops.backends.google.access import CloudAccess
from raytpu_ops.backends.google.fields import is_zone, region_of
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.errors import DeadlineExceeded, InvalidSpec, Misconfigured, RayTpuError, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.waits import Done, Pending

if TYPE_CHECKING:
    from raytpu_ops.backends.google.clients import GoogleApis

#: How long what Google says of a lease's pools is good for, while its hosts come up.
_FRESH = timedelta(seconds=10)


class PoolLeases:
    """The node pools of one GKE cluster.

    :param options: the user's.
    :param access: the way to the API server; it may say which cluster that is.
    :param cloud: whose word counts at Google.
    :param kube: opens a connection to the API server.
    :param clock: the time, UTC.
    :param sleep: takes seconds, between two looks.
    """

    def __init__(
        self,
        options: NodePools,
        access: KubeAccess,
        cloud: CloudAccess,
        kube: Callable[[], KubeApi],
        *,
        clock: Callable[[], datetime],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self.options = options
        self._access, self._cloud, self._kube, self._clock, self._sleep = access, cloud, kube, clock, sleep
        self._seen: dict[str, tuple[datetime, list[str]]] = {}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[PoolsApi]:
        """Google's clients, for the cluster.

        :raises Misconfigured: nobody says which cluster that is.
        """
        async with self._apis() as apis:
            yield PoolsApi(apis, self._cluster(apis.project))

    def _apis(self) -> GoogleApis:
        from raytpu_ops.backends.google.clients import GoogleApis

        # A path names its project: the account need not.
        project = cluster_parts(self.options.cluster)[0] if self.options.cluster else None
        return GoogleApis(self._cloud, project=project)

    def _cluster(self, project: str) -> str:
        if self.options.cluster:
            return self.options.cluster
        told = self._access.selectors
        if "cluster_name" not in told:
            raise Misconfigured(
                "backend 'gke': node_pools needs to know its cluster at Google: set node_pools.cluster to "
                "'projects/…/locations/…/clusters/…', or name the cluster by cluster_name and location"
            )
        project = told.get("project_id") or project
        return f"projects/{project}/locations/{told['location']}/clusters/{told['cluster_name']}"

    def zones(self, cluster: str) -> list[str]:
        """Where pools may be.

        :param cluster: path of the cluster.
        :raises InvalidSpec: nobody says it.
        """
        _, location, name = cluster_parts(cluster)
        far = [zone for zone in self.options.zones if region_of(zone) != region_of(location)]
        if far:
            raise InvalidSpec(
                f"node_pools.zones: {', '.join(far)}: cluster {name} is in {location}, and node pools are in their "
                f"cluster's region, {region_of(location)}"
            )
        if self.options.zones:
            return list(self.options.zones)
        if is_zone(location):
            return [location]
        raise InvalidSpec(
            f"node_pools.zones: the cluster is a regional one, so name the zones where {location} has TPUs, such as "
            f"'{location}-b'"
        )

    async def preflight(self, plan: Plan, manifest: Mapping[str, Any], owner: Owner | None) -> list[str]:
        """What Google says beforehand.

        :param manifest: of the RayCluster, whose pods need room.
        :param owner: whose the pools will be; None looks for nobody else's of their names.
        :return: notes, one line each.
        :raises Misconfigured: what is surely wrong.
        """
        from raytpu_ops.backends.google.preflight import preflight
        from raytpu_ops.backends.google.roles import GKE, WORKLOAD_POLICY

        own = own_policy(naming.lease_id(owner) if owner else "plan", plan.spec.shape, self.options)
        head, [hosts] = manifest["spec"]["headGroupSpec"], manifest["spec"]["workerGroupSpecs"]
        async with self._apis() as apis:
            cluster = self._cluster(apis.project)
            if self.options.reuse:
                await self.reused(plan.spec)
                return []
            google, zones = PoolsApi(apis, cluster), self.zones(cluster)

            async def pools() -> list[str]:
                try:
                    found = await google.pools()
                except RayTpuError as error:
                    return [f"the cluster's node pools were not looked at: {error}"]
                if owner is not None:
                    refuse_strangers(found, node_pool_names(owner, plan.spec), owner)
                return await head_notes(google, found, head["template"])

            async def policy() -> list[str]:
                if owner is not None and own is not None:
                    await found_policy(google, owner, own, zones[0])  # a cluster's zones are in one region
                return []

            return await preflight(
                apis,
                plan.spec,
                plan.ladder,
                zones,
                role=GKE,
                lease_for=plan.lease_for,
                project=cluster_parts(cluster)[0],
                permissions=WORKLOAD_POLICY if own else (),
                host=needs_of(hosts["template"]),
                also=[pools, policy],
                price_per_chip_hour=self.options.price_per_chip_hour,
            )

    # Pools of somebody else's

    async def reused(self, spec: SliceSpec) -> Nodes:
        """How pods find the pools that the user named.

        :raises Misconfigured: one is not there, is no such slice, or can't be told from others.
        """
        async with self.open() as google:
            pools = {pool.name: pool for pool in await google.pools()}
        named: list[NodePoolView] = []
        for name in self.options.reuse:
            problem = misfit(pools[name], spec.shape) if name in pools else "there is none of that name"
            if problem:
                raise Misconfigured(f"node_pools.reuse: node pool {name} can't be a slice of {spec.shape}: {problem}")
            named.append(pools[name])
        found = nodes_of(named, [pool for name, pool in pools.items() if name not in self.options.reuse])
        if found is None:
            raise Misconfigured(
                f"node_pools.reuse: pods can't be sent to {', '.join(self.options.reuse)} alone: give their nodes one "
                "label that no other node pool's have"
            )
        return found

    # Pools that are made

    async def grant(
        self,
        claim: Claim,
        plan: Plan,
        begin: Callable[[], Awaitable[Record]],
        finish: Callable[[Record], Awaitable[Released]],
        by: datetime,
        say: Say,
    ) -> Record:
        """See :class:`~raytpu_ops.backends.gke.granting.Granting`; rolls back what it began or adopted where it fails.

        What another process was granted meanwhile is the lease, whatever this one failed at (F34). What it can't look
        at stays: it may be a lease in use. Where it is a climb that was begun before, the next try goes on with it, and
        after the last one the release task or the reaper takes it.
        """
        async with self.open() as google:
            tools = Tools(self._kube, google, self._clock, self._sleep, say)
            granting = Granting(
                claim,
                plan,
                self.zones(google.cluster),
                self.options,
                begin,
                finish,
                tools,
            )
            try:
                return await granting.run(by)
            except RayTpuError as error:
                if not granting.begun:  # it made nothing: what is there was there before
                    if not isinstance(error, DeadlineExceeded):
                        raise
                    stays = f"what there is of lease {claim.name} stays for a retry, the release task or the reaper"
                    raise DeadlineExceeded(f"{error}; {stays}") from error
                left = await self._rolled_back(claim, plan, google, say)
                if isinstance(left, Record):
                    say(f"Another process was granted lease {claim.name} meanwhile; this one failed: {error}")
                    return left
                if left:
                    raise type(error)(f"{error}; {left}") from error
                raise

    async def _rolled_back(self, claim: Claim, plan: Plan, google: PoolsApi, say: Say) -> Record | str:
        """Give everything back and see it gone; a teardown never follows a failed setup.

        :return: what is left and who takes it, in words (F32); its record where it is granted, and nothing was touched.
        """

        free = False

        async def look() -> Pending | Done[list[str] | Record]:
            nonlocal free
            if (granted := await self._granted(claim, plan, google, free=free)) is not None:
                return Done(granted)
            free = True
            giving = await self._given_back(claim, plan, google)
            if giving.is_stuck or not giving.left:
                return Done(giving.left)
            if giving.held:
                return tools.while_making("; ".join(giving.left), plan.deadlines, begun)
            return Pending("; ".join(giving.left))

        tools = Tools(self._kube, google, self._clock, self._sleep, say)
        say("Taking back what was made for it")
        begun = self._clock()
        by = plan.deadlines.at(Phase.RELEASING, begun)
        left: list[str] | Record
        try:
            left = await tools.until(f"what was made for lease {claim.name}", look, by, Phase.RELEASING)
        except (DeadlineExceeded, Misconfigured) as error:
            left = [str(error) if free else f"{error}; its node pools stay, since they may be in use"]
        if isinstance(left, Record):
            return left
        when = "" if free else "once the cluster can be asked, "
        label = f"; {when}the release task or the reaper finds it by its label raytpu-owner={claim.owner.digest}"
        return f"left: {'; '.join(left)}{label}" if left else ""

    async def _granted(self, claim: Claim, plan: Plan, google: PoolsApi, *, free: bool) -> Record | None:
        """The record of the lease where it is granted; None where nobody works on it, so that it may be taken back.

        :param free: that was so at a look before, and giving back has begun.
        :raises Misconfigured: another lease has its place by now, or its slices may be in use and nobody may look.
        :raises RemoteUnavailable: they may be, and the cluster does not say it.
        """
        try:
            async with self._kube() as kube:
                there = await kube.ray_cluster(claim.name)
        except (Misconfigured, RemoteUnavailable):
            if not free and await _may_be_in_use(google, claim.owner, plan.spec):
                raise
            return None
        if there is None or read_record(there) is None:
            return None
        found = claim.adopt(there)
        if isinstance(found, Done) and found.value.pools is not None and found.value.pools.granted:
            return found.value
        return None

    async def _given_back(self, claim: Claim, plan: Plan, google: PoolsApi) -> GivingBack:
        """One round of it. The RayCluster goes last: until then the next try, or the reaper, finds the rest by it."""
        giving = GivingBack(claim.owner, claim.name, claim.namespace, self._clock)
        names = node_pool_names(claim.owner, plan.spec)
        policy = own_policy(claim.name, plan.spec.shape, self.options)
        if any(rung.kind == "queued" for rung in plan.ladder):
            await giving.tried(self.requests(giving))
        if await giving.google(google, names, policy, self.zones(google.cluster)):
            await giving.tried(self.kubernetes(giving))
            await giving.tried(self._let_go(giving))
        return giving

    async def _let_go(self, giving: GivingBack) -> None:
        async with self._kube() as kube:
            await giving.let_go(kube)

    async def requests(self, giving: GivingBack) -> None:
        """The part of a round that comes before all others, where the lease's nodes are queued for."""
        async with self._kube() as kube:
            await giving.requests(kube)

    async def kubernetes(self, giving: GivingBack) -> None:
        """The part of a round that Kubernetes has to do with."""
        async with self._kube() as kube:
            await giving.kubernetes(kube)

    async def give_back(self, giving: GivingBack, lease: SliceLease) -> None:
        """The part of a round that Google has to do with."""
        policy = own_policy(lease.id, lease.spec.shape, self.options)
        async with self.open() as google:
            zones = {*self.options.zones, *([lease.place["zone"]] if "zone" in lease.place else [])}
            clean = await giving.google(google, lease.created.get("node pool", []), policy, sorted(zones))
        if clean:
            await giving.tried(self._let_go(giving))

    async def records(self, labels: Mapping[str, str]) -> list[Record]:
        """The records that node pools carry, one for each owner.

        :param labels: that the pools have to have.
        """
        async with self.open() as google:
            pools = await google.pools()
        found: dict[str, Record] = {}
        for pool in pools:
            record = parsed(pool.record)
            if record is None or not pool.is_of(record.owner) or not labels.items() <= pool.labels.items():
                continue
            found.setdefault(record.owner.digest, record)
        return list(found.values())

    async def lost(self, lease: SliceLease, record: Record, requests: Sequence[RequestView]) -> tuple[list[str], str]:
        """The lease's pools that will never be, or are no more, in words; and why Google can't be asked, if so.

        :param requests: for their nodes, where these are queued for.
        """
        if record.pools is None or not record.pools.granted:
            return [], ""
        at, words = self._seen.get(lease.id, (None, []))
        if at is None or self._clock() - at >= _FRESH:
            try:
                async with self.open() as google:
                    found = lacking(record, await google.pools(), requests)
            except RayTpuError as error:
                return [], f"its node pools can't be seen: {error}"
            for name in unasked(record, requests):
                found.setdefault(name, f"nobody asks for the nodes of node pool {name}")
            words = list(found.values())
            self._seen[lease.id] = (self._clock(), words)
        return words, ""

    async def mend(self, lease: SliceLease, say: Say = silent) -> Record | None:
        """See :class:`~raytpu_ops.backends.gke.mending.Mending`."""
        self._seen.pop(lease.id, None)
        async with self.open() as google:
            return await Mending(lease, Tools(self._kube, google, self._clock, self._sleep, say)).run()


async def _may_be_in_use(google: PoolsApi, owner: Owner, spec: SliceSpec) -> bool:
    """By what Google says: slices are handed out when all their pools are made, and replaced only after that."""
    pools = [pool for pool in await google.pools() if pool.is_of(owner)]
    replaced = {pool.name for pool in pools} - set(node_pool_names(owner, spec))
    return bool(replaced) or sum(not pool.is_coming for pool in pools) >= spec.num_slices
