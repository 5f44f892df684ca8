"""Which failures are tried again: each class has a budget of its own, kept over tries and started anew by a clear."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, RetryAction, RetryDecision, TaskGroup
from airflow.sdk.exceptions import AirflowTaskTimeout, TaskDeferralError, TaskDeferralTimeout
from airflow.serialization.serialized_objects import DagSerialization

from raytpu_ops import RayTpuJobOperator, RetryBudget, tpu_retry_policy, tpu_slices
from raytpu_ops.operators.retries import TpuRetryPolicy
from raytpu_ops.tpu.errors import (
    CapacityUnavailable,
    DeadlineExceeded,
    InvalidSpec,
    JobStopped,
    Misconfigured,
    Preempted,
    RemoteUnavailable,
    UserCodeFailed,
)


class Task:
    """A task's life: its state store, its tries, and clears."""

    def __init__(self, policy: TpuRetryPolicy, retries: int = 100) -> None:
        self.policy, self.retries = policy, retries
        self.max_tries, self.try_number = retries, 0
        self.stored: dict[str, Any] = {}

    def fails(self, error: BaseException) -> RetryDecision:
        self.try_number += 1
        store = SimpleNamespace(get=self.stored.get, set=self._set)
        context: Any = {"ti": SimpleNamespace(max_tries=self.max_tries), "task_state_store": store}
        return self.policy.evaluate(error, self.try_number, self.max_tries, context)

    def cleared(self) -> None:
        self.max_tries = self.try_number + self.retries

    def _set(self, key: str, value: Any) -> None:
        self.stored[key] = json.loads(json.dumps(value))


def test_each_class_has_a_budget_of_its_own() -> None:
    task = Task(tpu_retry_policy(capacity=2, preemption=1, user_code=1))
    failures = [
        CapacityUnavailable("a"),
        Preempted("b"),
        UserCodeFailed("c"),
        CapacityUnavailable("d"),
        CapacityUnavailable("e"),
    ]
    decisions = [task.fails(error) for error in failures]
    assert [one.action for one in decisions] == [*[RetryAction.RETRY] * 4, RetryAction.FAIL]
    assert [one.reason for one in decisions] == [
        "CapacityUnavailable: retry 1 of 2 of capacity",
        "Preempted: retry 1 of 1 of preemption",
        "UserCodeFailed: retry 1 of 1 of user_code",
        "CapacityUnavailable: retry 2 of 2 of capacity",
        "CapacityUnavailable: all 2 retries of capacity are used",
    ]


def test_user_code_fails_at_once_by_default() -> None:
    decision = Task(tpu_retry_policy()).fails(UserCodeFailed("ValueError"))
    assert (decision.action, decision.reason) == (RetryAction.FAIL, "UserCodeFailed: is not retried")


@pytest.mark.parametrize("error", [Misconfigured("no permission"), InvalidSpec("no such topology")])
def test_what_is_wrong_as_written_is_never_tried_again(error: Exception) -> None:
    task = Task(tpu_retry_policy(capacity=9, preemption=9, user_code=9))
    assert task.fails(error).action is RetryAction.FAIL


def test_a_job_that_somebody_stopped_is_never_started_again() -> None:
    task = Task(tpu_retry_policy(capacity=9, preemption=9, user_code=9, deadline=9, remote=9))
    decision = task.fails(JobStopped("stopped"))
    assert (decision.action, decision.reason) == (RetryAction.FAIL, "JobStopped: somebody wanted it to end")


@pytest.mark.parametrize(
    ("error", "default", "word"), [(DeadlineExceeded("d"), 1, "deadline"), (RemoteUnavailable("r"), 2, "remote")]
)
def test_what_hangs_or_does_not_answer_has_a_small_budget(error: Exception, default: int, word: str) -> None:
    for policy, retries in ((tpu_retry_policy(), default), (tpu_retry_policy(**{word: 4}), 4)):
        task = Task(policy)
        actions = [task.fails(error).action for _ in range(retries + 1)]
        assert actions == [*[RetryAction.RETRY] * retries, RetryAction.FAIL]


def test_errors_that_are_not_of_this_package_share_a_small_budget_and_never_get_the_sum_of_all() -> None:
    policy = tpu_retry_policy()
    task = Task(policy, policy.retries)
    decisions = [task.fails(error) for error in (ValueError("x"), KeyError("y"), TaskDeferralError("z"))]
    assert [one.action for one in decisions] == [RetryAction.RETRY, RetryAction.RETRY, RetryAction.FAIL]
    assert [one.reason for one in decisions] == [
        "ValueError: retry 1 of 2 of other",
        "KeyError: retry 2 of 2 of other",
        "TaskDeferralError: all 2 retries of other are used",
    ]


@pytest.mark.parametrize("error", [AirflowTaskTimeout("execution_timeout"), TaskDeferralTimeout("trigger")])
def test_a_time_limit_of_airflows_own_counts_as_a_deadline(error: BaseException) -> None:
    task = Task(tpu_retry_policy())
    decisions = [task.fails(error) for error in (error, DeadlineExceeded("d"))]
    assert [one.action for one in decisions] == [RetryAction.RETRY, RetryAction.FAIL]


def test_a_clear_by_a_person_starts_the_counts_again() -> None:
    task = Task(tpu_retry_policy(preemption=1))
    assert task.fails(Preempted("a")).action is RetryAction.RETRY
    assert task.fails(Preempted("b")).action is RetryAction.FAIL
    task.cleared()
    assert task.fails(Preempted("c")).action is RetryAction.RETRY
    assert task.fails(Preempted("d")).action is RetryAction.FAIL


def test_without_a_state_store_every_try_counts() -> None:
    policy = tpu_retry_policy(preemption=2)
    for context in (None, {"ti": SimpleNamespace(max_tries=5)}):
        decisions = [policy.evaluate(Preempted("x"), number, 5, context) for number in (1, 2, 3)]  # type: ignore[arg-type]
        assert [one.action for one in decisions] == [RetryAction.RETRY, RetryAction.RETRY, RetryAction.FAIL]


def _delays(policy: TpuRetryPolicy, error: Exception, number: int) -> list[float]:
    task = Task(policy)
    delays = [task.fails(error).retry_delay for _ in range(number)]
    assert None not in delays
    return [delay.total_seconds() for delay in delays if delay is not None]


def test_capacity_waits_longer_each_time_and_preemption_comes_back_soon() -> None:
    delays = _delays(tpu_retry_policy(), CapacityUnavailable("x"), 6)
    for wanted, got in zip([300, 600, 1200, 2400, 3600, 3600], delays, strict=True):
        assert 0.8 * wanted <= got <= 1.2 * wanted
    assert _delays(tpu_retry_policy(), Preempted("x"), 1)[0] <= 20


def test_tasks_that_failed_together_do_not_come_back_together() -> None:
    budgets = tpu_retry_policy().budgets
    delays = {
        _delays(TpuRetryPolicy(budgets, rng=random.Random(seed)), CapacityUnavailable("x"), 1)[0] for seed in range(20)
    }
    assert len(delays) == 20


def test_a_budget_may_say_when_as_well() -> None:
    budget = RetryBudget(retries=1, delay=timedelta(hours=2), longest=timedelta(hours=9))
    policy = tpu_retry_policy(capacity=budget)
    assert 5760 <= _delays(policy, CapacityUnavailable("x"), 1)[0] <= 8640
    assert _delays(tpu_retry_policy(preemption=9999 // 10), Preempted("x"), 999)[-1] <= 360


def test_the_retries_that_a_task_needs_for_all_of_it() -> None:
    assert tpu_retry_policy(capacity=2, preemption=3, user_code=1, deadline=4, remote=5, other=6).retries == 21


POLICY = tpu_retry_policy()


@pytest.mark.parametrize(
    ("defaults", "arguments", "retries"),
    [
        ({}, {"retry_policy": POLICY}, POLICY.retries),
        ({"retries": 1}, {"retry_policy": POLICY}, POLICY.retries),
        ({"retry_policy": POLICY}, {}, POLICY.retries),
        ({}, {"retry_policy": POLICY, "retries": 3}, 3),
        ({"retry_policy": POLICY, "retries": 4}, {}, 4),
        ({"retries": 2}, {}, 2),
    ],
)
def test_a_policy_brings_its_retries(defaults: dict[str, Any], arguments: dict[str, Any], retries: int) -> None:
    with (
        DAG("d", schedule=None, default_args=defaults) as dag,
        tpu_slices("v4", topology="2x2x1", **arguments) as lease,
    ):
        RayTpuJobOperator(task_id="job", lease=lease, function="m:f", **arguments)

        RayTpuJobOperator.partial(task_id="each", lease=lease, **arguments).expand(function=["m:f", "m:g"])

    # As the scheduler has them, which makes no instance of a mapped task.
    found = {one.task_id: one.retries for one in DagSerialization.from_dict(DagSerialization.to_dict(dag)).tasks}
    assert found == {
        **dict.fromkeys(["plan", "provision", "labelled", "job", "each", "release"], retries),
        "released": 0,
    }


def test_a_policy_brings_its_retries_to_a_mapped_task_from_wherever_it_comes() -> None:
    theirs = {"default_args": {"retry_policy": POLICY}}
    with DAG("d", schedule=None) as dag:
        with TaskGroup("g", **theirs):
            RayTpuJobOperator.partial(task_id="each", lease="{{ params.x }}").expand(function=["m:f"])
        RayTpuJobOperator.partial(task_id="each", lease="{{ params.x }}", **theirs).expand(function=["m:f"])

    for name in ("g.each", "each"):
        mapped: Any = dag.get_task(name)
        assert mapped.retries == mapped.unmap({"function": "m:f"}).retries == POLICY.retries


def test_a_longest_delay_below_the_first_is_refused() -> None:
    with pytest.raises(ValueError, match="longest: 0:05:00 is shorter than the first delay, 2:00:00"):
        RetryBudget(retries=1, delay=timedelta(hours=2), longest=timedelta(minutes=5))


@pytest.mark.parametrize("value", [-1, True, "3", {"retries": 1}, 2.5])
def test_a_budget_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(InvalidSpec, match="capacity: "):
        tpu_retry_policy(capacity=value)


def test_it_survives_serialisation() -> None:
    policy = tpu_retry_policy(capacity=1, user_code=2)
    again = TpuRetryPolicy.deserialize(json.loads(json.dumps(policy.serialize())))
    assert again.budgets == policy.budgets
