"""Every ten minutes: gives back leases that have expired, and those whose DAG run is over.

For what Airflow never tears down: a run beyond its ``dagrun_timeout``, and a provisioning task whose
process was killed outright in its last try. One of these for each connection is enough; it begins to
work once it is unpaused.
"""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import Param, dag

from raytpu_ops import ReapTpuSlicesOperator


@dag(
    schedule=timedelta(minutes=10),
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=True,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=30)},
    tags=["tpu", "ray", "maintenance"],
    doc_md=__doc__,
    params={
        "dry_run": Param(False, type="boolean", title="Only look", description="Release nothing, log what would be."),
        "unknown_runs": Param(
            False,
            type="boolean",
            title="Unknown runs",
            description="Take leases of runs that this Airflow does not know, too. Only where no other Airflow has "
            "leases on this backend.",
        ),
    },
)
def tpu_reaper() -> None:
    ReapTpuSlicesOperator(
        task_id="reap",
        backend=os.environ.get("RAYTPU_REAPER_BACKEND", "local"),
        dry_run="{{ params.dry_run }}",
        unknown_runs="{{ params.unknown_runs }}",
    )


tpu_reaper()
