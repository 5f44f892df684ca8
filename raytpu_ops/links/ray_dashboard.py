"""The button that leads from a task to the dashboard of its Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

#: Where operators leave the URL for the link.
DASHBOARD_KEY = "ray_dashboard"


class RayDashboardLink(BaseOperatorLink):
    """Ray's dashboard: the job's page where the task runs a job, else the cluster's."""

    name = "Ray dashboard"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The URL that this try stored; empty while there is none."""
        from airflow.sdk.execution_time.xcom import XCom

        return XCom.get_value(key=DASHBOARD_KEY, ti_key=ti_key) or ""
