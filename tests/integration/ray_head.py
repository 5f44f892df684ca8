"""A Ray head of one's own for the client's tests: loopback, token, labelled as a one-host slice, gone afterwards."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

#: All of 127/8 is this machine; no other test uses this part of it.
ADDRESS = "127.78.0.1"
SLICE = "one-host"
CPUS = 4
#: What makes Ray label the head as the only host of a v4 slice of 2x2x1.
_TPU = {
    "TPU_NAME": SLICE,
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_TOPOLOGY": "2x2x1",
    "TPU_SKIP_MDS_QUERY": "1",
}


def free_ports(count: int) -> list[int]:
    """Ports that nobody has at this moment, outside of those that Ray gives to its workers."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            held = stack.enter_context(socket.socket())
            held.bind((ADDRESS, 0))
            port = held.getsockname()[1]
            if not 10002 <= port <= 19999:
                found.append(port)
        return found


class RayHead:
    """One head; ``start`` again after ``kill`` plays a head that was replaced under the same address.

    :param folder: its own.
    :param python: the interpreter that it and its workers run with.
    """

    def __init__(self, folder: Path, python: Path = Path(sys.executable)) -> None:
        self.folder = folder
        self.python = python
        self.token = secrets.token_hex(32)
        self.port, self.dashboard, self.client_port, self.agent = free_ports(4)
        self.address = f"http://{ADDRESS}:{self.dashboard}"
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def start(self) -> None:
        """Start it and wait until its dashboard answers and its agent listens."""
        self._starts += 1
        temp = self.folder / str(self._starts)
        command = [
            str(self.python), "-m", "ray.scripts.scripts", "start", "--head", "--block",
            f"--node-ip-address={ADDRESS}", f"--port={self.port}",
            f"--dashboard-host={ADDRESS}", f"--dashboard-port={self.dashboard}",
            f"--ray-client-server-port={self.client_port}", f"--dashboard-agent-listen-port={self.agent}",
            f"--num-cpus={CPUS}", '--resources={"TPU": 4}', "--object-store-memory=80000000", f"--temp-dir={temp}",
        ]  # fmt: skip
        env = {
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "120",
            "RAYTPU_ROOT": str(self.folder),  # the session looks for what is left by it
            **_TPU,
        }
        log = self.folder / f"head-{self._starts}.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self._wait_ready(log)

    def _wait_ready(self, log: Path) -> None:
        assert self._process is not None
        headers = {"authorization": f"Bearer {self.token}"}
        until = time.monotonic() + 180
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the head has ended: {log.read_text()[-2000:]}")
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"{self.address}/api/version", headers=headers, trust_env=False, timeout=5)
                if answer.is_success and _listens(self.agent):
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the head is not ready after 180 s: {log.read_text()[-2000:]}")

    def processes(self) -> list[psutil.Process]:
        """Everything that runs for this head, workers too."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RAYTPU_ROOT") == str(self.folder):
                    found.append(process)
        return found

    def find(self, words: str) -> psutil.Process:
        """The one process of this head with these words in its command line."""
        (found,) = [process for process in self.processes() if words in " ".join(process.cmdline())]
        return found

    def kill(self) -> None:
        """End all of it at once, as a machine that goes away does."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(30)
            self._process = None
        psutil.wait_procs(self.processes(), timeout=30)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((ADDRESS, port), timeout=1):
        return True
    return False
