"""Process 1 of one TPU VM: makes its view of the machine, answers as its metadata server, runs its startup script.

Run by `unshare` in network, mount, process, IPC and host-name namespaces of its own, with the VM's folder; SIGKILL
of that `unshare` ends all of the VM at once. The VM sees this machine's files and writes to a layer of its own,
which stays when it restarts. What the metadata server says is in `metadata.json`, which is read at each request;
guest attributes go to `guest.json`, what the startup script says to `serial.log`.
Imports nothing but the standard library: it starts often and should start fast.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

METADATA_IP = "169.254.169.254"
#: What a startup script finds on a TPU VM: no HOME among it.
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True)


class Vm:
    """The VM.

    :param folder: of the VM; `vm.json` has its address, its gateway, its host name, its chips and what of the
        machine is to be seen beside the root file system.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        spec = json.loads((folder / "vm.json").read_text())
        self.address, self.gateway, self.name = spec["address"], spec["gateway"], spec["name"]
        self.chips, self.seen = spec["chips"], spec["seen"]
        self.root = folder / "root"
        self._guest = threading.Lock()

    def metadata(self) -> dict[str, Any]:
        """What the metadata server says, now."""
        found: dict[str, Any] = json.loads((self.folder / "metadata.json").read_text())
        return found

    # The view

    def make_view(self) -> None:
        """Mounts and addresses."""
        _run("mount", "--make-rprivate", "/")
        for name in ("root", "upper", "work"):
            (self.folder / name).mkdir(exist_ok=True)
        layers = f"lowerdir=/,upperdir={self.folder}/upper,workdir={self.folder}/work"
        _run("mount", "-t", "overlay", "vm", "-o", layers, str(self.root))
        _run("mount", "-t", "proc", "proc", f"{self.root}/proc")
        _run("mount", "--rbind", "/sys", f"{self.root}/sys")
        for path in ("run", "tmp"):
            _run(
                "mount", "-t", "tmpfs", "-o", "mode=1777" if path == "tmp" else "mode=755", "vm", f"{self.root}/{path}"
            )
        self._make_devices()
        for path in self.seen:
            target = Path(f"{self.root}{path}")
            target.mkdir(parents=True, exist_ok=True)
            _run("mount", "--rbind", path, str(target))
        socket.sethostname(self.name)
        for command in (
            "link set lo up",
            f"addr add {METADATA_IP}/32 dev lo",
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self.gateway}",
        ):
            _run("ip", *command.split())
        hosts = f"127.0.0.1 localhost\n{METADATA_IP} metadata.google.internal metadata\n{self.address} {self.name}\n"
        for path, text in (("hosts", hosts), ("resolv.conf", ""), ("hostname", f"{self.name}\n")):
            file = self.root / "etc" / path
            file.unlink(missing_ok=True)  # it may be a link to somewhere in /run
            file.write_text(text)

    def _make_devices(self) -> None:
        dev = self.root / "dev"
        _run("mount", "-t", "tmpfs", "-o", "mode=755", "vm", str(dev))
        for name in _DEVICES:
            (dev / name).touch()
            _run("mount", "--bind", f"/dev/{name}", str(dev / name))
        for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            (dev / name).symlink_to(target)
        for name, kind in (("shm", "tmpfs"), ("pts", "devpts")):
            (dev / name).mkdir()
            _run("mount", "-t", kind, "vm", str(dev / name))
        for number in range(self.chips):
            (dev / f"accel{number}").touch()

    # The startup script

    def start_script(self) -> subprocess.Popen[bytes] | None:
        """Run what the metadata says, as Google's guest agent does; None where it says nothing."""
        script = self.metadata()["attributes"].get("startup-script")
        if not script:
            return None
        path = self.root / "tmp" / "metadata-startup-script"
        path.write_text(script)
        path.chmod(0o755)

        def enter() -> None:
            os.chroot(self.root)
            os.chdir("/")

        with (self.folder / "serial.log").open("ab") as log:
            return subprocess.Popen(
                ["/bin/bash", "-c", "exec /tmp/metadata-startup-script"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_ENVIRONMENT,
                preexec_fn=enter,
                start_new_session=True,
            )

    # Guest attributes

    def tell(self, path: str, value: str) -> bool:
        """Keep a guest attribute; False where the VM's metadata does not allow any."""
        if self.metadata()["attributes"].get("enable-guest-attributes", "").upper() != "TRUE":
            return False
        with self._guest:
            file = self.folder / "guest.json"
            kept = json.loads(file.read_text()) if file.exists() else {}
            unfinished = self.folder / ".guest"
            unfinished.write_text(json.dumps({**kept, path: value}))
            unfinished.rename(file)
        return True


class Handler(http.server.BaseHTTPRequestHandler):
    """The metadata server."""

    vm: Vm
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if not self._is_asked_rightly():
            return
        text, code = self._look(url.path)
        if query.get("wait_for_change", "").lower() == "true":
            known = query.get("last_etag") or _etag(text)
            ends = time.monotonic() + float(query.get("timeout_sec", "60"))
            while _etag(text) == known and time.monotonic() < ends:
                time.sleep(0.1)
                text, code = self._look(url.path)
        self._answer(code, text)

    def do_PUT(self) -> None:
        if not self._is_asked_rightly():
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
        head, _, path = urllib.parse.urlsplit(self.path).path.partition("/guest-attributes/")
        if not head.endswith("/instance") or path.count("/") != 1:
            self._answer(404, "Not Found")
        elif self.vm.tell(path, body):
            self._answer(200, "")
        else:
            self._answer(403, "Guest attributes endpoint access is disabled.")

    def _is_asked_rightly(self) -> bool:
        if self.headers.get("Metadata-Flavor") == "Google" and "X-Forwarded-For" not in self.headers:
            return True
        self._answer(403, "Missing Metadata-Flavor:Google header.")
        return False

    def _look(self, path: str) -> tuple[str, int]:
        parts = [part for part in path.removeprefix("/computeMetadata/v1").split("/") if part]
        found: Any = self.vm.metadata()["tree"]
        if parts[:2] == ["instance", "attributes"]:
            found, parts = self.vm.metadata()["attributes"], parts[2:]
        for part in parts:
            if not isinstance(found, dict) or part not in found:
                return "Not Found", 404
            found = found[part]
        if isinstance(found, dict):
            return "".join(f"{key}{'/' if isinstance(value, dict) else ''}\n" for key, value in found.items()), 200
        return str(found), 200

    def _answer(self, code: int, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Type", "application/text")
        self.send_header("ETag", _etag(text))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


class Server(socketserver.ThreadingTCPServer):
    """An HTTP server that does not ask a name server, which nobody answers for, what it is called."""

    daemon_threads = True
    allow_reuse_address = True


def _etag(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> None:
    vm = Vm(Path(sys.argv[1]))
    vm.make_view()
    handler = type("Handler", (Handler,), {"vm": vm})
    server = Server((METADATA_IP, 80), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    vm.start_script()
    (vm.folder / "up").touch()
    while True:  # reaps orphans; a VM goes on when its script has ended
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            threading.Event().wait()


if __name__ == "__main__":
    main()
