"""Starts a lease's processes so that they outlive whoever asked for it, and then is gone.

Run as a program of its own (``python -I -S launch.py FILE``), with the standard library alone, because
it forks: an Airflow task has threads and sockets that no host may inherit. FILE is JSON made by
``commands.py``. Each process gets a session of its own, the file descriptors that it needs and no
other, and writes its own pid and start time down *before* it becomes ``ray start``: there is no
moment in which it runs and nobody could find it.

Not here: what is started, and whether it should be (``cluster.py``).
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

#: The file in a process's folder that holds its identity, see ``processes.read_identity``.
IDENTITY = "process.json"
#: Held by the process for as long as it lives, so that two acquirers can't start it twice.
LOCK = "lock"


def start_time(pid: int | str) -> str | None:
    """When a process began, in words that no clock change moves; None where the system can't say.

    Ticks since boot and the boot's id: a wall-clock start time (psutil's ``create_time``) shifts with
    every correction of the clock, and then a host would look like a stranger. ``None`` also for a
    process that is dead and only waits for its parent to notice.
    Source: proc_pid_stat(5), fields 3 and 22, counted after the name, which may hold spaces.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{fields[19]}@{boot_id}"


def write_atomically(path: Path, text: str) -> None:
    """Write a file that only this user reads, and that a reader sees whole or not at all."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(path)


def _wait_for(path: Path, limit_s: float) -> None:
    """Wait until a file is there: the predecessor's socket, where hosts start one after another."""
    deadline = time.monotonic() + limit_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def become(process: dict[str, Any]) -> None:
    """Turn this forked process into the one that is wanted; returns only where its twin is running."""
    os.setsid()
    folder = Path(process["folder"])
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    log = os.open(process["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.set_inheritable(lock, True)  # kept over exec; Ray's own children close what they don't know
    identity = {"pid": os.getpid(), "started": start_time("self"), "noted_at": time.time()}
    write_atomically(folder / IDENTITY, json.dumps(identity))
    time.sleep(process["delay_s"])
    if process["after"]:
        _wait_for(Path(process["after"]), process["after_limit_s"])
    os.chdir(folder)
    os.execve(process["argv"][0], process["argv"], process["env"])  # noqa: S606 - no shell is what is wanted


def main(path: Path) -> None:
    """Start every process that the file names."""
    for process in json.loads(path.read_text(encoding="utf-8")):
        if os.fork() == 0:
            try:
                become(process)
            except BaseException:  # noqa: BLE001 - a fork must never return into its parent's code
                traceback.print_exc()
                os._exit(1)
            os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
