"""Whose a lease is: the task of a run, and of which Airflow where that has a name for itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from raytpu_ops.operators.base import RayTpuOperator, owner_of

CONTEXT: Any = {"ti": SimpleNamespace(dag_id="d", run_id="r", task_id="provision", map_index=-1)}


def test_two_airflows_with_names_of_their_own_own_nothing_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = [owner_of(CONTEXT)]
    for name in ("staging", " production "):
        monkeypatch.setenv("AIRFLOW__RAYTPU__DEPLOYMENT", name)
        owners.append(owner_of(CONTEXT))

    assert [owner.key for owner in owners] == ["d/r/provision", "staging:d/r/provision", "production:d/r/provision"]
    assert len({owner.digest for owner in owners}) == 3


def test_a_name_that_is_none_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asks(RayTpuOperator):
        def begin(self, context: Any) -> Any:
            return owner_of(context)

    monkeypatch.setenv("AIRFLOW__RAYTPU__DEPLOYMENT", "two\nlines")
    execute: Any = type(operator := Asks(task_id="provision")).execute.__wrapped__

    with pytest.raises(AirflowFailException, match="deployment"):
        execute(operator, CONTEXT)
