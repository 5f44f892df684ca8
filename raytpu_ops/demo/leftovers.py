"""What a run left on this machine: asked of the machine itself, not of anybody's memory."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from raytpu_ops.demo.leases import list_all
from raytpu_ops.demo.processes import marked


def left_behind(
    *, local_root: Path, marks: Sequence[tuple[str, str]], folders: Iterable[Path], ports: Iterable[int]
) -> list[str]:
    """Everything that is still there, in words; empty when nothing is.

    :param local_root: root of the local backend that was used.
    :param marks: variables and values in the environment of processes that were started.
    :param folders: what should be gone.
    :param ports: ports of 127.0.0.1 on which nobody should listen any more.
    """
    left = [f"lease {lease.id} of {lease.owner.key}" for lease in list_all(local_root)]
    processes = {process for variable, value in marks for process in marked(variable, value)}
    processes |= set(_started_below([local_root, *folders]))
    left += [f"process {process.pid} ({_name(process)})" for process in sorted(processes, key=lambda p: p.pid)]
    left += [f"folder {folder}" for folder in (local_root, *folders) if folder.exists()]
    left += [f"somebody who listens on port {port}" for port in ports if _listens(port)]
    return left


def _started_below(folders: Sequence[Path]) -> list[psutil.Process]:
    """Processes whose command line names one of the folders, as every Ray process names its session's."""
    below = tuple(f"{folder}/" for folder in folders)
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if any(start in word for word in words for start in below):
            found.append(process)
    return found


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "gone meanwhile"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
