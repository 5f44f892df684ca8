"""Acquiring: up the ladder with one queued resource at a time, from whatever a task that was killed left behind.

There is one name for the queued resource of an owner, so a zone never holds two; a step that failed is deleted
and seen gone before the next one is asked for, so two zones don't either. All state is on the queued resource.

Two tasks may climb for one owner at once (two that repair, a process that should be dead and its retry). Whoever sees
a request fail deletes it and asks for the next one, under the name that both know. Whoever sees it go without having
seen why follows what is asked for in its place, and takes it for released where nothing is. A climb deletes only
what it asked for or followed, told by the moment in which that was begun, never what came after it.
Not here: what is asked for (``request.py``), what becomes of it (``granted.py``), how it is given back
(``giving_back.py``).
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

from raytpu_ops.backends import ladder
from raytpu_ops.backends.base import Plan, Say
from raytpu_ops.backends.google.refusals import is_there_already
from raytpu_ops.backends.ladder import Climb, Step
from raytpu_ops.backends.tpu_vm import request
from raytpu_ops.backends.tpu_vm.api import TpuApi
from raytpu_ops.backends.tpu_vm.giving_back import GivingBack
from raytpu_ops.backends.tpu_vm.granted import Found, Granted, judged
from raytpu_ops.backends.tpu_vm.health import lost
from raytpu_ops.backends.tpu_vm.objects import NodeView, QueuedView, unread
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
#: How long after something was deleted by another hand it may take until the next one is asked for in its place.
FOLLOWED_WITHIN = timedelta(minutes=2)


class _Overtaken(Exception):
    """What is waited for goes, or something else of the owner stands: another hand was quicker."""


class Granting:
    """One acquisition.

    :param api: open.
    :param plan: what is wanted.
    :param owner: for whom.
    :param settings: the backend's options.
    :param ends: when the lease is over, in the place of what Google took back; where nothing stands any more, it was
        given back, and nothing is asked for. None for a lease of its own.
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
        ends: datetime | None = None,
        clock: Callable[[], datetime],
        sleep: Callable[[float], Awaitable[None]],
        say: Say,
    ) -> None:
        self._api, self._plan, self._owner, self._settings = api, plan, owner, settings
        self._token, self._clock, self._sleep, self._say, self._ends = token, clock, sleep, say, ends
        self._name = naming.lease_id(owner)
        self._digest = digest(plan, settings)
        self._steps = ladder.steps(plan, settings.zones)
        #: Zones in which a create of ours was answered: what has our name there is ours.
        self._made: set[str] = set()
        #: When the requests were begun that this one asked for or followed: all that it may delete.
        self._mine: set[datetime] = set()
        #: Since when what is in a zone was to go: a roll-back has no second time for what Google holds.
        self._going: dict[str, datetime] = {}

    async def run(self) -> Granted:
        """Adopt or climb until something is granted; rolls back where nothing is.

        :raises CapacityUnavailable: no rung had the chips in any zone.
        :raises Misconfigured: Google refuses for good, or something else has the name.
        """
        found = await self._found(follow=self._ends is not None)
        try:
            return await self._climb(found)
        except RayTpuError as error:
            if (granted := await self._whole()) is not None:
                self._say(f"Lease {self._name} is granted, to another process too; this one failed: {error}")
                return granted
            if left := await self._rolled_back():
                raise type(error)(f"{error}; {left}") from error
            raise

    # Before anything is made

    async def _views(self, zones: Sequence[str]) -> list[QueuedView]:
        """What has our name in the zones, all of it the owner's."""
        views = [await self._api.queued_resource(zone, self._name) for zone in zones]
        found = [view for view in views if view is not None]
        for view in found:
            self._check_ours(view)
        return found

    async def _found(self, *, follow: bool) -> list[Found]:
        """What the owner has, with its nodes, the furthest up the ladder first. Nothing is touched.

        :param follow: something was there; where nothing comes in its place, it was released.
        :raises Preempted: it was.
        """
        begun = self._clock()
        quiet = 0

        async def look() -> list[Found]:
            return [(view, await self._api.nodes_of(view)) for view in await self._views(self._settings.zones)]

        def judge(found: list[Found]) -> Pending | Done[list[Found]]:
            nonlocal quiet
            going = [str(view) for view, _ in found if view.meaning is Meaning.GOING]
            if going:
                decider.enter(Phase.RELEASING, self._plan.deadlines.at(Phase.RELEASING, begun))
                return Pending(f"the one before is still being deleted: {', '.join(going)}")
            if found or not follow:
                return Done(sorted(found, key=_step_of, reverse=True))
            quiet += 1  # looks and not minutes: while Google does not answer, nobody can ask for another one
            if quiet == 1:
                decider.enter(Phase.PROVISIONING, self._clock() + ANSWER_WITHIN)
            if quiet > FOLLOWED_WITHIN / timedelta(seconds=POLL_S):
                raise Preempted(
                    f"lease {self._name}: its queued resource was deleted by somebody else while it was waited for, "
                    "and nobody asked for another one. Clear the task that provisioned it to ask again."
                )
            return Pending("it was deleted; another task may ask for it anew")

        first = ladder.deadline(self._steps[0], Climb.start(begun), self._plan)
        deadline = begun + ANSWER_WITHIN if follow else min(begun + ANSWER_WITHIN, first)
        decider = self._wait(f"lease {self._name}", judge, deadline, Phase.PROVISIONING)
        return await wait_async(look, decider, sleep=self._sleep)

    def _check_ours(self, view: QueuedView) -> None:
        if view.owner != self._owner.digest:
            raise Misconfigured(
                f"{view} exists and is not {self._owner.key}'s: delete it (`{view.delete_by}`) or rename the task"
            )
        if view.meaning is Meaning.GOING:
            return
        if view.record is None:
            raise Misconfigured(unread(view))
        if view.record.digest != self._digest:
            raise Misconfigured(
                f"{view} exists for {self._owner.key} with another spec, ladder or other options ({view.record.spec}): "
                f"release it first, by the run's release task or `raytpu release {self._name}`, with --conn-id as the "
                "task has it"
            )

    # Up the ladder

    async def _climb(self, found: Sequence[Found]) -> Granted:
        climb, seen = await self._begun(found)
        while climb.step < len(self._steps):
            step = self._steps[climb.step]
            try:
                return await self._granted(step, climb, seen=seen)
            except _Overtaken:
                climb, seen = await self._begun(await self._found(follow=True))
            except RayTpuError as error:
                if not ladder.is_refusal(error):
                    raise
                self._say(f"{step} failed: {error}")
                await self._removed(_zone(step))
                climb, seen = climb.failed(step, error, self._clock()), ""
        raise ladder.exhausted(f"lease {self._name}", climb)

    async def _begun(self, found: Sequence[Found]) -> tuple[Climb, str]:
        """Where the climb goes on, and the state of its request; empty where none stands.

        One that was granted once and is lost is deleted, and the climb begins again (F12).

        :param found: the first one is followed; others are what two who climbed at once made, and go.
        """
        if not found:
            return Climb.start(self._clock()), ""
        (view, nodes), *twins = found
        for twin, _ in twins:
            self._mine.add(_climb_of(twin).begun)
            await self._removed(twin.zone)
        climb = _climb_of(view)
        self._mine.add(climb.begun)
        gone = [f"{view} is {view.state}"] if view.meaning is Meaning.LOST else lost(view, nodes)
        if not gone:
            self._say(f"Adopted {view}: it is {view.state}")
            return climb, view.state
        self._say(f"{'; '.join(gone)}: Google took the slices back; deleting what is left, to begin again")
        await self._removed(view.zone)
        return Climb.start(self._clock()), ""

    async def _granted(self, step: Step, climb: Climb, *, seen: str) -> Granted:
        """Ask for a step, unless its request was seen standing already, and wait until it is granted.

        :param seen: its state then.
        :raises _Overtaken: another hand deleted it, or asked for something else.
        """
        zone = _zone(step)
        what = f"queued resource {self._name} in {zone}"
        first_seen: datetime | None = None
        asked = ""
        self._mine.add(climb.begun)

        async def look() -> Found | None:
            nonlocal seen, asked
            # Everywhere just before it is asked for and just after: of two who do so at once, one sees the other.
            views = await self._views([zone] if seen else self._settings.zones)
            standing = [view for view in views if view.meaning is not Meaning.GOING]
            if not standing and not seen and not asked:
                if not views:
                    asked = await self._create(step, climb)
                return None
            if asked and not views and not (await self._api.is_over(asked, f"create {what}") or seen):
                return None  # it is being made, and may still come to nothing (F06)
            if seen == "CREATING" and not (views or asked):  # F06; Google deletes nothing in that state
                raise CapacityUnavailable(f"{what} came to nothing while it was {seen}; Google's audit log says why")
            if len(standing) != 1 or _climb_of(standing[0]).begun != climb.begun:
                raise _Overtaken
            [view] = standing
            seen = view.state
            self._made.add(zone)
            up = view.meaning in (Meaning.COMING, Meaning.THERE)
            return view, await self._api.nodes_of(view) if up else []

        def judge(found: Found | None) -> Pending | Done[Granted]:
            if found is None:
                return Pending(f"{step}: asked for")
            view, nodes = found
            verdict = judged(view, nodes)
            if isinstance(verdict, Pending):
                if view.meaning in (Meaning.COMING, Meaning.THERE):
                    decider.enter(Phase.PROVISIONING, self._plan.deadlines.at(Phase.PROVISIONING, granted(nodes)))
                return Pending(f"{step}: {verdict.description}")
            return verdict

        def granted(nodes: Sequence[NodeView]) -> datetime:
            """When hosts began to be made (F10): the queue's time is over, and its length does not count."""
            nonlocal first_seen
            # Without a node nothing says when, and a process that goes on sees it anew; it was within the queue's time.
            first_seen = first_seen or min(self._clock(), queued_until)
            return min((node.created for node in nodes if node.created is not None), default=first_seen)

        queued_until = ladder.deadline(step, climb, self._plan)
        decider = self._wait(what, judge, queued_until, Phase.QUEUED)
        return await wait_async(look, decider, sleep=self._sleep)

    async def _create(self, step: Step, climb: Climb) -> str:
        """The operation's name. Where nothing is seen after that and it ended well, another hand deleted it."""
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
            ends=self._ends,
            deadlines=self._plan.deadlines,
            until=ladder.deadline(step, climb, self._plan),
            dashboard=settings.dashboard_url,
            serve=settings.serve_url,
            external=settings.reach == "external",
        )
        token = self._token or secrets.token_urlsafe(32)
        wanted = request.queued_resource(self._api.project, step, record, settings, token, now)
        try:
            operation = await self._api.create(zone, self._name, wanted)
        except RayTpuError as error:
            if not is_there_already(error):
                raise
            return ""  # an earlier try of ours whose answer got lost (F02), or a stranger's: the next look tells
        self._made.add(zone)
        self._say(f"Asked for {step}: queued resource {self._name}, {self._plan.spec}")
        return operation

    # Back down

    async def _removed(self, zone: str) -> None:
        """Tell what was asked for or followed in a zone to go, and wait until it is gone.

        :raises DeadlineExceeded: it is still there.
        :raises Misconfigured: it may not be deleted, or not be looked at.
        """

        async def look() -> Pending | Done[None]:
            back = GivingBack(only=self._mine)
            await back.look(self._api, zone, self._name, self._owner, ours=zone in self._made)
            if back.errors:
                raise next((one for one in back.errors if not isinstance(one, RemoteUnavailable)), back.errors[0])
            if back.held:
                let_go = min(self._clock(), begun + back.held)
                decider.enter(Phase.RELEASING, self._plan.deadlines.at(Phase.RELEASING, let_go))
            return Pending("; ".join(back.left)) if back.left else Done(None)

        begun = self._going.setdefault(zone, self._clock())
        until = self._plan.deadlines.at(Phase.RELEASING, self._clock())
        decider: Wait[Pending | Done[None], None] = self._wait(
            f"queued resource {self._name} in {zone}", lambda seen: seen, until, Phase.RELEASING
        )
        await wait_async(look, decider, sleep=self._sleep)
        del self._going[zone]

    async def _whole(self) -> Granted | None:
        """What was asked for or followed, where it is whole: another process may have handed it out by now (F34)."""

        async def look() -> Granted | None:
            for view in [await self._api.queued_resource(zone, self._name) for zone in self._settings.zones]:
                ours = view is not None and view.owner == self._owner.digest and view.record is not None
                if view is None or not ours or _climb_of(view).begun not in self._mine:
                    continue
                verdict = judged(view, await self._api.nodes_of(view)) if view.meaning is Meaning.THERE else None
                if isinstance(verdict, Done):
                    return verdict.value
            return None

        until = self._clock() + ANSWER_WITHIN
        decider: Wait[Granted | None, Granted | None] = self._wait(self._name, Done, until, Phase.RELEASING)
        try:
            return await wait_async(look, decider, sleep=self._sleep)
        except RayTpuError:  # nothing of it is whole, or nobody can look, which the roll-back says
            return None

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


def _climb_of(view: QueuedView) -> Climb:
    assert view.record is not None, "it was checked to be ours"
    return view.record.climb


def _step_of(found: Found) -> int:
    return _climb_of(found[0]).step


def _zone(step: Step) -> str:
    assert step.zone is not None, "the settings have zones"
    return step.zone
