"""Retry budgets in a real Airflow: each class of failure has its own, kept over tries in the task's state store."""

from __future__ import annotations

import pytest

from raytpu_ops.demo.airflow import AirflowInstance

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(600)]

DAG = "case_retries"
LIMIT_S = 300.0


@pytest.mark.parametrize(
    ("failures", "state", "tries", "said"),
    [
        # An hour's retry_delay is the task's own: that these end at all shows that the policy's delays count.
        ("CapacityUnavailable,Preempted,Preempted", "success", 4, "Preempted: retry 2 of 2 of preemption"),
        ("CapacityUnavailable,CapacityUnavailable", "failed", 2, "CapacityUnavailable: all 1 retries of capacity"),
        ("UserCodeFailed", "failed", 1, "UserCodeFailed: is not retried"),
        ("Misconfigured", "failed", 1, "Misconfigured: it can never work as written"),
    ],
)
def test_each_class_of_failure_has_its_own_budget(
    airflow_instance: AirflowInstance, failures: str, state: str, tries: int, said: str
) -> None:
    api = airflow_instance.api
    api.wait_for_dag(DAG)
    api.unpause(DAG)
    run = api.trigger(DAG, {"failures": failures})

    assert api.wait_run(DAG, run, deadline_s=LIMIT_S)["state"] == state

    assert api.task(DAG, run, "fails")["try_number"] == tries
    last_failure = tries if state == "failed" else tries - 1
    assert said in str(api.log_events(DAG, run, "fails", last_failure))
