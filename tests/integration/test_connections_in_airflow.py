"""A connection of another provider, kept in Airflow's own database, is found from a task and from the triggerer."""

from __future__ import annotations

import json
import ssl
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from raytpu_ops.demo.airflow import AirflowInstance
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.spec import SliceSpec
from tests.testbed.pki import Authority

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(900)]

DAG = "connection_probe"
#: Hands out tokens that count up.
PLUGIN = """
import json, pathlib, sys
count = pathlib.Path(sys.argv[1])
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
status = {"token": f"s3cret-{number}"}
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}))
"""


class Handler(BaseHTTPRequestHandler):
    """An API server that refuses every other token, and has no RayCluster."""

    tokens: list[str]

    def do_GET(self) -> None:
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        self.tokens.append(token)
        known = token[-1:] in tuple("02468")
        details = {"name": "gone-1", "group": "ray.io", "kind": "rayclusters"}
        absent = {"code": 404, "reason": "NotFound", "message": 'rayclusters.ray.io "gone-1" not found'}
        answer = absent | {"details": details} if known else {"code": 401, "reason": "Unauthorized", "message": "No"}
        body = json.dumps({"kind": "Status", "apiVersion": "v1", "status": "Failure", **answer}).encode()
        self.send_response(int(answer["code"]))
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing: the test looks at what was asked."""


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """A kubeconfig with a credential plugin, and the tokens that arrive at its server."""
    authority = Authority(tmp_path / "pki")
    authority.issue("server", "server", hosts=("127.0.0.1",))
    tokens: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Asked", (Handler,), {"tokens": tokens}))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(authority.folder / "server.crt", authority.folder / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    path = authority.kubeconfig(tmp_path / "config", f"https://127.0.0.1:{server.server_port}", token="-")
    config = json.loads(path.read_text())
    config["users"][0]["user"] = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": ["-c", PLUGIN, str(tmp_path / "count")],
        }
    }
    path.write_text(json.dumps(config))
    yield path, tokens
    server.shutdown()
    thread.join()
    server.server_close()


def test_task_and_triggerer_find_the_cluster_by_its_connection_and_renew_what_is_refused(
    airflow_instance: AirflowInstance, kubeconfig: tuple[Path, list[str]]
) -> None:
    path, tokens = kubeconfig
    api = airflow_instance.api
    for conn_id, conn_type, extra in (
        ("probe_k8s", "kubernetes", {"kube_config": path.read_text()}),
        ("probe_tpus", "ray_tpu", {"backend": "gke", "kubernetes_conn_id": "probe_k8s", "queue": ""}),
    ):
        connection = {"connection_id": conn_id, "conn_type": conn_type, "extra": json.dumps(extra)}
        api._json("POST", "/connections", connection)
    lease = SliceLease(
        id="gone-1",
        owner=Owner(dag_id=DAG, run_id="r", task_id="t"),
        backend="gke",
        spec=SliceSpec.of("v4", "2x2x2"),
        ray=RayEndpoint(address="http://127.0.0.1:1"),
        conn_id="probe_tpus",
        granted_at=datetime.now(UTC),
        expires_at=datetime.now(UTC) + timedelta(hours=1),
    )
    api.wait_for_dag(DAG)
    api.unpause(DAG)

    run = api.trigger(DAG, {"lease": lease.to_xcom()})

    assert api.wait_run(DAG, run, deadline_s=300)["state"] == "failed"
    log = "\n".join(map(str, api.log_events(DAG, run, "labelled", 1)))
    assert "Preempted" in log
    assert "RayCluster gone-1 does not exist any more" in log
    # One process after the other: a token that is refused, a new one that is not.
    assert list(dict.fromkeys(tokens)) == [f"s3cret-{number}" for number in (1, 2, 3, 4)]
    assert "s3cret" not in log
