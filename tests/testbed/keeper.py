"""One process for each run, outside of it: starts it, ends it, and clears what outlives processes.

    python -m tests.testbed.keeper RUN OWNER_PID OWNER_CREATED HANDSHAKE_FD LOCK_FD PROGRAM

It ends the run when it is told to (SIGTERM), when the run ends by itself, and when the process that
wanted the run is gone, however that ended: it holds a pidfd of it. If the keeper itself is killed,
the kernel kills the run, and the next `up` clears its folder.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from tests.testbed.layout import Layout


def listen() -> socket.socket:
    """A listening socket on the host's loopback; the run inherits it, and no forwarder is needed.

    The port is named in `bind`, or the kernel would give it away while the API server is "down".
    """
    for port in random.sample(range(20000, 32000), 200):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            listener.close()
            continue
        return listener
    raise RuntimeError("no free port on 127.0.0.1 between 20000 and 32000")


def start_inside(layout: Layout, listener: socket.socket, program: str) -> subprocess.Popen[bytes]:
    """The run, in namespaces of its own.

    :param layout: the run.
    :param listener: handed on to it.
    :param program: module that is its process 1.
    """
    with (layout.logs / "inside.log").open("ab") as log:
        return subprocess.Popen(
            [
                # When this process dies, so does unshare, and with it process 1 and all below it.
                *("setpriv", "--pdeathsig", "KILL"),
                *("unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"),
                *(sys.executable, "-m", program, str(layout.root), str(listener.fileno())),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
        )


def _owner(pid: int, created: float) -> int | None:
    """A pidfd of the owner; None without an owner.

    :raises ProcessLookupError: when it is gone, or its pid is another's by now.
    """
    if pid == 0:
        return None
    handle = os.pidfd_open(pid)
    try:
        if abs(psutil.Process(pid).create_time() - created) < 1:
            return handle
    except psutil.NoSuchProcess:
        pass
    os.close(handle)
    raise ProcessLookupError(f"owner {pid} is gone")


def watch(layout: Layout, inside: subprocess.Popen[bytes], owner: int | None, handshake: int) -> None:
    """Until there is a reason to end.

    :param layout: the run.
    :param inside: its outermost process.
    :param owner: pidfd of the owner.
    :param handshake: written to once, when the run is up or is not going to be.
    """
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    poll = select.poll()
    child = os.pidfd_open(inside.pid)
    for handle in (waker, child, *([owner] if owner is not None else [])):
        poll.register(handle, select.POLLIN)
    told = False
    while True:
        events = {handle for handle, _ in poll.poll(100 if not told else None)}
        if not told and child in events:
            reason = layout.failure.read_text() if layout.failure.exists() else _tail(layout.logs / "inside.log")
            _tell(handshake, {"error": reason})
        elif not told and layout.state().get("ready"):
            _tell(handshake, {"ready": True})
            told = True
        if events:
            return


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-20:]) if path.exists() else "no log"


def _tell(handshake: int, message: dict[str, object]) -> None:
    try:
        os.write(handshake, json.dumps(message).encode())
    except BrokenPipeError:
        pass  # nobody waits for it any more; the owner's pidfd says so next
    os.close(handshake)


def _end(inside: subprocess.Popen[bytes]) -> None:
    """Kill the run, and return when its last process is dead.

    Process 1 of a namespace is the last: the kernel lets it end when all others have.
    """
    first = [os.pidfd_open(one.pid) for one in psutil.Process(inside.pid).children()] if inside.poll() is None else []
    inside.kill()
    inside.wait()
    for handle in first:
        select.select([handle], [], [], 30)
        os.close(handle)


def _keep_logs(layout: Layout) -> None:
    """`RAYTPU_TESTBED_LOGS` names a folder for the logs of runs that ended."""
    target = os.environ.get("RAYTPU_TESTBED_LOGS")
    if not target:
        return
    shutil.copytree(layout.logs, Path(target) / layout.id, dirs_exist_ok=True)
    for log in layout.nodes.glob("*/*.log"):
        shutil.copyfile(log, Path(target) / layout.id / f"{log.parent.name}-{log.name}")
    # Of the pods that were still there: NODE/pod-logs/POD/CONTAINER/RESTART.log
    for log in layout.nodes.glob("*/pod-logs/*/*/*.log"):
        pod, container = log.parts[-3:-1]
        shutil.copyfile(log, Path(target) / layout.id / f"pod-{pod.split('_')[1]}-{container}-{log.name}")


def main() -> None:
    layout = Layout(Path(sys.argv[1]))
    owner_pid, created, handshake = int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    program = sys.argv[6]
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.set_inheritable(handshake, False)
    with os.fdopen(int(sys.argv[5]), "w") as lock:  # held by whoever made the folder, and from now on by us
        os.set_inheritable(lock.fileno(), False)
        owner = None
        inside = None
        try:
            owner = _owner(owner_pid, created)
            with listen() as listener:
                port = listener.getsockname()[1]
                me = psutil.Process()
                layout.write_state(keeper=me.pid, created=me.create_time(), owner=owner_pid, port=port, program=program)
                inside = start_inside(layout, listener, program)
            watch(layout, inside, owner, handshake)
        finally:
            if inside is not None:
                _end(inside)
            _keep_logs(layout)
            left = layout.clear()
            if left:
                raise SystemExit(f"control groups are left: {left}")


if __name__ == "__main__":
    main()
