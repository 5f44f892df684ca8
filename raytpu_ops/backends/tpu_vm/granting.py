"""Acquiring: up the ladder with one queued resource at a time, from whatever a task that was killed left behind.

There is one name for the queued resource of an owner, so a zone never holds two; a step that failed is deleted
and seen gone before the next one is asked for, so two zones don't either. All state is on the queued resource.
Not here: what is asked for (``request.py``) and how it is given back (``giving_back.py``).
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar

from raytpu_ops.backends import ladder
from raytpu_ops.backends.base import Plan, Say
from raytpu_ops.backends.google.refusals import is_there_already, operation_failed
from raytpu_ops.backends.ladder import Climb, Step
from raytpu_ops.backends.tpu_vm import request
from raytpu_ops.backends.tpu_vm.api import TpuApi
from raytpu_ops.backends.tpu_vm.giving_back import GivingBack
from raytpu_ops.backends.tpu_vm.health import lost
from raytpu_ops.backends.tpu_vm.objects import NodeView, QueuedView
from raytpu_ops.backends.tpu_vm.record import OWNER, Record, asked_with, digest
from raytpu_ops.backends.tpu_vm.settings import Settings
from raytpu_ops.backends.tpu_vm.states import Meaning
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.errors import CapacityUnavailable, Misconfigured, Preempted, RayTpuError, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.waits import Done, Pending, Wait, wait_async

Answer = TypeVar("Answer")

#: Seconds between two looks: what is waited for takes minutes, and every look is two calls.
POLL_S = 10.0
#: How long Google may be away before the first look is given up.
ANSWER_WITHIN = timedelta(minutes=5)


class Granted(NamedTuple):
    """What was granted.

    :param queued: the queued resource.
    :param nodes: all its nodes, in the order of the slices.
    """

    queued: QueuedView
    nodes: Sequence[NodeView]


class Granting:
    """One acquisition.

    :param api: open.
    :param plan: what is wanted.
    :param owner: for whom.
    :param settings: the backend's options.
    :param anew: in the place of what Google took back; where nothing is there, or it is being deleted, somebody
        gives it back, and nothing is asked for.
    :param token: of a Ray head of the user's own; None makes a new one.
    :param clock: the time, UTC.
    :param sleep: takes seconds, between two looks.
    :param say: takes a line for the log.
    """

    def __init__(
        self,
        api: TpuApi,
        plan: Plan,
        owner: Owner,
        settings: Settings,
        *,
        token: str | None,
        anew: bool = False,
        clock: Callable[[], datetime],
        sleep: Callable[[float], Awaitable[None]],
        say: Say,
    ) -> None:
        self._api, self._plan, self._owner, self._settings = api, plan, owner, settings
        self._token, self._clock, self._sleep, self._say, self._anew = token, clock, sleep, say, anew
        self._name = naming.lease_id(owner)
        self._digest = digest(plan, settings)
        self._steps = ladder.steps(plan, settings.zones)
        #: Zones in which a create of ours was answered: what has our name there is ours.
        self._made: set[str] = set()

    async def run(self) -> Granted:
        """Adopt or climb until something is granted; rolls back where nothing is.

        :raises CapacityUnavailable: no rung had the chips in any zone.
        :raises Misconfigured: Google refuses for good, or something else has the name.
        """
        found = await self._found()
        try:
            return await self._climb(found)
        except RayTpuError as error:
            if left := await self._rolled_back():
                raise type(error)(f"{error}; {left}") from error
            raise

    # Before anything is made

    async def _found(self) -> tuple[QueuedView, Sequence[NodeView]] | None:
        """What the owner has already, with its nodes; None where that is nothing. Nothing is touched."""

        async def look() -> list[tuple[QueuedView, Sequence[NodeView]]]:
            views = [await self._api.queued_resource(zone, self._name) for zone in self._settings.zones]
            return [(view, await self._api.nodes_of(view)) for view in views if view is not None]

        def judge(
            found: list[tuple[QueuedView, Sequence[NodeView]]],
        ) -> Pending | Done[tuple[QueuedView, Sequence[NodeView]] | None]:
            for view, _ in found:
                self._check_ours(view)
            going = [str(view) for view, _ in found if view.meaning is Meaning.GOING]
            if self._anew and (going or not found):
                raise Preempted(
                    f"lease {self._name} was released while its slices were to be replaced. Clear the task that "
                    "provisioned it to get a new one."
                )
            if going:
                decider.enter(Phase.RELEASING, self._plan.deadlines.at(Phase.RELEASING, begun))
                return Pending(f"the one before is still being deleted: {', '.join(going)}")
            return Done(max(found, key=_step_of, default=None))

        begun = self._clock()
        first = ladder.deadline(self._steps[0], Climb.start(begun), self._plan)
        decider = self._wait(f"lease {self._name}", judge, min(begun + ANSWER_WITHIN, first), Phase.PROVISIONING)
        return await wait_async(look, decider, sleep=self._sleep)

    def _check_ours(self, view: QueuedView) -> None:
        delete = f"gcloud compute tpus queued-resources delete {view.id} --zone {view.zone} --force"
        if view.owner != self._owner.digest:
            raise Misconfigured(
                f"{view} exists and is not {self._owner.key}'s: delete it (`{delete}`) or rename the task"
            )
        if view.meaning is Meaning.GOING:
            return
        if view.record is None:
            raise Misconfigured(
                f"{view} is {self._owner.key}'s, but somebody wrote over its record: delete it, by `{delete}`"
            )
        if view.record.digest != self._digest:
            raise Misconfigured(
                f"{view} exists for {self._owner.key} with another spec, ladder or other options ({view.record.spec}): "
                "release it first, by the run's release task or `raytpu release`"
            )

    # Up the ladder

    async def _climb(self, found: tuple[QueuedView, Sequence[NodeView]] | None) -> Granted:
        climb = Climb.start(self._clock()) if found is None else await self._adopted(*found)
        while climb.step < len(self._steps):
            step = self._steps[climb.step]
            try:
                return await self._granted(step, climb)
            except RayTpuError as error:
                if not ladder.is_refusal(error):
                    raise
                self._say(f"{step} failed: {error}")
                await self._removed(_zone(step))
                climb = climb.failed(step, error, self._clock())
        raise ladder.exhausted(f"lease {self._name}", climb)

    async def _adopted(self, view: QueuedView, nodes: Sequence[NodeView]) -> Climb:
        """Where the climb goes on; one that was granted once and is lost is deleted, and it begins again (F12)."""
        assert view.record is not None, "it was checked to be ours"
        await self._twins_removed(view)
        gone = [f"{view} is {view.state}"] if view.meaning is Meaning.LOST else lost(view, nodes)
        if not gone:
            self._say(f"Adopted {view}: it is {view.state}")
            return view.record.climb
        self._say(f"{'; '.join(gone)}: Google took the slices back; deleting what is left, to begin again")
        await self._removed(view.zone, only=view)
        return Climb.start(self._clock())

    async def _twins_removed(self, found: QueuedView) -> None:
        for zone in self._settings.zones:
            if zone != found.zone:
                await self._removed(zone)

    async def _granted(self, step: Step, climb: Climb) -> Granted:
        zone, seen_before = _zone(step), False
        first_seen: datetime | None = None

        async def look() -> tuple[QueuedView, list[NodeView]] | None:
            nonlocal seen_before
            view = await self._api.queued_resource(zone, self._name)
            if view is None:
                if seen_before:
                    raise Preempted(
                        f"queued resource {self._name} in {zone} was deleted by somebody else while it was waited for; "
                        "clear the task to ask again"
                    )
                await self._create(step, climb)
                return None
            self._check_ours(view)
            seen_before = True
            self._made.add(zone)
            up = view.meaning in (Meaning.COMING, Meaning.THERE)
            return view, await self._api.nodes_of(view) if up else []

        def judge(seen: tuple[QueuedView, list[NodeView]] | None) -> Pending | Done[Granted]:
            if seen is None:
                return Pending(f"{step}: asked for")
            view, nodes = seen
            verdict = judged(view, nodes)
            if isinstance(verdict, Pending):
                if view.meaning in (Meaning.COMING, Meaning.THERE):
                    decider.enter(Phase.PROVISIONING, self._plan.deadlines.at(Phase.PROVISIONING, granted(nodes)))
                return Pending(f"{step}: {verdict.description}")
            return verdict

        def granted(nodes: Sequence[NodeView]) -> datetime:
            """When hosts began to be made (F10): the queue's time is over, and its length does not count."""
            nonlocal first_seen
            first_seen = first_seen or self._clock()
            return min((node.created for node in nodes if node.created is not None), default=first_seen)

        decider = self._wait(
            f"queued resource {self._name} in {zone}", judge, ladder.deadline(step, climb, self._plan), Phase.QUEUED
        )
        return await wait_async(look, decider, sleep=self._sleep)

    async def _create(self, step: Step, climb: Climb) -> None:
        settings, now, zone = self._settings, self._clock(), _zone(step)
        record = Record(
            owner=self._owner,
            spec=self._plan.spec,
            capacity=step.rung.model_dump(mode="json"),
            climb=climb,
            ladder=self._plan.ladder,
            settings=asked_with(settings),
            digest=self._digest,
            lease_for=self._plan.lease_for,
            until=ladder.deadline(step, climb, self._plan),
            dashboard=settings.dashboard_url,
            serve=settings.serve_url,
            external=settings.reach == "external",
        )
        token = self._token or secrets.token_urlsafe(32)
        wanted = request.queued_resource(self._api.project, step, record, settings, token, now)
        try:
            await self._api.create(zone, self._name, wanted)
        except RayTpuError as error:
            if not is_there_already(error):
                raise
            return  # an earlier try of ours whose answer got lost (F02), or a stranger's: the next look tells
        self._made.add(zone)
        self._say(f"Asked for {step}: queued resource {self._name}, {self._plan.spec}")

    # Back down

    async def _removed(self, zone: str, *, only: QueuedView | None = None) -> None:
        """Tell what the owner has in a zone to go, and wait until it is gone.

        :param only: the one to delete; where another task of the run has asked anew by now, that one stays.
        :raises DeadlineExceeded: it is still there.
        :raises Misconfigured: it may not be deleted, or not be looked at.
        """

        async def look() -> Pending | Done[None]:
            back = GivingBack()
            if only is not None:
                there = await self._api.queued_resource(zone, self._name)
                if there is not None and there.node_ids != only.node_ids:
                    return Done(None)
            await back.look(self._api, zone, self._name, self._owner, ours=zone in self._made)
            if back.errors:
                raise next((one for one in back.errors if not isinstance(one, RemoteUnavailable)), back.errors[0])
            return Pending("; ".join(back.left)) if back.left else Done(None)

        until = self._plan.deadlines.at(Phase.RELEASING, self._clock())
        decider: Wait[Pending | Done[None], None] = self._wait(
            f"queued resource {self._name} in {zone}", lambda seen: seen, until, Phase.RELEASING
        )
        await wait_async(look, decider, sleep=self._sleep)

    async def _rolled_back(self) -> str:
        """Give back what was made; a teardown follows a failed setup only in luck.

        :return: what may be left and why, in words (F32); empty where nothing is.
        """
        left = []
        for zone in self._settings.zones:
            try:
                await self._removed(zone)
            except RayTpuError as error:
                if zone in self._made or not isinstance(error, Misconfigured):
                    left.append(f"queued resource {self._name} in {zone} may be left: {error}")
        if not left:
            return ""
        return f"{'; '.join(left)}; the reaper finds it by its label {OWNER}={self._owner.digest}"

    def _wait(
        self,
        what: str,
        judge: Callable[[Answer], Pending | Done[Any]],
        deadline: datetime,
        phase: str,
    ) -> Wait[Answer, Any]:
        return Wait(
            what, judge, deadline=deadline, phase=phase, poll_s=POLL_S, on_progress=self._say, clock=self._clock
        )


def judged(view: QueuedView, nodes: Sequence[NodeView]) -> Pending | Done[Granted]:
    """What a queued resource that is waited for means.

    :param nodes: those of its nodes that exist.
    :raises CapacityUnavailable: it is not granted, or was taken back before it was whole.
    :raises Misconfigured: it can never be granted.
    :raises Preempted: somebody deletes it.
    """
    match view.meaning:
        case Meaning.REFUSED:
            error = operation_failed(view.failure, str(view))
            # Nothing comes of a FAILED one any more, so what is transient elsewhere is a refusal here.
            raise error if isinstance(error, Misconfigured) else CapacityUnavailable(str(error or _no_reason(view)))
        case Meaning.LOST:
            raise CapacityUnavailable(f"{view} is {view.state}: Google took the slices back before they were whole")
        case Meaning.GOING:
            raise Preempted(f"{view} is being deleted by somebody else while it was waited for; clear the task")
        case Meaning.QUEUED | Meaning.UNKNOWN:
            return Pending(view.state)
    taken = [f"{node} is {node.words()}" for node in nodes if node.meaning in (Meaning.LOST, Meaning.GOING)]
    if taken:
        raise CapacityUnavailable(f"{view}: {', '.join(taken)} before all were there")
    ready = [node for node in nodes if node.meaning is Meaning.THERE and node.address]
    if view.meaning is Meaning.THERE and len(ready) == len(view.node_ids):
        return Done(Granted(view, ready))
    return Pending(f"{view.state}, {len(ready)} of {len(view.node_ids)} nodes are READY")


def _no_reason(view: QueuedView) -> str:
    return f"{view} is {view.state}, and Google gives no reason"


def _step_of(found: tuple[QueuedView, Sequence[NodeView]]) -> int:
    view, _ = found
    return view.record.climb.step if view.record is not None else -1


def _zone(step: Step) -> str:
    assert step.zone is not None, "the settings have zones"
    return step.zone
