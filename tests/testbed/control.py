"""Orders to a running testbed: one HTTP endpoint on a socket in the run's folder.

`POST /<order>` with a JSON object of arguments; the answer is `{"result": …}` or `{"error": …}`.
`client.Testbed` has a method for each order; this file says what each of them does inside.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.testbed.admission import WebhookFaults
from tests.testbed.images import ImageFault
from tests.testbed.inside import Cluster
from tests.testbed.nodes import Pool
from tests.testbed.proxy import Fault


class Orders:
    """Every order is a public method; its arguments are JSON.

    :param cluster: the run.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def status(self) -> dict[str, Any]:
        cluster = self._cluster
        return {
            "children": cluster.children.status(),
            "pools": {name: pool.node_names for name, pool in cluster.pools.items()},
            "addresses": cluster.addresses,
            "proxy": cluster.proxy.describe(),
            "webhook": {"faults": vars(cluster.webhook.faults), "answered": cluster.webhook.answered},
            "pulled": cluster.registry.pulled,
            "autoscaler": cluster.autoscaler.describe() if cluster.autoscaler else None,
        }

    async def add_pools(self, spec: str, labels: dict[str, str], wait: bool) -> list[str]:
        pools = self._cluster.reserve(spec, labels)
        for pool in pools:
            await self._cluster.add_pool(pool, wait=wait)
        return [pool.name for pool in pools]

    async def add_pool(self, wait: bool, **pool: Any) -> None:
        await self._cluster.add_pool(self._cluster.name(Pool.named(**pool)), wait=wait)

    async def remove_pool(self, name: str) -> None:
        await self._cluster.remove_pool(name)

    async def start_autoscaler(self, specs: list[str], idle: float) -> None:
        self._cluster.start_autoscaler(specs, idle)

    async def stop_autoscaler(self) -> None:
        await self._cluster.stop_autoscaler()

    async def stockout(self, patterns: list[str]) -> None:
        if self._cluster.autoscaler is None:
            raise RuntimeError("this run has no autoscaler")
        self._cluster.autoscaler.stockouts = patterns

    async def kill_node(self, name: str, forget: bool) -> None:
        await self._cluster.kill_node(name, forget=forget)

    async def start_node(self, name: str, wait: bool) -> None:
        await self._cluster.start_node(name, wait=wait)

    async def chips(self, node: str, healthy: bool) -> None:
        self._cluster.plugins[node].set_healthy(healthy)

    async def operator_gates(self, gates: str) -> str:
        before = self._cluster.options.operator_gates
        await self._cluster.set_operator_gates(gates)
        return before

    async def webhook(self, **faults: Any) -> None:
        await self._cluster.webhook.set_faults(WebhookFaults(**faults))

    async def stop_webhook(self) -> None:
        await self._cluster.webhook.stop()

    async def start_webhook(self) -> None:
        await self._cluster.webhook.start()

    async def image_faults(self, faults: list[dict[str, Any]]) -> None:
        self._cluster.registry.faults = [ImageFault(**one) for one in faults]

    async def stop_api(self) -> None:
        await self._cluster.stop_api()

    async def start_api(self) -> None:
        await self._cluster.start_api()

    async def stop_program(self, name: str) -> None:
        await self._cluster.children.stop(name, signal.SIGKILL)

    async def start_program(self, name: str) -> None:
        self._cluster.children.start(self._cluster.children.by_name[name])

    async def add_fault(self, **fault: Any) -> int:
        return self._cluster.proxy.add(Fault(**fault))

    async def remove_fault(self, number: int) -> dict[str, int]:
        fault = self._cluster.proxy.faults.pop(number)
        return {"matched": fault.matched, "hits": fault.hits}

    async def cut_watches(self) -> int:
        return self._cluster.proxy.cut_watches()

    async def cut_tunnels(self) -> int:
        return self._cluster.proxy.cut_tunnels()

    async def requests(self, forget: bool) -> list[dict[str, Any]]:
        record = self._cluster.proxy.record
        found = list(record)
        if forget:
            record.clear()
        return found


async def serve(orders: object, socket: Path) -> web.AppRunner:
    """Take orders from now on.

    :param orders: every public method of it is one.
    :param socket: where they come in.
    """

    async def take(request: web.Request) -> web.Response:
        name = request.match_info["order"]
        order = None if name.startswith("_") else getattr(orders, name, None)
        if order is None:
            return web.json_response({"error": f"no such order: {name}"}, status=404)
        try:
            return web.json_response({"result": await order(**await request.json())})
        except Exception as error:  # noqa: BLE001 - whoever gave the order hears of it
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)

    app = web.Application()
    app.router.add_post("/{order}", take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    return runner
