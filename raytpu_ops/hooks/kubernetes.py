"""Which API server a ``ray_tpu`` connection means, and by whose word: options become a ``KubeAccess``.

Three ways lead to a server, and one says nothing at all:

- ``kubernetes_conn_id`` (and ``context``): a connection of the cncf.kubernetes provider;
- ``cluster_name``, ``location`` …: a GKE cluster, by an account of Google's (``google.py``);
- ``kubeconfig`` (and ``context``): a file on this machine;
- none of them: inside a pod its own service account, else the user's kubeconfig.

Not here: what is asked of the server (``backends/gke``). Connections are read in a thread: in a
triggerer that call would block the one event loop, or meet another one in flight there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured
from raytpu_ops.tpu.fields import Line, Word
from raytpu_ops.tpu.problems import Checked, read
from raytpu_ops.tpu.words import near

if TYPE_CHECKING:
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
    from kubernetes_asyncio.client import Configuration

    from raytpu_ops.backends.gke.access import KubeAccess

#: How every refusal begins.
_WHERE = "backend 'gke'"
#: Set by Kubernetes in every pod.
_IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
_INSTEAD = "a Kubernetes connection says it: name that in kubernetes_conn_id"
#: Names that people know from elsewhere, with ours.
_KNOWN_ELSEWHERE = {
    "in_cluster": "leave it out inside a pod, or " + _INSTEAD,
    "kube_config": _INSTEAD,
    "kube_config_path": "write kubeconfig",
    "config_file": "write kubeconfig",
    "cluster_context": "write context",
    "region": "write location",
    "zone": "write location",
    "cluster": "write cluster_name",
    "project": "write project_id",
}


def _flag(value: object) -> object:
    """A box of the connection form, or what became of it on its way through a lease, which holds text."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _chain(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Box = Annotated[bool, Field(strict=True), BeforeValidator(_flag)]
Chain = Annotated[list[Line], BeforeValidator(_chain)]


class ByConnection(Checked):
    """A Kubernetes connection of Airflow's.

    :param kubernetes_conn_id: the connection.
    :param context: of its kubeconfig, where the connection does not say it.
    """

    kubernetes_conn_id: Word
    context: Line | None = None


class ByFile(Checked):
    """A kubeconfig on this machine.

    :param kubeconfig: the file; default ``$KUBECONFIG``, else ``~/.kube/config``.
    :param context: of the file; default its current one.
    """

    kubeconfig: Line | None = None
    context: Line | None = None


class ByName(Checked):
    """A GKE cluster and who asks for it.

    :param cluster_name: the cluster.
    :param location: its region or zone.
    :param project_id: its project; default the one of the Google connection or of its credentials.
    :param gcp_conn_id: the Google connection; default ``google_cloud_default`` where that is there, else the
        credentials that the machine or the pod has.
    :param impersonation_chain: service accounts to act as, the last of them towards the cluster.
    :param use_internal_ip: talk to the control plane's private address.
    :param use_dns_endpoint: talk to its DNS name, which needs no route to an address.
    """

    cluster_name: Word
    location: Word
    project_id: Word | None = None
    gcp_conn_id: Word | None = None
    impersonation_chain: Chain = Field(default_factory=list)
    use_internal_ip: Box = False
    use_dns_endpoint: Box = False

    @model_validator(mode="after")
    def _one_endpoint(self) -> Self:
        if self.use_internal_ip and self.use_dns_endpoint:
            raise InvalidSpec(f"{_WHERE}: use_internal_ip and use_dns_endpoint are both set: choose one of them")
        return self


#: Most telling key of each way -> its model.
_WAYS: dict[str, type[ByConnection | ByFile | ByName]] = {
    "kubernetes_conn_id": ByConnection,
    "cluster_name": ByName,
    "kubeconfig": ByFile,
}
#: Options that name a cluster, each in its way.
CLUSTER_KEYS = tuple(_WAYS)
#: Every option that this module takes.
ACCESS_KEYS = frozenset(key for model in _WAYS.values() for key in model.model_fields)


def access_from(options: Mapping[str, Any]) -> tuple[KubeAccess, dict[str, Any]]:
    """The way to the API server, and the options that do not speak of it.

    :param options: of a ``ray_tpu`` connection and of a task, one over the other.
    :raises InvalidSpec: naming the key that is missing, contradicts another or is none.
    :raises Misconfigured: when an extra of this package is not installed; the message has the command.
    """
    # A form sends empty fields and boxes that are not ticked; they say nothing.
    said = {key: value for key, value in options.items() if key in ACCESS_KEYS and value}
    rest = {key: value for key, value in options.items() if key not in ACCESS_KEYS}
    _refuse_misspelt(rest)
    ways = _ways_in(said)
    if len(ways) > 1 or (ways == ["cluster_name"] and "context" in said):
        one, other = [*(_a_key_of(way, said) for way in ways), "context"][:2]
        raise InvalidSpec(f"{_WHERE}: {one} and {other} are two ways to an API server: keep one of them")
    _need("gke", "kubernetes_asyncio.client", "kubernetes_asyncio.config")
    if ways == ["kubernetes_conn_id"]:
        _need("gke", "airflow.providers.cncf.kubernetes.hooks.kubernetes")
        return ConnectionAccess(read(ByConnection, said, _WHERE)), rest
    if ways == ["cluster_name"]:
        asked = _read_by_name(said)
        _need("google", "airflow.providers.google.common.hooks.base_google", "google.cloud.container_v1")
        from raytpu_ops.hooks.google import GoogleAccess

        return GoogleAccess(asked), rest
    from raytpu_ops.backends.gke.access import KubeconfigAccess

    by_file = read(ByFile, said, _WHERE)
    return KubeconfigAccess(by_file.kubeconfig, by_file.context), rest


def overlaid(options: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``options``; where it names another way to a server, the first one is dropped whole.

    :param options: what a connection says.
    :param over: what a task says.
    """
    mine, theirs = _ways_in(over), _ways_in(options) or (["kubeconfig"] if options.get("context") else [])
    another = bool(mine) and set(mine).isdisjoint(theirs)
    kept = {key: value for key, value in options.items() if not (another and key in ACCESS_KEYS)}
    return {**kept, **over}


def found_again(options: Mapping[str, Any], place: Mapping[str, str]) -> dict[str, Any]:
    """The options by which a lease is found again, whatever else the task that got it was told.

    :param options: what the connection says now.
    :param place: of the lease: the selectors of its access and where on that server it is, both as options.
    """
    from raytpu_ops.backends.gke.settings import Settings

    known = ACCESS_KEYS | Settings.model_fields.keys() | {"google_endpoints"}
    told = {key: value for key, value in place.items() if key in known}
    if not told.keys() & ACCESS_KEYS:
        return {**options, **told}
    return {key: value for key, value in options.items() if key not in ACCESS_KEYS} | told


def _ways_in(options: Mapping[str, Any]) -> list[str]:
    """The ways that the options speak of; ``context`` goes with two of them and tells nothing."""
    told = {key for key, value in options.items() if key != "context" and value}
    return [way for way, model in _WAYS.items() if told & model.model_fields.keys()]


def _a_key_of(way: str, said: Mapping[str, Any]) -> str:
    return way if way in said else next(key for key in _WAYS[way].model_fields if key in said)


def _read_by_name(said: Mapping[str, Any]) -> ByName:
    missing = [key for key in ("cluster_name", "location") if key not in said]
    if missing:
        raise InvalidSpec(
            f"{_WHERE}: {' and '.join(missing)} {'are' if missing[1:] else 'is'} missing beside "
            f"{_a_key_of('cluster_name', said)}: a GKE cluster is named by cluster_name and location, and by "
            "project_id where the Google connection does not say it"
        )
    return read(ByName, said, _WHERE)


def _refuse_misspelt(rest: Mapping[str, Any]) -> None:
    """Keys that the backend would call unknown, where this module knows better what was meant."""
    from raytpu_ops.backends.gke.settings import Settings

    for key in rest:
        if key in Settings.model_fields:
            continue
        if key in _KNOWN_ELSEWHERE:
            raise InvalidSpec(f"{_WHERE}: there is no option {key!r}: {_KNOWN_ELSEWHERE[key]}")
        hint = near(str(key), ACCESS_KEYS | Settings.model_fields.keys())
        if any(repr(known) in hint for known in ACCESS_KEYS):
            raise InvalidSpec(f"{_WHERE}: there is no option {key!r}{hint}")


def _need(extra: str, *modules: str) -> None:
    """Import what an extra brings: here rather than in an event loop, which that would hold up for seconds."""
    try:
        for module in modules:
            import_module(module)
    except ImportError as error:
        raise Misconfigured(f"{_WHERE}: {error}: pip install 'raytpu-ops[{extra}]'") from error


class ConnectionAccess:
    """The API server of a connection of type ``kubernetes``: in-cluster, kubeconfig by path or as JSON.

    :param asked: the connection.
    """

    def __init__(self, asked: ByConnection) -> None:
        self._asked = asked
        self._cached: Configuration | None = None
        self.selectors: Mapping[str, str] = asked.model_dump(exclude_none=True)

    def __repr__(self) -> str:
        return f"ConnectionAccess({', '.join(f'{key}={value!r}' for key, value in self.selectors.items())})"

    async def configuration(self, *, renew: bool = False) -> Configuration:
        """See :meth:`KubeAccess.configuration`."""
        if renew or self._cached is None:
            self._cached = await self._load()
        return self._cached

    async def _load(self) -> Configuration:
        from airflow.sdk.exceptions import AirflowException
        from kubernetes_asyncio.client import Configuration

        from raytpu_ops.backends.gke.kubeconfig import check_server, load

        found = Configuration()
        where = f"connection {self._asked.kubernetes_conn_id!r}"
        hook, extra = await asyncio.to_thread(self._hook, found)

        async def fill() -> None:
            if not (hook.in_cluster or extra.get("in_cluster")):
                hook.cluster_context = hook.cluster_context or extra.get("cluster_context") or _current_context(extra)
            try:
                # The hook has no public way to its configuration but to connect; nothing is sent yet.
                async with hook.get_conn():
                    pass
            except AirflowException as error:
                raise Misconfigured(f"{where}: {error}") from None

        await load(fill, where)
        check_server(found, where)
        self._asked = self._asked.model_copy(update={"context": hook.cluster_context})
        self.selectors = self._asked.model_dump(exclude_none=True)
        return found

    def _hook(self, found: Configuration) -> tuple[AsyncKubernetesHook, dict[str, Any]]:
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
        from airflow.sdk.exceptions import AirflowNotFoundException

        conn_id = self._asked.kubernetes_conn_id
        try:
            connection = AsyncKubernetesHook.get_connection(conn_id)
        except AirflowNotFoundException:
            raise Misconfigured(f"connection {conn_id!r} does not exist: add it with type 'kubernetes'") from None
        extra = _fields(connection.extra_dejson)
        file = extra.get("kube_config_path")
        if file and os.pathsep not in file and not Path(file).expanduser().is_file():
            raise Misconfigured(f"connection {conn_id!r}: kube_config_path {file!r} is no file on this machine")
        if _flag(extra.get("disable_verify_ssl")):
            found.verify_ssl = False
        silent = not any(extra.get(key) for key in ("in_cluster", "kube_config_path", "kube_config"))
        hook = AsyncKubernetesHook(
            conn_id=conn_id,
            connection_extras=extra,
            client_configuration=found,
            cluster_context=self._asked.context,
            # The provider's blocking hook tries this first, its async one does not.
            in_cluster=True if silent and not self._asked.context and os.environ.get(_IN_CLUSTER) else None,
        )
        return hook, extra


def _current_context(extra: Mapping[str, Any]) -> str | None:
    """The current context of the kubeconfig that a connection means."""
    import yaml

    from raytpu_ops.backends.gke.kubeconfig import current_context

    inline = extra.get("kube_config")
    if inline and not extra.get("kube_config_path"):  # the provider refuses both
        return current_context(yaml.safe_load(inline) if isinstance(inline, str) else inline)
    return current_context(extra.get("kube_config_path"))


def _fields(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The extra without empty fields and without the prefix of old Airflows."""
    prefix = "extra__kubernetes__"
    return {str(key).removeprefix(prefix): value for key, value in extra.items() if value not in (None, "")}
