"""Which failures are worth another try, and when: a budget of its own for each class of failure.

Airflow counts all tries of a task alike. No capacity, a preemption and a bug in user code deserve
different numbers of tries and different delays, so this policy counts each class by itself, in the task's
state store, which a worker that dies does not take along. A clear by a person starts all counts again.
Not here: what a failure is (``tpu/errors.py``).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from airflow.sdk import RetryDecision, RetryPolicy
from airflow.sdk.exceptions import AirflowTaskTimeout, TaskDeferralTimeout
from pydantic import Field, model_validator

from raytpu_ops.tpu.errors import FailureClass, InvalidSpec, RayTpuError
from raytpu_ops.tpu.fields import Count, Duration
from raytpu_ops.tpu.problems import Checked, read

if TYPE_CHECKING:
    from airflow.sdk import Context

#: Where the counts are kept.
KEY = "raytpu_retries"
#: The class of every error that is not of this package: a bug, a template, a worker that broke.
OTHER = "Other"


class RetryBudget(Checked):
    """How often, and when, a class of failure is tried again.

    :param retries: how often in the life of a task.
    :param delay: before the first of them; a ``timedelta`` or seconds. Each further one waits twice as long.
    :param longest: no delay is longer; at least ``delay``.
    """

    retries: Count = Field(ge=0, le=1000)
    delay: Duration
    longest: Duration

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.longest < self.delay:
            raise InvalidSpec(f"longest: {self.longest} is shorter than the first delay, {self.delay}")
        return self

    def delay_before(self, number: int, rng: random.Random) -> timedelta:
        """The delay before the ``number``-th retry, from 1, give or take a fifth so that tasks do not come in step."""
        wanted = min(self.delay * 2.0 ** min(number - 1, 30), self.longest)
        return wanted * rng.uniform(0.8, 1.2)


_DEFAULTS: dict[str, RetryBudget] = {
    # Capacity comes back in minutes or hours, and others wait for it too.
    FailureClass.CAPACITY_UNAVAILABLE: RetryBudget(retries=6, delay=timedelta(minutes=5), longest=timedelta(hours=1)),
    # Other machines are there, and the work goes on from its last checkpoint.
    FailureClass.PREEMPTED: RetryBudget(retries=10, delay=timedelta(seconds=15), longest=timedelta(minutes=5)),
    # The same code fails again.
    FailureClass.USER_CODE_FAILED: RetryBudget(retries=0, delay=timedelta(seconds=15), longest=timedelta(minutes=5)),
    # What hung for a day may hang for another: once more, in case a host was to blame.
    FailureClass.DEADLINE_EXCEEDED: RetryBudget(retries=1, delay=timedelta(minutes=1), longest=timedelta(minutes=15)),
    # Waits bear a far side that is away for a while; whoever still fails so has waited long already.
    FailureClass.REMOTE_UNAVAILABLE: RetryBudget(retries=2, delay=timedelta(minutes=1), longest=timedelta(minutes=15)),
    # Most of them come again, and slices bill meanwhile; the sum of all budgets would be nineteen tries.
    OTHER: RetryBudget(retries=2, delay=timedelta(minutes=1), longest=timedelta(minutes=15)),
}
_WORDS: dict[str, str] = {
    FailureClass.CAPACITY_UNAVAILABLE: "capacity",
    FailureClass.PREEMPTED: "preemption",
    FailureClass.USER_CODE_FAILED: "user_code",
    FailureClass.DEADLINE_EXCEEDED: "deadline",
    FailureClass.REMOTE_UNAVAILABLE: "remote",
    OTHER: "other",
}

#: What no further try makes good.
_FINAL: dict[str, str] = {
    FailureClass.MISCONFIGURED: "it can never work as written",
    FailureClass.JOB_STOPPED: "somebody wanted it to end",
}


class TpuRetryPolicy(RetryPolicy):
    """See :func:`tpu_retry_policy`.

    :param budgets: by class of failure, and of all other errors (:data:`OTHER`).
    :param rng: the source of jitter.
    """

    def __init__(self, budgets: Mapping[str, RetryBudget], *, rng: random.Random | None = None) -> None:
        self.budgets = dict(budgets)
        self._rng = rng or random.Random()  # noqa: S311 - jitter is no secret

    @property
    def retries(self) -> int:
        """The sum of all budgets: what ``retries`` of the task has to be for none to be cut short."""
        return sum(budget.retries for budget in self.budgets.values())

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        """Called by Airflow in the worker when a try failed."""
        kind = _kind_of(exception)
        if kind in _FINAL:
            return RetryDecision.fail(f"{kind}: {_FINAL[kind]}")
        said = type(exception).__name__ if kind == OTHER else kind
        budget, word = self.budgets.get(kind, _DEFAULTS[kind]), _WORDS[kind]
        failures = self._counted(kind, try_number, context)
        if failures > budget.retries:
            used = f"all {budget.retries} retries of {word} are used" if budget.retries else "is not retried"
            return RetryDecision.fail(f"{said}: {used}")
        return RetryDecision.retry(
            budget.delay_before(failures, self._rng), f"{said}: retry {failures} of {budget.retries} of {word}"
        )

    def _counted(self, kind: str, try_number: int, context: Context | None) -> int:
        """Failures of this class with this one, since the task ran first or a person cleared it."""
        from raytpu_ops.operators.base import epoch_of

        store = context.get("task_state_store") if context is not None else None
        if context is None or store is None:
            return try_number  # as if all had failed so: never too many
        epoch = epoch_of(context)
        stored = store.get(KEY)
        counts: dict[str, Any] = stored if isinstance(stored, dict) and stored.get("epoch") == epoch else {}
        found = int(counts.get(str(kind), 0)) + 1
        store.set(KEY, {**counts, "epoch": epoch, str(kind): found})
        return found

    def serialize(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"budgets": {str(kind): budget.model_dump(mode="json") for kind, budget in self.budgets.items()}}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> Self:
        """What :meth:`serialize` wrote."""
        return cls({kind: RetryBudget.model_validate(one) for kind, one in data["budgets"].items()})


def _kind_of(error: BaseException) -> str:
    if isinstance(error, RayTpuError):
        return error.failure_class
    # `execution_timeout`, and Airflow's own time limit of a wait in the triggerer.
    return FailureClass.DEADLINE_EXCEEDED if isinstance(error, AirflowTaskTimeout | TaskDeferralTimeout) else OTHER


def tpu_retry_policy(
    *,
    capacity: int | RetryBudget | None = None,
    preemption: int | RetryBudget | None = None,
    user_code: int | RetryBudget | None = None,
    deadline: int | RetryBudget | None = None,
    remote: int | RetryBudget | None = None,
    other: int | RetryBudget | None = None,
) -> TpuRetryPolicy:
    """A retry policy for tasks that get or use slices, with a budget for each class of failure.

    What is wrong as written is never tried again, nor is a job that somebody stopped. Airflow ends a task after
    ``retries`` whatever a policy says: where a task of this package, or :func:`tpu_slices`, has such a policy
    and no ``retries``, that is ``policy.retries``; for other tasks set it.

    :param capacity: retries after nobody had the chips; default 6, after 5 minutes and then ever longer, at most
        an hour. A number, or a :class:`RetryBudget`.
    :param preemption: retries after slices were taken back; default 10, after 15 seconds, at most 5 minutes.
    :param user_code: retries after the submitted code failed; default none.
    :param deadline: retries after a phase took longer than its deadline, or a worker had the task for longer than its
        ``execution_timeout``, which does not count in the triggerer; default 1, after a minute.
    :param remote: retries after a far side did not answer for long; default 2, after a minute.
    :param other: retries after any other error, such as a bug or a template that fails; default 2, after a minute.
    :raises InvalidSpec: one line: where, what is wrong, what would be right.
    """
    given = {
        "capacity": capacity,
        "preemption": preemption,
        "user_code": user_code,
        "deadline": deadline,
        "remote": remote,
        "other": other,
    }
    return TpuRetryPolicy({kind: _budget(given[word], word, _DEFAULTS[kind]) for kind, word in _WORDS.items()})


def _budget(value: object, what: str, default: RetryBudget) -> RetryBudget:
    if value is None:
        return default
    if isinstance(value, int) and not isinstance(value, bool):
        value = {**default.model_dump(), "retries": value}
    return read(RetryBudget, value, what)
