"""Random lives of one owner's lease, with faults, crashes and two tasks at once: nothing is left at the end.

There are never two queued resources that bill. Two that wait in the queue there may be for a moment, where two tasks
that are not in step ask for one at once.

Each sequence follows from its seed alone, with every call and its instant; one that fails is run again by
`RAYTPU_SEED=… pytest tests/unit/tpu_vm/test_random.py`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest
from google.cloud import tpu_v2

from raytpu_ops.backends.google.roles import TPU_VM
from raytpu_ops.backends.tpu_vm import TpuVmBackend
from raytpu_ops.tpu.capacity import OnDemand, Queued, Reservation, Spot
from raytpu_ops.tpu.errors import RayTpuError
from raytpu_ops.tpu.lease import SliceLease
from tests.google_fake import Clock, GoogleFake
from tests.google_fake.access import FakeAccess
from tests.google_fake.gate import Call
from tests.google_fake.refusals import Code, Refusal
from tests.google_fake.roles import Watch
from tests.google_fake.together import Together, jitter
from tests.google_fake.tpu_queue import Delays, Held
from tests.unit.tpu_vm.conftest import ME, ZONES, planned

State = tpu_v2.QueuedResourceState.State
#: Here; `tests/cluster/test_tpu_vm_lives.py` goes through five hundred.
SEQUENCES = 25
#: Names of nodes follow from instants.
START = datetime(2026, 11, 30, tzinfo=UTC)
LADDERS = ([Spot()], [Reservation("a"), Spot()], [Queued(timedelta(hours=1)), OnDemand()])
#: Errors that pass, errors that don't, and answers that are lost after the deed.
TRANSIENT = ("UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED")
#: Where Ray would be.
NOBODY_LISTENS = "http://127.0.0.1:1"
#: States in which a queued resource is paid for, or will be in a moment.
BILLS = frozenset({State.PROVISIONING, State.ACTIVE})
#: How long two may wait in the queue: each task sees the other's when it looks next, with answers that get lost.
SEEN_WITHIN = timedelta(minutes=1)
KINDS = ("acquire", "acquire", "crash", "crash", "twice", "twice", "repair", "release", "crash in release", "time")
METHODS = ("GetQueuedResource", "CreateQueuedResource", "DeleteQueuedResource", "GetNode", "ListNodes", "tpu.*")


class Life:
    """One sequence.

    :param google: with nothing in it.
    :param seed: all there is to it.
    """

    def __init__(self, google: GoogleFake, seed: int) -> None:
        self.google = google
        self.random = random.Random(seed)
        self.plan = planned(
            self.random.choice(LADDERS), provisioning=timedelta(minutes=10), releasing=timedelta(minutes=5)
        )
        google.tpu.held = self.random.choice((None, Held(), Held(by_operation=True), Held(gives_up=False)))
        self.log: list[str] = []
        #: Every call, for whoever compares.
        self.calls: list[str] = []
        #: Moments at which the owner had two queued resources that bill; or two at all, while one task worked for it
        #: or for longer than two tasks take to see it.
        self.doubled: list[str] = []
        #: Since when there are two.
        self.two_since: datetime | None = None
        #: How many tasks work for the owner.
        self.tasks = 1

    def backend(self, together: Together | None = None) -> TpuVmBackend:
        """In a process of its own: it knows nothing of what was before."""
        clock = self.google.clock
        sleep = together.sleep if together else clock.sleep
        return TpuVmBackend(
            FakeAccess(self.google), clock=clock.now, sleep=sleep, zones=ZONES, dashboard_url=NOBODY_LISTENS
        )

    def faults(self) -> None:
        """What goes wrong next, if anything."""
        faults, dice = self.google.faults, self.random
        self.google.allow()
        for _ in range(dice.choice((0, 0, 1, 2))):
            method, times = dice.choice(METHODS), dice.randint(1, 3)
            faults.inject(method, dice.choice(TRANSIENT), times, after=dice.random() < 0.4)
        match dice.randrange(11):
            case 0:
                faults.stockout(times=dice.randint(1, 3))
            case 1:
                faults.quota("zone", times=1)
            case 2:
                faults.inject("CreateQueuedResource", "INVALID_ARGUMENT", 1)
            case 3:
                faults.cut(dice.choice(METHODS), 1)
            case 4 if self.google.nodes():
                self.google.tpu.preempt(dice.choice(sorted(self.google.nodes())))
            case 5:
                self.google.tpu.delays.queue = dice.choice((0, 20, 20, 20, float("inf")))
            case 6:
                faults.late(Refusal(Code.RESOURCE_EXHAUSTED, "no quota"), times=dice.randint(1, 3))
            case 7:  # F32: for some calls, or until the next act
                faults.inject(dice.choice(METHODS), "PERMISSION_DENIED", dice.randint(1, 4))
            case 8:
                self.google.deny(dice.choice(TPU_VM.needed))

    async def killed_somewhere(self, what: Callable[[], object]) -> None:
        """Do something, and let its process die at one of its calls."""
        at = self.random.randint(0, 12)
        calls = itertools.count()
        loop = asyncio.get_running_loop()

        def dies(call: Call) -> bool:
            if next(calls) == at:
                loop.call_soon_threadsafe(task.cancel)  # while the fake carries the request out
            return False

        fault = self.google.faults.inject("tpu.*", "UNAVAILABLE", None, when=dies)
        task = asyncio.ensure_future(what())  # type: ignore[arg-type]
        try:
            await asyncio.wait([task])
        finally:
            with self.google.clock.lock:  # until the request is carried out
                self.google.faults.answers.remove(fault)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, RayTpuError):
            raise error

    async def act(self) -> None:
        """One thing that a task, a person or Google does."""
        kind = self.random.choice(KINDS)
        self.log.append(kind)
        backend = self.backend()
        try:
            match kind:
                case "acquire":
                    lease = await backend.acquire(self.plan, ME)
                    assert await self.backend().find(ME) == lease
                case "crash":
                    await self.killed_somewhere(lambda: backend.acquire(self.plan, ME))
                case "repair":
                    if (found := await backend.find(ME)) is not None:
                        await backend.repair(found)
                case "twice":
                    await self.twice()
                case "release":
                    if (found := await backend.find(ME)) is not None:
                        await backend.release(found)
                case "crash in release":
                    if (found := await backend.find(ME)) is not None:
                        await self.killed_somewhere(lambda: backend.release(found))
                case "time":
                    self.google.advance(self.random.choice((10, 60, 600, 7200)))
        except RayTpuError as error:
            self.log.append(f"  {type(error).__name__}: {error}")

    async def twice(self) -> None:
        """Two tasks at once, each acquires or repairs: what one of them gets is there, and is what the other gets."""
        lease = await self.backend().find(ME)
        together = Together(self.google)
        ways: list[Callable[[], Awaitable[SliceLease]]] = []
        for _ in range(2):
            backend = self.backend(together)
            if lease is not None and self.random.random() < 0.5:
                ways.append(functools.partial(backend.repair, lease))
            else:
                ways.append(functools.partial(backend.acquire, self.plan, ME))
        late = self.random.choice((0, 3, 10, 25, 60, 300))
        self.tasks = 2
        ends = await together.run((0, ways[0]), (late, ways[1]))
        self.tasks = 1
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, RayTpuError):
                raise end
            self.log.append(f"  {end}" if isinstance(end, BaseException) else f"  {end.created}")
        # A repair that Google does not answer gives the lease back as it is.
        got = [end for end in ends if isinstance(end, SliceLease) and end != lease]
        if got:
            assert len(self.google.queued_resources()) == 1
        if len(got) == 2:
            assert got[0] == got[1] == await self.backend().find(ME)

    async def end(self) -> None:
        """The reaper, with nothing going wrong any more."""
        self.google.faults.clear()
        self.google.allow()
        self.watch()
        for _ in range(60):
            backend = self.backend()
            for lease in await backend.list_leases():
                await backend.release(lease)
            self.google.advance(30)
            if not self.google.queued_resources() and not self.google.nodes():
                return
        raise AssertionError(f"left: {self.google.queued_resources()}")

    def watch(self) -> None:
        """Write down every call, and whether there were two."""

        def watched(call: Call) -> bool:
            self.calls.append(f"{call.at} {call.method} {call.resource}")
            states = [State(one.state.state) for one in self.google.queued_resources().values()]
            self.two_since = (self.two_since or call.at) if len(states) > 1 else None
            paid_twice = len([state for state in states if state in BILLS]) > 1
            long = self.two_since is not None and (self.tasks == 1 or call.at - self.two_since > SEEN_WITHIN)
            if paid_twice or long:
                self.doubled.append(f"{call.method} at {call.at}: {', '.join(state.name for state in states)}")
            return False

        self.google.faults.inject("*", "UNAVAILABLE", None, when=watched)


async def live(seed: int) -> Life:
    """One sequence, which ends with nothing left.

    :param seed: all there is to it.
    """
    with GoogleFake(clock=Clock(start=START)) as google, jitter(seed):
        Watch(google, TPU_VM)
        google.tpu.delays = Delays(accept=1, wait=1, queue=7, provision=15, delete=9, suspend=10)
        life = Life(google, seed)
        life.watch()
        try:
            for _ in range(life.random.randint(3, 7)):
                life.faults()
                await life.act()
            assert life.doubled == []
            await life.end()
        except BaseException:
            print(f"RAYTPU_SEED={seed}", *life.log, sep="\n")
            raise
    return life


@pytest.mark.timeout(600)
async def test_random_lives_leave_nothing_and_never_have_two() -> None:
    seeds = [int(os.environ["RAYTPU_SEED"])] if "RAYTPU_SEED" in os.environ else range(SEQUENCES)
    for seed in seeds:
        await live(seed)


async def test_a_seed_is_the_same_life_each_time() -> None:
    """What failed is seen again: the same calls at the same instants, the same ends."""
    kinds = set()
    for seed in range(8):
        one, other = await live(seed), await live(seed)
        assert (one.log, one.calls) == (other.log, other.calls), f"seed {seed}"
        kinds |= {*one.log}
    assert kinds >= {*KINDS}
