"""A DAG whose tasks fail in classes, for the test of retry budgets. What fails comes from the run's params."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, task

from raytpu_ops import RetryBudget, tpu_retry_policy
from raytpu_ops.tpu.errors import error_for

POLICY = tpu_retry_policy(
    capacity=RetryBudget(retries=1, delay=timedelta(seconds=1), longest=timedelta(seconds=1)),
    preemption=RetryBudget(retries=2, delay=timedelta(seconds=1), longest=timedelta(seconds=1)),
)

with DAG("case_retries", schedule=None, params={"failures": Param("", type="string")}):

    @task(retries=POLICY.retries, retry_delay=timedelta(hours=1), retry_policy=POLICY)
    def fails(**context: Any) -> int:
        """Fails as the params say, one word a try; after the last of them it succeeds."""
        ti = context["ti"]
        words = context["params"]["failures"].split(",")
        if ti.try_number <= len(words):
            raise error_for(words[ti.try_number - 1], "as the test asked")
        return int(ti.try_number)

    fails()
