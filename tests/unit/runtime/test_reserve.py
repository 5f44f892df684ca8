"""Why slices could not be had, in words, and which slices are chosen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raytpu_ops.runtime import cluster, reserve
from raytpu_ops.runtime.cluster import Holding, Host
from raytpu_ops.tpu.errors import DeadlineExceeded, InvalidSpec, Preempted
from raytpu_ops.tpu.shapes import SliceShape
from raytpu_ops.tpu.spec import SliceSpec

SPEC = SliceSpec.of("v4", "2x2x2", num_slices=2)


def host(slice_name: str, worker_id: int, *, alive: bool = True, chips: int = 4) -> Host:
    address = f"127.0.{slice_name[1]}.{worker_id + 2}"
    return Host(f"{slice_name}-{worker_id}", address, 1, slice_name, worker_id, "v4-16", chips, alive)


WHOLE = [host(name, worker) for name in ("s0", "s1") for worker in (0, 1)]


class World:
    """The cluster as the module sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hosts = list(WHOLE)
        self.held: list[Holding] = []
        self.lock = threading.RLock()
        for module in (cluster, reserve):
            monkeypatch.setattr(module, "tpu_hosts", lambda _pod_type=None: list(self.hosts))
        monkeypatch.setattr(reserve, "holdings", lambda _address: self.held)
        monkeypatch.setattr(reserve, "free_chips", self.free)

    def free(self) -> dict[str, float]:
        free = {at.node_id: float(at.chips) for at in self.hosts if at.alive}
        for holding in self.held:
            free[holding.node_id] -= holding.chips
        return free

    def hold(self, node_id: str, job: str = "job1", group: str | None = None) -> None:
        self.held.append(Holding(node_id, 4, f"4 chips by placement group x of job {job}", job, group))

    def why(self, **options: Any) -> Any:
        return reserve.not_reserved(SPEC, 12.3, "head:1", options.get("is_own", lambda _: False))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_busy_host_is_named_with_who_holds_it(world: World) -> None:
    world.hold("s1-1", "other")
    error = world.why()
    assert isinstance(error, DeadlineExceeded)
    assert "not reserved after 12 s: s1 worker 1 (127.0.1.3) is busy: 4 chips by placement group x of job other" in str(
        error
    )
    assert "s0 worker" not in str(error)


def test_what_the_waiter_holds_itself_is_no_reason(world: World) -> None:
    world.hold("s0-0", "me")
    world.hold("s0-1", "me")
    world.hold("s1-1", "other")
    message = str(world.why(is_own=lambda holding: holding.job_id == "me"))
    assert "s1 worker 1" in message
    assert "s0" not in message


def test_busy_chips_without_a_known_holder_are_named_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        reserve, "free_chips", lambda: {at.node_id: 0.0 for at in WHOLE[:1]} | dict.fromkeys(["s0-1"], 4.0)
    )
    assert "s0 worker 0 (127.0.0.2) is busy: nobody knows who holds its chips" in str(world.why())


def test_a_slice_that_lost_a_host_is_a_preemption(world: World) -> None:
    world.hosts[3] = host("s1", 1, alive=False)
    error = world.why()
    assert isinstance(error, Preempted)
    assert "only 1 of 2 slices are whole: s1 worker 1 (127.0.1.3) died" in str(error)


def test_a_slice_that_is_gone_whole_and_was_replaced_is_no_preemption(world: World) -> None:
    world.hosts += [host("s9", worker, alive=False) for worker in (0, 1)]
    world.hold("s1-1")
    assert isinstance(world.why(), DeadlineExceeded)


def test_too_few_slices_from_the_start_is_a_deadline(world: World) -> None:
    world.hosts = WHOLE[:3]
    error = world.why()
    assert isinstance(error, DeadlineExceeded)
    assert "only 1 of 2 slices are whole, 3 of 4 hosts are there" in str(error)


def test_a_host_with_fewer_chips_than_the_shape_does_not_make_a_slice_whole(world: World) -> None:
    world.hosts[0] = host("s0", 0, chips=1)
    assert list(cluster.whole_slices(SPEC.shape)) == ["s1"]


def test_only_slices_that_are_whole_and_free_are_chosen(world: World) -> None:
    assert reserve._free_slices(SPEC.shape) == ["s0", "s1"]
    world.hold("s0-1")
    assert reserve._free_slices(SPEC.shape) == ["s1"]
    world.hosts[2] = host("s1", 0, alive=False)
    assert reserve._free_slices(SPEC.shape) == []


class Claim:
    """One slice in that world."""

    def __init__(self, world: World, slice_name: str, who: str) -> None:
        self.world, self.slice_name = world, slice_name
        self.placement_group = SimpleNamespace(id=SimpleNamespace(hex=lambda: f"{who} has {slice_name}"))

    def shutdown(self) -> None:
        with self.world.lock:
            self.world.held = [
                holding for holding in self.world.held if holding.group_id != self.placement_group.id.hex()
            ]


class Claims:
    """Claims as Ray grants them: the first one has the slice. Time is short."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.paused: Callable[[], None] = lambda: None
        self.before: Callable[[str, str], None] = lambda _who, _slice_name: None
        self.after: Callable[[str, str], None] = lambda _who, _slice_name: None
        monkeypatch.setattr(reserve, "_claim", self.claim)
        monkeypatch.setattr(reserve, "_places", lambda _groups: [])
        monkeypatch.setattr(reserve, "_LOOK_S", 0.01)
        monkeypatch.setattr(reserve, "_CLAIM_S", 0.1)
        self.sleep = time.sleep
        monkeypatch.setattr(reserve.time, "sleep", self.pause)

    def claim(self, _shape: Any, slice_names: list[str], name: str) -> Claim | None:
        [slice_name] = slice_names
        who = name.rpartition("-")[0]
        self.before(who, slice_name)
        with self.world.lock:
            if slice_name not in reserve._free_slices(SPEC.shape):
                return None
            claim = Claim(self.world, slice_name, who)
            for at in WHOLE:
                if at.slice_name == slice_name:
                    self.world.hold(at.node_id, who, claim.placement_group.id.hex())
        self.after(who, slice_name)
        return claim

    def pause(self, seconds: float) -> None:
        self.paused()
        self.sleep(seconds)

    def reserve(self, who: str, for_s: float = 60.0) -> reserve.Reservation:
        return reserve.reserve(SPEC, time.monotonic() + for_s, who, "head:1")

    def holders(self) -> set[str]:
        with self.world.lock:
            return {holding.job_id for holding in self.world.held}


@pytest.fixture
def claims(world: World, monkeypatch: pytest.MonkeyPatch) -> Claims:
    return Claims(world, monkeypatch)


def test_nothing_is_kept_while_there_are_too_few(world: World, claims: Claims) -> None:
    """Others may need no more than that."""
    world.hold("s0-0", "other")
    seen = []

    def paused() -> None:
        seen.append(claims.holders())
        world.held.clear()

    claims.paused = paused
    reservation = claims.reserve("a")
    assert seen == [{"other"}]
    assert {holding.group_id for holding in world.held} == {"a has s0", "a has s1"}
    reservation.release()
    assert world.held == []


def test_what_is_held_when_another_is_faster_is_given_back_before_the_next_look(world: World, claims: Claims) -> None:
    claims.before = lambda _who, slice_name: world.hold("s1-1", "other") if slice_name == "s1" else None
    seen = []

    def paused() -> None:
        seen.append(claims.holders())
        claims.before = lambda _who, _slice_name: None
        world.held.clear()

    claims.paused = paused
    claims.reserve("a")
    assert seen == [{"other"}]
    assert claims.holders() == {"a"}


def test_at_the_deadline_who_was_faster_is_named_and_nothing_is_kept(world: World, claims: Claims) -> None:
    claims.before = lambda _who, slice_name: world.hold("s1-1", "other") if slice_name == "s1" else None
    with pytest.raises(DeadlineExceeded, match=r"s1 worker 1 .* of job other\. Stop who holds it") as raised:
        claims.reserve("a", for_s=-1)
    assert "s0" not in str(raised.value)
    assert claims.holders() == {"other"}


def test_two_that_want_all_slices_at_once_have_them_one_after_the_other(
    world: World, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one slice each, both would wait for the other until both fail."""
    free_slices, mine, both = reserve._free_slices, threading.local(), threading.Barrier(2)

    def together(step: str) -> None:
        if not hasattr(mine, step):
            setattr(mine, step, True)
            both.wait(60)

    def from_its_own_end(shape: SliceShape) -> list[str]:
        free = free_slices(shape)
        together("looked")
        return free[::-1] if threading.current_thread().name == "b" else free

    monkeypatch.setattr(reserve, "_free_slices", from_its_own_end)
    claims.after = lambda _who, _slice_name: together("has one")
    had: list[str] = []

    def work(who: str) -> None:
        with reserve.reserved(SPEC, time.monotonic() + 60, who, "head:1"):
            had.append(who)
            assert claims.holders() == {who}

    threads = [threading.Thread(target=work, args=[who], name=who) for who in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(had) == ["a", "b"]
    assert world.held == []


def test_a_shape_that_ray_cannot_reserve_is_refused_at_once(world: World) -> None:
    unlisted = next(SliceSpec.of("v4", shape.topology) for shape in reversed(_catalogue()) if not shape.ray_reserves)
    with pytest.raises(InvalidSpec, match="no task could reserve such a slice"):
        reserve.reserve(unlisted, 0.0, "name", "head:1")


def _catalogue() -> list[Any]:
    from raytpu_ops.tpu.shapes import catalogue

    return catalogue("v4")
