"""Several slices for Ray Train: Ray's own code asks for them, of a Ray that is played below its placement groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import pytest
from ray.train.v2._internal.execution.worker_group import worker_group as ray_worker_group

from raytpu_ops.runtime import reserve
from raytpu_ops.runtime.attendant import Attendant
from raytpu_ops.runtime.cluster import SLICE_NAME, Host
from raytpu_ops.tpu.spec import SliceSpec

SPEC = SliceSpec.of("v4", "2x2x2", num_slices=2)
NAMES = ("s0", "s1")
HOSTS = [
    Host(f"{name}-{worker}", "127.0.0.2", 1, name, worker, "v4-16", 4, True) for name in NAMES for worker in (0, 1)
]
RAYS_OWN = ray_worker_group.SlicePlacementGroup
#: Of each worker; Ray Train adds the accelerator's type.
ASKED = {"TPU": 4, "CPU": 0, "accelerator_type:TPU-V4": 0.001}

Item = tuple[str, str]


class Group:
    """A placement group: it has all its bundles, or none.

    :param ray: the cluster.
    :param wanted: ways to grant it: in each, what is taken of which slice.
    """

    def __init__(self, ray: Ray, wanted: Sequence[frozenset[Item]]) -> None:
        self.ray, self.wanted = ray, wanted
        self.has: frozenset[Item] = frozenset()
        self.wait(0)

    def wait(self, timeout_seconds: float) -> bool:
        with self.ray.changed:
            return bool(self.ray.changed.wait_for(self._granted, timeout_seconds))

    def _granted(self) -> bool:
        taken = self.ray.taken()
        if not self.has:
            self.has = next((way for way in self.wanted if not way & taken), frozenset())
        return bool(self.has)


class Ray:
    """A cluster of two slices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.changed = threading.Condition()
        self.groups: list[Group] = []
        #: What was asked of hosts, in all groups.
        self.asked: list[Mapping[str, float]] = []
        #: Called after a head was had in the way that Ray chooses it by itself.
        self.has_head: Callable[[], None] = lambda: None
        # By name: ``ray.util`` has a function of the same name as its module.
        tpu, groups = import_module("ray.util.tpu"), import_module("ray.util.placement_group")
        for module in (tpu, groups):
            monkeypatch.setattr(module, "placement_group", self.placement_group)
            monkeypatch.setattr(module, "remove_placement_group", self.remove)
        monkeypatch.setattr(tpu, "reserve_tpu_slice", self.reserve_tpu_slice)
        # Without the wrapper that starts a Ray where there is none.
        monkeypatch.setattr(tpu, "slice_placement_group", tpu.SlicePlacementGroup)
        monkeypatch.setattr(reserve, "free_chips", self.free_chips)
        monkeypatch.setattr("raytpu_ops.runtime.cluster.tpu_hosts", lambda _pod_type=None: HOSTS)
        monkeypatch.setattr(reserve, "_LOOK_S", 0.01)
        monkeypatch.setattr(reserve, "_CLAIM_S", 0.1)
        monkeypatch.setattr(ray_worker_group, "SlicePlacementGroup", RAYS_OWN)

    def taken(self) -> set[Item]:
        return {item for group in self.groups for item in group.has}

    def free_chips(self) -> dict[str, float]:
        with self.changed:
            taken = self.taken()
        return {host.node_id: 0.0 if (host.slice_name, "chips") in taken else 4.0 for host in HOSTS}

    def _made(self, wanted: Sequence[frozenset[Item]]) -> Group:
        with self.changed:
            group = Group(self, wanted)
            self.groups.append(group)
        return group

    def placement_group(
        self, bundles: Sequence[Mapping[str, float]], *, bundle_label_selector: Sequence[Mapping[str, str]], **_: Any
    ) -> Group:
        self.asked += [bundle for bundle in bundles if "TPU" in bundle]
        named = zip(bundles, bundle_label_selector, strict=True)
        wanted = {(labels[SLICE_NAME], "chips" if "TPU" in bundle else "head") for bundle, labels in named}
        return self._made([frozenset(wanted)])

    def remove(self, group: Group) -> None:
        with self.changed:
            if group in self.groups:
                self.groups.remove(group)
            self.changed.notify_all()

    def reserve_tpu_slice(self, _topology: str, _type: str, **_: Any) -> tuple[str, Any]:
        group = self._made([frozenset({(name, "head")}) for name in NAMES])
        if not group.wait(1.0):  # who has it waits here as well
            self.remove(group)
            raise TimeoutError("no head")
        self.has_head()
        [(name, _head)] = group.has
        return name, group


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    return Ray(monkeypatch)


def train(run: str, within_s: float) -> Any:
    """What Ray Train does to have the slices of a run."""
    Attendant(run, SPEC, within_s).before_worker_group_start(None)
    return ray_worker_group.SlicePlacementGroup(
        topology="2x2x2",
        accelerator_version="v4",
        num_slices=SPEC.num_slices,
        resources_per_bundle=ASKED,
        strategy="PACK",
        head_reservation_timeout_s=within_s,
    )


def test_two_runs_that_want_all_slices_at_once_have_them_one_after_the_other(ray: Ray):
    """With one slice each, both would wait for the other until both fail."""
    both = threading.Barrier(2)
    ray.has_head = lambda: both.wait(60) and None
    had: list[str] = []
    failed: list[TimeoutError] = []

    def work(run: str) -> None:
        try:
            group = train(run, within_s=60.0)
        except TimeoutError as error:
            failed.append(error)
            return
        had.append(run)
        group.shutdown()

    threads = [threading.Thread(target=work, args=[run]) for run in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sorted(had) == ["a", "b"]
    assert ray.groups == []


def test_heads_and_chips_are_held_until_the_run_gives_them_back(ray: Ray):
    """Who goes by Ray's heads leaves the slices alone; all is one placement group, which Ray Train needs."""
    group = train("a", within_s=60.0)
    assert ray.taken() == {(name, what) for name in NAMES for what in ("head", "chips")}
    assert group.placement_group.has == frozenset((name, "chips") for name in NAMES)
    assert ray.asked == [ASKED] * SPEC.hosts  # a bundle with less takes no worker
    group.shutdown()
    group.shutdown()
    assert ray.groups == []


def test_a_run_waits_with_nothing_while_another_has_a_slice(ray: Ray):
    """It is Ray Train's own error at the end of its time, and others may need no more than what is left."""
    ray.placement_group([{"TPU": 4}], bundle_label_selector=[{SLICE_NAME: "s1"}])
    with pytest.raises(TimeoutError, match="not reserved"):
        train("a", within_s=0.05)
    assert ray.taken() == {("s1", "chips")}


def test_who_is_slower_at_one_slice_gives_the_other_back(ray: Ray):
    """Its head is held by somebody who goes on to wait for busy hosts; the chips look free."""
    head = ray.placement_group([{"TPU-v4-16-head": 1}], bundle_label_selector=[{SLICE_NAME: "s1"}])
    with pytest.raises(TimeoutError):
        train("a", within_s=0.05)
    assert ray.groups == [head]
