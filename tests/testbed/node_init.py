"""Process 1 of one node: makes the node's view of the machine, then runs containerd and kubelet.

Run by `unshare` in mount and process namespaces of its own, with the path of a JSON file that holds
`folder`, `containerd` and `kubelet` (command lines) and `cgroup`. SIGKILL of that `unshare` ends all
of the node at once, mounts and virtual links too; that is how a host vanishes.
Imports nothing but the standard library: it starts often and should start fast.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

#: Folders that kubelet or containerd insist on; the host's own stay untouched.
_PRIVATE = ("/run", "/var/log")
CONTAINERD_SOCKET = "/run/containerd.sock"


def _mount(*args: str) -> None:
    subprocess.run(["mount", *args], check=True)


def make_view(folder: Path) -> None:
    """Mounts of the node.

    :param folder: of the node; its `kubelet` becomes `/var/lib/kubelet`.
    """
    _mount("--make-rprivate", "/")
    _mount("-t", "proc", "proc", "/proc")
    for path in _PRIVATE:
        _mount("-t", "tmpfs", "-o", "mode=755", "testbed", path)
    Path("/run/netns").mkdir()
    kubelet = Path("/var/lib/kubelet")  # on the run's own tmpfs
    kubelet.mkdir(exist_ok=True)
    # Device plugins and pod volumes have this path compiled in.
    _mount("--bind", str(folder / "kubelet"), str(kubelet))
    # Volumes that kubelet mounts later have to reach the containers.
    _mount("--make-rshared", "/")


def _wait_for(path: str, process: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        probe = socket.socket(socket.AF_UNIX)
        try:
            probe.connect(path)
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"containerd does not answer on {path}") from None
        finally:
            probe.close()
        time.sleep(0.05)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(spec["folder"])
    make_view(folder)

    def start(name: str) -> "subprocess.Popen[bytes]":
        log = (folder / f"{name}.log").open("ab")
        return subprocess.Popen(spec[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    containerd = start("containerd")
    _wait_for(CONTAINERD_SOCKET, containerd, 60)
    kubelet = start("kubelet")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Reap orphans; start either again when it ends, as systemd would.
    while True:
        pid, _ = os.waitpid(-1, 0)
        if pid == containerd.pid:
            containerd = start("containerd")
        elif pid == kubelet.pid:
            time.sleep(1)
            kubelet = start("kubelet")


if __name__ == "__main__":
    main()
