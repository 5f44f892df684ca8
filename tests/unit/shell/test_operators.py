"""What all operators do with errors: a value that can never work is not retried, everything else is."""

from __future__ import annotations

import asyncio
import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from airflow.sdk import DAG, TaskGroup
from airflow.sdk.exceptions import AirflowFailException, AirflowTaskTimeout
from airflow.sdk.execution_time.timeout import timeout

from raytpu_ops import ProvisionTpuSlicesOperator, RayServeOperator, tpu_slices
from raytpu_ops.backends.base import Plan, Released
from raytpu_ops.operators.base import RayTpuOperator
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.capacity import OnDemand
from raytpu_ops.tpu.deadlines import Deadlines, Schedule
from raytpu_ops.tpu.errors import CapacityUnavailable, InvalidSpec, Misconfigured
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.spec import SliceSpec


class Fails(RayTpuOperator):
    """Fails as it is told, at once or when it is resumed."""

    def __init__(self, *, error: Exception, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.error = error

    def begin(self, context: Any) -> None:
        raise self.error

    def resume(self, context: Any, event: Any = None) -> Any:
        raise self.error


def fail(error: Exception, *, resumed: bool) -> None:
    with DAG("d", schedule=None):
        task = Fails(task_id="t", error=error)
    context: Any = {}
    if resumed:
        task.resume_execution("resume", None, context)
    else:
        type(task).execute.__wrapped__(task, context)  # type: ignore[attr-defined]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_value_that_can_never_work_fails_for_good_in_the_same_words(resumed: bool) -> None:
    with pytest.raises(AirflowFailException) as caught:
        fail(InvalidSpec("topology 4x4 is none of v4"), resumed=resumed)

    assert str(caught.value) == "topology 4x4 is none of v4"
    assert isinstance(caught.value.__cause__, InvalidSpec)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("error", [Misconfigured("no such connection"), CapacityUnavailable("no chips")])
def test_anything_else_may_be_retried(error: Exception, resumed: bool) -> None:
    with pytest.raises(type(error)) as caught:
        fail(error, resumed=resumed)

    assert caught.value is error


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_lease_whose_time_is_over_is_adopted_with_a_warning(hours: int, capsys: pytest.CaptureFixture[str]) -> None:
    with DAG("d", schedule=None):
        task = ProvisionTpuSlicesOperator(
            task_id="provision", generation="v4", topology="2x2x1", ray_tpu_conn_id="tpus"
        )
    until = datetime.now(UTC) + timedelta(hours=hours)
    lease = SliceLease(
        id="tpu-d-r",
        owner=Owner(dag_id="d", run_id="r", task_id="provision"),
        backend="local",
        spec=task._wanted()[0],
        capacity={"kind": "on_demand"},
        ray=RayEndpoint(address="http://127.0.0.1:8265", serve_address="http://127.0.0.1:8000"),
        granted_at=until - timedelta(hours=2),
        expires_at=until,
    )
    context: Any = {"ti": Instance(-1)}

    assert task.finish(context, lease.to_xcom())["id"] == lease.id

    assert ("release it (`raytpu release tpu-d-r --conn-id tpus`)" in capsys.readouterr().out) == (hours < 0)


class _TimesOut:
    """A backend that has made something when the task's time is over."""

    acquires_in_task = True

    def __init__(self) -> None:
        self.made: list[str] = []

    async def plan(self, *_: object, **__: object) -> Plan:
        return Plan(
            backend="local",
            spec=SliceSpec.of("v4", "2x2x1"),
            ladder=[OnDemand()],
            lease_for=timedelta(hours=1),
            creates=["1 head with Ray"],
        )

    async def acquire(self, *_: object, **__: object) -> None:
        self.made.append("head")
        print("made: head")
        signal.raise_signal(signal.SIGALRM)
        await asyncio.Event().wait()

    async def find(self, owner: Owner) -> Owner:
        return owner

    async def release(self, _: object) -> Released:
        return Released(removed=[self.made.pop()])


def test_what_is_made_when_the_execution_timeout_comes_is_given_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the plan was told before anything was made."""
    with DAG("d", schedule=None):
        task = ProvisionTpuSlicesOperator(task_id="provision", generation="v4", topology="2x2x1")
    backend = _TimesOut()
    monkeypatch.setattr(task, "_open", lambda: backend)
    context: Any = {"ti": Instance(-1)}

    with pytest.raises(AirflowTaskTimeout), timeout(seconds=3600):
        task.begin(context)

    assert backend.made == []
    said = capsys.readouterr().out
    assert 0 <= said.find("Plan: 1 head with Ray") < said.find("made: head")


def test_deadlines_that_the_author_does_not_give_are_those_that_the_backend_thinks_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with DAG("d", schedule=None):
        task = ProvisionTpuSlicesOperator(
            task_id="provision", generation="v4", topology="2x2x1", deadlines={"releasing": 60}
        )
    backend: Any = _TimesOut()
    thought = Deadlines(provisioning=7200, releasing=7200)
    plan = asyncio.run(backend.plan()).model_copy(update={"deadlines": thought})

    async def planned(*_: object, **__: object) -> Plan:
        return plan

    monkeypatch.setattr(backend, "plan", planned)

    assert task._plan(backend, None).deadlines == Deadlines(provisioning=7200, releasing=60)


class _Asked(_TimesOut):
    """A backend that is asked for a plan, and by whom."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[Owner | None] = []

    async def plan(self, *_: object, owner: Owner | None = None, **__: object) -> Plan:
        self.owners.append(owner)
        return (await super().plan()).model_copy(update={"names": naming.with_room(owner, 2) if owner else []})


def test_the_plan_of_a_dag_has_the_names_that_its_lease_will_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F03, F18: those of the task that provisions, told to the log with the room that there is."""
    with DAG("d", schedule=None) as dag, TaskGroup("g"), tpu_slices("v4", topology="2x2x1"):
        pass
    task, backend = dag.get_task("g.plan"), _Asked()
    monkeypatch.setattr(task, "_open", lambda: backend)
    context: Any = {"ti": Instance(-1)}

    task.begin(context)

    owner = Owner(dag_id="d", run_id="r", task_id="g.provision")
    assert backend.owners == [owner]
    pool = naming.node_pool_name(owner, 1)
    said = f"Plan: names: lease {naming.lease_id(owner)} ({len(naming.lease_id(owner))} of 40 characters), last node"
    assert f"{said} pool {pool} ({len(pool)} of 40)" in capsys.readouterr().out


class Instance:
    """A running task instance."""

    dag_id, run_id, task_id = "d", "r", "g.serve"

    def __init__(self, map_index: int) -> None:
        self.map_index = map_index

    def xcom_push(self, key: str, value: object) -> None:
        """Nobody reads it here."""


@pytest.mark.parametrize(
    ("map_index", "name", "expected"),
    [
        (-1, None, ("g-serve", "/g-serve", "d/g.serve")),
        (3, None, ("g-serve-3", "/g-serve-3", "d/g.serve[3]")),
        (3, "digits", ("digits", "/digits", "d/g.serve[3]")),
    ],
)
def test_applications_of_mapped_tasks_have_names_of_their_own(
    map_index: int, name: str | None, expected: tuple[str, str, str]
) -> None:
    with DAG("d", schedule=None), TaskGroup("g"):
        task = RayServeOperator(task_id="serve", lease="{{ params.x }}", app="m:app", name=name)
    context: Any = {"ti": Instance(map_index)}

    request = task._checked(context, Schedule.start(None))

    assert (request.name, request.route_prefix, request.owner) == expected
