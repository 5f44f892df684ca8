"""DAGs for the tests of what colour a run has, and of what nobody gave back. Their slices are played."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, task
from played_backend import NAME  # type: ignore[import-not-found] # Airflow has the plugins on its path

from raytpu_ops import ProvisionTpuSlicesOperator, ReapTpuSlicesOperator, tpu_slices

PARAMS = {
    "folder": Param("", type="string"),
    "refuse": Param("", type="string"),
    "fail": Param("", type="string"),
    "wait": Param("", type="string"),
    "skip": Param(False, type="boolean"),
}
FROM_PARAMS: dict[str, Any] = {
    "backend": NAME,
    "backend_options": {"folder": "{{ params.folder }}", "refuse": "{{ params.refuse }}"},
}
SLICES: dict[str, Any] = {
    "topology": "2x2x1",
    **FROM_PARAMS,
    "deadlines": {"labelled": timedelta(minutes=10), "releasing": timedelta(seconds=3)},
    "deferrable": False,
    "retries": 0,
}


@task(retries=0)
def step(name: str, **context: Any) -> str:
    """A step that fails or waits if the run's params say so."""
    params = context["params"]
    if params["fail"] == name:
        raise RuntimeError("broken on purpose")
    give_up = time.monotonic() + 600
    while params["wait"] == name and not Path(params["folder"], "gate").exists():
        if time.monotonic() > give_up:
            raise TimeoutError("the gate never opened")
        time.sleep(0.2)
    return name


with DAG("outcome", schedule=None, params=PARAMS), tpu_slices("v4", **SLICES) as lease:

    @task.short_circuit(retries=0, ignore_downstream_trigger_rules=False)
    def goes_on(**context: Any) -> bool:
        """Whether the last step runs."""
        return not context["params"]["skip"]

    (
        step.override(task_id="first")("first")
        >> step.override(task_id="second")("second")
        >> goes_on()
        >> step.override(task_id="third")("third")
    )

with DAG("outcome_mapped", schedule=None, params=PARAMS), tpu_slices("v4", **SLICES) as lease:
    step.override(task_id="each").expand(name=["first", "second"])

with (
    DAG("outcome_timeout", schedule=None, params=PARAMS, dagrun_timeout=timedelta(seconds=60)),
    tpu_slices("v4", **SLICES) as lease,
):
    step.override(task_id="first")("first")

with DAG("provision_alone", schedule=None, params=PARAMS):
    # Nothing releases here but the provisioning task itself.
    ProvisionTpuSlicesOperator(task_id="provision", generation="v4", topology="2x2x1", retries=0, **FROM_PARAMS)

with DAG("outcome_reap", schedule=None, params=PARAMS):
    ReapTpuSlicesOperator(task_id="reap", backend=NAME, backend_options={"folder": "{{ params.folder }}"}, retries=0)
