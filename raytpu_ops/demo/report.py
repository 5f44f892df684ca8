"""What the demo shows: a table that follows the run where there is a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raytpu_ops.demo.accounting import PhaseCost, costs
from raytpu_ops.demo.pipeline import Finished, Snapshot

_COLOURS = {"done": "green", "running": "yellow", "next": "yellow", "failed": "red"}


class Progress(Protocol):
    """Shows how far the demo is; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def step(self, text: str) -> None:
        """A step before or after the run."""

    def show(self, snapshot: Snapshot, line: str | None = None) -> None:
        """The run as it is now, and the latest line of the log of what runs."""


def progress(console: Console, *, plain: bool) -> Progress:
    """The kind that fits: a live table on a terminal, lines where the output goes elsewhere."""
    return PlainProgress(console) if plain or not console.is_terminal else LiveProgress(console)


class PlainProgress:
    """One line for each thing that changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def step(self, text: str) -> None:
        """A line of its own."""
        self._print(text)

    def show(self, snapshot: Snapshot, line: str | None = None) -> None:
        """Each phase that is in another state than before."""
        seconds = snapshot.seconds()
        for phase in snapshot.phases:
            if phase.state in {"waiting", "next"} or self._said.get(phase.phase) == phase.state:
                continue
            self._said[phase.phase] = phase.state
            ended = f" in {seconds[phase.phase]:.1f} s" if phase.ended and phase.phase in seconds else ""
            again = f" (try {phase.tries})" if phase.tries > 1 else ""
            self._print(f"{phase.phase}: {phase.state}{ended}{again}")

    def _print(self, text: str) -> None:
        now = datetime.now().astimezone()
        self._console.print(f"{now:%H:%M:%S}  {text}", markup=False, highlight=False, soft_wrap=True)


class LiveProgress:
    """A table that is drawn anew."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._steps: list[str] = []

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def step(self, text: str) -> None:
        """The step above the table."""
        self._steps = [text]
        self._live.update(Text(f"{text} …", style="dim"))

    def show(self, snapshot: Snapshot, line: str | None = None) -> None:
        """The table, and the log's latest line below it."""
        table = Table(title=f"run: {snapshot.run_state}", title_justify="left", box=None, pad_edge=False)
        table.add_column("phase")
        table.add_column("state")
        table.add_column("seconds", justify="right")
        seconds = snapshot.seconds(datetime.now(UTC))
        for phase in snapshot.phases:
            took = f"{seconds[phase.phase]:.0f}" if phase.phase in seconds else ""
            again = f" (try {phase.tries})" if phase.tries > 1 else ""
            table.add_row(phase.phase, Text(phase.state + again, style=_COLOURS.get(phase.state, "dim")), took)
        below = Text(line or "", style="dim", no_wrap=True, overflow="ellipsis")
        self._live.update(Group(table, below))


def cost_table(lines: Sequence[PhaseCost]) -> Table:
    """Phase, seconds, chips, chip-seconds used and idle, with a line of sums."""
    table = Table(title="Where the time and the chips went", title_justify="left")
    table.add_column("phase")
    table.add_column("state")
    for name in ("seconds", "chips", "chip-seconds used", "idle"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            line.phase, line.state, f"{line.seconds:.1f}", str(line.chips), f"{line.used:.0f}", f"{line.idle:.0f}"
        )
    table.add_section()
    used, idle = sum(line.used for line in lines), sum(line.idle for line in lines)
    table.add_row("all", "", f"{sum(line.seconds for line in lines):.1f}", "", f"{used:.0f}", f"{idle:.0f}")
    return table


def host_table(workers: Sequence[dict[str, Any]]) -> Table:
    """The hosts that trained: which slice, which host of it, and what JAX was told about the slices."""
    table = Table(
        title="Slices and hosts that were reserved for training", title_justify="left", box=None, pad_edge=False
    )
    table.add_column("slice", overflow="fold")
    for name in ("worker", "address", "MEGASCALE"):
        table.add_column(name, no_wrap=True)
    for worker in sorted(workers, key=lambda w: (str(w.get("slice")), int(w.get("worker_id") or 0))):
        mega = {str(k).upper().removeprefix("MEGASCALE_"): v for k, v in (worker.get("megascale") or {}).items()}
        table.add_row(
            str(worker.get("slice")),
            str(worker.get("worker_id")),
            str(worker.get("address") or worker.get("ip") or ""),
            f"{mega.get('SLICE_ID', '-')} of {mega.get('NUM_SLICES', '-')}",
        )
    return table


def print_report(console: Console, run: Finished) -> None:
    """Everything about a run that is over."""
    console.print(cost_table(costs(run)))
    training = run.outputs.get("train") or {}
    if training.get("workers"):
        console.print(host_table(training["workers"]))
    served = run.outputs.get("serve") or {}
    if served:
        console.print(f"served at {served.get('url')} from {served.get('application')}", highlight=False)
    if run.accuracy is not None:
        asked = run.outputs["evaluate"].get("asked")
        console.print(f"accuracy of the served model on {asked} held-out digits: {run.accuracy:.4f}", highlight=False)
    for phase, lines in run.failures.items():
        console.print(f"\n{phase} failed; the end of its log:", style="red", highlight=False)
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
