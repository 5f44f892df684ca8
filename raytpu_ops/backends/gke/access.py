"""How a Kubernetes API server is reached: where the configuration comes from, and how it is renewed.

Not here: what is asked there (``api.py``), and Airflow connections (``hooks/kubernetes.py``), which
bring an access of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from raytpu_ops.backends.gke.kubeconfig import check_server, current_context, load
from raytpu_ops.tpu.errors import Misconfigured

if TYPE_CHECKING:
    from kubernetes_asyncio.client import Configuration

#: The variable that Kubernetes sets in every pod.
_IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
_NEXT = (
    ". Name a kubeconfig and a context that work here (`kubectl version` shows it), or a connection in "
    "kubernetes_conn_id"
)


@runtime_checkable
class KubeAccess(Protocol):
    """A way to one API server."""

    #: What a later task needs to find the same way again: names of connections and clusters, no
    #: secret. It travels in the lease's ``place``. Whole once there is a configuration: the context that
    #: is the current one by then belongs to it, since anybody's ``kubectl`` may make another one current.
    selectors: Mapping[str, str]

    async def configuration(self, *, renew: bool = False) -> Configuration:
        """Host, trust and credentials of the API server.

        :param renew: the last credentials were refused: fetch new ones.
        :raises Misconfigured: there is no such configuration here.
        :raises RemoteUnavailable: whoever gives out credentials does not answer.
        """


class KubeconfigAccess:
    """A kubeconfig file; without one, and inside a pod, the pod's own service account.

    :param kubeconfig: the file; default ``$KUBECONFIG``, else ``~/.kube/config``.
    :param context: of the file; default the one that is current when it is first loaded, which stays.
    """

    def __init__(self, kubeconfig: str | None = None, context: str | None = None) -> None:
        self._file, self._context = kubeconfig, context
        self._cached: Configuration | None = None
        self.selectors: Mapping[str, str] = {
            **({"kubeconfig": kubeconfig} if kubeconfig else {}),
            **({"context": context} if context else {}),
        }

    def __repr__(self) -> str:
        return f"KubeconfigAccess({self._file!r}, {self._context!r})"

    async def configuration(self, *, renew: bool = False) -> Configuration:
        """See :meth:`KubeAccess.configuration`."""
        if renew or self._cached is None:
            self._cached = await self._load()
        return self._cached

    async def _load(self) -> Configuration:
        from kubernetes_asyncio import config
        from kubernetes_asyncio.client import Configuration

        found = Configuration()
        file, context = self._file or os.environ.get("KUBECONFIG"), self._context

        async def fill() -> None:
            nonlocal context
            if not file and not self._context and os.environ.get(_IN_CLUSTER):
                config.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
            else:
                path = _checked(file) if file else _default()
                context = context or current_context(path)
                await config.load_kube_config(config_file=path, context=context, client_configuration=found)

        what = f"kubeconfig {file!r}" if file else "Kubernetes"
        await load(fill, what, _NEXT)
        check_server(found, what)
        if context:
            self._context = context
            self.selectors = {**self.selectors, "context": context}
        return found


def _default() -> str:
    path = Path.home() / ".kube" / "config"
    if not path.is_file():
        raise Misconfigured(f"there is no kubeconfig: $KUBECONFIG is not set, and ~/.kube/config is no file{_NEXT}")
    return str(path)


def _checked(file: str) -> str:
    """The file's path; a list of files is the loader's business, a single one gets a clear error here."""
    if os.pathsep in file:
        return file
    path = Path(file).expanduser()
    if not path.is_file():
        raise Misconfigured(f"kubeconfig {file!r} is no file on this machine")
    return str(path)
