"""Child processes of process 1: started, logged, reaped, restarted.

Process 1 of a namespace inherits orphans, so it reaps by hand whatever ends and cannot use the
standard library's child watchers beside that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Child:
    """One program that ought to run.

    :param name: of it, and of its log file.
    :param argv: its command line, or a function that makes it anew at each start.
    :param env: its environment on top of ours.
    :param restart: start it again when it ends by itself, as a Deployment or systemd would.
    """

    name: str
    argv: list[str] | Callable[[], list[str]]
    env: Mapping[str, str] = field(default_factory=dict)
    restart: bool = True
    pid: int = 0
    starts: int = 0
    wanted: bool = True
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class CommandFailed(RuntimeError):
    """A short command ended with an error; the message carries its output."""


class Children:
    """All children of this process.

    :param logs: folder of their logs.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.by_name: dict[str, Child] = {}
        self._by_pid: dict[int, Callable[[int], None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            tell = self._by_pid.pop(pid, None)
            if tell is not None:  # else an orphan of a killed node
                tell(os.waitstatus_to_exitcode(status))

    def _spawn(self, name: str, argv: list[str], env: Mapping[str, str], ended: Callable[[int], None]) -> int:
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **env},
                start_new_session=True,
            )
        process.returncode = 0  # we reap it; the object must not warn that nobody did
        self._by_pid[process.pid] = ended
        return process.pid

    def start(self, child: Child) -> None:
        """Start a child now and, if it wants that, again whenever it ends."""
        self.by_name[child.name] = child
        child.wanted = True
        child.ended = asyncio.Event()
        child.starts += 1
        argv = child.argv() if callable(child.argv) else child.argv
        child.pid = self._spawn(child.name, argv, child.env, lambda code: self._ended(child, code))

    def _ended(self, child: Child, code: int) -> None:
        child.pid = 0
        child.ended.set()
        with (self.logs / f"{child.name}.log").open("a") as log:
            log.write(f"[testbed] {child.name} ended with {code}\n")
        if child.wanted and child.restart:
            task = asyncio.ensure_future(self._again(child))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _again(self, child: Child) -> None:
        await asyncio.sleep(1)  # no busy loop when it cannot start at all
        if child.wanted and child.pid == 0:
            self.start(child)

    async def stop(self, name: str, how: signal.Signals = signal.SIGTERM, patience: float = 10.0) -> None:
        """End a child and wait until it is gone; it is not started again.

        :param name: of the child.
        :param how: the first signal; SIGKILL follows when it does not help.
        :param patience: seconds until then.
        """
        child = self.by_name[name]
        child.wanted = False
        if child.pid == 0:
            return
        os.kill(child.pid, how)
        try:
            await asyncio.wait_for(child.ended.wait(), patience)
        except TimeoutError:
            if child.pid:
                os.kill(child.pid, signal.SIGKILL)
            await child.ended.wait()

    async def run(self, *argv: str) -> None:
        """Run a short command to its end.

        :param argv: its command line.
        :raises CommandFailed: when it ends with an error.
        """
        name = f"run-{Path(argv[0]).name}"
        log = self.logs / f"{name}.log"
        before = log.stat().st_size if log.exists() else 0
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._spawn(name, list(argv), {}, lambda code: None if done.done() else done.set_result(code))
        code = await done
        if code != 0:
            said = log.read_bytes()[before:].decode(errors="replace").strip()
            raise CommandFailed(f"{' '.join(argv)} ended with {code}: {said[-2000:]}")

    def status(self) -> dict[str, dict[str, int]]:
        """Each child's pid (0 if it does not run) and how often it was started."""
        return {name: {"pid": child.pid, "starts": child.starts} for name, child in self.by_name.items()}
