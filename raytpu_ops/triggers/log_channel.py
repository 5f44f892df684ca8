"""Nothing that a trigger has logged is lost when it ends.

A trigger's log lines go through a socket to the triggerer's main process, which writes them to the
task's log: 4 KB at a turn. That the trigger is done it learns over another socket, and what is then
still unread goes to the triggerer's own log: of a job that prints much the last lines (seen in
Airflow 3.3; ``TriggerRunnerSupervisor._handle_request`` closes the task's log at once). So a trigger
waits until its lines are read before it says that it is done.
Not here: how lines get there. Only Linux says how much of a socket is unread; elsewhere nothing waits.
"""

from __future__ import annotations

import array
import asyncio
import sys
import time

#: How long the main process may take, in seconds: it serves every trigger's lines, and may be behind.
READ_WITHIN_S = 60.0
_LOOK_S = 0.02


async def wait_until_read(within_s: float = READ_WITHIN_S) -> bool:
    """Wait until every line that this process has logged is with the triggerer's main process.

    :param within_s: how long at most, in seconds.
    :return: whether it is; True as well where that cannot be seen.
    """
    fd = _channel()
    if fd is None:
        return True
    until = time.monotonic() + within_s
    while _unread(fd):
        if time.monotonic() > until:
            return False
        await asyncio.sleep(_LOOK_S)  # nothing tells when the other end of a socket has read
    return True


def _channel() -> int | None:
    """The descriptor that Airflow's log lines are written to; None outside of a triggerer."""
    import structlog

    try:
        return int(structlog.get_config()["logger_factory"].io.fileno())
    except (AttributeError, KeyError, OSError, ValueError):
        return None


def _unread(fd: int) -> int:
    """How many bytes the other end has not read; 0 where ``fd`` is no socket."""
    if not sys.platform.startswith("linux"):
        return 0
    import fcntl
    import termios

    size = array.array("i", [0])
    try:
        fcntl.ioctl(fd, termios.TIOCOUTQ, size)
    except OSError:
        return 0
    return size[0]
