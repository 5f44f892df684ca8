"""GKE's TPU webhook as a server: HTTPS on loopback inside the run's network namespace, with faults.

The rules are in `tpu_webhook.py`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.testbed import tpu_webhook as rules
from tests.testbed.api import Api
from tests.testbed.layout import WEBHOOK_PORT, Layout

_LABEL = {"matchLabels": {"app.kubernetes.io/name": "kuberay"}}


@dataclass
class WebhookFaults:
    """What the webhook does wrong.

    :param duplicate_ids: every host of a slice is host 0.
    :param stale: the legacy path counts the pods that there were when this was set, and no others.
    :param crash_heads: heads get a command that fails at once: they crash-loop.
    :param status: answer every request with this status instead.
    :param delay: seconds before each answer.
    """

    duplicate_ids: bool = False
    stale: bool = False
    crash_heads: bool = False
    status: int = 0
    delay: float = 0.0


class TpuWebhook:
    """The server.

    :param layout: the run.
    :param api: to list pods, as the webhook's cache does.
    """

    def __init__(self, layout: Layout, api: Api) -> None:
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(layout.pki / "webhook.crt", layout.pki / "webhook.key")
        self._ca = base64.b64encode((layout.pki / "ca.crt").read_bytes()).decode()
        self._api = api
        self._runner: web.AppRunner | None = None
        # Ids are given out one after another, else two pods could be counted as absent at once.
        self._one_at_a_time = asyncio.Lock()
        self._snapshot: list[rules.Object] = []
        self.faults = WebhookFaults()
        self.answered = 0

    def manifests(self) -> list[dict[str, Any]]:
        """Its registrations with the API server."""

        def webhook(path: str, group: str, version: str, resource: str) -> dict[str, Any]:
            return {
                "name": f"{path}.tpu-webhook.testbed.invalid",
                "clientConfig": {"url": f"https://127.0.0.1:{WEBHOOK_PORT}/{path}", "caBundle": self._ca},
                "rules": [
                    {"operations": ["CREATE"], "apiGroups": [group], "apiVersions": [version], "resources": [resource]}
                ],
                "objectSelector": _LABEL,
                "failurePolicy": "Fail",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
                "timeoutSeconds": 10,
            }

        group = "admissionregistration.k8s.io/v1"
        return [
            {
                "apiVersion": group,
                "kind": kind,
                "metadata": {"name": "kuberay-tpu-webhook"},
                "webhooks": [one],
            }
            for kind, one in (
                ("MutatingWebhookConfiguration", webhook("mutate", "", "v1", "pods")),
                ("ValidatingWebhookConfiguration", webhook("validate", "ray.io", "v1", "rayclusters")),
            )
        ]

    async def start(self) -> None:
        """Listen; does nothing when it does already."""
        if self._runner is not None:
            return
        app = web.Application()
        app.router.add_post("/mutate", self._mutate)
        app.router.add_post("/validate", self._validate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", WEBHOOK_PORT, ssl_context=self._tls).start()

    async def stop(self) -> None:
        """Refuse connections, and drop those that are open."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def set_faults(self, faults: WebhookFaults) -> None:
        """Behave like this from now on.

        :param faults: what to do wrong.
        """
        if faults.stale and not self.faults.stale:
            self._snapshot = await self._pods("/api/v1/pods")
        self.faults = faults

    async def _pods(self, path: str) -> list[rules.Object]:
        return list((await self._api.call("GET", path)).get("items") or [])

    async def _known(self, pod: rules.Object, namespace: str) -> list[rules.Object]:
        labels = pod["metadata"].get("labels") or {}
        wanted = {rules.CLUSTER: labels.get(rules.CLUSTER), rules.GROUP: labels.get(rules.GROUP)}
        if not all(wanted.values()):
            return []
        if self.faults.stale:
            return [
                one
                for one in self._snapshot
                if one["metadata"]["namespace"] == namespace
                and wanted.items() <= (one["metadata"].get("labels") or {}).items()
            ]
        selector = ",".join(f"{key}={value}" for key, value in wanted.items())
        return await self._pods(f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}")

    async def _mutate(self, request: web.Request) -> web.Response:
        async def patch(review: dict[str, Any]) -> dict[str, Any]:
            pod, namespace = review["object"], review["namespace"]
            labels = pod["metadata"].get("labels") or {}
            if self.faults.crash_heads and labels.get("ray.io/node-type") == "head":
                crash = ["/bin/sh", "-c", "echo 'the testbed lets this head crash' >&2; exit 13"]
                changes = [
                    {"op": "add", "path": "/spec/containers/0/command", "value": crash},
                    {"op": "add", "path": "/spec/containers/0/args", "value": []},
                ]
            else:
                async with self._one_at_a_time:
                    known = [] if rules.HOST_INDEX in labels else await self._known(pod, namespace)
                    changes = rules.mutate(pod, known, duplicates=self.faults.duplicate_ids)
            encoded = base64.b64encode(json.dumps(changes).encode()).decode()
            return {"allowed": True, "patchType": "JSONPatch", "patch": encoded}

        return await self._answer(request, patch)

    async def _validate(self, request: web.Request) -> web.Response:
        async def verdict(review: dict[str, Any]) -> dict[str, Any]:
            message = rules.validate(review["object"])
            if message is None:
                return {"allowed": True}
            return {"allowed": False, "status": {"status": "Failure", "message": message}}

        return await self._answer(request, verdict)

    async def _answer(self, request: web.Request, decide: Any) -> web.Response:
        self.answered += 1
        if self.faults.delay:
            await asyncio.sleep(self.faults.delay)
        if self.faults.status:
            return web.Response(status=self.faults.status, text="the testbed's fault")
        review = (await request.json())["request"]
        try:
            response = {"uid": review["uid"], **await decide(review)}
        except rules.Refused as error:
            # As the real one: it logs the reason and answers only this.
            return web.Response(status=403, text=f"Failed to {request.path[1:]}: {error}")
        return web.json_response({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})
