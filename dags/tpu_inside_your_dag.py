"""One step on a TPU slice inside somebody else's DAG: a ``@task`` before it, a ``@task`` after it.

``RayTpuJobOperator`` runs a function once on each host of the slice. The slice is acquired after the
first task and given back while the last one runs: neither needs it. Everything else is ordinary Airflow.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import dag, task

from raytpu_ops import RayTpuJobOperator, tpu_slices

#: The folder above the package ``steps``.
CODE = Path(__file__).parent


@dag(
    schedule=None,
    catchup=False,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=5)},
    tags=["tpu", "ray"],
    doc_md=__doc__,
)
def tpu_inside_your_dag() -> None:
    @task
    def matrices() -> list[int]:
        """Sizes of the matrices that the slice multiplies."""
        return [128, 256]

    @task
    def summarise(job: dict[str, Any]) -> dict[str, float]:
        """The mean over the hosts, for each size."""
        per_host = [host["value"] for host in job["hosts"]]
        return {size: sum(one[size] for one in per_host) / len(per_host) for size in per_host[0]}

    sizes = matrices()
    with tpu_slices("v4", topology="2x2x2", backend="local", lease_for=timedelta(hours=1), after=sizes) as lease:
        norms = RayTpuJobOperator(
            task_id="norms",
            lease=lease,
            function="steps.norms:of_products",
            op_args=[sizes],
            working_dir=str(CODE),
            deadlines={"starting": timedelta(minutes=5), "running": timedelta(minutes=10)},
        )
    summarise(norms.output)


tpu_inside_your_dag()
