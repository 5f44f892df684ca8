"""The reaper on the local backend: real processes and folders of a run that is over go, another's stay."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.local import LocalBackend, processes
from raytpu_ops.flows.reaping import nobody_knows, reap
from raytpu_ops.tpu.lease import Owner


async def test_what_a_run_that_is_over_left_goes_and_what_is_in_use_stays(
    backend: LocalBackend, root: Path, make_plan: Callable[..., Plan], owner: Owner
) -> None:
    over = await backend.acquire(make_plan(1), owner)
    used = await backend.acquire(make_plan(1), owner.model_copy(update={"run_id": "goes on"}))
    now = datetime.now(UTC)

    async def is_over(of: Owner) -> bool:
        return of == over.owner

    done = await reap(backend, is_over, now, by=now + timedelta(seconds=60), say=print)

    assert [line.partition(" ")[0] for line in done.released] == [over.id]
    assert [lease.id for lease in await backend.list_leases()] == [used.id]
    assert {one.marks[processes.MARK_LEASE] for one in processes.marked(root)} == {used.id}

    later = used.expires_at
    done = await reap(backend, nobody_knows, later, by=now + timedelta(seconds=60), say=print)

    assert [line.partition(" ")[0] for line in done.released] == [used.id]
    assert processes.marked(root) == []
