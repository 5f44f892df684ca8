"""The little that the testbed itself asks of the API server: apply, get, delete, list.

Plain HTTP on the server inside the namespace, past the fault proxy. Not for tests: they use
Kubernetes' own client.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

_FIELD_MANAGER = "raytpu-testbed"
#: Kinds whose plural is not just an `s` more.
_PLURAL = {
    "NetworkPolicy": "networkpolicies",
    "EndpointSlice": "endpointslices",
    "RuntimeClass": "runtimeclasses",
    "PriorityClass": "priorityclasses",
    "PriorityLevelConfiguration": "prioritylevelconfigurations",
}


class ApiError(RuntimeError):
    """The API server refused.

    :param status: the HTTP status.
    :param message: what it said.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """One session with the API server.

    :param server: its URL.
    :param pki: folder with `ca.crt`, `testbed.crt` and `testbed.key`.
    """

    def __init__(self, server: str, pki: Path) -> None:
        context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        context.load_cert_chain(pki / "testbed.crt", pki / "testbed.key")
        self._server = server
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context))

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def call(self, method: str, path: str, body: object = None, kind: str = "application/json") -> dict[str, Any]:
        """One request.

        :param method: GET, POST, PATCH, DELETE.
        :param path: with its query.
        :param body: sent as JSON, or as it is if it is bytes.
        :param kind: the body's media type.
        :raises ApiError: for any status from 400 on.
        """
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        async with self._session.request(
            method, self._server + path, data=data, headers={"Content-Type": kind}
        ) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise ApiError(answer.status, f"{method} {path}: {text[:1000]}")
            return dict(json.loads(text)) if text.startswith("{") else {"text": text}

    async def apply(self, *objects: dict[str, Any]) -> None:
        """Server-side apply, one after another.

        :param objects: whole manifests.
        """
        for one in objects:
            query = f"?fieldManager={_FIELD_MANAGER}&force=true"
            await self.call("PATCH", path_of(one) + query, one, "application/apply-patch+yaml")

    async def create_yaml(self, path: str, text: bytes) -> None:
        """Create an object from a manifest, unread: some of KubeRay's take seconds to parse.

        :param path: of the collection.
        :param text: the manifest.
        """
        await self.call("POST", path, text, "application/yaml")

    async def delete(self, path: str) -> None:
        """Delete an object; that it is gone already is as good.

        :param path: of the object.
        """
        try:
            await self.call("DELETE", path)
        except ApiError as error:
            if error.status != 404:
                raise

    async def ready(self, within: float) -> None:
        """Wait until `/readyz` says exactly `ok`: before that the built-in roles are not there.

        :param within: seconds.
        :raises TimeoutError: with the last answer.
        """
        deadline = time.monotonic() + within
        last = "no answer"
        while time.monotonic() < deadline:
            try:
                last = (await self.call("GET", "/readyz"))["text"]
            except (aiohttp.ClientError, ApiError) as error:
                last = str(error)
            if last == "ok":
                return
            await asyncio.sleep(0.1)
        raise TimeoutError(f"the API server is not ready after {within:.0f} s: {last}")

    async def established(self, names: Iterable[str], within: float = 60) -> None:
        """Wait until custom resources are served.

        :param names: of the definitions.
        :param within: seconds.
        """
        deadline = time.monotonic() + within
        for name in names:
            while True:
                path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
                conditions = (await self.call("GET", path)).get("status", {}).get("conditions") or []
                if any(one["type"] == "Established" and one["status"] == "True" for one in conditions):
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{name} is not established after {within:.0f} s: {conditions}")
                await asyncio.sleep(0.1)


def path_of(one: dict[str, Any]) -> str:
    """The path of an object.

    :param one: its manifest, or what of it says kind, name and namespace.
    """
    version, kind = one["apiVersion"], one["kind"]
    prefix = f"/apis/{version}" if "/" in version else f"/api/{version}"
    namespace = one["metadata"].get("namespace")
    plural = _PLURAL.get(kind, f"{kind.lower()}s")
    where = f"/namespaces/{namespace}" if namespace else ""
    return f"{prefix}{where}/{plural}/{one['metadata']['name']}"
