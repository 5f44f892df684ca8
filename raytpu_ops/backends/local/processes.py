"""Real processes: who is alive, whose they are, and how they are ended.

A process is its pid *and* its start time. A lease's processes are found by the marks in their
environment, so that they are found after every file of ours is gone; ``SPT_NOENV`` (``commands.py``)
keeps Ray from writing its process titles over that environment.

Not here: what a lease consists of (``record.py``).
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from raytpu_ops.backends.local.launch import IDENTITY, start_time

#: The lease's id.
MARK_LEASE = "RAYTPU_LEASE"
#: The root folder under which the lease lives: leases of two roots never touch each other.
MARK_ROOT = "RAYTPU_ROOT"
#: The lease itself as JSON, so that it can be listed and released after its folder was lost.
MARK_GRANT = "RAYTPU_GRANT"
#: Name of the slice; the head has none.
MARK_SLICE = "RAYTPU_SLICE"
#: Worker id of the host within its slice; the head has none.
MARK_HOST = "RAYTPU_HOST"
#: Name of the process's folder within the lease's: ``h`` for the head, a number for each host.
MARK_PART = "RAYTPU_PART"

#: Clocks may be corrected by about this much between two looks at a start time, where only the wall clock tells it.
_CLOCK_SLACK_S = 2.0


@dataclass(frozen=True)
class ProcessId:
    """Identity of a process.

    :param pid: its number, which another process may get once it is gone.
    :param started: when it began, as ``launch.start_time`` tells it; None where the system can't.
    :param noted_at: Unix seconds at which the process itself wrote this down.
    """

    pid: int
    started: str | None
    noted_at: float

    def alive(self) -> bool:
        """The very process still runs; a zombie does not, and neither does a stranger with its number."""
        if self.started is not None:
            return start_time(self.pid) == self.started
        # No /proc (macOS). A stranger who got the number was born after our process wrote the note.
        try:
            process = psutil.Process(self.pid)
            return process.create_time() <= self.noted_at + _CLOCK_SLACK_S and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def read_identity(folder: Path) -> ProcessId | None:
    """Who was started for a folder; None where nobody ever was."""
    try:
        note = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return ProcessId(note["pid"], note["started"], note["noted_at"])


@dataclass(frozen=True)
class Marked:
    """A process that carries a lease's marks.

    :param process: psutil checks its identity again before it sends a signal.
    :param marks: its environment.
    """

    process: psutil.Process
    marks: Mapping[str, str]

    @property
    def lease_id(self) -> str:
        """The lease that it belongs to."""
        return self.marks[MARK_LEASE]


def marked(root: Path, *, lease_id: str | None = None) -> list[Marked]:
    """Every process of this user that carries the root's marks, whoever its parent is now.

    :param root: the root folder, resolved.
    :param lease_id: only this lease's; None for any lease of the root.
    """
    found = []
    uid = os.getuid()
    for process in psutil.process_iter():
        try:
            if process.uids().real != uid:
                continue
            marks = process.environ()
        except (psutil.Error, OSError):
            continue  # gone while we looked, a zombie, or not ours to read: then it is not ours either
        if marks.get(MARK_ROOT) == str(root) and MARK_LEASE in marks and lease_id in (None, marks[MARK_LEASE]):
            found.append(Marked(process, marks))
    return found


def with_descendants(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes and everything below them, without ourselves and those above us.

    A child that threw its environment away is still a child.
    """
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            children[process.ppid()].append(process)
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    family: dict[int, psutil.Process] = {}
    to_see = list(roots)
    while to_see:
        process = to_see.pop()
        if process.pid not in family and process.pid not in mine:
            family[process.pid] = process
            to_see += children[process.pid]
    return list(family.values())


def end(find: Callable[[], list[psutil.Process]], *, grace_s: float, limit_s: float) -> list[str]:
    """End processes: politely, then not; looks again until no more are born.

    :param find: looks for what is still there.
    :param grace_s: seconds between SIGTERM and SIGKILL; 0 kills at once.
    :param limit_s: seconds for the killing, after which the rest is given up.
    :return: what is left, in words; empty when nothing is.
    """
    there = find()
    if grace_s > 0 and there:
        for process in there:
            _signal(process, psutil.Process.terminate)
        _wait(there, grace_s)
        there = find()
    rounds = max(1, int(limit_s / 0.5))
    while there and rounds:
        for process in there:
            _signal(process, psutil.Process.kill)
        _wait(there, 0.5)
        there = find()
        rounds -= 1
    return [describe(process) for process in there]


def _wait(there: Iterable[psutil.Process], limit_s: float) -> None:
    """Wait until none of them runs. Not ``psutil.wait_procs``: a zombie is there for it until its parent looks."""
    deadline = time.monotonic() + limit_s
    for process in there:
        while _runs(process) and time.monotonic() < deadline:
            time.sleep(0.01)  # only a parent can be told of an exit, and none of these is our child


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, send: Callable[[psutil.Process], None]) -> None:
    try:
        send(process)
    except psutil.NoSuchProcess:
        return  # what we wanted
    except psutil.AccessDenied:
        return  # somebody else's by now (setuid); the next look reports it as left


def describe(process: psutil.Process) -> str:
    """A process in words."""
    try:
        return f"process {process.pid} ({process.name()}, {process.status()})"
    except psutil.Error:
        return f"process {process.pid}"
