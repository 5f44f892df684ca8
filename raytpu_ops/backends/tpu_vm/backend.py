"""The tpu_vm backend: a lease is one queued resource of Cloud TPU, whose VMs start Ray by themselves.

Worker 0 of the first slice is Ray's head, unless the user has one. Everything is found again from the queued
resource: its name follows from the owner, its nodes' metadata hold the rest, Ray's token too. So whoever may
read the metadata of TPU VMs in the project (``tpu.nodes.get``), or runs something
on the VMs, can read the token; it is in no label, log, XCom or argument.

Not here: requests (``request.py``), the way up (``granting.py``) and down (``giving_back.py``), how leases are found
(``finding.py``), what the answers mean (``states.py``, ``health.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from raytpu_ops.backends.base import Patience, Plan, Released, Say, belongs, check_narrowing, silent
from raytpu_ops.backends.google import roles
from raytpu_ops.backends.google.access import CloudAccess, DefaultAccess
from raytpu_ops.backends.google.preflight import preflight
from raytpu_ops.backends.tpu_vm import request
from raytpu_ops.backends.tpu_vm.api import TpuApi
from raytpu_ops.backends.tpu_vm.finding import found
from raytpu_ops.backends.tpu_vm.giving_back import GivingBack
from raytpu_ops.backends.tpu_vm.granting import ANSWER_WITHIN, FOLLOWED_WITHIN, Granting
from raytpu_ops.backends.tpu_vm.health import Seen, judged, taken
from raytpu_ops.backends.tpu_vm.leases import lease_of, zones_of
from raytpu_ops.backends.tpu_vm.objects import QueuedView, unread
from raytpu_ops.backends.tpu_vm.settings import Settings
from raytpu_ops.backends.tpu_vm.settling import Settling
from raytpu_ops.backends.tpu_vm.states import Meaning
from raytpu_ops.ray.credentials import FetchedToken, check_token
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.capacity import AnyCapacity
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, Preempted, RayTpuError, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.waits import Done, Pending, Wait, utc_now, wait_async

if TYPE_CHECKING:
    from raytpu_ops.ray.client import RayClient
    from raytpu_ops.ray.credentials import Credentials

Answer = TypeVar("Answer")

#: How long what Google said of a lease is good for: waits look every second, and Google counts requests.
GOOD_FOR = timedelta(seconds=10)
#: How long a VM may take to start Ray again before its slice counts as lost.
BACK_WITHIN = timedelta(minutes=10)


class TpuVmBackend:
    """Grants slices as Cloud TPU VMs.

    :param cloud: who asks Google; default what this machine or pod is to Google.
    :param ray_token: the token of the Ray head that ``ray_head`` names, and not used without one; default: a new one
        for each lease.
    :param clock: the time, UTC.
    :param sleep: takes seconds, between two tries.
    :param options: see :class:`~raytpu_ops.backends.tpu_vm.settings.Settings`.
    :raises InvalidSpec: an option is not right.
    """

    name = "tpu_vm"
    acquires_in_task = False
    ships_runtime = True  # the VMs have Ray, not this package

    def __init__(
        self,
        cloud: CloudAccess | None = None,
        *,
        ray_token: str | None = None,
        clock: Callable[[], datetime] = utc_now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        **options: Any,
    ) -> None:
        self.settings = Settings.of(options)
        self.cloud = cloud if cloud is not None else DefaultAccess()
        self._ray_token = check_token(ray_token) if ray_token else None
        self.patience = Patience(ANSWER_WITHIN)
        self._clock, self._sleep = clock, sleep
        self._tokens: dict[tuple[str, datetime], FetchedToken] = {}
        #: Releases that are not over, of each lease by its id and when it was granted.
        self._releasing: dict[tuple[str, datetime], Settling] = {}
        #: What Google said last of a lease, and when.
        self._looked: dict[str, tuple[datetime, Seen]] = {}
        #: What the VMs of a lease said last, and when.
        self._heard: dict[str, tuple[datetime, dict[str, Sequence[str]]]] = {}
        #: Leases of which nothing is known at the moment, and since when.
        self._silent: dict[str, datetime] = {}

    def __repr__(self) -> str:
        return f"TpuVmBackend({self.cloud!r}, zones={self.settings.zones!r})"

    async def plan(
        self, spec: SliceSpec, ladder: Sequence[AnyCapacity], *, lease_for: timedelta, owner: Owner | None = None
    ) -> Plan:
        """Check the spec and the ladder against what Cloud TPU has, and what Google tells about the project.

        :raises InvalidSpec: a generation, shape or kind of capacity that it does not have; or an option is missing.
        :raises Misconfigured: rights, the API, or all zones lack what is needed; or nobody says who asks.
        """
        self._check_enough()
        request.check(spec)
        for number, rung in enumerate(ladder):
            request.check_rung(rung, f"capacity[{number}]")
        settings, shape = self.settings, spec.shape
        notes = [f"zones, in this order: {', '.join(settings.zones)}"]
        if not settings.external_ip:
            notes.append("the VMs have internal addresses only: Airflow must reach those, and what they install too")
        async with self._api() as api:
            notes += await preflight(
                api.apis,
                spec,
                ladder,
                settings.zones,
                role=roles.TPU_VM,
                lease_for=lease_for,
                runtime_version=request.runtime_version(spec, settings),
                price_per_chip_hour=settings.price_per_chip_hour,
            )
        nodes = "node" if spec.num_slices == 1 else "nodes"
        head = f"Ray head at {settings.ray_head}" if settings.ray_head else "Ray head on worker 0 of the first slice"
        return Plan(
            backend=self.name,
            spec=spec,
            ladder=list(ladder),
            lease_for=lease_for,
            creates=[
                f"1 queued resource with {request.runtime_version(spec, settings)}",
                f"{spec.num_slices} TPU {nodes} of {shape}: {spec.hosts} VMs, {shape.chips_per_host} chips each",
                head,
            ],
            notes=notes,
            names=naming.with_room(owner) if owner else [],
        )

    async def acquire(self, plan: Plan, owner: Owner, *, say: Say = silent) -> SliceLease:
        """Climb the ladder until Google has granted all slices; :meth:`observe` tells when Ray is up on them.

        :raises InvalidSpec: an option is missing.
        :raises CapacityUnavailable: no rung had the chips in any zone.
        :raises Misconfigured: Google refuses for good, or something else has the name.
        :raises DeadlineExceeded: Google was away, or something could not be deleted in time.
        """
        self._check_enough()
        settings = self.settings
        return await self._acquired(plan, owner, settings, self._ray_token if settings.ray_head else None, say)

    def _check_enough(self) -> None:
        """Only whoever asks for slices needs all that belongs together; a lease is found and given back with less."""
        self.settings.check_enough()
        if self.settings.ray_head and not self._ray_token:
            raise InvalidSpec(
                "ray_token: is missing: the VMs join ray_head with its token; put it into the extra of the ray_tpu "
                "connection as 'ray_token', which Airflow masks"
            )

    async def _acquired(
        self, plan: Plan, owner: Owner, settings: Settings, token: str | None, say: Say, *, ends: datetime | None = None
    ) -> SliceLease:
        async with self._api() as api:
            granting = Granting(
                api,
                plan,
                owner,
                settings,
                token=token,
                ends=ends,
                clock=self._clock,
                sleep=self._sleep,
                say=say,
            )
            granted = await granting.run()
        assert granted.queued.record is not None, "it was checked to be ours"
        self._looked.pop(granted.queued.id, None)
        return lease_of(granted.queued, granted.queued.record, granted.nodes, who=self.cloud.selectors)

    async def find(self, owner: Owner) -> SliceLease | None:
        """The owner's lease, whether it is granted yet or not; None where there is none.

        :raises Misconfigured: there is one, and it can't be read.
        """
        leases = await self._waiting(f"lease {naming.lease_id(owner)}", lambda: self._found(owner))
        return leases[0] if leases else None

    async def _found(self, owner: Owner | None = None, say: Say = silent) -> list[SliceLease]:
        async with self._api() as api:
            return await found(api, self.settings.zones, owner, who=self.cloud.selectors, say=say)

    async def list_leases(self, say: Say = silent, /, **labels: str) -> list[SliceLease]:
        """Leases in all zones of the project, whichever the options name.

        :param say: takes a line for what is ours and can't be read, and for zones of the options that do not answer.
        :param labels: narrow by ``dag_id``, ``run_id``, ``task_id``.
        :raises InvalidSpec: for any other label.
        """
        check_narrowing(labels)
        leases = await self._waiting("leases of TPU VMs", lambda: self._found(say=say))
        return [one for one in leases if belongs(one, labels)]

    async def observe(self, lease: SliceLease) -> Readiness:
        """What Google and Ray say of the lease."""
        try:
            seen = await self._seen(lease)
        except RemoteUnavailable as error:
            # Whether it queues or comes up is not known now, so only the silence itself may be too long.
            return Readiness(problems=[str(error)], since=self._silent.setdefault(lease.id, self._clock()))
        self._silent.pop(lease.id, None)
        report = judged(lease, seen)
        if not seen.up or report.broken:
            return report
        seen = await self._asked(lease, seen)
        if not judged(lease, seen).ready:
            seen = replace(seen, said=await self._said(seen))
        return judged(lease, seen)

    async def _seen(self, lease: SliceLease) -> Seen:
        """What Google says; remembered for :data:`GOOD_FOR`."""
        at, seen = self._looked.get(lease.id, (None, None))
        if at is not None and seen is not None and self._clock() < at + GOOD_FOR:
            return seen
        async with self._api() as api:
            view = await self._view(api, lease)
            nodes = await api.nodes_of(view) if view is not None else []
            seen = Seen(view, {node.id: node for node in nodes})
        self._looked[lease.id] = (self._clock(), seen)
        return seen

    async def _view(self, api: TpuApi, lease: SliceLease) -> QueuedView | None:
        """Its queued resource; one that was granted anew may be in another zone."""
        for zone in self._zones(lease):
            view = await api.queued_resource(zone, lease.id)
            if view is not None and view.owner == lease.owner.digest:
                return view
        return None

    def _zones(self, lease: SliceLease) -> list[str]:
        return list(dict.fromkeys([*zones_of(lease), *self.settings.zones]))

    async def _said(self, seen: Seen) -> dict[str, Sequence[str]]:
        """What the VMs say while Ray is not whole; it helps a person, and where it can't be read the rest stands."""
        assert seen.queued is not None, "it is up"
        view = seen.queued
        at, said = self._heard.get(view.id, (None, {}))
        if at is not None and self._clock() < at + GOOD_FOR:
            return said
        said = {}
        async with self._api() as api:
            for node in view.node_ids:
                try:
                    said[node] = await api.said(view.zone, node)
                except RayTpuError as error:
                    said[node] = [f"(not to be had: {error})"]
        self._heard[view.id] = (self._clock(), said)
        return said

    async def _asked(self, lease: SliceLease, seen: Seen) -> Seen:
        """With what Ray says."""
        try:
            async with self.ray(lease) as ray:
                seen = replace(seen, ray=await ray.nodes())
                if not judged(lease, seen).ready:
                    return seen  # who holds which chips matters later, and a head that starts has enough to do
                return replace(seen, holders=await ray.holders(), usage=await ray.usage())
        except RemoteUnavailable as error:
            return replace(seen, silence=str(error)) if seen.ray is None else seen

    async def repair(self, lease: SliceLease, *, say: Say = silent) -> SliceLease:
        """Wait until the VMs whose Ray died have started it again; what Google took back is asked for anew (F12).

        A queued resource brings its nodes once, so all slices are asked for again, from the foot of the ladder;
        where another task of the run has them granted anew already, the lease is that one.

        :raises CapacityUnavailable: Google has no other slices.
        :raises Preempted: the lease is gone as a whole, or Ray did not come back within :data:`BACK_WITHIN`.
        """
        until = self._clock() + BACK_WITHIN
        gone: datetime | None = None

        async def look() -> tuple[Readiness, Seen | None]:
            report = await self.observe(lease)
            return report, self._looked.get(lease.id, (None, None))[1]

        def judge(looked: tuple[Readiness, Seen | None]) -> Pending | Done[QueuedView | None]:
            nonlocal gone
            report, seen = looked
            now = self._clock()
            if not report.slices:  # Google does not answer: what it said before is no news, and nobody can ask anew
                gone = None
                return Pending(report.describe()) if now < until else Done(None)
            if seen is not None and (why := taken(lease, seen)):
                if seen.queued is not None and seen.queued.meaning is not Meaning.GOING:
                    return Done(seen.queued)
                # Another task that repairs deletes what is left before it asks anew.
                gone = (gone or now) if seen.queued is None else None
                if now < (until if gone is None else gone + FOLLOWED_WITHIN):
                    return Pending(why)
                raise Preempted(f"lease {lease.id}: {why}. Clear the task that provisioned it to get a new one.")
            if not report.broken:
                return Done(None)
            if now >= until:
                raise Preempted(f"lease {lease.id}: Ray did not come back on its VMs: {report.describe()}")
            return Pending(report.describe())

        decider = Wait(f"lease {lease.id}", judge, deadline=None, on_progress=say, clock=self._clock)
        lost = await wait_async(look, decider, sleep=self._sleep)
        return lease if lost is None else await self._granted_anew(lease, lost, say)

    async def _granted_anew(self, lease: SliceLease, lost: QueuedView, say: Say) -> SliceLease:
        record = lost.record
        if record is None:
            raise Misconfigured(unread(lost))
        plan = Plan(
            backend=self.name,
            spec=record.spec,
            ladder=record.ladder,
            lease_for=record.lease_for,
            deadlines=record.deadlines,
        )
        # What is lost may have been granted anew itself; a task may hold the older lease.
        ends = record.ends or lease.expires_at
        # The options of the task that provisioned it: this task knows only how to find it.
        settings = Settings.of(record.settings)
        token = (self._ray_token or lost.token) if settings.ray_head else None
        granted = await self._acquired(plan, lease.owner, settings, token, say, ends=ends)
        return granted.model_copy(update={"conn_id": lease.conn_id})

    async def release(self, lease: SliceLease) -> Released:
        """Delete the queued resource with its nodes, in whatever state they are, and see that they are gone.

        Where it was not whole, another task may be asking for it anew: then only some quiet ends it.
        """
        back = GivingBack()
        name = naming.lease_id(lease.owner)
        async with self._api() as api:
            for zone in self._zones(lease):
                await back.look(api, zone, name, lease.owner)
        self._looked.pop(lease.id, None)
        key = (lease.id, lease.granted_at)
        left = self._releasing.setdefault(key, Settling()).left(back, self._clock())
        if not left:
            del self._releasing[key]
        return Released(removed=back.removed, left=left, held=back.held)

    def ray(self, lease: SliceLease) -> RayClient:
        """A client for the lease's Ray; its token is read from the VMs' metadata when the client is used."""
        from raytpu_ops.ray.client import RayClient

        # A lease that is granted anew has its former one's name, and another token.
        key = (lease.id, lease.granted_at)
        token = self._tokens.setdefault(
            key,
            FetchedToken(
                lambda: self._read_token(lease),
                f"lease {lease.id}: its queued resource is gone, and Ray's token with it",
            ),
        )
        return RayClient(lease.ray.address, credentials=token, sleep=self._sleep)

    async def _read_token(self, lease: SliceLease) -> str | None:
        async with self._api() as api:
            view = await self._view(api, lease)
        return view.token if view is not None else None

    def serve_credentials(self, lease: SliceLease) -> Credentials | None:
        """None: Serve lets everybody in who reaches the head's address."""
        return None

    def _api(self) -> TpuApi:
        return TpuApi(self.cloud)

    async def _waiting(self, what: str, look: Callable[[], Awaitable[Answer]]) -> Answer:
        """Do something that is safe to do again until it is through, as long as Google may be away."""
        deadline = self._clock() + self.patience.within
        decider: Wait[Answer, Answer] = Wait(
            what,
            Done,
            deadline=deadline,
            max_backoff_s=5.0,
            on_progress=lambda line: self.patience.say(f"{line}; given up at {deadline:%H:%M:%S} UTC"),
            clock=self._clock,
        )
        return await wait_async(look, decider, sleep=self._sleep)
