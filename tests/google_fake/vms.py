"""TPU nodes of the fake bring real processes: each worker is a VM, a namespace that runs the node's startup script.

A VM has an address of its own, which the Node says, and a metadata server that says what a TPU VM's says.
Deletion and preemption kill everything in it. Not here: namespaces (`zone.py`).
"""

from __future__ import annotations

import json
import threading
import traceback
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.cloud import tpu_v2

from tests.google_fake.zone import Zone

if TYPE_CHECKING:
    from tests.google_fake.tpu_queue import Queue
    from tests.google_fake.tpu_rules import Shape


class BootsVms:
    """The VMs of all nodes.

    :param queue: of the fake.
    :param shared: folders of this machine that every VM sees and writes to, as if they were a bucket.
    """

    def __init__(self, queue: Queue, shared: Iterable[Path] = ()) -> None:
        self._queue = queue
        self._shared = [str(path) for path in shared]
        self._zone = Zone.up()
        self._workers: dict[str, list[str]] = {}
        self._addresses: dict[str, str] = {}
        self._last: dict[str, threading.Thread] = {}
        #: What went wrong in here; the fake raises it at its end.
        self.errors: list[str] = []

    def close(self) -> None:
        """Every VM ends."""
        for thread in list(self._last.values()):
            thread.join()
        self._zone.down()

    # What a test looks at and does

    @property
    def machine(self) -> str:
        """The address by which VMs reach this machine."""
        return self._zone.machine

    def log(self, node: str, worker: int = 0) -> str:
        """What a VM's startup script said.

        :param node: full name.
        """
        path = self.folder(node, worker) / "serial.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def folder(self, node: str, worker: int = 0) -> Path:
        """A VM's files: `serial.log`, `metadata.json`, and in `upper` what it wrote."""
        return self._zone.folder(self._workers[node][worker])

    def run(self, node: str, worker: int, *argv: str) -> str:
        """Run a short command on a VM, as root would over SSH.

        :return: what it said.
        :raises subprocess.CalledProcessError: when it ends with an error.
        """
        return self._zone.run(self._workers[node][worker], *argv)

    def kill(self, node: str, worker: int = 0) -> None:
        """A VM vanishes, though its node says nothing of it."""
        self._zone.order("kill", name=self._workers[node][worker], forget=False)

    def restart(self, node: str, worker: int = 0) -> None:
        """A VM restarts: with its disk, and its startup script runs again."""
        self.kill(node, worker)
        found = self._queue.nodes[node]
        self._boot(found, self._workers[node][worker], worker)

    def status(self) -> dict[str, bool]:
        """The VMs, and whether each of them runs."""
        return dict(self._zone.order("status"))

    # The watcher

    def node_made(self, node: tpu_v2.Node, shape: Shape) -> None:
        """Its VMs boot, side by side."""
        names = [f"t1v-n-{zlib.crc32(node.name.encode()):08x}-w-{worker}" for worker in range(shape.hosts)]
        self._workers[node.name] = names
        for name in names:
            self._addresses.setdefault(name, self._zone.address(len(self._addresses)))
        node.network_endpoints = [{"ip_address": self._addresses[name], "port": 8470} for name in names]
        for worker, name in enumerate(names):
            self._then(name, lambda worker=worker, name=name: self._boot(node, name, worker))  # type: ignore[misc]

    def node_changed(self, node: tpu_v2.Node) -> None:
        """Its VMs' metadata is another."""
        for worker, name in enumerate(self._workers.get(node.name, [])):
            said = self._metadata(node, name, worker)
            self._then(name, lambda name=name, said=said: self._zone.order("describe", name=name, metadata=said))  # type: ignore[misc]

    def node_gone(self, node: tpu_v2.Node) -> None:
        """Its VMs die."""
        for name in self._workers.get(node.name, []):
            self._then(name, lambda name=name: self._zone.order("kill", name=name, forget=True))  # type: ignore[misc]

    def busy(self, node: tpu_v2.Node) -> bool:
        """Whether VMs are coming or going."""
        threads = [self._last.get(name) for name in self._workers.get(node.name, [])]
        return any(thread is not None and thread.is_alive() for thread in threads)

    def guest_attributes(self, node: tpu_v2.Node) -> list[dict[str, str]]:
        """What each worker of a node has told."""
        found = []
        for name in self._workers.get(node.name, []):
            path = self._zone.folder(name) / "guest.json"
            found.append(json.loads(path.read_text()) if path.exists() else {})
        return found

    # Work, one thing after the other for each VM, side by side for several

    def _then(self, name: str, do: Callable[[], None]) -> None:
        before = self._last.get(name)

        def work() -> None:
            if before is not None:
                before.join()
            try:
                do()
            except Exception:  # noqa: BLE001 - nobody waits for a thread's error, so it is kept
                self.errors.append(f"VM {name}: {traceback.format_exc()}")

        self._last[name] = threading.Thread(target=work, name=f"google-fake-{name}", daemon=True)
        self._last[name].start()

    def _boot(self, node: tpu_v2.Node, name: str, worker: int) -> None:
        shape = self._queue.shape_of(node)
        spec = {
            "address": self._addresses[name],
            "gateway": self._zone.gateway,
            "name": name,
            "chips": shape.chips // shape.hosts,
            "seen": [*self._zone.seen, *self._shared],
        }
        self._zone.order("boot", name=name, spec=spec, metadata=self._metadata(node, name, worker))

    # What a TPU VM's metadata server says

    def _metadata(self, node: tpu_v2.Node, name: str, worker: int) -> dict[str, Any]:
        _, project, _, zone, _, node_id = node.name.split("/")
        shape = self._queue.shape_of(node)
        names = self._workers[node.name]
        slices = [one for one in self._queue.nodes.values() if one.queued_resource == node.queued_resource]
        env = {
            "ACCELERATOR_TYPE": shape.accelerator_type,
            "CHIPS_PER_HOST_BOUNDS": "2,2,1",
            "CONSUMER_PROJECT_ID": project,
            "NODE_ID": node_id,
            "RUNTIME_VERSION": node.runtime_version,
            "TOPOLOGY": shape.topology,
            "TYPE": shape.family.type_.name,
            "WORKER_ID": str(worker),
            "ZONE": zone,
        }
        if node.multislice_node:
            first = self._workers[slices[0].name][0]
            env |= {
                "MEGASCALE_COORDINATOR_ADDRESS": f"{self._addresses[first]}:8080",
                "MEGASCALE_NUM_SLICES": str(len(slices)),
                "MEGASCALE_PORT": "8080",
                "MEGASCALE_SLICE_ID": str([one.name for one in slices].index(node.name)),
            }
        attributes = {
            "accelerator-type": shape.accelerator_type,
            "agent-worker-number": str(worker),
            "instance-id": node_id,
            "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in env.items()),
            "worker-id": str(worker),
            "worker-network-endpoints": ",".join(f"unknown:unknown:{self._addresses[one]}" for one in names),
            **node.metadata,
        }
        tree = {
            "instance": {
                "attributes": {},
                "hostname": f"{name}.{zone}.c.{project}.internal",
                "id": str(node.id + worker),
                "name": name,
                "network-interfaces": {"0": {"ip": self._addresses[name]}},
                "zone": f"projects/1234567890/zones/{zone}",
            },
            "project": {"numeric-project-id": "1234567890", "project-id": project},
        }
        return {"tree": tree, "attributes": attributes}
