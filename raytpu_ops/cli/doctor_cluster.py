"""Questions that ``raytpu doctor`` puts to a Kubernetes API server, and its answers as plain values.

A refusal is an answer here, since whether something is refused is what the doctor wants to know.
Not here: what the answers mean (``doctor_gke.py``), and the backend's own calls
(``backends/gke/api.py``), which end in an error where these end in a status.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raytpu_ops.backends.gke.rights import Right
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.tpu.errors import RemoteUnavailable

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

#: Seconds for one answer; the schema of KubeRay's objects has megabytes.
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Answer:
    """What the API server said.

    :param status: of HTTP.
    :param body: its JSON; empty where there was none.
    """

    status: int
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it was granted."""
        return 200 <= self.status < 300

    @property
    def items(self) -> list[dict[str, Any]]:
        """Of a list."""
        found: list[dict[str, Any]] = self.body.get("items") or []
        return found

    @property
    def message(self) -> str:
        """Why it was refused, in the API server's words."""
        return f"{self.status} {self.body.get('message') or 'without a word'}"


class Cluster:
    """One API server, asked as whoever the configuration says.

    :param client: Kubernetes' own.
    :param settings: of the backend, as far as they are known; the namespace is.
    """

    #: Whom the API server takes us for, once it was asked; None where it does not tell.
    user: str | None = None

    def __init__(self, client: ApiClient, settings: Settings) -> None:
        self._client = client
        self.settings = settings
        self.namespace = settings.namespace
        self.url = client.configuration.host or ""

    async def ask(self, method: str, path: str, body: object = None, **query: str) -> Answer:
        """One request.

        :param method: of HTTP.
        :param path: on the API server.
        :param body: sent as JSON.
        :param query: of the URL.
        :raises RemoteUnavailable: no answer came.
        """
        from aiohttp import ClientError

        try:
            response = await self._client.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params={"Accept": "application/json"},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=_TIMEOUT_S,
            )
            text = await response.text()
        except (ClientError, OSError, TimeoutError) as error:
            why = str(error) or f"no answer within {_TIMEOUT_S:.0f} s"
            raise RemoteUnavailable(f"Kubernetes API server {self.url}: {why}") from error
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = {"message": text.strip()[:200]}
        return Answer(response.status, parsed if isinstance(parsed, dict) else {})

    async def introduce(self) -> None:
        """Ask whom the API server takes us for; before 1.28 Kubernetes does not tell."""
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = await self.ask("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
        if answer.ok:
            self.user = answer.body.get("status", {}).get("userInfo", {}).get("username")

    async def refused(self, rights: Iterable[Right]) -> list[Right] | Answer:
        """Those of the rights that we do not have in the namespace, or what the API server says to the question."""
        wanted = list(rights)
        answers = await asyncio.gather(*(self._review(right) for right in wanted))
        for answer in answers:
            if not answer.ok:
                return answer
        return [
            right
            for right, answer in zip(wanted, answers, strict=True)
            if not answer.body.get("status", {}).get("allowed")
        ]

    async def may(self, right: Right) -> bool:
        """Whether we have that right in the namespace."""
        return await self.refused([right]) == []

    async def _review(self, right: Right) -> Answer:
        attributes = {
            "namespace": self.namespace,
            "verb": right.verb,
            "group": right.group,
            "resource": right.resource,
            "subresource": right.subresource,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        return await self.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
