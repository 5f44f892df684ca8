"""Process 1 of a run: everything that is the cluster is started from here, and ends with it.

Run by `keeper.py` in network, mount and process namespaces of its own, so that addresses, links,
mounts and processes of two runs never meet and none of them can outlive this process.
Orders from outside come through `control.py`.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import subprocess
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
from aiohttp import web

from tests.testbed import cgroups, controlplane, kueue, nodes
from tests.testbed.admission import TpuWebhook
from tests.testbed.api import Api, ApiError
from tests.testbed.autoscaler import Autoscaler
from tests.testbed.device_plugin import DevicePlugin
from tests.testbed.images import Registry
from tests.testbed.layout import API, POD_GATEWAY, REGISTRY_PORT, SERVICE_DNS, Layout, Options
from tests.testbed.parts import MODULES, cache
from tests.testbed.pki import Authority, new_token
from tests.testbed.processes import Child, Children
from tests.testbed.proxy import FaultProxy

#: Watchers of files that one user may have on this machine. A kubelet with its containerd takes ten, so the
#: usual 128 end a third run's kubelets ("too many open files"), or a slice of more than twelve hosts.
_WATCHERS = Path("/proc/sys/fs/inotify/max_user_instances"), 1024
#: Hidden from the run, so that nothing of it is left on the host.
_HIDDEN = ("/run", "/var/lib", "/var/log")


def make_view(layout: Layout, options: Options) -> None:
    """Mounts and links of the run, before anything is started.

    :param layout: the run.
    :param options: what it is made of.
    """
    needed = [str(layout.root), str(cache()), sys.prefix, sys.base_prefix, options.venv, str(Path(__file__).parent)]
    for hidden in _HIDDEN:
        for path in needed:
            if Path(path).is_relative_to(hidden):
                raise RuntimeError(f"{path} is below {hidden}, which the testbed hides from itself; move it")
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "testbed", hidden], check=True)
    link = "02:00:0a:f4:00:01"  # fixed, else a bridge takes the lowest of its members', which come and go
    for command in (
        "link set lo up",
        "link add nodes type bridge",
        f"addr add {API}/24 dev nodes",
        f"addr add {SERVICE_DNS}/32 dev nodes",
        "link set nodes up",
        f"link add pods address {link} type bridge",
        f"addr add {POD_GATEWAY}/16 dev pods",
        "link set pods up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    limit, enough = _WATCHERS
    if int(limit.read_text()) < enough:
        with suppress(OSError):  # not every container may; few nodes do with less
            limit.write_text(str(enough))  # of the whole machine, and it stays: another run may count on it


class Cluster:
    """The run, while it lives.

    :param layout: its folder.
    :param options: what it is made of.
    :param listener: a socket of the host's loopback that clients connect to.
    """

    def __init__(self, layout: Layout, options: Options, listener: socket.socket) -> None:
        self.layout, self.options = layout, options
        self.children = Children(layout.logs)
        self.authority = Authority(layout.pki)
        controlplane.make_identities(layout, self.authority)
        self.api = Api(controlplane.INNER, layout.pki)
        self.webhook = TpuWebhook(layout, self.api)
        self.registry = Registry(options.venv)
        self.proxy = self._make_proxy(listener)
        self.pools: dict[str, nodes.Pool] = {}
        self.addresses: dict[str, str] = {}
        self.plugins: dict[str, DevicePlugin] = {}
        self.autoscaler: Autoscaler | None = None
        self._port = listener.getsockname()[1]
        self._node_count = 0
        self._names: set[str] = set()
        self._shared: asyncio.Task[None] | None = None

    def _make_proxy(self, listener: socket.socket) -> FaultProxy:
        pki = self.layout.pki
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server.load_cert_chain(pki / "proxy.crt", pki / "proxy.key")
        return FaultProxy(listener, server, ssl.create_default_context(cafile=str(pki / "ca.crt")))

    async def up(self) -> None:
        """Start all of it, and return when it is ready."""
        token = new_token()
        tokens = self.layout.pki / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text(f'{token},testbed:admin,testbed-admin,"system:masters"\n')
        self.children.start(Child("etcd", controlplane.etcd(self.layout)))
        self.children.start(Child("kube-apiserver", controlplane.apiserver(self.layout)))
        await self.api.ready(120)
        self.children.start(
            Child("kube-controller-manager", controlplane.controller_manager(self.layout, self.options))
        )
        self.children.start(Child("kube-scheduler", controlplane.scheduler(self.layout)))
        pools = [pool for spec in self.options.nodes for pool in self.reserve(spec)]
        await asyncio.gather(self._install_kuberay(), *(self.add_pool(pool) for pool in pools))
        if self.options.kueue:
            await kueue.install(self.layout, self.api, self.children)
        await self._accounts()
        if self.options.autoscale:
            self.start_autoscaler(self.options.autoscale, self.options.autoscale_idle)
        self.authority.kubeconfig(self.layout.kubeconfig, f"https://127.0.0.1:{self._port}", token=token)
        await self.proxy.open()

    def start_autoscaler(self, specs: Iterable[str], idle: float) -> None:
        """Nodes come and go with the pods that want them, from now on.

        :param specs: the pools that there may be.
        :param idle: seconds after which an empty one goes.
        """
        if self.options.control_plane:
            raise RuntimeError("this run is a control plane alone: it has no nodes")
        if self.autoscaler is not None:
            raise RuntimeError("this run has an autoscaler already")
        self.autoscaler = Autoscaler(self, specs, idle)
        self.autoscaler.start()

    async def stop_autoscaler(self) -> None:
        """Its pools go with it."""
        autoscaler, self.autoscaler = self.autoscaler, None
        if autoscaler is not None:
            await autoscaler.stop()

    def reserve(self, spec: str, labels: dict[str, str] | None = None) -> list[nodes.Pool]:
        """The pools that a word means, with names that nobody else gets any more.

        :param spec: `v4-2x2x2*2`.
        :param labels: more labels for the nodes.
        """
        found = [replace(pool, labels=labels or {}) for pool in nodes.parse(spec, frozenset(self._names))]
        self._names |= {pool.name for pool in found}
        self.pools |= {pool.name: pool for pool in found}
        return found

    def name(self, pool: nodes.Pool) -> nodes.Pool:
        """A pool that somebody else has named.

        :param pool: to boot.
        :raises ValueError: for a name that is taken.
        """
        if pool.name in self.pools:
            raise ValueError(f"node pool {pool.name} is there already")
        self._names.add(pool.name)
        self.pools[pool.name] = pool
        return pool

    async def _install_kuberay(self) -> None:
        names = []
        for path in sorted((MODULES["kuberay"].home() / "crds").glob("*.yaml")):
            group, plural = path.stem.split("_")
            names.append(f"{plural}.{group}")
            await self.api.create_yaml("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", path.read_bytes())
        await self.webhook.start()
        await self.api.apply(*self.webhook.manifests())
        await self.api.established(names)
        self.children.start(Child("ray-operator", controlplane.operator(self.layout, self.options)))
        await self._healthy("http://127.0.0.1:8382/readyz")

    async def _healthy(self, url: str, within: float = 60) -> None:
        deadline = asyncio.get_running_loop().time() + within
        async with aiohttp.ClientSession() as session:
            while True:
                with suppress(aiohttp.ClientError):
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            return
                if asyncio.get_running_loop().time() > deadline:
                    raise TimeoutError(f"{url} is not healthy after {within:.0f} s; see its log")
                await asyncio.sleep(0.1)

    async def _accounts(self) -> None:
        """Pods are refused until their namespace has its service account."""
        for _ in range(600):
            with suppress(ApiError):
                await self.api.call("GET", "/api/v1/namespaces/default/serviceaccounts/default")
                return
            await asyncio.sleep(0.1)
        raise TimeoutError("the namespace default has no service account: see the log of kube-controller-manager")

    # Nodes

    async def _share(self) -> None:
        """What the first node brings, once: registry, DNS, and the files that all nodes read."""
        if self._shared is None:
            self._shared = asyncio.create_task(self._make_shared())
        await self._shared

    async def _make_shared(self) -> None:
        await asyncio.to_thread(nodes.shared_files, self.layout, self.options.venv)
        runner = web.AppRunner(self.registry.app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", REGISTRY_PORT).start()
        self.children.start(Child("coredns", controlplane.coredns(self.layout)))

    async def add_pool(self, pool: nodes.Pool, *, wait: bool = True) -> None:
        """Boot the nodes of a pool side by side.

        :param pool: what to boot.
        :param wait: until they are ready and offer their chips.
        """
        if self.options.control_plane:
            raise RuntimeError("this run is a control plane alone: it has no nodes")
        await self._share()
        self.pools[pool.name] = pool
        for name in pool.node_names:
            self._node_count += 1
            _, self.addresses[name] = nodes.node_files(self.layout, self.authority, name, pool, self._node_count)
        await asyncio.gather(*(self.start_node(name, wait=wait) for name in pool.node_names))

    def pool_of(self, node: str) -> nodes.Pool:
        """The pool that a node is in.

        :param node: its name.
        """
        found = [pool for pool in self.pools.values() if node in pool.node_names]
        if not found or node not in self.addresses:
            raise KeyError(f"no node {node!r}; there are {', '.join(sorted(self.addresses)) or 'none'}")
        return found[0]

    async def start_node(self, name: str, *, wait: bool = True) -> None:
        """Boot one node, for the first time or again after it was killed.

        :param name: of the node.
        :param wait: until it is ready and offers its chips.
        """
        pool = self.pool_of(name)
        cgroups.make(f"{self.layout.cgroup}/{name}")
        await self.children.run("ip", "addr", "replace", f"{self.addresses[name]}/32", "dev", "nodes")
        init = [sys.executable, "-I", str(Path(__file__).with_name("node_init.py"))]
        argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", *init]
        folder = self.layout.nodes / name
        self.children.start(Child(f"node-{name}", [*argv, str(folder / "node.json")], restart=False))
        if pool.shape is not None:
            self.plugins[name] = DevicePlugin(folder / "kubelet", pool.shape)
            await self.plugins[name].start()
        if wait:
            await self._wait_for_node(name, pool)
        if "kube-proxy" not in self.children.by_name:
            self.children.start(Child("kube-proxy", lambda: controlplane.kube_proxy(self.layout, self._a_live_node())))

    def _a_live_node(self) -> str:
        nodes_of_us = {name: self.children.by_name.get(f"node-{name}") for name in self.addresses}
        return next((name for name, child in nodes_of_us.items() if child is not None and child.pid), "none")

    async def _wait_for_node(self, name: str, pool: nodes.Pool, within: float = 120) -> None:
        wanted = str(pool.shape.chips_per_host) if pool.shape else "0"
        deadline = asyncio.get_running_loop().time() + within
        seen = "not registered"
        while asyncio.get_running_loop().time() < deadline:
            if self.children.by_name[f"node-{name}"].pid == 0:
                raise RuntimeError(f"node {name} ended by itself: see logs/node-{name}.log and nodes/{name}/*.log")
            with suppress(ApiError, aiohttp.ClientError):
                status = (await self.api.call("GET", f"/api/v1/nodes/{name}"))["status"]
                ready = [one for one in status.get("conditions") or [] if one["type"] == "Ready"]
                chips = (status.get("allocatable") or {}).get("google.com/tpu", "0")
                seen = f"{ready[0]['message'] if ready else 'no condition Ready'}; chips {chips} of {wanted}"
                # After a boot the API server still knows the last one's chips; a pod that trusts them fails.
                known = pool.shape is None or self.plugins[name].is_known
                if ready and ready[0]["status"] == "True" and chips == wanted and known:
                    return
            await asyncio.sleep(0.2)
        raise TimeoutError(f"node {name} is not ready after {within:.0f} s: {seen}; {self._complaint(name)}")

    def _complaint(self, name: str) -> str:
        log = self.layout.nodes / name / "kubelet.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        errors = [line for line in lines[-200:] if line.startswith("E")]
        return f"its kubelet's last error: {errors[-1][:400]}" if errors else "its kubelet names no error"

    async def kill_node(self, name: str, *, forget: bool = False) -> None:
        """The host vanishes: no process of it runs on, nothing says goodbye.

        :param name: of the node.
        :param forget: remove its Node object too, as GKE does some time later.
        """
        self.pool_of(name)
        if f"node-{name}" in self.children.by_name:
            await self.children.stop(f"node-{name}", signal.SIGKILL)
        plugin = self.plugins.pop(name, None)
        if plugin is not None:
            await plugin.stop()
        # Packets to it go nowhere from now on.
        with suppress(RuntimeError):
            await self.children.run("ip", "addr", "del", f"{self.addresses[name]}/32", "dev", "nodes")
        left = await asyncio.to_thread(cgroups.remove, f"{self.layout.cgroup}/{name}")
        if left:
            raise RuntimeError(f"node {name} left control groups behind: {left}")
        if forget:
            await self.api.delete(f"/api/v1/nodes/{name}")

    async def remove_pool(self, name: str) -> None:
        """The node pool is deleted, and its nodes with it, however far they came.

        :param name: of the pool.
        """
        for node in self.pools[name].node_names:
            if node in self.addresses:
                await self.kill_node(node, forget=True)
                del self.addresses[node]
        del self.pools[name]

    # KubeRay

    async def set_operator_gates(self, gates: str) -> None:
        """KubeRay starts anew, with these feature gates.

        :param gates: `RayMultiHostIndexing=false`; empty for its defaults.
        """
        await self.children.stop("ray-operator")
        self.options = replace(self.options, operator_gates=gates)
        self.children.start(Child("ray-operator", controlplane.operator(self.layout, self.options)))
        await self._healthy("http://127.0.0.1:8382/readyz")

    # The API server

    async def stop_api(self) -> None:
        """The API server is gone, for those who are tested and for the cluster."""
        await self.proxy.close()
        await self.children.stop("kube-apiserver", signal.SIGKILL)

    async def start_api(self) -> None:
        """It is back."""
        self.children.start(self.children.by_name["kube-apiserver"])
        await self.api.ready(120)
        await self.proxy.open()


async def _main(layout: Layout, listener: socket.socket) -> None:
    from tests.testbed.control import Orders, serve  # the orders need this module

    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    cluster = Cluster(layout, Options.from_json(layout.options.read_text()), listener)
    await cluster.up()
    runner = await serve(Orders(cluster), layout.control)
    layout.write_state(ready=True)
    await ending.wait()
    await runner.cleanup()


def main() -> None:
    layout = Layout(Path(sys.argv[1]))
    listener = socket.socket(fileno=int(sys.argv[2]))
    listener.set_inheritable(False)
    try:
        programs = f"{layout.cgroup}/programs"
        cgroups.make(programs, cgroups.PROGRAMS_WEIGHT)
        cgroups.enter(programs)
        make_view(layout, Options.from_json(layout.options.read_text()))
        asyncio.run(_main(layout, listener))
    except Exception as error:  # noqa: BLE001 - whoever waits for the run is told why there is none
        traceback.print_exc()
        layout.failure.write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
