"""What all operators do with errors: a value that can never work is not retried, everything else is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from airflow.sdk import DAG, TaskGroup
from airflow.sdk.exceptions import AirflowFailException

from raytpu_ops import ProvisionTpuSlicesOperator, RayServeOperator
from raytpu_ops.operators.base import RayTpuOperator
from raytpu_ops.tpu.deadlines import Schedule
from raytpu_ops.tpu.errors import CapacityUnavailable, InvalidSpec, Misconfigured
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease


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
        task = ProvisionTpuSlicesOperator(task_id="provision", generation="v4", topology="2x2x1")
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

    assert ("release it (`raytpu release tpu-d-r`)" in capsys.readouterr().out) == (hours < 0)


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
        task = RayServeOperator(task_id="serve", lease=None, app="m:app", name=name)
    context: Any = {"ti": Instance(map_index)}

    request = task._checked(context, Schedule.start(None))

    assert (request.name, request.route_prefix, request.owner) == expected
