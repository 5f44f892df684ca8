"""An API server on loopback that knows who asks, Airflow connections, and files that lead there."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from raytpu_ops.backends.gke.access import KubeAccess
from tests.testbed.pki import Authority
from tests.unit.hooks.fake_google import Tokens

VERSION = {
    "major": "1",
    "minor": "37",
    "gitVersion": "v1.37.2",
    "gitCommit": "",
    "gitTreeState": "clean",
} | dict.fromkeys(("buildDate", "goVersion", "compiler", "platform"), "")


class ApiServer:
    """Answers ``/version`` to a bearer of one of :attr:`tokens` and to a client certificate of its authority.

    :param folder: where keys and certificates go.
    """

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.authority.issue("server", "server", hosts=("127.0.0.1", "localhost"))
        self.tokens: set[str] = set()
        #: Who asked, in order: a token, a certificate's name, or nobody.
        self.asked: list[str] = []
        self.url = ""

    @property
    def address(self) -> str:
        return self.url.removeprefix("https://")

    @property
    def tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.authority.ca)
        context.load_cert_chain(self.authority.folder / "server.crt", self.authority.folder / "server.key")
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def kubeconfig(self, path: Path, **user: Any) -> Path:
        """A kubeconfig whose user is proven by what is given."""
        self.authority.kubeconfig(path, self.url, token="-")
        config = json.loads(path.read_text())
        config["users"][0]["user"] = user
        path.write_text(json.dumps(config))
        return path

    async def answer(self, request: web.Request) -> web.Response:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        certificate = request.get_extra_info("peercert") or {}
        named = dict(pair for group in certificate.get("subject", ()) for pair in group)
        who = token or named.get("commonName", "nobody")
        self.asked.append(who)
        if token in self.tokens or (not token and named):
            return web.json_response(VERSION)
        return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    found = ApiServer(tmp_path / "pki")
    app = web.Application()
    app.router.add_get("/version/", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=found.tls)
    await site.start()
    found.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


@pytest.fixture
async def tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Tokens]:
    """Everybody at Google who hands out tokens; this machine's own credentials are theirs too."""
    from google.auth import iam
    from google.auth.compute_engine import _metadata
    from google.oauth2 import credentials

    found = Tokens()
    runner = web.AppRunner(found.app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"127.0.0.1:{runner.addresses[0][1]}"
    found.url = f"http://{address}"
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT", "NO_GCE_CHECK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "no-gcloud"))
    monkeypatch.setenv("GCE_METADATA_IP", address)
    monkeypatch.setattr(_metadata, "_GCE_METADATA_HOST", address)
    # Whatever the file says.
    monkeypatch.setattr(credentials, "_GOOGLE_OAUTH2_TOKEN_ENDPOINT", f"{found.url}/refresh")
    monkeypatch.setattr(iam, "_IAM_ENDPOINT", f"{found.url}/as/{{}}")
    yield found
    await runner.cleanup()


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes an Airflow connection: its id, its type, its extra."""

    def make(conn_id: str, conn_type: str, **extra: Any) -> str:
        value = json.dumps({"conn_type": conn_type, "extra": extra})
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", value)
        return conn_id

    return make


async def ask(access: KubeAccess, *, renew: bool = False) -> int:
    """The status with which the API server answers somebody who comes this way."""
    from kubernetes_asyncio.client import ApiClient, VersionApi
    from kubernetes_asyncio.client.exceptions import ApiException

    async with ApiClient(await access.configuration(renew=renew)) as client:
        try:
            await VersionApi(client).get_code()
        except ApiException as error:
            return int(error.status)
    return 200
