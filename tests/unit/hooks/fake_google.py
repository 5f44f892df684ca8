"""Google's side of the wire on loopback: tokens, metadata, acting as others, and a GKE cluster's description.

The client libraries are the real ones and speak their real protocols. Not here: any cluster.
"""

from __future__ import annotations

import json
from concurrent import futures
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.cloud.container_v1.types import Cluster, GetClusterRequest

#: Whom the machine's or the pod's own credentials stand for.
POD = "pod@tpu-project.iam.gserviceaccount.com"
#: With what a person who once logged in gets tokens.
REFRESH = "1//refresh"


class Tokens:
    """OAuth's token endpoint, the metadata server and IAM: everybody who hands out tokens."""

    def __init__(self) -> None:
        self.url = ""
        self.lifetime_s = 3600
        #: Whom a token was handed out to, in order; the token itself is ``<who>-<number>``.
        self.given: list[str] = []
        #: Status and JSON of what is answered instead of a token.
        self.refusal: tuple[int, dict[str, Any]] | None = None

    @property
    def app(self) -> web.Application:
        app = web.Application()
        root = "/computeMetadata/v1"
        account = f"{root}/instance/service-accounts"
        app.router.add_get("/", self.metadata(""))
        app.router.add_get(f"{root}/project/project-id", self.metadata("tpu-project"))
        app.router.add_get(f"{root}/universe/universe-domain", self.metadata("googleapis.com"))
        app.router.add_get(f"{account}/{{email}}/", self.metadata({"email": POD, "scopes": [], "aliases": ["default"]}))
        app.router.add_get(f"{account}/{{email}}/token", self.from_metadata)
        app.router.add_post("/token", self.from_key)
        app.router.add_post("/refresh", self.from_refresh)
        app.router.add_post("/as/{email}", self.as_another)
        return app

    def metadata(self, answer: Any) -> Any:
        async def handler(request: web.Request) -> web.Response:
            headers = {"metadata-flavor": "Google"}
            return web.Response(text=answer, headers=headers) if isinstance(answer, str) else web.json_response(answer)

        return handler

    def token(self, who: str) -> str:
        self.given.append(who)
        return f"{who}-{len(self.given)}"

    def refused(self) -> web.Response | None:
        return web.json_response(self.refusal[1], status=self.refusal[0]) if self.refusal else None

    async def from_key(self, request: web.Request) -> web.Response:
        return self.refused() or web.json_response({"access_token": self.token("key"), "expires_in": self.lifetime_s})

    async def from_refresh(self, request: web.Request) -> web.Response:
        said = await request.post()
        if (said.get("grant_type"), said.get("refresh_token")) != ("refresh_token", REFRESH):
            return web.json_response({"error": "invalid_grant", "error_description": "Bad Request"}, status=400)
        token = {"access_token": self.token("person"), "expires_in": self.lifetime_s, "token_type": "Bearer"}
        return self.refused() or web.json_response(token)

    async def from_metadata(self, request: web.Request) -> web.Response:
        token = {"access_token": self.token("pod"), "expires_in": self.lifetime_s, "token_type": "Bearer"}
        return web.json_response(token, headers={"metadata-flavor": "Google"})

    async def as_another(self, request: web.Request) -> web.Response:
        if refused := self.refused():
            return refused
        ends = datetime.now(UTC) + timedelta(seconds=self.lifetime_s)
        who = request.match_info["email"].partition("@")[0]
        return web.json_response({"accessToken": self.token(who), "expireTime": ends.strftime("%Y-%m-%dT%H:%M:%SZ")})

    def login(self, folder: Path) -> Path:
        """What ``gcloud auth application-default login`` leaves; it says a quota project, and no project to work in."""
        folder.mkdir()
        path = folder / "application_default_credentials.json"
        path.touch(mode=0o600)
        person = {
            "type": "authorized_user",
            "account": "",
            "client_id": "1.apps.googleusercontent.com",
            "client_secret": "d-1",
            "refresh_token": REFRESH,
            "quota_project_id": "somebodys-quota",
            "universe_domain": "googleapis.com",
        }
        path.write_text(json.dumps(person))
        return path

    def key(self, project: str = "tpu-project") -> dict[str, str]:
        """A service account's key whose tokens come from here."""
        private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return {
            "type": "service_account",
            "project_id": project,
            "private_key_id": "1",
            "private_key": pem.decode(),
            "client_email": f"airflow@{project}.iam.gserviceaccount.com",
            "client_id": "1",
            "token_uri": f"{self.url}/token",
        }


class Gke:
    """The GKE API, as far as describing clusters goes."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.clusters: dict[str, Cluster] = {}
        #: The name of each cluster that was asked for.
        self.asked: list[str] = []
        #: What is answered instead.
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        describe = grpc.unary_unary_rpc_method_handler(
            self._describe,
            request_deserializer=GetClusterRequest.deserialize,
            response_serializer=Cluster.serialize,
        )
        handlers = {"GetCluster": describe}
        name = "google.container.v1.ClusterManager"
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
        port = self._server.add_secure_port("localhost:0", credentials)
        self.endpoint = f"localhost:{port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait()

    def _describe(self, request: GetClusterRequest, context: grpc.ServicerContext) -> Cluster:
        self.asked.append(request.name)
        if self.refusal is not None:
            context.abort(*self.refusal)
        if request.name not in self.clusters:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Not found: {request.name}.")
        return self.clusters[request.name]
