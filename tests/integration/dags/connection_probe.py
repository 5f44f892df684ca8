"""For test_connections_in_airflow.py: a look at a lease, in the task and in the triggerer."""

from __future__ import annotations

from airflow.sdk import DAG, Param

from raytpu_ops import TpuSlicesReadySensor

with DAG(
    "connection_probe",
    schedule=None,
    params={"lease": Param({}, type="object")},
    render_template_as_native_obj=True,
    default_args={"retries": 0},
):
    TpuSlicesReadySensor(task_id="labelled", lease="{{ params.lease }}")
