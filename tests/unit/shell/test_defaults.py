"""What a DAG says for all its tasks, with work in mind: where it reaches ours, and where it would do harm."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import DAG

from raytpu_ops import ReapTpuSlicesOperator, ReleaseTpuSlicesOperator

ALL = timedelta(minutes=5)
OWN = timedelta(hours=1)


@pytest.mark.parametrize(
    ("operator", "arguments", "mapped"),
    [
        (ReleaseTpuSlicesOperator, {"lease": "{{ params.x }}"}, {"ray_tpu_conn_id": ["a", "b"]}),
        (ReleaseTpuSlicesOperator, {}, {"lease": [{}, {}]}),
        (ReapTpuSlicesOperator, {}, {"backend": ["gke", "tpu_vm"]}),
    ],
)
def test_no_task_that_releases_is_cut_off_by_the_execution_timeout_of_all_tasks(
    operator: Any, arguments: dict[str, Any], mapped: dict[str, Any]
) -> None:
    """One that ends half way leaves chips that bill."""
    with DAG("d", schedule=None, default_args={"execution_timeout": ALL}) as dag:
        operator(task_id="one", **{name: values[0] for name, values in mapped.items()}, **arguments)
        operator.partial(task_id="each", **arguments).expand(**mapped)
        operator.partial(task_id="said", execution_timeout=OWN, **arguments).expand(**mapped)

    tasks: Any = dag.task_dict
    instances = {
        name: tasks[name].unmap({name: values[0] for name, values in mapped.items()}) for name in ("each", "said")
    }
    assert {name: task.execution_timeout for name, task in tasks.items()} == {"one": None, "each": None, "said": OWN}
    assert {name: task.execution_timeout for name, task in instances.items()} == {"each": None, "said": OWN}
