"""Where the files of a run are, which addresses it uses, which runs there are, and how they are cleared.

A run is a folder. Its keeper holds a lock on it for as long as it lives, and the kernel lets go of
that lock however the keeper ends: a folder whose lock is free is a leftover.
Addresses are the same in every run: each has a network namespace of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.testbed import cgroups

#: Inside the network namespace of a run.
API = "10.200.0.1"
API_PORT = 6443
NODE_NET = "10.200.0"
POD_CIDR, POD_GATEWAY = "10.244.0.0/16", "10.244.0.1"
SERVICE_CIDR, SERVICE_API, SERVICE_DNS = "10.96.0.0/16", "10.96.0.1", "10.96.0.10"
WEBHOOK_PORT, REGISTRY_PORT, KUEUE_PORT = 9444, 5000, 9443


@dataclass(frozen=True)
class Options:
    """What a run is made of.

    :param nodes: node pools, as `nodes.parse` reads them; empty for the control plane alone.
    :param control_plane: no kubelets, containerd or DNS, and none can be added.
    :param kueue: with Kueue.
    :param operator_gates: KubeRay's feature gates, `RayMultiHostIndexing=false`.
    :param autoscale: pools that the autoscaler may boot, `v4-2x2x2*4`; empty without one.
    :param autoscale_idle: seconds after which it removes an empty pool.
    :param node_grace: seconds after which a silent node is NotReady; Kubernetes' own default is 50.
    :param venv: the virtual environment with Ray that pods see.
    """

    nodes: tuple[str, ...] = ()
    control_plane: bool = False
    kueue: bool = False
    operator_gates: str = ""
    autoscale: tuple[str, ...] = ()
    autoscale_idle: float = 15
    node_grace: int = 20
    venv: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Options:
        values = json.loads(text)
        return cls(**{**values, "nodes": tuple(values["nodes"]), "autoscale": tuple(values["autoscale"])})


@dataclass(frozen=True)
class Layout:
    """The folder of one run.

    :param root: the folder; its name is the run's id.
    """

    root: Path
    id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", self.root.name)

    def __getattr__(self, name: str) -> Path:
        # Folders: pki, logs, nodes, images, work. Made when they are first asked for.
        if name not in ("pki", "logs", "nodes", "ipam", "work"):
            raise AttributeError(name)
        path = self.root / name
        path.mkdir(exist_ok=True, mode=0o700)
        return path

    @property
    def control(self) -> Path:
        """Socket on which `inside.py` takes orders."""
        return self.root / "control.sock"

    @property
    def kubeconfig(self) -> Path:
        """For programs outside: through the proxy on loopback, as cluster-admin."""
        return self.root / "kubeconfig"

    @property
    def shared(self) -> Path:
        """A folder that pods may mount by `hostPath`, at the same path, and any user of a pod may write to."""
        path = self.root / "shared"
        if not path.exists():
            path.mkdir()
            path.chmod(0o777)  # whatever the umask; the folder above keeps the machine's users out
        return path

    @property
    def audit(self) -> Path:
        """The API server's own record of what service accounts asked for."""
        return self.logs / "audit.log"

    @property
    def options(self) -> Path:
        return self.root / "options.json"

    @property
    def failure(self) -> Path:
        """Why the run did not come up, in words."""
        return self.root / "failure"

    @property
    def cgroup(self) -> str:
        """Name of the run's control group in each hierarchy."""
        return f"raytpu-testbed-{self.id}"

    def state(self) -> dict[str, Any]:
        """What the keeper wrote: its pid, its owner, the port of the API server."""
        path = self.root / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def write_state(self, **values: object) -> None:
        unfinished = self.root / ".state"
        unfinished.write_text(json.dumps({**self.state(), **values}))
        unfinished.rename(self.root / "state.json")

    def lock(self) -> IO[str] | None:
        """Take the run's lock; None while its keeper lives."""
        handle = (self.root / "lock").open("w")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            return None
        return handle

    def clear(self) -> list[str]:
        """Remove what outlives the processes: control groups and the folder.

        :return: what could not be removed.
        """
        left = cgroups.remove(self.cgroup)
        deadline = time.monotonic() + 10
        while self.root.exists():
            try:
                shutil.rmtree(self.root)
            except OSError:  # a process that is just being killed still writes here
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        return left


def runs_root() -> Path:
    """The folder of all runs; `RAYTPU_TESTBED_RUNS` moves it. Its path must stay short: it holds sockets."""
    return Path(os.environ.get("RAYTPU_TESTBED_RUNS") or "/var/tmp/raytpu-testbed")


def new_run() -> tuple[Layout, IO[str]]:
    """A folder for a run, and its lock, which is held before anybody can see the folder."""
    root = runs_root()
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = secrets.token_hex(3)
    unseen = Layout(root / f".{name}")
    unseen.root.mkdir(mode=0o700)
    handle = unseen.lock()
    assert handle is not None
    unseen.root.rename(root / name)
    return Layout(root / name), handle


def all_runs() -> Iterator[Layout]:
    """Every run's folder, live or not."""
    if runs_root().exists():
        for path in sorted(runs_root().iterdir()):
            # A hidden one is being made, unless whoever made it died over it.
            if path.is_dir() and not (path.name.startswith(".") and time.time() - path.stat().st_mtime < 60):
                yield Layout(path)


def sweep(say: Callable[[str], None] = print) -> list[str]:
    """Clear every run whose keeper is gone.

    :param say: told of each, and what of it could not be removed.
    :return: ids of the runs that were cleared.
    """
    swept = []
    for layout in all_runs():
        try:
            handle = layout.lock()
        except FileNotFoundError:
            continue  # cleared by its own keeper in this moment
        if handle is None:
            continue
        with handle:
            left = layout.clear()
        say(f"cleared what was left of run {layout.id}" + (f", but not of {', '.join(left)}" if left else ""))
        swept.append(layout.id)
    return swept
