"""Processes that we started, found by a mark in their environment and ended to the last child.

A mark is a variable with a value of ours in the environment that every child inherits, so it finds
what a process tree no longer shows once a parent has died. A process is its pid *and* its create
time (psutil compares both before it signals). Not here: what is started and why.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import psutil

#: Programs that set their title overwrite the environment that /proc shows, and with it the mark;
#: with this variable setproctitle leaves it alone.
KEEP_ENVIRONMENT_READABLE = {"SPT_NOENV": "1"}

#: Below the kernel's usual ephemeral range, so no outgoing connection takes a port between our look
#: and the server's bind, and above Ray's worker ports.
_PORTS = range(20_100, 32_000)


def marked(variable: str, value: str) -> list[psutil.Process]:
    """This user's processes whose environment has ``variable=value``, the caller left out."""
    own = os.getuid()
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.uids().real == own and process.environ().get(variable) == value:
                found.append(process)
        except psutil.Error:
            continue  # gone meanwhile, a zombie, or not ours to read: none of them is ours to end
    return found


def with_children(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes and all that descends from them, each once, this process left out."""
    found: dict[psutil.Process, None] = {}
    for process in processes:
        try:
            family = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        found.update(dict.fromkeys(family))
    return [process for process in found if process.pid != os.getpid()]


def end(processes: Iterable[psutil.Process], *, grace_s: float) -> list[psutil.Process]:
    """Ask the processes to end, give them ``grace_s`` seconds, then kill them and their children.

    :param processes: the ones that are asked; children are only killed, if they outlive the grace.
    :param grace_s: seconds between asking and killing; 0 kills at once.
    :return: those that are still there, which means that the kernel will not let them go.
    """
    roots = list(processes)
    family = with_children(roots)
    if grace_s > 0:
        for process in roots:
            _signal(process.terminate)
        _, family = psutil.wait_procs(family, timeout=grace_s)
        family = with_children(family)
    for process in family:
        _signal(process.kill)
    _, left = psutil.wait_procs(family, timeout=10)
    return left


def end_marked(variable: str, value: str, *, rounds: int = 5) -> list[psutil.Process]:
    """Kill every process with that mark; again while one of them forked in between.

    :return: those that are still there after the last round.
    """
    left: list[psutil.Process] = []
    for _ in range(rounds):
        left = marked(variable, value)
        if not left:
            break
        end(left, grace_s=0)
    return left


def _signal(send: object) -> None:
    try:
        send()  # type: ignore[operator]
    except psutil.NoSuchProcess:
        return  # it went by itself, which is what we want


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` on which nobody listens.

    :raises OSError: when none of a hundred tries was free.
    """
    for _ in range(100):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port on {host} between {_PORTS.start} and {_PORTS.stop - 1} in a hundred tries")


def tail(path: Path, lines: int = 25) -> str:
    """The last lines of a log file; words of our own when there is none."""
    try:
        with path.open(errors="replace") as file:
            text = "".join(deque(file, maxlen=lines)).rstrip()
    except FileNotFoundError:
        return f"({path} was never written)"
    return text or f"({path} is empty)"
