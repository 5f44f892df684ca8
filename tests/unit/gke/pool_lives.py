"""Random lives of one owner's lease with node pools: acquired, killed, tried again, mended, given back, with faults.

Each follows from its seed alone, with every call and its instant. Nothing may be left at the end, never may the owner
have more pools than slices, and nobody but a release takes a pool that runs from a lease that is granted.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from google.cloud.container_v1 import NodePool

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.record import OWNER, read_record
from raytpu_ops.backends.google.roles import GKE
from raytpu_ops.tpu.capacity import FlexStart, OnDemand, Queued, Spot
from raytpu_ops.tpu.errors import RayTpuError
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake import Clock, GoogleFake
from tests.google_fake.fake import CLUSTER
from tests.google_fake.gate import Call
from tests.google_fake.roles import Watch
from tests.google_fake.together import Together, jitter
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import AWAY, LOST, PODS, RAY_CLUSTERS, RESET, FakeKube, Serving, kubeconfig
from tests.unit.gke.pool_killer import Killer
from tests.unit.gke.pool_world import LEASE_ID, World
from tests.unit.gke.seen import START

LADDERS = (
    [Spot()],
    [Spot(), OnDemand()],
    [FlexStart(3600, within=600), OnDemand()],
    [Queued(3600, within=600), OnDemand()],
    [FlexStart(3600, within=600), Queued(3600, within=600)],
)
SPECS = (
    SliceSpec.of("v4", "2x2x2", num_slices=2),
    SliceSpec.of("v4", "2x2x2"),
    SliceSpec.of("7x", "2x2x2"),
    SliceSpec.of("v6e", "2x2", num_slices=2),
)
#: Errors that pass, at Google and at Kubernetes.
TRANSIENT = ("UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED", "ABORTED")
METHODS = ("ListNodePools", "ListOperations", "CreateNodePool", "DeleteNodePool", "GetNodePool", "container.*")
KUBE = ("get rayclusters", "patch rayclusters", "delete rayclusters", "list pods", "delete pods", "")
QUEUE = ("list provisioningrequests", "patch provisioningrequests", "delete provisioningrequests", "patch podtemplates")

#: What is done, those twice that most depends on.
KINDS = (
    *("acquire", "acquire", "twice", "crash", "crash", "release", "crash in release"),
    *("repair", "repair twice", "crash in repair", "time"),
)


class Life:
    """One sequence.

    :param world: with nothing in it.
    :param seed: all there is to it.
    :param killer: of calls.
    """

    def __init__(self, world: World, seed: int, killer: Killer) -> None:
        self.world, self.killer, self.dice = world, killer, random.Random(seed)
        self.spec, self.ladder = self.dice.choice(SPECS), self.dice.choice(LADDERS)
        self.lease: SliceLease | None = None
        #: What is being done.
        self.kind = ""
        self.log = [f"{self.spec}, {[str(rung) for rung in self.ladder]}"]
        #: Moments at which there were too many pools, or one that a lease has was taken.
        self.wrong: list[str] = []
        self.plan: Plan
        self._calls: list[str] = []

    @property
    def told(self) -> list[str]:
        """What was done and how it ended, and every call, for whoever compares."""
        kube = self.world.kube
        return [*(line.replace(kube.address, "kube") for line in self.log), *self._calls, *kube.calls]

    def backend(self, **options: Any) -> GkeBackend:
        """In a process of its own: it knows nothing of what was before."""
        return self.world.backend(**options)

    async def live(self) -> None:
        """The whole of it."""
        container = self.world.google.container
        container.at_once = self.dice.choice((1, 5))
        container.delays.create = container.delays.fail = container.delays.delete = container.delays.scale_up = 7
        if self.dice.random() < 0.2:  # GKE tries for long, and lets go of nothing
            container.delays.fail = 2100
        self.world.google.compute.delay = 4
        self._heal()
        plan = await self.world.plan(self.backend(), self.ladder, self.spec)
        short = {"provisioning": timedelta(minutes=10), "releasing": timedelta(minutes=5)}
        self.plan = plan.model_copy(update={"deadlines": plan.deadlines.model_copy(update=short)})
        self._calls.clear()  # a plan asks for all at once
        for _ in range(self.dice.randint(3, 8)):
            self._faults()
            await self._act()
        await self._end()
        assert not self.wrong

    def _heal(self) -> None:
        """Nothing goes wrong any more."""
        self.world.kube.heals()
        self.world.queue.refusal = ""
        self.world.google.faults.clear()
        self.world.google.allow()
        self.world.google.faults.inject("*", "UNAVAILABLE", None, when=self._counts)

    def _counts(self, call: Call) -> bool:
        self._calls.append(f"{call.at} {call.method} {call.resource}")
        live = [
            name
            for name, pool in self.world.pools.items()
            if pool.config.labels.get(OWNER) == ME.digest and pool.status.name not in ("STOPPING", "ERROR")
        ]
        if len(live) > self.spec.num_slices:
            self.wrong.append(f"{call.method} at {call.at}: {live}")
        name = call.resource.rpartition("/")[2]
        # A release takes pools also where Kubernetes does not hear of it.
        taken = call.method == "DeleteNodePool" and "release" not in self.kind
        if taken and name in self._granted() and name in live:
            self.wrong.append(f"{call.method} {name} at {call.at}, which the lease has")
        return False

    def _granted(self) -> list[str]:
        """The pools that a lease which is granted has, and is not about to lose."""
        there = self.world.kube.all(RAY_CLUSTERS).get(LEASE_ID)
        record = read_record(there) if there and not there["metadata"].get("deletionTimestamp") else None
        return record.pools.names if record is not None and record.pools is not None and record.pools.granted else []

    def _faults(self) -> None:
        """What goes wrong next, if anything."""
        faults, dice = self.world.google.faults, self.dice
        self.world.google.allow()
        for _ in range(dice.choice((0, 0, 1, 2))):
            faults.inject(dice.choice(METHODS), dice.choice(TRANSIENT), dice.randint(1, 3), after=dice.random() < 0.4)
        for _ in range(dice.choice((0, 0, 1))):
            calls = QUEUE if dice.random() < 0.3 else KUBE
            self.world.kube.fails(dice.choice(calls), *dice.choices((RESET, AWAY, LOST), k=dice.randint(1, 3)))
        self.world.queue.refusal = dice.choice(("", "", "", "there are none"))
        if dice.random() < 0.3:  # F32: for some calls, or until the next act
            faults.inject(dice.choice(METHODS), "PERMISSION_DENIED", dice.randint(1, 4))
        elif dice.random() < 0.15:
            self.world.google.deny(dice.choice(GKE.needed))
        self._befalls()

    def _befalls(self) -> None:
        faults, dice = self.world.google.faults, self.dice
        match dice.randrange(10):
            case 0:
                faults.stockout(times=dice.randint(1, 3))
            case 1:
                faults.quota("region", times=1)
            case 2:
                faults.inject("CreateNodePool", "INVALID_ARGUMENT", 1)
            case 3:
                faults.cut(dice.choice(METHODS), 1)
            case 4 if self.world.pools:
                self.world.google.container.vanish(f"{CLUSTER}/nodePools/{dice.choice(sorted(self.world.pools))}")
            case 5:
                self.world.google.container.occupy(CLUSTER, dice.choice((20, 100)))
            case 6:
                faults.too_many("container.*", times=3)
            case 7:
                self.world.google.expire_tokens()
            case 8 if self.world.pools:
                self.world.queue.revoke(dice.choice(sorted(self.world.pools)))
            case 9:  # for longer than it is waited for
                self.world.kube.fails("", *[AWAY] * dice.choice((20, 60)))

    async def _act(self) -> None:
        """One thing that a task, a person or Google does."""
        kind = self.kind = self.dice.choice(KINDS)
        self.log.append(kind)
        try:
            match kind:
                case "acquire":
                    self.lease = await self.backend().acquire(self.plan, ME)
                case "twice":
                    await self._twice(lambda backend: backend.acquire(self.plan, ME))
                case "crash":
                    await self._killed(lambda: self.backend().acquire(self.plan, ME))
                case "release" if lease := await self._known():
                    await self.backend().release(lease)
                case "crash in release" if lease := await self._known():
                    await self._killed(lambda: self.backend().release(lease))
                case "repair" if lease := await self._known():
                    self._lose_hosts()
                    self.lease = await self.backend().repair(lease)
                case "repair twice" if lease := await self._known():
                    self._lose_hosts()
                    await self._twice(lambda backend: backend.repair(lease))
                case "crash in repair" if lease := await self._known():
                    self._lose_hosts()
                    await self._killed(lambda: self.backend().repair(lease))
                case "time":
                    self.world.google.advance(self.dice.choice((10, 60, 600, 7200)))
                    self.world.settle()
        except RayTpuError as error:
            self.log.append(f"  {type(error).__name__}: {error}")

    async def _twice(self, what: Callable[[GkeBackend], Awaitable[SliceLease]]) -> None:
        """Two processes do it at the same time, or one a bit later."""
        together = Together(self.world.google, self.world.passes)
        ways = [functools.partial(self._tried, what, self.backend(sleep=together.sleep)) for _ in range(2)]
        ends = await together.run((0, ways[0]), (self.dice.choice((0, 3, 10, 25, 60, 300)), ways[1]))
        for end in ends:
            if isinstance(end, BaseException):
                raise end
            self.log.append(f"  {end}")

    async def _tried(self, what: Callable[[GkeBackend], Awaitable[SliceLease]], backend: GkeBackend) -> str:
        try:
            self.lease = await what(backend)
        except RayTpuError as error:
            return f"{type(error).__name__}: {error}"
        return f"granted {self.lease.created['node pool']}"

    async def _known(self) -> SliceLease | None:
        """The lease, as a task of the run has it, or finds it."""
        self.lease = await self.backend().find(ME) or self.lease
        return self.lease

    def _lose_hosts(self) -> None:
        """Their pods wait again; mostly because a pool is gone, or broke."""
        if self.world.pools and self.dice.random() < 0.7:
            name = self.dice.choice(sorted(self.world.pools))
            if self.dice.random() < 0.5:
                self.world.google.container.vanish(f"{CLUSTER}/nodePools/{name}")
            else:
                self.world.pools[name].status = NodePool.Status.ERROR
        for pod in self.world.kube.all(PODS).values():
            if "host" in pod["metadata"]["name"]:
                pod["status"] = {"phase": "Pending", "conditions": []}

    async def _killed(self, what: Callable[[], Awaitable[Any]]) -> None:
        """Do something, and let its process die at one of its calls."""
        self.killer.at(self.dice.randint(0, 25), answered=self.dice.random() < 0.5)
        try:
            done = await what()
            self.lease = done if isinstance(done, SliceLease) else self.lease
        except asyncio.CancelledError:
            self.log.append(f"  killed at call {self.killer.calls}")
        finally:
            self.killer.rests()

    async def _end(self) -> None:
        """The reaper, with nothing going wrong any more: it knows of no lease but those that it finds."""
        self._heal()
        self.kind = "release"
        for _ in range(80):
            for lease in await self.backend().list_leases():
                await self.backend().release(lease)
            await self.world.sleep(30)
            if not self.world.left:
                return
        raise AssertionError(f"left: {self.world.left}")


async def live(folder: Path, killer: Killer, seed: int) -> Life:
    """One sequence, which ends with nothing left; one that fails says what was done in it.

    :param folder: for a kubeconfig.
    :param killer: of calls.
    :param seed: all there is to it.
    """
    with GoogleFake(clock=Clock(start=START)) as google, jitter(seed):
        Watch(google, GKE)
        async with Serving(FakeKube()) as kube:
            access = KubeconfigAccess(str(kubeconfig(folder / "kubeconfig", kube.address)))
            life = Life(World(kube, google, access), seed, killer)
            try:
                await life.live()
            except BaseException:
                print(f"RAYTPU_SEED={seed}", *life.log, sep="\n")
                raise
    return life


async def lives(folder: Path, patch: pytest.MonkeyPatch, seeds: Iterable[int]) -> list[Life]:
    """Sequences, one after another."""
    killer = Killer(patch)
    for place in ("SSL_CERT_FILE", "SSL_CERT_DIR"):  # reading the machine's takes longer than all else, none needs them
        patch.setenv(place, os.devnull)
    return [await live(folder, killer, seed) for seed in seeds]
