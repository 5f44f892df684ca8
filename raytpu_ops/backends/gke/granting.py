"""From nothing to node pools for every slice, rung by rung and zone by zone, safe to be killed at any point.

The RayCluster is made first, suspended: it carries the record of how far the climb has come, and it is
what everything is found by. Then come the pools of the present step, side by side as far as Google lets
(it works on one thing a cluster at a time, F04). When all of them run, the RayCluster's pods are wanted.
Pools that scale from zero come with the pods, so there the pods are wanted at once; so they are where nodes are
queued for, since Google takes nodes back that nobody waits for. A step that fails takes its
pools away again, and sees them gone, before the next one begins. Nothing that another process needs is
remembered in this one: each look reads what is there, does what follows from it and is safe to be done again.

Not here: requests and what answers mean (``node_pools.py``), giving back (``giving_back.py``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

from raytpu_ops.backends.base import Plan, Released, Say
from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.backends.gke.asking import ask, withdraw
from raytpu_ops.backends.gke.claim import Claim
from raytpu_ops.backends.gke.node_pools import TRIES_WITHIN, Wanted, creations, is_making, node_pool_names
from raytpu_ops.backends.gke.objects import ClusterView, PodView, first_hosts_since
from raytpu_ops.backends.gke.pool_settings import NodePools
from raytpu_ops.backends.gke.pools_api import PoolsApi
from raytpu_ops.backends.gke.queued import RequestView, check, consuming, granted_since, is_queued
from raytpu_ops.backends.gke.reconciling import Reconciler
from raytpu_ops.backends.gke.record import HOLD, RECORD, Pools, Record, read_record
from raytpu_ops.backends.ladder import Climb, Step, deadline, exhausted, is_refusal, steps
from raytpu_ops.tpu.deadlines import Deadlines, Phase
from raytpu_ops.tpu.errors import Preempted, RayTpuError
from raytpu_ops.waits import Done, Pending, Wait, wait_async

Answer = TypeVar("Answer")
Json = dict[str, Any]

#: Seconds between two looks at what Google makes; it takes minutes.
POLL_S = 10.0


@dataclass(frozen=True)
class Entered(Pending):
    """Not yet, and another phase has begun, with a deadline of its own.

    :param phase: that phase.
    :param by: its deadline, UTC.
    """

    phase: Phase
    by: datetime


@dataclass(frozen=True)
class Tools:
    """What the work is done with.

    :param kube: opens a connection to the API server.
    :param google: the cluster's node pools.
    :param clock: the time, UTC.
    :param sleep: takes seconds, between two looks.
    :param say: takes a line for the log.
    """

    kube: Callable[[], KubeApi]
    google: PoolsApi
    clock: Callable[[], datetime]
    sleep: Callable[[float], Awaitable[None]]
    say: Say

    async def until(
        self, what: str, look: Callable[[], Awaitable[Pending | Done[Answer]]], by: datetime, phase: Phase
    ) -> Answer:
        """Look, and act, until it is done; safe to be done again.

        :param by: the deadline, UTC, of the phase with which it begins.
        :raises DeadlineExceeded: it is later than that of the phase that it is in.
        """

        def judge(seen: Pending | Done[Answer]) -> Pending | Done[Answer]:
            if isinstance(seen, Entered):
                decider.enter(seen.phase, seen.by)
            return seen

        decider: Wait[Pending | Done[Answer], Answer] = Wait(
            what, judge, deadline=by, phase=phase, poll_s=POLL_S, on_progress=self.say, clock=self.clock
        )
        return await wait_async(look, decider, sleep=self.sleep)

    def while_making(self, words: str, deadlines: Deadlines, begun: datetime) -> Entered:
        """Still there, as GKE makes a pool and deletes none before it is through: the time to delete begins then.

        :param words: what is there.
        :param deadlines: those of the phases.
        :param begun: when it was to go, UTC.
        """
        by = deadlines.at(Phase.RELEASING, min(self.clock(), begun + TRIES_WITHIN))
        return Entered(words, Phase.RELEASING, by)


class Granting:
    """One acquisition.

    :param claim: on the RayCluster.
    :param plan: what is wanted.
    :param zones: where each kind of capacity is tried.
    :param options: the user's, of the pools.
    :param begin: makes the record of a lease that begins now.
    :param finish: goes on with a release that was killed, of the lease with that record.
    :param tools: what it is done with.
    :ivar begun: the owner's RayCluster is this acquisition's, or may be, so what is there may be rolled back. Before
        that it is none of its business: a lease may stand that somebody uses, and an API server that is away does not
        say so.
    """

    def __init__(
        self,
        claim: Claim,
        plan: Plan,
        zones: Sequence[str],
        options: NodePools,
        begin: Callable[[], Awaitable[Record]],
        finish: Callable[[Record], Awaitable[Released]],
        tools: Tools,
    ) -> None:
        self.begun, self._finish = False, finish
        self._claim, self._plan, self._options, self._begin, self._tools = claim, plan, options, begin, tools
        self._steps = steps(plan, zones)
        self._reconcilers: dict[int, Reconciler] = {}
        #: By when a step began: when its hosts were first granted. What is taken back and comes anew puts its deadline
        #: off no more. A process that goes on counts from what it sees, which is one such time more, and not for ever.
        self._first_granted: dict[datetime, datetime] = {}
        #: How much longer than usual a former lease takes to go.
        self._held = timedelta(0)

    async def run(self, by: datetime) -> Record:
        """Climb until a step grants all pools.

        :param by: until when the RayCluster has to be there, UTC, if no former one has to go first.
        :raises CapacityUnavailable: no step did.
        """
        gone_by = self._plan.deadlines.at(Phase.RELEASING, self._tools.clock())
        record = await self._tools.until(self._claim.what, lambda: self._start(gone_by), by, Phase.STARTING)
        self.begun = True
        while record.pools is not None and not record.pools.granted:
            step = self._step(record)
            try:
                record = await self._granted(step, record)
            except RayTpuError as error:
                if not is_refusal(error):
                    raise
                record = await self._failed(step, error)
        return record

    def _step(self, record: Record) -> Step:
        climb = _climb(record)
        if climb.step >= len(self._steps):
            raise exhausted(f"lease {self._claim.name}", climb)
        return self._steps[climb.step]

    # The RayCluster

    async def _start(self, gone_by: datetime) -> Pending | Done[Record]:
        async with self._tools.kube() as kube:
            there = await kube.ray_cluster(self._claim.name)
            self.begun = False  # what became of an apply whose answer got lost is known by now
            if there is not None:
                found = self._claim.adopt(there)
                if isinstance(found, Done):
                    return found
                left: list[str] = []
                if HOLD in ClusterView.of(there).finalizers:
                    # What it has is told by its own record: options, and the cluster, may be others by now.
                    released = await self._finish(read_record(there) or await self._first())
                    left, self._held = released.left, max(self._held, released.held)
                # Its pools take minutes each, one after the other (F08).
                return Entered("; ".join([found.description, *left]), Phase.RELEASING, gone_by + self._held)
            record = await self._first()
            self.begun = True
            await kube.apply_ray_cluster(self._claim.written(record))
            return Done(record)

    async def _first(self) -> Record:
        record = await self._begin()
        names = node_pool_names(self._claim.owner, self._plan.spec)
        sight = await self._tools.google.look()
        # What failed before this lease began is none of its failures.
        spent = [one.name for one in creations(sight.operations, names) if one.failed]
        climb, step = Climb.start(record.granted_at), self._steps[0]
        assert step.zone is not None
        options = self._options.model_copy(update={"cluster": None})
        pools = Pools(cluster=self._tools.google.cluster, zone=step.zone, names=names, options=options, spent=spent)
        record = self._at(record.model_copy(update={"climb": climb, "pools": pools}))
        await self._reconciler(step, record).refuse_strangers(sight.pools)
        return record

    def _at(self, record: Record) -> Record:
        """The record with what follows from the step that its climb is at."""
        climb = _climb(record)
        if climb.step >= len(self._steps):
            return record
        step = self._steps[climb.step]
        by = self._deadline(step, climb)
        if step.rung.waits_in_queue:  # what is granted in its last minute comes later
            by = self._plan.deadlines.at(Phase.PROVISIONING, by)
        changes = {
            "capacity": step.rung.model_dump(mode="json"),
            "pools": pools_of(record).model_copy(update={"zone": step.zone}),
            # The reaper leaves a lease alone that still climbs.
            "expires_at": by + self._plan.lease_for,
        }
        return record.model_copy(update=changes)

    def _deadline(self, step: Step, climb: Climb) -> datetime:
        by = deadline(step, climb, self._plan)
        return min(by, climb.begun + step.rung.valid_for) if step.rung.kind == "queued" else by

    async def _read(self, kube: KubeApi) -> tuple[Json, Record]:
        there = await kube.ray_cluster(self._claim.name)
        found = self._claim.adopt(there) if there is not None else None
        if there is None or not isinstance(found, Done):
            raise self._taken_away()
        return there, found.value

    async def _write(self, kube: KubeApi, there: Json, record: Record, *, suspend: bool) -> None:
        # Pods that are wanted say which request their nodes come by, or that they come by none.
        groups = None if suspend else consuming(there, record)
        if not await kube.change_ray_cluster(there, {RECORD: record.model_dump_json()}, suspend=suspend, groups=groups):
            raise self._taken_away()

    def _taken_away(self) -> Preempted:
        return Preempted(
            f"{self._claim.what} was deleted while capacity for it was being acquired, by a release or the reaper; "
            "try again"
        )

    # One step

    async def _granted(self, step: Step, record: Record) -> Record:
        by = self._deadline(step, _climb(record))
        phase = Phase.QUEUED if step.rung.waits_in_queue else Phase.PROVISIONING
        return await self._tools.until(f"lease {self._claim.name}, {step}", lambda: self._advance(step, by), by, phase)

    async def _advance(self, step: Step, by: datetime) -> Pending | Done[Record]:
        sight = await self._tools.google.look()
        async with self._tools.kube() as kube:
            there, record = await self._read(kube)
            if _climb(record).step != step.number or pools_of(record).granted:
                return Done(record)  # another process has gone on
            pending = await self._reconciler(step, record).round(
                sight, record.model_dump_json(), pools_of(record).spent, may_create=self._tools.clock() < by
            )
            if pending is None and step.rung.waits_in_queue:
                pending = await self._filled(kube, there, record)
            if pending is not None:
                return pending
            now = self._tools.clock()
            changes = {
                "granted_at": now,
                "expires_at": now + self._plan.lease_for,
                "pools": pools_of(record).model_copy(update={"granted": True}),
            }
            record = record.model_copy(update=changes)
            await self._write(kube, there, record, suspend=False)
            return Done(record)

    async def _filled(self, kube: KubeApi, there: Json, record: Record) -> Pending | None:
        """Pods, and requests where there is a queue, ask for the hosts; then all of them have one."""
        asked: list[RequestView] = []
        if is_queued(record):
            found = await ask(kube, there, record, self._plan.lease_for)
            if isinstance(found, Pending):
                return found
            asked = found
        if ClusterView.of(there).suspended:
            await self._write(kube, there, record, suspend=False)
            return Pending("the pools are there, empty; its pods ask for their hosts")
        pods = [PodView.of(pod) for pod in await kube.pods(self._claim.name)]
        hosts = [pod for pod in pods if not pod.is_head and not pod.deleting]
        placed = [pod for pod in hosts if pod.is_placed]
        spec = self._plan.spec
        if len(placed) >= spec.hosts:
            return None
        check(asked, spec.shape.hosts, len(placed))
        waits = [f"pod {pod.name} {pod.words()}" for pod in hosts if not pod.is_placed][:1]
        why = "".join(f"; {words}" for words in [one.words() for one in asked] or waits)
        words = f"{len(placed)} of {spec.hosts} hosts are there{why}"
        granted = granted_since(asked) if asked else first_hosts_since(hosts, spec.num_slices)
        if granted is None:
            return Pending(words)
        # The queue's time is over, and its length does not count (F10).
        climb = _climb(record)
        begun = self._first_granted.setdefault(climb.begun, max(granted, climb.begun))
        return Entered(words, Phase.PROVISIONING, self._plan.deadlines.at(Phase.PROVISIONING, begun))

    def _reconciler(self, step: Step, record: Record) -> Reconciler:
        """One for each step: it remembers what Google named as the operation to wait for."""
        if step.number not in self._reconcilers:
            assert step.zone is not None
            wanted = Wanted(
                owner=self._claim.owner,
                lease=self._claim.name,
                shape=self._plan.spec.shape,
                rung=step.rung,
                zone=step.zone,
                names=tuple(pools_of(record).names),
                options=self._options,
            )
            self._reconcilers[step.number] = Reconciler(wanted, self._tools.google)
        return self._reconcilers[step.number]

    async def _failed(self, step: Step, error: RayTpuError) -> Record:
        """Take the step's pools away, and go on to the next one."""
        self._tools.say(f"{step}: {error}")
        begun = self._tools.clock()
        by = self._plan.deadlines.at(Phase.RELEASING, begun)
        what = f"lease {self._claim.name}, {step} failed, its node pools"
        return await self._tools.until(what, lambda: self._cleared(step, error, begun), by, Phase.RELEASING)

    async def _cleared(self, step: Step, error: RayTpuError, begun: datetime) -> Pending | Done[Record]:
        sight = await self._tools.google.look()
        async with self._tools.kube() as kube:
            there, record = await self._read(kube)
            if _climb(record).step != step.number or pools_of(record).granted:
                return Done(record)  # another process has gone on
            if not ClusterView.of(there).suspended:
                await self._write(kube, there, record, suspend=True)
                return Pending("its pods are told to go")
            if step.rung.kind == "queued" and (names := await withdraw(kube, self._claim.owner)):
                return Pending(f"ProvisioningRequest {', '.join(names)} is told to go")
            pending, spent = await self._reconciler(step, record).clear(sight)
            if pending is not None and is_making(sight.pools):
                return self._tools.while_making(pending.description, self._plan.deadlines, begun)
            if pending is not None:
                return pending
            climb = _climb(record).failed(step, error, self._tools.clock())
            pools = pools_of(record).model_copy(update={"spent": spent})
            record = self._at(record.model_copy(update={"climb": climb, "pools": pools}))
            await self._write(kube, there, record, suspend=True)
            return Done(record)


def _climb(record: Record) -> Climb:
    assert record.climb is not None, "a lease with pools of its own has a climb"
    return record.climb


def pools_of(record: Record) -> Pools:
    """The pools of a lease that has some of its own."""
    assert record.pools is not None, "a lease with a climb has pools of its own"
    return record.pools
