"""Every ten minutes: gives back leases that have expired, and those whose DAG run is over.

For what Airflow never tears down: a run beyond its ``dagrun_timeout``, and a provisioning task whose
process was killed outright in its last try. It begins to work once it is unpaused.

Where to look: ``RAYTPU_REAPER_CONN_IDS`` in the environment of the DAG processor and the workers names
connections, such as ``ray_tpu_default``, with commas between them; each gets a task. ``RAYTPU_REAPER_BACKEND``
names the backend where a connection does not say it. Without both, this machine's own (``local``) is looked after.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta

from airflow.sdk import Param, dag

from raytpu_ops import ReapTpuSlicesOperator

_NAMED = (name.strip() for name in os.environ.get("RAYTPU_REAPER_CONN_IDS", "").split(","))
CONNECTIONS = list(dict.fromkeys(name for name in _NAMED if name))
#: A connection says it itself.
BACKEND = os.environ.get("RAYTPU_REAPER_BACKEND") or (None if CONNECTIONS else "local")


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
    for conn_id in CONNECTIONS or [None]:
        ReapTpuSlicesOperator(
            task_id="reap" if conn_id is None else f"reap_{re.sub(r'[^A-Za-z0-9_.-]', '_', conn_id)}",
            ray_tpu_conn_id=conn_id,
            backend=BACKEND,
            dry_run="{{ params.dry_run }}",
            unknown_runs="{{ params.unknown_runs }}",
        )


tpu_reaper()
