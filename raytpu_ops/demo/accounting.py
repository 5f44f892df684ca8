"""Where a run's seconds and chips went: held, used and idle chip-seconds for each phase."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from raytpu_ops.demo.pipeline import Finished


@dataclass(frozen=True)
class PhaseCost:
    """One line of the closing table.

    :param phase: its name.
    :param state: how it ended.
    :param seconds: how long it took, Airflow's scheduling included.
    :param chips: chips that the lease held during it.
    :param used: chip-seconds in which chips worked: the training itself, the slice that answers.
    :param idle: chip-seconds that were held beside that.
    """

    phase: str
    state: str
    seconds: float
    chips: int
    used: float
    idle: float


def costs(run: Finished) -> list[PhaseCost]:
    """The table's lines, in the order of the phases; those that never began are left out.

    A lease is held from the moment it was granted until its release has ended.
    """
    lease = run.lease
    seconds = run.last.seconds()
    lines = []
    for state in run.last.phases:
        if state.phase not in seconds:
            continue
        took = seconds[state.phase]
        chips = lease.spec.chips if lease and state.phase != "plan" else 0
        held_s = took
        if lease and state.ended and state.phase == "provision":
            held_s = min(took, max(0.0, (state.ended - lease.granted_at).total_seconds()))
        used = min(_used(run, state.phase, took), chips * held_s)
        lines.append(PhaseCost(state.phase, state.state, took, chips, used, chips * held_s - used))
    return lines


def _used(run: Finished, phase: str, took: float) -> float:
    lease = run.lease
    if lease is None:
        return 0.0
    if phase == "train":
        return lease.spec.chips * _training_seconds(run.outputs.get("train") or {})
    if phase == "evaluate" and run.outputs.get("evaluate"):
        return lease.spec.shape.chips * took  # one slice answers, the others wait
    return 0.0


def _training_seconds(result: dict[str, Any]) -> float:
    try:
        started, finished = (datetime.fromisoformat(result[key]) for key in ("started_at", "finished_at"))
    except KeyError:
        return 0.0
    return max(0.0, (finished - started).total_seconds())
