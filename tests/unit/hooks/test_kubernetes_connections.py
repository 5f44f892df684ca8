"""Every way of the cncf.kubernetes provider leads to the API server, in an event loop and with fresh credentials."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytpu_ops.hooks.kubernetes import access_from
from raytpu_ops.tpu.errors import Misconfigured, RemoteUnavailable
from tests.unit.hooks.conftest import ApiServer, ask

Connect = Callable[..., str]

#: A credential plugin: each run hands out another token, and counts up.
PLUGIN = """
import json, pathlib, sys
count = pathlib.Path(sys.argv[1])
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
status = {"token": f"plugin-{number}"}
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}))
"""


def plugin(code: str, *args: str) -> dict[str, Any]:
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": ["-c", code, *args],
            "interactiveMode": "Never",
        }
    }


def by(conn_id: str, **more: str) -> Any:
    return access_from({"kubernetes_conn_id": conn_id, **more})[0]


async def test_a_kubeconfig_with_a_token(server: ApiServer, tmp_path: Path, connect: Connect) -> None:
    server.tokens = {"abc"}
    connect("k8s", "kubernetes", kube_config_path=str(server.kubeconfig(tmp_path / "config", token="abc")))

    assert await ask(by("k8s")) == 200


async def test_a_kubeconfig_with_a_client_certificate(server: ApiServer, tmp_path: Path, connect: Connect) -> None:
    server.authority.issue("client", "airflow")
    files = {
        "client-certificate": str(server.authority.folder / "client.crt"),
        "client-key": str(server.authority.folder / "client.key"),
    }
    connect("k8s", "kubernetes", kube_config_path=str(server.kubeconfig(tmp_path / "config", **files)))

    assert await ask(by("k8s")) == 200
    assert server.asked == ["airflow"]


async def test_a_kubeconfig_as_json_in_the_connection(server: ApiServer, tmp_path: Path, connect: Connect) -> None:
    server.tokens = {"abc"}
    config = json.loads(server.kubeconfig(tmp_path / "config", token="abc").read_text())
    connect("as_text", "kubernetes", kube_config=json.dumps(config))
    connect("as_object", "kubernetes", kube_config=config)

    assert [await ask(by("as_text")), await ask(by("as_object"))] == [200, 200]


async def test_a_plugin_is_asked_again_when_its_token_was_refused(
    server: ApiServer, tmp_path: Path, connect: Connect
) -> None:
    """F38."""
    server.tokens = {"plugin-1"}
    user = plugin(PLUGIN, str(tmp_path / "count"))
    connect("k8s", "kubernetes", kube_config_path=str(server.kubeconfig(tmp_path / "config", **user)))
    access = by("k8s")

    assert [await ask(access), await ask(access)] == [200, 200]
    server.tokens = {"plugin-2"}
    assert [await ask(access), await ask(access, renew=True), await ask(access)] == [401, 200, 200]
    assert server.asked == ["plugin-1", "plugin-1", "plugin-1", "plugin-2", "plugin-2"]


async def test_renewing_reads_connection_and_file_again(server: ApiServer, tmp_path: Path, connect: Connect) -> None:
    connect("k8s", "kubernetes", kube_config_path=str(server.kubeconfig(tmp_path / "config", token="old")))
    access = by("k8s")
    server.tokens = {"new"}

    assert await ask(access) == 401
    server.kubeconfig(tmp_path / "config", token="new")
    assert await ask(access, renew=True) == 200


async def test_the_context_of_the_task_goes_over_the_connections(
    server: ApiServer, tmp_path: Path, connect: Connect
) -> None:
    server.tokens = {"abc"}
    path = server.kubeconfig(tmp_path / "config", token="wrong")
    config = json.loads(path.read_text())
    config["users"].append({"name": "right", "user": {"token": "abc"}})
    config["contexts"].append({"name": "right", "context": {"cluster": "testbed", "user": "right"}})
    path.write_text(json.dumps(config))
    connect("k8s", "kubernetes", kube_config_path=str(path), cluster_context="testbed")

    assert await ask(by("k8s")) == 401
    assert await ask(by("k8s", context="right")) == 200


@pytest.mark.parametrize("extra", [{"in_cluster": True}, {}], ids=["said", "nothing is said"])
async def test_inside_a_pod_its_service_account_is_used(
    server: ApiServer, tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    in_pod(server, tmp_path, monkeypatch, token="of-the-pod")
    server.tokens = {"of-the-pod"}
    connect("k8s", "kubernetes", **extra)

    assert await ask(by("k8s")) == 200


async def test_without_any_option_a_pods_service_account_is_used(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pod(server, tmp_path, monkeypatch, token="of-the-pod")
    server.tokens = {"of-the-pod"}

    assert await ask(access_from({})[0]) == 200


async def test_a_kubeconfig_without_a_connection(server: ApiServer, tmp_path: Path) -> None:
    server.tokens = {"abc"}
    path = server.kubeconfig(tmp_path / "config", token="abc")

    assert await ask(access_from({"kubeconfig": str(path)})[0]) == 200


def in_pod(server: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch, *, token: str) -> None:
    from kubernetes_asyncio.config import incluster_config

    (folder / "token").write_text(token)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(folder / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(server.authority.ca))
    host, _, port = server.address.partition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.delenv("KUBECONFIG", raising=False)


async def test_another_loop_may_use_the_same_access(server: ApiServer, tmp_path: Path, connect: Connect) -> None:
    """An operator runs each of its flows in a loop of its own."""
    server.tokens = {"abc"}
    connect("k8s", "kubernetes", kube_config_path=str(server.kubeconfig(tmp_path / "config", token="abc")))
    access = by("k8s")

    answers = [await asyncio.to_thread(asyncio.run, ask(access, renew=True)) for _ in range(2)]

    assert [*answers, await ask(access, renew=True)] == [200, 200, 200]


async def test_the_event_loop_goes_on_while_the_connection_is_read(
    server: ApiServer, tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a triggerer that call waits for the supervisor, whose answer comes by way of the same loop."""
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook

    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    server.tokens = {"abc"}
    connect("k8s", "kubernetes", kube_config_path=str(server.kubeconfig(tmp_path / "config", token="abc")))
    read = AsyncKubernetesHook.get_connection

    def slow(conn_id: str) -> Any:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=30)
        loop.call_soon_threadsafe(heard.set)
        return read(conn_id)

    monkeypatch.setattr(AsyncKubernetesHook, "get_connection", staticmethod(slow))

    assert await ask(by("k8s")) == 200
    assert heard.is_set()


async def test_verification_is_off_where_the_connection_says_so(
    server: ApiServer, tmp_path: Path, connect: Connect
) -> None:
    path = server.kubeconfig(tmp_path / "config", token="abc")
    config = json.loads(path.read_text())
    del config["clusters"][0]["cluster"]["certificate-authority"]
    path.write_text(json.dumps(config))
    connect("strict", "kubernetes", kube_config_path=str(path))
    connect("lax", "kubernetes", kube_config_path=str(path), disable_verify_ssl=True)

    assert (await by("strict").configuration()).verify_ssl
    assert not (await by("lax").configuration()).verify_ssl


async def test_an_absent_connection_is_named() -> None:
    with pytest.raises(Misconfigured, match="connection 'nowhere' does not exist: add it with type 'kubernetes'"):
        await by("nowhere").configuration()


async def test_an_absent_file_is_named(connect: Connect) -> None:
    connect("k8s", "kubernetes", kube_config_path="/no/such/file")

    with pytest.raises(Misconfigured, match="'k8s': kube_config_path '/no/such/file' is no file on this machine"):
        await by("k8s").configuration()


async def test_an_absent_plugin_is_a_mistake(server: ApiServer, tmp_path: Path, connect: Connect) -> None:
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-plugin"}}
    connect("k8s", "kubernetes", kube_config_path=str(server.kubeconfig(tmp_path / "config", **user)))

    with pytest.raises(Misconfigured, match="no-such-plugin"):
        await by("k8s").configuration()


@pytest.mark.parametrize("by_file", [False, True])
async def test_a_plugin_that_fails_may_not_fail_tomorrow(
    server: ApiServer, tmp_path: Path, connect: Connect, by_file: bool
) -> None:
    user = plugin("import sys; sys.exit('no route to the token service')")
    path = str(server.kubeconfig(tmp_path / "config", **user))
    connect("k8s", "kubernetes", kube_config_path=path)
    access = access_from({"kubeconfig": path})[0] if by_file else by("k8s")

    with pytest.raises(RemoteUnavailable, match="gives out credentials failed: .*no route to the token service"):
        await access.configuration()


@pytest.mark.parametrize("by_file", [False, True])
async def test_a_plugin_that_hangs_is_ended_and_ends_no_wait(
    server: ApiServer, tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch, by_file: bool
) -> None:
    monkeypatch.setattr("raytpu_ops.backends.gke.kubeconfig.PLUGIN_S", 0.3)
    user = plugin("import time; time.sleep(1000)", str(tmp_path))
    path = str(server.kubeconfig(tmp_path / "config", **user))
    connect("k8s", "kubernetes", kube_config_path=path)
    access = access_from({"kubeconfig": path})[0] if by_file else by("k8s")

    with pytest.raises(RemoteUnavailable, match=r"took over 0\.3 s"):
        await access.configuration()
    assert not running(str(tmp_path))


def running(word: str) -> list[int]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            found += [child.pid] if word in child.cmdline() else []
    return found


BROKEN = (
    "users: [{name: x, user: {token: s3cret}",
    "s3cret",
    '["s3cret"]',
    '{"clusters": "s3cret", "users": [], "contexts": []}',
    # The library puts a user's whole entry into the error about it.
    '{"current-context": "x", "clusters": [{"name": "x", "cluster": {"server": "https://127.0.0.1"}}], '
    '"contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}], '
    '"users": [{"name": "x", "token": "s3cret"}]}',
    '{"current-context": "x", "clusters": [{"name": "x", "cluster": {"server": "https://127.0.0.1", '
    '"certificate-authority-data": "s3cret"}}], "users": [], '
    '"contexts": [{"name": "x", "context": {"cluster": "x"}}]}',
)


@pytest.mark.parametrize("kubeconfig", BROKEN)
async def test_a_broken_kubeconfig_is_refused_without_its_text(
    connect: Connect, tmp_path: Path, kubeconfig: str
) -> None:
    connect("k8s", "kubernetes", kube_config=kubeconfig)
    file = tmp_path / "config"
    file.write_text(kubeconfig)

    for access, begin in (
        (by("k8s"), "connection 'k8s': "),
        (access_from({"kubeconfig": str(file)})[0], "kubeconfig "),
    ):
        with pytest.raises(Misconfigured, match=rf"^{begin}[^\n]*$") as caught:
            await access.configuration()
        # A task's log shows the cause as well.
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
        assert "s3cret" not in str(caught.value)


async def test_nothing_that_can_be_printed_holds_a_secret(server: ApiServer, tmp_path: Path, connect: Connect) -> None:
    config = json.loads(server.kubeconfig(tmp_path / "config", token="s3cret").read_text())
    connect("k8s", "kubernetes", kube_config=config)
    access = by("k8s", context="testbed")

    shown = f"{access!r} {access} {await access.configuration()!r} {access.selectors}"

    assert repr(access) == "ConnectionAccess(kubernetes_conn_id='k8s', context='testbed')"
    assert access.selectors == {"kubernetes_conn_id": "k8s", "context": "testbed"}
    assert "s3cret" not in shown
