"""A whole Airflow on this machine: API server, scheduler, DAG processor and triggerer over one home.

Each component is a process of its own that the instance starts and ends by itself, because a
SIGTERM to ``airflow standalone`` orphans its children. Loopback only, a generated password. Used by
the demo, ``raytpu ui`` and the integration tests; never part of a deployment.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from raytpu_ops.demo.airflow_api import AirflowApi
from raytpu_ops.demo.airflow_config import USERNAME, Settings, environment, write_config
from raytpu_ops.demo.guard import Guard
from raytpu_ops.demo.home import lock_home
from raytpu_ops.demo.places import short_temp
from raytpu_ops.demo.processes import KEEP_ENVIRONMENT_READABLE, end, end_marked, free_port, marked, tail
from raytpu_ops.tpu.errors import DeadlineExceeded, Misconfigured

#: In the environment of every process below an instance; its value names the instance.
MARK = "RAYTPU_AIRFLOW"

#: Component -> its command. Logs of tasks and triggers are read from the home, not served.
_COMMANDS: Mapping[str, Sequence[str]] = {
    "api-server": ("api-server",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}
COMPONENTS = tuple(_COMMANDS)
#: What each component is called in the answer of ``/api/v2/monitor/health``.
_HEALTH_NAMES = {"scheduler": "scheduler", "dag-processor": "dag_processor", "triggerer": "triggerer"}


class AirflowInstance:
    """One Airflow over one home; a context manager that leaves no process behind.

    :param home: its AIRFLOW_HOME, made where it is not there; one instance at a time uses it.
    :param dags_folder: the folder with the DAG files, or several.
    :param port: the API server's port on 127.0.0.1; None takes a free one.
    :param env: variables that its processes get on top of a small allow-list.
    :param settings: sections and options of ``airflow.cfg`` that win over ours.
    :param plugins_folder: a folder with Airflow plugins; None for none.
    :param local_root: root of the local backend whose leases die with us when we are killed.
    :param temporary: folders (the home, for one) that are removed when we are killed. :meth:`stop`
        leaves them alone.
    :raises Misconfigured: the home cannot be made, or another process has an Airflow over it.
    """

    def __init__(
        self,
        home: Path,
        dags_folder: Path | Sequence[Path],
        *,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        settings: Settings | None = None,
        plugins_folder: Path | None = None,
        local_root: Path | None = None,
        temporary: Sequence[Path] = (),
    ) -> None:
        self.home = home.absolute()
        self._lock: IO[str] | None = lock_home(self.home)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.username = USERNAME
        self.mark = secrets.token_hex(8)
        self.password = write_config(
            self.home,
            [path.absolute() for path in ([dags_folder] if isinstance(dags_folder, Path) else dags_folder)],
            port=self.port,
            plugins_folder=plugins_folder.absolute() if plugins_folder else None,
            settings=settings or {},
        )
        #: Temporary files of its processes, who forget some of theirs; goes away with them.
        self.temp = short_temp() / f"rta-{self.mark}"
        extra = {**(env or {}), **KEEP_ENVIRONMENT_READABLE, "TMPDIR": str(self.temp), MARK: self.mark}
        self.env = environment(self.home, extra)
        self.api = AirflowApi(self.url, self.username, self.password)
        self._components: dict[str, subprocess.Popen[bytes]] = {}
        self._guard: Guard | None = None
        self._local_root = local_root
        self._temporary = temporary

    @property
    def pids(self) -> dict[str, int]:
        """Component to process id, of those that were started and not stopped."""
        return {name: process.pid for name, process in self._components.items()}

    def log_path(self, component: str) -> Path:
        """Where a component's own output goes."""
        return self.home / "logs" / f"{component}.log"

    def start(self, *, deadline_s: float = 180, say: Callable[[str], None] = lambda _: None) -> Self:
        """Make the database, start every component and wait until all of them are healthy.

        :param deadline_s: seconds for everything together.
        :param say: takes a line for each step.
        :raises Misconfigured: a component ended; its last log lines are in the message.
        :raises DeadlineExceeded: naming the components that are not healthy.
        """
        until = time.monotonic() + deadline_s
        self._lock = self._lock or lock_home(self.home)
        (self.home / "logs").mkdir(parents=True, exist_ok=True)
        self.temp.mkdir(mode=0o700)
        self._guard = Guard(
            marks=[(MARK, self.mark)],
            local_root=self._local_root,
            folders=[self.temp, *self._temporary],
        )
        try:
            say("making the database")
            # Each of these is one busy core for some seconds; the API server needs no table to come up.
            self.start_component(COMPONENTS[0])
            self._migrate(deadline_s)
            for component in COMPONENTS[1:]:
                self._raise_if_one_ended()  # a port that is taken shows before everything else is up
                self.start_component(component)
            self.wait_healthy(deadline_s=until - time.monotonic(), say=say)
        except BaseException:
            self.stop()
            raise
        return self

    def start_component(self, component: str) -> int:
        """Start one component, such as after :meth:`kill_component`; its pid."""
        running = self._components.get(component)
        if running is not None and running.poll() is None:
            raise Misconfigured(f"Airflow's {component} runs already as process {running.pid}; kill it first")
        with self.log_path(component).open("ab") as log:
            self._components[component] = self._spawn(_COMMANDS[component], log)
        return self._components[component].pid

    def kill_component(self, component: str, *, grace_s: float = 0) -> None:
        """End one component with all its children, by SIGKILL unless a grace is given.

        :param grace_s: seconds between SIGTERM and SIGKILL.
        """
        process = self._components.pop(component)
        if process.poll() is None:
            end([psutil.Process(process.pid)], grace_s=grace_s)
        process.wait(timeout=10)

    def wait_healthy(self, *, deadline_s: float, say: Callable[[str], None] = lambda _: None) -> None:
        """Wait until ``/api/v2/monitor/health`` finds every started component healthy.

        :raises Misconfigured: a component ended.
        :raises DeadlineExceeded: naming those that are not healthy.
        """
        until = time.monotonic() + deadline_s
        waiting_for = ""
        while missing := self._not_healthy():
            self._raise_if_one_ended()
            if (now := ", ".join(missing)) != waiting_for:
                waiting_for = now
                say(f"waiting for {now}")
            if time.monotonic() > until:
                logs = "\n".join(f"--- {name}\n{tail(self.log_path(name))}" for name in missing)
                raise DeadlineExceeded(f"Airflow in {self.home}: {now} not healthy after {deadline_s:.0f} s\n{logs}")
            if "api-server" not in missing:
                # Built at the first request, 4 s of work: while the others come up, not in the first task.
                self.api.warm_up()
            time.sleep(0.25)
        self.api.warm_up()

    def stop(self, *, grace_s: float = 5) -> list[str]:
        """End every process of this instance, to the last task.

        :param grace_s: seconds between SIGTERM and SIGKILL.
        :return: what is still there, in words; empty when nothing is.
        """
        running = {name: p for name, p in self._components.items() if p.poll() is None}
        # The API server keeps nothing in memory, and the others talk to it until their own end.
        api_server = running.pop("api-server", None)
        end([psutil.Process(p.pid) for p in running.values()], grace_s=grace_s)
        self.api.close()
        if api_server is not None:
            end([psutil.Process(api_server.pid)], grace_s=0)
        for process in self._components.values():
            process.wait(timeout=10)
        self._components.clear()
        left = end_marked(MARK, self.mark)
        shutil.rmtree(self.temp, ignore_errors=True)
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        return [f"process {process.pid} of Airflow" for process in left]

    def ended(self) -> list[str]:
        """Components that ended by themselves, each with its exit code and its last log lines."""
        return [
            f"Airflow's {component} in {self.home} ended with {process.returncode}; its last lines:\n"
            f"{tail(self.log_path(component))}"
            for component, process in self._components.items()
            if process.poll() is not None
        ]

    def processes(self) -> list[psutil.Process]:
        """Every process of this instance: components, their workers and the tasks that run."""
        return marked(MARK, self.mark)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _spawn(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "airflow", *command],
            cwd=self.home,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _migrate(self, deadline_s: float) -> None:
        path = self.log_path("db-migrate")
        with path.open("ab") as log:
            process = self._spawn(("db", "migrate"), log)
        try:
            code = process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            end([psutil.Process(process.pid)], grace_s=0)
            process.wait(timeout=10)
            raise DeadlineExceeded(f"airflow db migrate: not done after {deadline_s:.0f} s\n{tail(path)}") from None
        if code != 0:
            raise Misconfigured(f"airflow db migrate in {self.home} ended with {code}\n{tail(path)}")

    def _not_healthy(self) -> list[str]:
        health = self.api.health()
        missing = [] if health else ["api-server"]
        for component, name in _HEALTH_NAMES.items():
            if component in self._components and health.get(name, {}).get("status") != "healthy":
                missing.append(component)
        return missing

    def _raise_if_one_ended(self) -> None:
        if ended := self.ended():
            raise Misconfigured("\n".join(ended))
