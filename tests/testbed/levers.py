"""What a test can do to a run that the testbed started: one method for each lever and each fault.

Part of `client.Testbed`, which brings runs up and down. Each method is an order to `control.py`, sent
over the socket in the run's folder. Faults that are plain Kubernetes are in `faults.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.testbed.faults import KubernetesFaults
from tests.testbed.layout import Layout


class TestbedFailed(RuntimeError):
    """A run did not come up, or refused an order; the message says why."""

    __test__ = False


class Levers(KubernetesFaults):
    """Orders to a run.

    :param layout: its folder.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout.kubeconfig)
        self.layout = layout
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(layout.control)), base_url="http://testbed", timeout=300
        )

    def close(self) -> None:
        """Close the connections to the run; it goes on."""
        self._http.close()
        super().close()

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

    # Storage

    @property
    def shared(self) -> Path:
        """A folder of this machine that pods may mount by `hostPath` and write to; it goes with the run."""
        return self.layout.shared

    def shared_volume(self) -> dict[str, Any]:
        """`volumes` and `volumeMounts` that give a pod `shared` at the path that it has on this machine."""
        path = str(self.shared)
        return {
            "volumes": [{"name": "shared", "hostPath": {"path": path, "type": "Directory"}}],
            "volumeMounts": [{"name": "shared", "mountPath": path}],
        }

    # Nodes

    def add_pools(self, spec: str, *, labels: dict[str, str] | None = None, wait: bool = True) -> list[str]:
        """Boot node pools, as an autoscaler or the GKE API would.

        :param spec: `v4-2x2x2*2`.
        :param labels: more labels for the nodes, `cloud.google.com/gke-spot`.
        :param wait: until the nodes are ready.
        :return: names of the pools.
        """
        return list(self.order("add_pools", spec=spec, labels=labels or {}, wait=wait))

    def add_pool(
        self,
        name: str,
        hosts: int,
        *,
        machine_type: str = "",
        topology: str = "",
        labels: dict[str, str],
        taints: list[dict[str, str]],
        wait: bool = True,
    ) -> None:
        """Boot one node pool, as the GKE API is told to.

        :param name: of the pool, which begins its nodes' names.
        :param hosts: nodes of it.
        :param machine_type: of its nodes; without TPUs if it has no `topology`.
        :param topology: of the slice, or of each node's own.
        :param labels: more labels for the nodes.
        :param taints: all taints of the nodes.
        :param wait: until the nodes are ready.
        """
        pool = {"name": name, "hosts": hosts, "machine_type": machine_type, "topology": topology}
        self.order("add_pool", **pool, labels=labels, taints=taints, wait=wait)

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
        try:
            yield
        finally:
            self.order("chips", node=node, healthy=True)

    # The autoscaler

    @contextmanager
    def autoscaler(self, *specs: str, idle: float = 15) -> Iterator[None]:
        """Node pools come when pods wait for them, and go when they are empty; at the end all that came go.

        :param specs: what there may be: `v4-2x2x2*4`, up to four such slices.
        :param idle: seconds after which an empty pool goes.
        """
        self.order("start_autoscaler", specs=specs, idle=idle)
        try:
            yield
        finally:
            self.order("stop_autoscaler")

    @contextmanager
    def stockout(self, *patterns: str) -> Iterator[None]:
        """There are no machines: what the autoscaler asks for fails, and is asked for again some time later.

        :param patterns: of the kinds of pool, `v4-*`; all of them if left out.
        """
        self.order("stockout", patterns=patterns or ("*",))
        try:
            yield
        finally:
            self.order("stockout", patterns=())

    # KubeRay

    @contextmanager
    def operator_gates(self, gates: str) -> Iterator[None]:
        """KubeRay runs with other feature gates; it starts anew for that, before and after.

        :param gates: `RayMultiHostIndexing=false`: pods get no index, and the TPU webhook counts them.
        """
        before = self.order("operator_gates", gates=gates)
        try:
            yield
        finally:
            self.order("operator_gates", gates=before)

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
            self.api.rest_client.pool_manager.clear()

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

    def cut_tunnels(self) -> int:
        """Every open websocket and exec of those who are tested breaks.

        :return: how many there were.
        """
        return int(self.order("cut_tunnels"))

    def requests(self, *, forget: bool = False) -> list[dict[str, Any]]:
        """What went through the proxy: method, target, watch, status, fault; oldest first.

        :param forget: start the record anew.
        """
        return list(self.order("requests", forget=forget))

    def asked(self, namespace: str) -> set[tuple[str, str, str]]:
        """What a namespace's service accounts asked of the API server, by its own record: group, path, verb.

        :param namespace: of the accounts.
        """
        found = set()
        for line in self.layout.audit.read_text().splitlines():
            event = json.loads(line)
            if f"system:serviceaccounts:{namespace}" in event["user"]["groups"] and "objectRef" in event:
                what = event["objectRef"]
                path = "/".join(filter(None, (what["resource"], what.get("subresource"))))
                found.add((what.get("apiGroup", ""), path, event["verb"]))
        return found
