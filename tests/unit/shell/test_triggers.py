"""Triggers: they survive storage, send one event, and stop remote work only for a person."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import create_autospec

import pytest
from airflow._shared.module_loading import import_string
from airflow.sdk.execution_time.xcom import XCom

from raytpu_ops.backends.base import Plan, Released
from raytpu_ops.tpu.capacity import FlexStart, Spot
from raytpu_ops.tpu.errors import Preempted, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.triggers.base import FlowTrigger, LeaseTrigger
from raytpu_ops.triggers.leases import ProvisionSlicesTrigger, ReleaseSlicesTrigger, SlicesReadyTrigger
from raytpu_ops.triggers.ray_work import RayJobTrigger, RayServeTrigger

OWNER = Owner(dag_id="d", run_id="r", task_id="t")
LEASE = SliceLease(
    id="d-1",
    owner=OWNER,
    backend="local",
    spec=SliceSpec.of("v4", "2x2x2"),
    ray=RayEndpoint(address="http://127.0.0.1:1"),
    granted_at=datetime.now(UTC),
    expires_at=datetime.now(UTC) + timedelta(hours=1),
)
COMMON: dict[str, Any] = {"lease": LEASE.to_xcom(), "owner": OWNER.model_dump(mode="json")}
SCHEDULE = {"begun": "2030-01-01T00:00:00Z", "deadlines": {}}

PLAN = Plan(backend="local", spec=LEASE.spec, ladder=[Spot(), FlexStart(3600, within=60)])

TRIGGERS: list[FlowTrigger] = [
    ProvisionSlicesTrigger(
        plan=PLAN.model_dump(mode="json"),
        owner=COMMON["owner"],
        ray_tpu_conn_id="tpus",
        options={"namespace": "ml"},
    ),
    SlicesReadyTrigger(**COMMON, schedule=SCHEDULE, poll_s=1.0),
    ReleaseSlicesTrigger(**COMMON, by="2030-01-01T00:00:00+00:00"),
    RayJobTrigger(**COMMON, request={"attempt": {"epoch": 1}}),
    RayServeTrigger(**COMMON, request={"name": "digits"}),
]


class Probe(LeaseTrigger):
    """A trigger whose flow and state a test chooses; remembers what it stopped."""

    outcome: Callable[[], dict[str, Any]] = staticmethod(lambda: {"answer": 42})
    state: str | None = "failed"
    over = False
    stopped = 0
    given_back = 0

    async def flow(self, backend: Any) -> dict[str, Any]:
        return self.outcome()

    async def stop(self, backend: Any) -> None:
        self.stopped += 1

    async def task_state(self) -> str | None:
        return self.state

    async def run_is_over(self) -> bool:
        return self.over

    async def give_back(self, backend: Any) -> None:
        self.given_back += 1

    async def backend(self) -> Any:
        return None


async def events_of(trigger: FlowTrigger) -> list[Any]:
    return [event.payload async for event in trigger.run()]


@pytest.mark.parametrize("trigger", TRIGGERS, ids=lambda trigger: type(trigger).__name__)
def test_a_trigger_comes_back_from_storage_as_it_was(trigger: FlowTrigger) -> None:
    path, kwargs = trigger.serialize()
    again = import_string(path)(**json.loads(json.dumps(kwargs)))

    assert type(again) is type(trigger)
    assert again.serialize() == (path, kwargs)


async def test_a_flow_sends_one_event_with_its_result() -> None:
    assert await events_of(Probe(**COMMON)) == [{"result": {"answer": 42}}]


async def test_a_failure_travels_with_its_class() -> None:
    def fail() -> dict[str, Any]:
        raise Preempted("slice a lost a host")

    probe = Probe(**COMMON)
    probe.outcome = fail

    assert await events_of(probe) == [
        {"failure_class": "Preempted", "message": "slice a lost a host", "refused": False}
    ]


@pytest.fixture(autouse=True)
def xcoms(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the task handed on, behind Airflow's own signatures: the four ids of a task instance and nothing more."""
    found: dict[str, Any] = {}
    ids = {"dag_id": "d", "run_id": "r", "task_id": "t", "map_index": -1}

    def write(*, key: str, value: Any, **of: Any) -> None:
        assert of == ids
        found[key] = value

    def read(*, key: str, **of: Any) -> Any:
        assert of == ids
        return found.get(key)

    monkeypatch.setattr(XCom, "set", create_autospec(XCom.set, side_effect=write))
    monkeypatch.setattr(XCom, "get_one", create_autospec(XCom.get_one, side_effect=read))
    return found


@pytest.mark.parametrize("state", ["failed", "success", "skipped", "up_for_retry", "scheduled", None])
async def test_what_a_person_ended_is_stopped(state: str | None) -> None:
    probe = Probe(**COMMON)
    probe.state = state

    await probe.on_kill()

    assert probe.stopped == 1


async def test_a_triggerer_that_stalled_takes_nothing_from_a_task_that_another_one_brought_to_success(
    xcoms: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is trained on, its application asked, when the stalled one wakes up and is told to end."""
    taken: list[str] = []

    async def take_back(*_: Any) -> list[str]:
        taken.append("lease")
        return []

    monkeypatch.setattr("raytpu_ops.triggers.leases.take_back", take_back)
    monkeypatch.setattr("raytpu_ops.triggers.leases.IN_FLIGHT_S", 0.0)
    probe = Probe(**COMMON)
    provision = ProvisionSlicesTrigger(
        plan=PLAN.model_dump(mode="json"), owner=COMMON["owner"], ray_tpu_conn_id=None, options=None
    )
    monkeypatch.setattr(provision, "task_state", probe.task_state)
    monkeypatch.setattr(provision, "backend", probe.backend)
    probe.state = "success"
    xcoms["return_value"] = {"id": "d-1"}

    await probe.on_kill()
    await provision.on_kill()
    assert (probe.stopped, taken) == (0, [])

    xcoms.clear()  # a person's mark leaves no result
    await probe.on_kill()
    await provision.on_kill()
    assert (probe.stopped, taken) == (1, ["lease", "lease"])


@pytest.mark.parametrize(("state", "removed"), [("scheduled", 0), ("queued", 0), ("failed", 1), (None, 1)])
async def test_an_application_stays_for_a_task_that_is_about_to_run(
    state: str | None, removed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is about to say that it is up, where another triggerer brought it there."""
    calls: list[str] = []

    async def remove(_backend: Any, _lease: Any, name: str, _owner: str) -> str:
        calls.append(name)
        return "removed"

    monkeypatch.setattr("raytpu_ops.flows.serving.remove_application", remove)
    probe = Probe(**COMMON)
    probe.state = state
    serve = RayServeTrigger(**COMMON, request={"name": "digits"})
    for name in ("task_state", "run_is_over", "backend"):
        monkeypatch.setattr(serve, name, getattr(probe, name))

    await serve.on_kill()

    assert calls == ["digits"] * removed


@pytest.mark.parametrize("state", ["deferred", "running"])
async def test_what_lives_on_elsewhere_is_not_stopped(state: str) -> None:
    probe = Probe(**COMMON)
    probe.state = state

    await probe.on_kill()

    assert probe.stopped == 0


@pytest.mark.parametrize(("over", "given_back"), [(True, 1), (False, 0)])
async def test_beyond_dagrun_timeout_the_lease_is_given_back_for_no_teardown_will(over: bool, given_back: int) -> None:
    """A mark of one task, or of a run whose teardown is to come, gives nothing back."""
    probe = Probe(**COMMON)
    probe.state, probe.over = "skipped", over

    await probe.on_kill()

    assert (probe.stopped, probe.given_back) == (1, given_back)


async def test_the_lease_is_given_back_even_if_the_work_on_it_cannot_be_stopped() -> None:
    class Stuck(Probe):
        async def stop(self, backend: Any) -> None:
            raise RemoteUnavailable("Ray is away")

    probe = Stuck(**COMMON)
    probe.over = True

    with pytest.raises(RemoteUnavailable):
        await probe.on_kill()

    assert probe.given_back == 1


async def test_a_lease_of_another_run_is_not_given_back() -> None:
    probe = Probe(**COMMON | {"owner": {**COMMON["owner"], "run_id": "another"}})
    probe.over = True

    await probe.on_kill()

    assert (probe.stopped, probe.given_back) == (1, 0)


async def test_a_late_kill_after_the_event_stops_nothing() -> None:
    probe = Probe(**COMMON)
    await events_of(probe)

    await probe.on_kill()

    assert probe.stopped == 0


class Slices:
    """A backend that remembers whose slices it took back; one request arrives late."""

    def __init__(self) -> None:
        self.leases = [LEASE, LEASE]
        self.released = 0

    async def find(self, owner: Owner) -> SliceLease | None:
        assert owner == OWNER
        return self.leases.pop() if self.leases else None

    async def release(self, lease: SliceLease) -> Released:
        self.released += 1
        return Released(removed=[lease.id])


@pytest.mark.parametrize(
    ("state", "released"),
    [("failed", 2), ("success", 2), ("skipped", 2), (None, 0), ("scheduled", 0), ("deferred", 0), ("up_for_retry", 0)],
)
async def test_slices_that_a_person_does_not_want_any_more_are_taken_back_while_they_are_provisioned(
    state: str | None, released: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what a request made that was on its way; after a clear the next try goes on with what there is."""
    slices = Slices()

    class Ended(ProvisionSlicesTrigger):
        async def task_state(self) -> str | None:
            return state

        async def backend(self) -> Any:
            return slices

    monkeypatch.setattr("raytpu_ops.triggers.leases.IN_FLIGHT_S", 0)
    _, kwargs = TRIGGERS[0].serialize()

    await Ended(**kwargs).on_kill()

    assert slices.released == released


async def test_a_note_that_airflow_does_not_take_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's end counts, and the next note is tried again."""
    loop, noted = asyncio.get_running_loop(), asyncio.Event()
    taken: list[int] = []

    class Noting(RayJobTrigger):
        refusals = 1

        def _read_note(self) -> int:
            return 0

        def _write_note(self, lines: int) -> None:
            if self.refusals:
                self.refusals -= 1
                raise RuntimeError("the API server is away")
            taken.append(lines)
            loop.call_soon_threadsafe(noted.set)

    async def prints_and_ends(
        *_: Any, emit: Callable[[str], None], on_position: Callable[[int], None], **__: Any
    ) -> dict[str, Any]:
        emit("one line")
        on_position(1)
        async with asyncio.timeout(20):
            await noted.wait()
        return {"metrics": {}}

    monkeypatch.setattr("raytpu_ops.triggers.ray_work.NOTE_EVERY_S", 0)
    monkeypatch.setattr("raytpu_ops.flows.jobs.run_job", prints_and_ends)
    request = {
        "attempt": {"owner": OWNER.model_dump(mode="json"), "epoch": 0, "number": 0},
        "work": "{}",
        "schedule": SCHEDULE,
    }

    result = await Noting(**COMMON, request=request).flow(None)  # type: ignore[arg-type]

    assert result == {"metrics": {}}
    assert taken == [1]


@pytest.mark.parametrize("deployment", [None, "staging"])
def test_a_job_notes_how_far_its_log_was_shown_whatever_airflow_is_called(
    xcoms: dict[str, Any], deployment: str | None
) -> None:
    owner = OWNER.model_copy(update={"deployment": deployment})
    kept = RayJobTrigger(lease=COMMON["lease"], owner=owner.model_dump(mode="json"), request={})

    assert kept._read_note() == 0
    kept._write_note(7)
    assert kept._read_note() == 7
