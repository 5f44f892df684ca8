"""A job that prints much: every line in the task's log, once and whole, to the last one."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from raytpu_ops.demo.airflow import AirflowInstance
from tests.integration.local_fixtures import Leased
from tests.integration.test_jobs_on_a_lease import Run

pytestmark = [pytest.mark.airflow, pytest.mark.ray, pytest.mark.timeout(900)]

LINES = 5_000


def test_every_line_comes_once_and_whole(
    airflow_instance: AirflowInstance, local_slice: Leased, tmp_path: Path
) -> None:
    """From both hosts at once, written by print() in pieces, and the last ones just before the job is over."""
    gate = tmp_path / "gate"
    gate.touch()
    run = Run(
        airflow_instance, local_slice, "case_job_deferred", function="case_code:wait_for", args=[str(gate), LINES]
    )

    run.ends("success")

    log = run.log()
    came = Counter(line for line in log if re.search(r" worker [01]\) ", line))
    wanted = {f"line {number} of {LINES}" for number in range(LINES)} | {"waiting at the gate", "through the gate"}
    assert Counter(line.partition(") ")[2] for line in came.elements()) == dict.fromkeys(wanted, 2)
    assert not [line for line in log if "missing" in line]
