"""A Ray head that somebody started himself, with a token: what the option `ray_head` names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

#: Apart from those that Ray takes where nobody says any.
GCS_PORT, DASHBOARD_PORT = 26379, 28265
#: How long it may take to end, seconds, before it is killed.
_ENDS_WITHIN = 30.0


@contextmanager
def own_head(address: str, token: str, folder: Path) -> Iterator[None]:
    """It runs meanwhile, without chips.

    :param address: of this machine, that hosts reach.
    :param folder: for its files; a short path, since Ray has sockets below it.
    """
    file = folder / "token"
    file.touch(mode=0o600)
    file.write_text(token)
    arguments = [
        "--head",
        f"--node-ip-address={address}",
        f"--port={GCS_PORT}",
        f"--dashboard-host={address}",
        f"--dashboard-port={DASHBOARD_PORT}",
        "--ray-client-server-port=20001",
        "--dashboard-agent-listen-port=22365",
        "--num-cpus=1",
        f"--object-store-memory={160 * 2**20}",
        f"--temp-dir={folder}",
        "--block",
    ]
    environment = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file), "RAY_USAGE_STATS_ENABLED": "0"}
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
    with (folder / "log").open("wb") as log, subprocess.Popen(argv, env=environment, stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            all_of_it = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            process.terminate()
            _, alive = psutil.wait_procs(all_of_it, timeout=_ENDS_WITHIN)
            for one in alive:
                one.kill()
