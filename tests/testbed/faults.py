"""Faults that are plain Kubernetes: any cluster can have them, so they work on any kubeconfig.

Part of `client.Testbed`; alone it serves a cluster that the testbed did not start
(`RAYTPU_TEST_KUBECONFIG`).
"""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.dynamic import DynamicClient
from kubernetes.stream import stream

from tests.testbed import accounts

_HOLD = "raytpu.test/hold"


class KubernetesFaults:
    """Faults by Kubernetes' own API, and the clients that tests use.

    :param kubeconfig: of the cluster.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self.api = config.new_client_from_config(str(kubeconfig))
        self.core = client.CoreV1Api(self.api)
        self.custom = client.CustomObjectsApi(self.api)
        self._dynamic: DynamicClient | None = None
        self._folder: Path | None = None

    def close(self) -> None:
        """Close the clients' connections, and forget the kubeconfigs that were made."""
        self.api.close()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    @property
    def dynamic(self) -> DynamicClient:
        """For any kind: `dynamic.resources.get(api_version=…, kind=…)`."""
        if self._dynamic is None:
            self._dynamic = DynamicClient(self.api)
        return self._dynamic

    @contextmanager
    def namespace(self, prefix: str = "t", *, wait: bool = True) -> Iterator[str]:
        """A new namespace, gone with all that is in it when this ends.

        :param prefix: of its name.
        :param wait: until it is gone; else it is told to go.
        """
        # A test before may have had the API server killed: connections that are idle since then are dead.
        self.api.rest_client.pool_manager.clear()
        with accounts.namespace(self, f"{prefix}-{secrets.token_hex(3)}", wait=wait) as name:
            yield name

    def kubeconfig_for(self, rights: Path | Iterable[dict[str, Any]], namespace: str, account: str = "") -> Path:
        """A kubeconfig that may do exactly what some rights say, by the token of a service account.

        :param rights: a manifest with ServiceAccount, Role and RoleBinding, applied as it stands but for
            its namespace; or rules of a Role, for a new account.
        :param namespace: where.
        :param account: the ServiceAccount, if the manifest binds several.
        :return: the file; it is there until `close`.
        """
        content = accounts.kubeconfig_for(self, rights, namespace, account)
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="raytpu-kubeconfigs-"))
        path = self._folder / f"{namespace}-{secrets.token_hex(3)}"
        path.touch(mode=0o600)
        path.write_text(json.dumps(content))  # JSON is YAML
        return path

    def proxied(self, namespace: str, service: str, path: str, token: str = "") -> tuple[int, bytes]:
        """GET from a service through the API server, as the backend reaches Ray.

        The API server keeps `Authorization` for itself; Ray takes its token from a header of its own.

        :param namespace: of the service.
        :param service: name and port, `demo-head-svc:dashboard`.
        :param path: below the service, with its query.
        :param token: for Ray.
        :return: status and body.
        """
        where = f"/api/v1/namespaces/{namespace}/services/{service}/proxy/{path.lstrip('/')}"
        headers = {"x-ray-authorization": f"Bearer {token}"} if token else {}
        try:
            answer = self.api.call_api(
                where, "GET", header_params=headers, auth_settings=["BearerToken"],
                _preload_content=False, _return_http_data_only=True,
            )  # fmt: skip
        except client.ApiException as error:
            return error.status, (error.body or "").encode() if isinstance(error.body, str) else error.body or b""
        return answer.status, answer.data

    def logs(self, pod: str, namespace: str = "default", *, previous: bool = False) -> str:
        """What a pod wrote; the client's own method gives the text of a bytes literal.

        :param pod: its name.
        :param namespace: of the pod.
        :param previous: of the container before its last restart.
        """
        answer = self.core.read_namespaced_pod_log(pod, namespace, previous=previous, _preload_content=False)
        return str(answer.data.decode(errors="replace"))

    def run_in(self, pod: str, *command: str, namespace: str = "default", timeout: float = 60) -> str:
        """Run a command in a pod's first container; what it wrote.

        :param pod: its name.
        :param command: and its arguments.
        :param namespace: of the pod.
        :param timeout: seconds.
        """
        socket = stream(
            self.core.connect_get_namespaced_pod_exec, pod, namespace, command=list(command),
            stdout=True, stderr=True, _preload_content=False,
        )  # fmt: skip
        try:
            socket.run_forever(timeout=timeout)
            return str(socket.read_all())
        finally:
            socket.close()
            socket.sock.shutdown()  # `close` leaves the connection open where the other side closed first

    def nodes(self, selector: str = "") -> list[str]:
        """Names of the nodes.

        :param selector: of labels.
        """
        return [one.metadata.name for one in self.core.list_node(label_selector=selector).items]

    def cordon(self, node: str, *, on: bool = True) -> None:
        """No new pod comes to a node.

        :param node: its name.
        :param on: or comes again.
        """
        self.core.patch_node(node, {"spec": {"unschedulable": on}})

    def drain_node(self, node: str, timeout: float = 120) -> list[str]:
        """Cordon a node and evict its pods, as maintenance does; returns when they are gone.

        :param node: its name.
        :param timeout: seconds.
        :return: names of the evicted pods.
        """
        self.cordon(node)
        on_node = f"spec.nodeName={node}"
        evicted = []
        for pod in self.core.list_pod_for_all_namespaces(field_selector=on_node).items:
            meta = client.V1ObjectMeta(name=pod.metadata.name, namespace=pod.metadata.namespace)
            eviction = client.V1Eviction(metadata=meta)
            self.core.create_namespaced_pod_eviction(pod.metadata.name, pod.metadata.namespace, eviction)
            evicted.append(pod.metadata.name)
        wait_until(
            lambda: not self.core.list_pod_for_all_namespaces(field_selector=on_node).items,
            timeout,
            lambda: f"pods are left on {node}: {evicted}",
        )
        return evicted

    @contextmanager
    def no_node_fits(self, selector: str = "google.com/tpu", *, but: Container[str] = ()) -> Iterator[None]:
        """New pods find no node; whatever was cordoned before stays so afterwards.

        :param selector: of the nodes that are cordoned; by default those that offer chips.
        :param but: names of nodes that stay as they are.
        """
        if selector == "google.com/tpu":
            found = [one for one in self.core.list_node().items if selector in (one.status.allocatable or {})]
        else:
            found = self.core.list_node(label_selector=selector).items
        names = [one.metadata.name for one in found if not one.spec.unschedulable and one.metadata.name not in but]
        with ExitStack() as cordoned:
            for node in names:
                cordoned.callback(self.cordon, node, on=False)
                self.cordon(node)
            yield

    @contextmanager
    def labelled(self, selector: str, key: str) -> Iterator[None]:
        """Nodes have one more label, for pods that may come to no others; without it they find no node.

        :param selector: of the nodes.
        :param key: of the label, which no node has; its value is `true`.
        """
        with ExitStack() as labelled:
            for node in self.nodes(selector):
                labelled.callback(self.core.patch_node, node, {"metadata": {"labels": {key: None}}})
                self.core.patch_node(node, {"metadata": {"labels": {key: "true"}}})
            yield

    @contextmanager
    def held(self, api_version: str, kind: str, name: str, namespace: str) -> Iterator[None]:
        """A finalizer that nobody takes away holds an object in deletion.

        :param api_version: of the object, `ray.io/v1`.
        :param kind: of the object, `RayCluster`.
        :param name: of the object.
        :param namespace: of the object.
        """
        resource = self.dynamic.resources.get(api_version=api_version, kind=kind)

        def change(present: bool) -> None:
            try:
                one = resource.get(name=name, namespace=namespace)
            except client.ApiException as error:
                if error.status == 404:
                    return  # gone, and nothing to let go of
                raise
            others = [finalizer for finalizer in one.metadata.finalizers or [] if finalizer != _HOLD]
            patch = {"metadata": {"finalizers": [*others, _HOLD] if present else others}}
            resource.patch(body=patch, name=name, namespace=namespace, content_type="application/merge-patch+json")

        change(True)
        try:
            yield
        finally:
            change(False)

    def count(self, api_version: str, kind: str, selector: str = "", namespace: str | None = None) -> int:
        """How many objects there are.

        :param api_version: of the kind.
        :param kind: `RayCluster`.
        :param selector: of labels.
        :param namespace: where; everywhere if left out.
        """
        resource = self.dynamic.resources.get(api_version=api_version, kind=kind)
        return len(resource.get(label_selector=selector, namespace=namespace).items)


def wait_until(holds: Callable[[], Any], timeout: float, what: Callable[[], str] | str, interval: float = 0.2) -> Any:
    """Wait for a condition.

    :param holds: answers something true when it holds.
    :param timeout: seconds.
    :param what: what did not happen, for the error.
    :param interval: seconds between two looks.
    :raises TimeoutError: when it never does.
    """
    deadline = time.monotonic() + timeout
    while True:
        found = holds()
        if found:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout:.0f} s: {what if isinstance(what, str) else what()}")
        time.sleep(interval)
