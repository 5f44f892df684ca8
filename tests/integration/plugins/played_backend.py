"""A backend that grants leases on nothing, within a moment: for what Airflow makes of a scope, not for Ray.

Its options: ``folder``, where a file for each lease lies; ``refuse``, a phase that fails for good, or ``slow``:
then capacity is granted, like a cloud's, in the triggerer, once the file ``gate`` is in the folder.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from raytpu_ops.backends import base
from raytpu_ops.backends.base import Plan, Released, Say, silent
from raytpu_ops.tpu.errors import CapacityUnavailable, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.readiness import Readiness, SliceReport
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.waits import Done, Pending, Wait, wait_async

NAME = "played"


class PlayedBackend:
    """See the module's docstring."""

    name = NAME
    ships_runtime = False

    def __init__(self, folder: str = "", refuse: str = "") -> None:
        self.folder = folder
        self.refuse = refuse
        self.acquires_in_task = refuse != "slow"

    async def plan(
        self, spec: SliceSpec, ladder: Sequence[Any], *, lease_for: timedelta, owner: Owner | None = None
    ) -> Plan:
        """Nothing to check."""
        return Plan(backend=self.name, spec=spec, ladder=list(ladder), lease_for=lease_for)

    async def acquire(self, plan: Plan, owner: Owner, *, say: Say = silent) -> SliceLease:
        """Write the lease down."""
        if self.refuse == "provision":
            raise CapacityUnavailable("nothing to be had")
        now = datetime.now(UTC)
        if there := await self.find(owner):
            say(f"adopting {there.id}")
        lease = there or SliceLease(
            id=f"played-{owner.digest}",
            owner=owner,
            backend=self.name,
            spec=plan.spec,
            place={"folder": self.folder, "refuse": self.refuse},
            ray=RayEndpoint(address="http://127.0.0.1:9"),
            granted_at=now,
            expires_at=now + plan.lease_for,
        )
        self._file(lease).write_text(lease.model_dump_json())
        if self.refuse == "half way":
            os.kill(os.getpid(), signal.SIGKILL)
        return await self._granted(lease, say) if self.refuse == "slow" else lease

    async def _granted(self, lease: SliceLease, say: Say) -> SliceLease:
        def judge(opened: bool) -> Pending | Done[SliceLease]:
            return Done(lease) if opened else Pending(f"{lease.id} waits for capacity")

        decider = Wait(lease.id, judge, deadline=None, poll_s=0.1, on_progress=say)
        return await wait_async(lambda: asyncio.to_thread(Path(self.folder, "gate").exists), decider)

    async def find(self, owner: Owner) -> SliceLease | None:
        """The lease of that owner, of its file."""
        return next((one for one in await self.list_leases() if one.owner == owner), None)

    async def observe(self, lease: SliceLease) -> Readiness:
        """Whole, unless the label is what is refused."""
        missing = ["it is kept waiting"] if lease.place["refuse"] == "labelled" else []
        return Readiness(slices=[SliceReport(name="s0", hosts_wanted=1, missing=missing)], head_alive=True)

    async def repair(self, lease: SliceLease, *, say: Say = silent) -> SliceLease:
        """Nothing breaks."""
        return lease

    async def release(self, lease: SliceLease) -> Released:
        """Remove the file."""
        if lease.place["refuse"] == "release":
            raise RemoteUnavailable("the far side is away")
        self._file(lease).unlink(missing_ok=True)
        return Released(removed=[lease.id])

    async def list_leases(self, say: Say = silent, /, **labels: str) -> list[SliceLease]:
        """Those with a file."""
        return [SliceLease.model_validate_json(text) for text in _texts(self.folder)]

    def ray(self, lease: SliceLease) -> Any:
        """There is none."""
        raise NotImplementedError

    def serve_credentials(self, lease: SliceLease) -> None:
        """There are none."""

    @staticmethod
    def _file(lease: SliceLease) -> Path:
        return Path(lease.place["folder"]) / f"{lease.id}.lease"


def _texts(folder: str) -> list[str]:
    return [path.read_text() for path in Path(folder).glob("*.lease")]


base._BACKENDS[NAME] = f"{__name__}:PlayedBackend"
