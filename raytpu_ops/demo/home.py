"""An Airflow's home has one user at a time: the process that holds its lock, which the kernel frees when it dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from raytpu_ops.tpu.errors import Misconfigured

_LOCK = "raytpu.lock"


def lock_home(home: Path) -> IO[str]:
    """Make a home where there is none, and take it; closing what is returned gives it back.

    :param home: the AIRFLOW_HOME, made with mode 0700.
    :raises Misconfigured: it cannot be made, or another process uses it.
    """
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.fdopen(os.open(home / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
    except OSError as error:
        raise Misconfigured(f"{home} can't be Airflow's home: {error.strerror or error}; name another folder") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = file.read().strip() or "?"
        file.close()
        raise Misconfigured(
            f"an Airflow over {home} is up already, started by process {holder}: use that one, end it, or take "
            "another folder (--home)"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
