"""The process that works on a lease ends between any two calls, or within one: the next one finishes its work."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes_asyncio.client.rest import RESTClientObject

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.tpu.lease import SliceLease
from tests.unit.gke.conftest import ME
from tests.unit.gke.fake_kube import LOST, NAMESPACE, PODS, RAY_CLUSTERS, RESET, SECRETS, FakeKube, Fault

Make = Callable[..., GkeBackend]


class Killer:
    """Ends whoever makes the n-th call: before it is sent, or after it was answered.

    :ivar calls: how many calls there were.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self._at: tuple[int, bool] | None = None
        really = RESTClientObject.request

        async def counted(client: RESTClientObject, *args: Any, **options: Any) -> Any:
            number, self.calls = self.calls, self.calls + 1
            self._strike(number, False)
            answer = await really(client, *args, **options)
            self._strike(number, True)
            return answer

        monkeypatch.setattr(RESTClientObject, "request", counted)

    def _strike(self, number: int, answered: bool) -> None:
        if self._at == (number, answered):
            raise asyncio.CancelledError

    def at(self, number: int, answered: bool) -> None:
        self.calls, self._at = 0, (number, answered)

    def rests(self) -> None:
        self.calls, self._at = 0, None


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(monkeypatch)


def written(kube: FakeKube) -> list[str]:
    return [call for call in kube.calls if not call.startswith(("get", "list"))]


async def points(killer: Killer, act: Callable[[], Any]) -> list[tuple[int, bool]]:
    """Every point of something that is done once, undisturbed."""
    killer.rests()
    await act()
    return [(number, answered) for number in range(killer.calls) for answered in (False, True)]


async def test_an_acquire_that_is_cut_at_any_point_is_finished_by_the_next(
    kube: FakeKube, make: Make, plan: Plan, killer: Killer
):
    """F39: one RayCluster, which the retry adopts."""
    every = await points(killer, lambda: make().acquire(plan, ME))
    assert len(every) == 4  # a look and a write

    for number, answered in every:
        kube.objects.clear()
        kube.calls.clear()
        killer.at(number, answered)
        with pytest.raises(asyncio.CancelledError):
            await make().acquire(plan, ME)
        killer.rests()

        lease = await make().acquire(plan, ME)

        assert kube.all(RAY_CLUSTERS).keys() == {lease.id}
        assert written(kube) == ["patch rayclusters"]
        assert await make().find(ME) == lease


async def test_a_release_that_is_cut_at_any_point_is_finished_by_the_next(
    kube: FakeKube, make: Make, plan: Plan, killer: Killer
):
    async def granted() -> SliceLease:
        kube.objects.clear()
        lease = await make().acquire(plan, ME)
        kube.become_whole(lease.id)
        return lease

    lease = await granted()
    every = await points(killer, lambda: make().release(lease))
    assert len(every) == 2 * 8  # a look at each kind, and six deletions

    for number, answered in every:
        killer.rests()
        lease = await granted()
        killer.at(number, answered)
        with pytest.raises(asyncio.CancelledError):
            await make().release(lease)
        killer.rests()

        await make().release(lease)
        kube.settle()

        assert (await make().release(lease)).left == []
        assert [kube.all(kind) for kind in (RAY_CLUSTERS, PODS, SECRETS)] == [{}, {}, {}]


#: Acquires, as a task of Airflow does.
_ACQUIRER = """
import asyncio, json, sys
from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.tpu.lease import Owner

kubeconfig, namespace, plan, owner = json.loads(sys.argv[1])
backend = GkeBackend(KubeconfigAccess(kubeconfig), namespace=namespace)
lease = asyncio.run(backend.acquire(Plan.model_validate(plan), Owner.model_validate(owner)))
print(json.dumps(lease.to_xcom()))
"""


@pytest.mark.parametrize(
    ("call", "fault"),
    [("get rayclusters", RESET), ("patch rayclusters", RESET), ("patch rayclusters", LOST)],
    ids=["while-it-looks", "before-it-is-made", "after-it-was-made"],
)
async def test_a_process_that_is_killed_leaves_what_the_next_one_adopts(
    kube: FakeKube, tmp_path: Path, plan: Plan, make: Make, call: str, fault: Fault
):
    """SIGKILL from the server's side, in the middle of each call."""
    job = [str(tmp_path / "kubeconfig"), NAMESPACE, plan.model_dump(mode="json"), ME.model_dump(mode="json")]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _ACQUIRER, json.dumps(job), stdout=asyncio.subprocess.PIPE
    )
    kube.fails(call, replace(fault, then=lambda: os.kill(process.pid, signal.SIGKILL)))
    assert (await process.communicate(), process.returncode) == ((b"", None), -signal.SIGKILL)
    kube.heals()

    lease = await make().acquire(plan, ME)

    assert kube.all(RAY_CLUSTERS).keys() == {lease.id}
    assert kube.count("patch") == (1 if fault is LOST or call.startswith("get") else 2)
