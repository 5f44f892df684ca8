"""What all operators do with errors: a value that can never work is not retried, everything else is."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException

from raytpu_ops.operators.base import RayTpuOperator
from raytpu_ops.tpu.errors import CapacityUnavailable, InvalidSpec, Misconfigured


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
