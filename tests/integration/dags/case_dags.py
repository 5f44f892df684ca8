"""DAGs for the tests of what happens to a job when things go wrong around it."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param

from raytpu_ops import (
    ProvisionTpuSlicesOperator,
    RayServeOperator,
    RayTpuJobOperator,
    RayTrainOperator,
    ReleaseTpuSlicesOperator,
    TpuSlicesReadySensor,
    tpu_slices,
)

CODE = str(Path(__file__).parent)
COMMON: dict[str, Any] = {
    "schedule": None,
    "catchup": False,
    # A lease in a param is a dict in the task, not its text.
    "render_template_as_native_obj": True,
    "default_args": {"retries": 1, "retry_delay": timedelta(seconds=1)},
}
WHOLE = {"labelled": timedelta(minutes=5)}
WORK = {**WHOLE, "starting": timedelta(minutes=5), "running": timedelta(minutes=10)}

for deferrable in (True, False):
    word = "deferred" if deferrable else "blocking"

    with DAG(
        f"case_job_{word}",
        params={
            "lease": Param({}, type="object"),
            "function": Param("case_code:hello", type="string"),
            "args": Param([], type="array"),
            "starting_s": Param(300, type="integer"),
        },
        **COMMON,
    ):
        RayTpuJobOperator(
            task_id="job",
            lease="{{ params.lease }}",
            function="{{ params.function }}",
            op_args="{{ params.args }}",  # type: ignore[arg-type] # a list once it is rendered
            working_dir=CODE,
            deadlines=WORK,
            deferrable=deferrable,
        )

    with DAG(
        f"case_train_{word}",
        params={
            "lease": Param({}, type="object"),
            "gate": Param("", type="string"),
            "storage": Param("", type="string"),
        },
        **COMMON,
    ):
        RayTrainOperator(
            task_id="train",
            # On a busy machine JAX may not come up at once on hosts that were just replaced.
            retries=3,
            lease="{{ params.lease }}",
            train_loop="case_code:train",
            config={"gate": "{{ params.gate }}"},
            storage="{{ params.storage }}",
            working_dir=CODE,
            deadlines=WORK,
            deferrable=deferrable,
        )

    with (
        DAG(f"case_slices_{word}", params={"function": Param("case_code:hello", type="string")}, **COMMON),
        tpu_slices(
            "v4",
            topology="2x2x1",
            backend="local",
            lease_for=timedelta(hours=1),
            deadlines={**WHOLE, "releasing": timedelta(minutes=2)},
            deferrable=deferrable,
        ) as lease,
    ):
        RayTpuJobOperator(
            task_id="job",
            lease=lease,
            function="{{ params.function }}",
            working_dir=CODE,
            deadlines=WORK,
            deferrable=deferrable,
            retries=0,
        )

with DAG("case_serve", params={"lease": Param({}, type="object"), "app": Param("", type="string")}, **COMMON):
    RayServeOperator(
        task_id="serve",
        lease="{{ params.lease }}",
        app="{{ params.app }}",
        working_dir=CODE,
        deadlines={phase: WORK[phase] for phase in ("labelled", "starting")},
        retries=0,
    )


class LingersOnce(ProvisionTpuSlicesOperator):
    """Its first try has made everything and told nobody when it is killed."""

    def execute(self, context: Any) -> dict[str, Any]:
        lease = super().execute(context)
        if context["ti"].try_number == 1:
            print("lingering")
            threading.Event().wait(600)
        return lease


with DAG("case_killed_provision", **COMMON):
    provision = LingersOnce(task_id="provision", generation="v4", topology="2x2x1", backend="local")
    release = ReleaseTpuSlicesOperator(task_id="release", lease=provision.output)
    with release.as_teardown(setups=provision):
        labelled = TpuSlicesReadySensor(task_id="labelled", lease=provision.output, deadlines=WHOLE)
        RayTpuJobOperator(
            task_id="job",
            lease=labelled.output,
            function="case_code:wait_for_ever",
            working_dir=CODE,
            deadlines=WORK,
        )
