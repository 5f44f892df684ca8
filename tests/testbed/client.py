"""`Testbed`: what a test holds. Brings a run up and down, and has one method for each fault.

Talks to the run over the socket in its folder; Kubernetes itself is reached with Kubernetes' own
client through `kubeconfig`. Faults that are plain Kubernetes (drain, cordon, a finalizer) are in
`faults.py`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from tests.testbed import layout as runs
from tests.testbed import parts
from tests.testbed.faults import KubernetesFaults
from tests.testbed.layout import Layout, Options

_REPOSITORY = Path(__file__).parents[2]


class TestbedFailed(RuntimeError):
    """A run did not come up, or refused an order; the message says why."""

    __test__ = False


class Testbed(KubernetesFaults):
    """A run that is up.

    :param layout: its folder.
    """

    __test__ = False

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout.kubeconfig)
        self.layout = layout
        self._keeper: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(layout.control)), base_url="http://testbed", timeout=300
        )

    # Up and down

    @classmethod
    def up(
        cls,
        *nodes: str,
        control_plane: bool = False,
        kueue: bool = False,
        operator_gates: str = "",
        node_grace: int = 20,
        owner: int | None = None,
        within: float = 300,
        say: Callable[[str], None] = print,
        nice: int = 0,
    ) -> Testbed:
        """Start a run, and return when it is ready; what is absent is built first.

        :param nodes: node pools: `cpu`, `v4-2x2x2*2` (two slices, a pool each), `v6e-2x4@ct6e-standard-4t`.
        :param control_plane: no nodes, now or later; ready in seconds.
        :param kueue: with Kueue.
        :param operator_gates: KubeRay's feature gates, `RayMultiHostIndexing=false`.
        :param node_grace: seconds after which a silent node is NotReady.
        :param owner: pid of the process that the run ends with; this one by default, 0 for none.
        :param within: seconds.
        :param say: told what is built.
        :param nice: niceness of builds.
        :raises TestbedUnavailable: when this machine cannot.
        :raises TestbedFailed: when it does not come up.
        """
        parts.ensure(nodes=not control_plane, kueue=kueue, say=say, nice=nice)
        runs.sweep()
        layout, lock = runs.new_run()
        options = Options(nodes, control_plane, kueue, operator_gates, node_grace, venv=sys.prefix)
        layout.options.write_text(options.to_json())
        owner = os.getpid() if owner is None else owner
        created = psutil.Process(owner).create_time() if owner else 0.0
        reading, writing = os.pipe()
        with lock, (layout.logs / "keeper.log").open("ab") as log:
            keeper = subprocess.Popen(
                [sys.executable, "-m", "tests.testbed.keeper", str(layout.root), str(owner), str(created),
                 str(writing), str(lock.fileno())],
                cwd=_REPOSITORY,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writing, lock.fileno()],
                start_new_session=True,  # Ctrl-C is for the test; the keeper sees that its owner ends
            )  # fmt: skip
        os.close(writing)
        try:
            _await_handshake(reading, within)
        except BaseException:
            keeper.terminate()
            keeper.wait(60)
            raise
        finally:
            os.close(reading)
        testbed = cls(layout)
        testbed._keeper = keeper
        return testbed

    @classmethod
    def running(cls) -> list[Testbed]:
        """Every run of this user that is ready, whoever started it."""
        return [cls(one) for one in runs.all_runs() if one.state().get("ready") and _keeper_of(one) is not None]

    def down(self, timeout: float = 60) -> None:
        """End the run and all that belongs to it.

        :param timeout: seconds.
        :raises TestbedFailed: when something is left.
        """
        self.close()
        keeper = _keeper_of(self.layout)
        if keeper is not None:
            keeper.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout
        while self.layout.root.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._keeper is not None:
            code = self._keeper.wait(max(deadline - time.monotonic(), 1))
            if code != 0:
                raise TestbedFailed(f"the keeper of {self.layout.root} ended with {code}")
        if self.layout.root.exists():
            raise TestbedFailed(f"{self.layout.root} is left after {timeout:.0f} s")

    def close(self) -> None:
        """Close the connections to the run; it goes on."""
        self._http.close()
        super().close()

    def __enter__(self) -> Testbed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def order(self, order: str, /, **arguments: object) -> Any:
        """Give an order; see `control.py`.

        :param order: its name.
        :param arguments: of the order.
        :raises TestbedFailed: when it fails.
        """
        answer = self._http.post(f"/{order}", json=arguments).json()
        if "error" in answer:
            raise TestbedFailed(f"{order}: {answer['error']}")
        return answer["result"]

    def status(self) -> dict[str, Any]:
        """Programs, pools, faults, connections, and the images that were pulled."""
        return dict(self.order("status"))

    @property
    def server(self) -> str:
        """URL of the API server, on this machine's loopback."""
        return f"https://127.0.0.1:{self.layout.state()['port']}"

    # Nodes

    def add_pools(self, spec: str, *, labels: dict[str, str] | None = None, wait: bool = True) -> list[str]:
        """Boot node pools, as an autoscaler or the GKE API would.

        :param spec: `v4-2x2x2*2`.
        :param labels: more labels for the nodes, `cloud.google.com/gke-spot`.
        :param wait: until the nodes are ready.
        :return: names of the pools.
        """
        return list(self.order("add_pools", spec=spec, labels=labels or {}, wait=wait))

    def remove_pool(self, name: str) -> None:
        """Delete a node pool and its nodes.

        :param name: of the pool.
        """
        self.order("remove_pool", name=name)

    def pools(self) -> dict[str, list[str]]:
        """The pools and their nodes."""
        return dict(self.status()["pools"])

    def kill_node(self, name: str, *, forget: bool = False) -> None:
        """A host vanishes: SIGKILL for all that runs on it.

        :param name: of the node.
        :param forget: its Node object goes too, as on GKE some time later.
        """
        self.order("kill_node", name=name, forget=forget)

    def start_node(self, name: str, *, wait: bool = True) -> None:
        """A host that was killed boots again.

        :param name: of the node.
        :param wait: until it is ready.
        """
        self.order("start_node", name=name, wait=wait)

    @contextmanager
    def broken_chips(self, node: str) -> Iterator[None]:
        """The chips of a host are reported unhealthy.

        :param node: the host.
        """
        self.order("chips", node=node, healthy=False)
        yield
        self.order("chips", node=node, healthy=True)

    # The TPU webhook

    @contextmanager
    def webhook_down(self) -> Iterator[None]:
        """Connections to the TPU webhook are refused; creates fail with "failed calling webhook"."""
        self.order("stop_webhook")
        try:
            yield
        finally:
            self.order("start_webhook")

    @contextmanager
    def webhook_faults(
        self,
        *,
        duplicate_ids: bool = False,
        stale: bool = False,
        crash_heads: bool = False,
        status: int = 0,
        delay: float = 0.0,
    ) -> Iterator[None]:
        """The TPU webhook misbehaves.

        :param duplicate_ids: every host of a slice gets the worker id 0.
        :param stale: without KubeRay's indexing labels it counts only the pods that exist now.
        :param crash_heads: new head pods crash-loop.
        :param status: it answers everything with this HTTP status.
        :param delay: seconds before each answer.
        """
        faults = {
            "duplicate_ids": duplicate_ids, "stale": stale, "crash_heads": crash_heads, "status": status, "delay": delay
        }  # fmt: skip
        self.order("webhook", **faults)
        try:
            yield
        finally:
            self.order("webhook")

    # Images

    @contextmanager
    def image_faults(self, pattern: str, *, missing: bool = False, delay: float = 0.0) -> Iterator[None]:
        """An image cannot be pulled, or takes long. Nodes keep what they pulled: use a tag of its own.

        :param pattern: of the whole reference, `*/ray:broken`.
        :param missing: the registry does not know it.
        :param delay: seconds that the pull takes.
        """
        self.order("image_faults", faults=[{"pattern": pattern, "missing": missing, "delay": delay}])
        try:
            yield
        finally:
            self.order("image_faults", faults=[])

    # The API server

    @contextmanager
    def api_down(self) -> Iterator[None]:
        """The API server is killed: connections are refused, for the cluster's own programs too."""
        self.order("stop_api")
        try:
            yield
        finally:
            self.order("start_api")

    def restart_api(self, seconds: float = 0) -> None:
        """The API server is killed and comes back.

        :param seconds: that it stays away.
        """
        with self.api_down():
            time.sleep(seconds)

    @contextmanager
    def program_down(self, name: str) -> Iterator[None]:
        """One program of the cluster is away: `ray-operator`, `kube-scheduler`, `kueue`.

        :param name: of the program.
        """
        self.order("stop_program", name=name)
        try:
            yield
        finally:
            self.order("start_program", name=name)

    @contextmanager
    def api_fault(self, action: str, **how: object) -> Iterator[Callable[[], dict[str, int]]]:
        """Requests that match meet a fault on their way to the API server; see `proxy.Fault`.

        :param action: `status`, `gone`, `reset`, `lost`, `hang`, `delay`.
        :param how: method, path, watch, status, message, retry_after, seconds, after, times.
        :return: a function that answers how often it matched and hit so far.
        """
        number = self.order("add_fault", action=action, **how)

        def counts() -> dict[str, int]:
            found = self.status()["proxy"]["faults"][str(number)]
            return {"matched": found["matched"], "hits": found["hits"]}

        try:
            yield counts
        finally:
            self.order("remove_fault", number=number)

    def cut_watches(self) -> int:
        """Every open watch of those who are tested breaks.

        :return: how many there were.
        """
        return int(self.order("cut_watches"))

    def requests(self, *, forget: bool = False) -> list[dict[str, Any]]:
        """What went through the proxy: method, target, watch, status, fault; oldest first.

        :param forget: start the record anew.
        """
        return list(self.order("requests", forget=forget))


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH")]))
    # Pods are not ours to configure by accident: only what the testbed itself reads goes along.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TPU_", "AIRFLOW"))}
    return {**kept, "PYTHONPATH": path}


def _await_handshake(reading: int, within: float) -> None:
    ready, _, _ = select.select([reading], [], [], within)
    if not ready:
        raise TestbedFailed(f"the testbed is not up after {within:.0f} s")
    text = os.read(reading, 2**16)
    message = json.loads(text) if text else {"error": "the keeper ended before the run was up"}
    if "error" in message:
        raise TestbedFailed(f"the testbed did not come up: {message['error']}")


def _keeper_of(layout: Layout) -> psutil.Process | None:
    state = layout.state()
    try:
        keeper = psutil.Process(state["keeper"])
        return keeper if abs(keeper.create_time() - state["created"]) < 1 else None
    except (KeyError, psutil.NoSuchProcess):
        return None
