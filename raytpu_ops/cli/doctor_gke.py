"""``raytpu doctor --backend gke``: whether a cluster has what the ``gke`` backend needs of it.

Everything is asked of the API server as the one who will run the backend, and nothing is changed. Not
here: the questions themselves (``doctor_cluster.py``), the TPU webhook (``doctor_webhook.py``) and what nodes must
have (``doctor_nodes.py``).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from raytpu_ops.backends.deployed import deployed
from raytpu_ops.backends.gke import queued
from raytpu_ops.backends.gke.rights import PROXY, RIGHTS, Right, needed
from raytpu_ops.cli import doctor_nodes, doctor_webhook
from raytpu_ops.cli.doctor import Check, numbers, package, unseen
from raytpu_ops.cli.doctor_cluster import Answer, Cluster
from raytpu_ops.tpu.errors import RayTpuError

if TYPE_CHECKING:
    from raytpu_ops.backends.gke.access import KubeAccess
    from raytpu_ops.backends.gke.settings import Settings

#: As our manifests have them.
_NAMESPACE, _ACCOUNT = "raytpu", "raytpu-airflow"
#: KubeRay that knows `authOptions`, and makes the token by itself.
_OLDEST_KUBERAY = (1, 5)
#: The first one that numbers the hosts of a slice without being told to.
_INDEXING_SINCE = (1, 6)
_INDEXING = "RayMultiHostIndexing"
#: On by default since 1.3; of its conditions KubeRay's word that a RayCluster is whole is made.
_CONDITIONS = "RayClusterStatusConditions"
_ADDON = "gcloud container clusters update CLUSTER --location LOCATION --update-addons RayOperator=ENABLED"
_GET_KUBERAY = f"on GKE: {_ADDON}; elsewhere install KubeRay 1.6 or newer"
_NEWER_KUBERAY = (
    "upgrade KubeRay to 1.6 or newer; Google's add-on follows the version of the cluster: "
    "gcloud container clusters upgrade CLUSTER --location LOCATION --master"
)
#: Deployments of the operator are told by their image, whatever the chart calls them.
_OPERATOR_IMAGE = re.compile(r"(kuberay[/-]operator|ray-operator)(?=[:@]|\Z)")
_TAG = re.compile(r":v?([0-9]+(?:\.[0-9]+)+)")


async def checks(access: KubeAccess, settings: Settings) -> list[Check]:
    """Look at everything; nothing is changed.

    :param access: the way to the API server.
    :param settings: of the backend, as far as they are known: where the RayClusters are to live, how Ray is reached.
    """
    found = [package("kubernetes-asyncio", (34,), "pip install 'raytpu-ops[gke]'")]
    if found[0].missing:
        return found
    from kubernetes_asyncio.client import ApiClient

    try:
        async with ApiClient(await access.configuration()) as client:
            cluster = Cluster(client, settings)
            found.append(await _server(cluster))
            if found[-1].missing:
                return found
            for rows in await asyncio.gather(*(look(cluster) for look in _LOOKS)):
                found += rows if isinstance(rows, list) else [rows]
    except RayTpuError as error:
        how = "name another file or context (--kubeconfig, --context), or make one: " + _credentials()
        found.append(Check("API server", False, str(error), how))
    return found


def _credentials() -> str:
    return "gcloud container clusters get-credentials CLUSTER --location LOCATION"


async def _server(cluster: Cluster) -> Check:
    answer = await cluster.ask("GET", "/version")
    if answer.status == 401:
        return Check("API server", False, f"{cluster.url} refuses the credentials: {answer.message}", _credentials())
    if not answer.ok:
        return Check("API server", False, f"{cluster.url}: {answer.message}", "see that this is an API server")
    await cluster.introduce()
    known = f", which knows you as {cluster.user}" if cluster.user else ""
    return Check("API server", True, f"{answer.body.get('gitVersion', 'unknown version')} at {cluster.url}{known}")


async def _namespace(cluster: Cluster) -> Check:
    answer = await cluster.ask("GET", f"/api/v1/namespaces/{cluster.namespace}")
    if answer.status == 404:
        return Check("namespace", False, f"no {cluster.namespace!r}", f"kubectl create namespace {cluster.namespace}")
    if not answer.ok:
        return _unreadable("namespace", "namespaces", cluster, answer)
    phase = answer.body.get("status", {}).get("phase", "Active")
    if phase != "Active":
        return Check("namespace", False, f"{cluster.namespace}: {phase}", "wait until it is gone, and make it anew")
    return Check("namespace", True, cluster.namespace)


async def _api(cluster: Cluster) -> Check:
    """The kinds of KubeRay; discovery and schemas may be read by everybody, the CRD itself may not."""
    answer = await cluster.ask("GET", "/apis/ray.io")
    if answer.status == 404:
        return Check("KubeRay's API", False, "no rayclusters.ray.io", _GET_KUBERAY)
    if not answer.ok:
        return unseen("KubeRay's API", answer.message, "have the ClusterRole system:discovery granted")
    versions = [one["version"] for one in answer.body.get("versions") or []]
    if "v1" not in versions:
        return Check("KubeRay's API", False, f"ray.io serves {', '.join(versions)}, not v1", _NEWER_KUBERAY)
    schema = await cluster.ask("GET", "/openapi/v3/apis/ray.io/v1")
    spec = _properties(schema.body, "RayCluster").get("spec", {}).get("properties", {})
    if not spec:
        return Check("KubeRay's API", True, f"ray.io/{', '.join(versions)}; its schema is not readable")
    if "authOptions" not in spec:
        return Check("KubeRay's API", False, "RayCluster has no authOptions: before KubeRay 1.5", _NEWER_KUBERAY)
    return Check("KubeRay's API", True, f"ray.io/{', '.join(versions)}, with token authentication")


def _properties(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    for name, one in schema.get("components", {}).get("schemas", {}).items():
        if name.rsplit(".", 1)[-1] == kind:
            found: dict[str, Any] = one.get("properties", {})
            return found
    return {}


async def _operator(cluster: Cluster) -> list[Check]:
    answer = await cluster.ask("GET", "/apis/apps/v1/deployments")
    if not answer.ok:
        return [
            _unreadable("KubeRay operator", "deployments of all namespaces", cluster, answer),
            unseen(_INDEXING, "the operator's flags are not readable"),
        ]
    judged = [
        _of_operator(deployment, container, cluster.namespace)
        for deployment in answer.items
        for container in deployment["spec"]["template"]["spec"]["containers"]
        if _OPERATOR_IMAGE.search(container["image"])
    ]
    if judged:
        return _best(judged)
    where = "no Deployment of it: Google's add-on may hide it, or it runs outside of the cluster"
    help_ = f"make a RayCluster and see whether anybody minds it; if nobody does, {_GET_KUBERAY}"
    return [unseen("KubeRay operator", where, help_), unseen(_INDEXING, "the operator's flags are not readable")]


def _best(judged: Sequence[list[Check]]) -> list[Check]:
    """The operator that is right, else what is wrong with each: a cluster may have one for each team's namespaces."""
    for rows in judged:
        if rows[0].ok:
            return rows
    found = "; ".join(dict.fromkeys(rows[0].found for rows in judged))
    help_ = "; ".join(dict.fromkeys(rows[0].help for rows in judged))
    return [Check("KubeRay operator", False, found, help_), *judged[0][1:]]


def _of_operator(deployment: dict[str, Any], container: dict[str, Any], namespace: str) -> list[Check]:
    flags = _flags([*(container.get("command") or []), *(container.get("args") or [])])
    tag = _TAG.search(container["image"].rsplit("/", 1)[-1])
    version = numbers(tag[1]) if tag else None
    meta = deployment["metadata"]
    name, known = f"{meta['namespace']}/{meta['name']}", container["image"].rsplit("/", 1)[-1]
    watched = [one for one in flags.get("watch-namespace", "").split(",") if one]
    running = deployment.get("status", {}).get("availableReplicas", 0)
    found = Check("KubeRay operator", True, f"{known} as {name}")
    if version and version < _OLDEST_KUBERAY:
        found = Check("KubeRay operator", False, f"{known} as {name} is too old", _NEWER_KUBERAY)
    elif _gates(flags).get(_CONDITIONS, "true").lower() == "false":
        found = Check(
            "KubeRay operator",
            False,
            f"{name} has {_CONDITIONS} off: no lease is ever ready",
            f"give it --feature-gates={_CONDITIONS}=true, or leave that gate out",
        )
    elif not running:
        look = f"kubectl describe deployment --namespace {meta['namespace']} {meta['name']}"
        found = Check("KubeRay operator", False, f"{name} has no pod that is up", look)
    elif watched and namespace not in watched:
        help_ = f"use one of them (--namespace), or add {namespace!r} to its --watch-namespace"
        found = Check("KubeRay operator", False, f"{name} minds only {', '.join(watched)}", help_)
    return [found, _indexing(flags, version)]


def _indexing(flags: dict[str, str], version: tuple[int, ...] | None) -> Check:
    said = _gates(flags).get(_INDEXING)
    if said is None and "config" in flags:
        return unseen(_INDEXING, f"is set in {flags['config']} of the operator, if at all")
    if said is None and version is None:
        return unseen(_INDEXING, "nobody sets it, and the image does not tell its version")
    if said is not None and said.lower() == "true":
        return Check(_INDEXING, True, "on")
    if said is None and version is not None and version >= _INDEXING_SINCE:
        return Check(_INDEXING, True, "on by default")
    return Check(
        _INDEXING,
        False,
        "off: hosts of a slice are numbered by counting pods, which has given two of them the same id",
        f"KubeRay 1.6 or newer has it on; before, give the operator --feature-gates={_INDEXING}=true",
        needed=False,
    )


def _gates(flags: dict[str, str]) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\w+)", flags.get("feature-gates", "")))


def _flags(words: Sequence[str]) -> dict[str, str]:
    """Flags of a command line, in both spellings: ``--a=b`` and ``--a b``."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            found[name] = value if equals else ("" if following.startswith("-") else following)
    return found


async def _rights(cluster: Cluster) -> Check:
    wanted = needed(PROXY) if cluster.settings.proxied else needed()
    name = f"rights in {cluster.namespace}"
    refused = await cluster.refused(wanted)
    if isinstance(refused, Answer):
        return unseen(name, refused.message, "have the ClusterRole system:basic-user granted")
    if not refused:
        return Check(name, True, f"all {len(wanted)}")
    return Check(name, False, _in_words(refused), _how_to_grant(cluster))


def _in_words(rights: Sequence[Right]) -> str:
    by_resource = groupby(rights, key=lambda right: right.full_name)
    return "not allowed: " + "; ".join(f"{', '.join(one.verb for one in group)} {name}" for name, group in by_resource)


def _how_to_grant(cluster: Cluster) -> str:
    apply, subject = _apply("rbac.yaml", cluster), _subject(cluster)
    if subject is None:
        return apply
    return (
        f"{apply}, then kubectl create rolebinding raytpu-user --namespace {cluster.namespace} --role raytpu {subject}"
    )


def _apply(name: str, cluster: Cluster) -> str:
    """The command that applies one of our manifests for the namespace at hand."""
    file = manifest(name)
    if cluster.namespace == _NAMESPACE:
        return f"kubectl apply -f {file}"
    return f"sed 's/namespace: {_NAMESPACE}$/namespace: {cluster.namespace}/' {file} | kubectl apply -f -"


def _subject(cluster: Cluster) -> str | None:
    """Whom a binding of ours has to name; None for the service account that our manifests bind themselves."""
    user = cluster.user or "USER"
    match = re.fullmatch(r"system:serviceaccount:([^:]+):([^:]+)", user)
    if match is None:
        return f"--user {user}"
    where, name = match.groups()
    return None if (where, name) == (cluster.namespace, _ACCOUNT) else f"--serviceaccount {where}:{name}"


async def _kueue(cluster: Cluster) -> Check:
    return await _optional(cluster, "Kueue", "kueue.x-k8s.io", "the option `queue`", "not installed")


async def _queued(cluster: Cluster) -> Check:
    absent = f"not there, {queued.NEEDS} has it"
    return await _optional(
        cluster, "queued provisioning", queued.GROUP, "capacity `Queued` with the option `node_pools`", absent
    )


async def _optional(cluster: Cluster, name: str, group: str, needs: str, absent: str) -> Check:
    """An API that only some leases use, and the rights on it.

    :param name: of the feature, as ``RIGHTS`` has it.
    :param needs: what uses it.
    :param absent: what is to be said where the cluster does not have it.
    """
    answer = await cluster.ask("GET", f"/apis/{group}")
    if answer.status == 404:
        return Check(name, True, f"{absent}; only {needs} needs it")
    if not answer.ok:
        return unseen(name, answer.message)
    refused = await cluster.refused([right for right in RIGHTS if right.only_for == name])
    if refused and not isinstance(refused, Answer):
        help_ = f"only {needs} needs it: {_how_to_grant(cluster)}"
        return Check(name, False, _in_words(refused), help_, needed=False)
    return Check(name, True, ", ".join(one["version"] for one in answer.body.get("versions") or []))


async def _nodes(cluster: Cluster) -> list[Check]:
    # All of them: what a slice's nodes may lack is the label to ask for.
    answer = await cluster.ask("GET", "/api/v1/nodes")
    if not answer.ok:
        return [_unreadable(name, "nodes", cluster, answer) for name in (doctor_nodes.SLICES, doctor_nodes.HEAD)]
    return doctor_nodes.judge(answer.items, cluster.settings.head)


#: In the order in which they are shown.
_LOOKS: tuple[Callable[[Cluster], Awaitable[Check | list[Check]]], ...] = (
    _namespace,
    _api,
    _operator,
    doctor_webhook.check,
    _rights,
    _kueue,
    _queued,
    _nodes,
)


def _unreadable(name: str, what: str, cluster: Cluster, answer: Answer) -> Check:
    if answer.status != 403:
        return unseen(name, answer.message)
    subject = _subject(cluster)
    bind = f", then kubectl create clusterrolebinding raytpu-doctor-user --clusterrole raytpu-doctor {subject}"
    return unseen(name, f"not readable: no right on {what}", _apply("doctor.yaml", cluster) + (bind if subject else ""))


def manifest(name: str) -> str:
    """Where a manifest of ``deploy/gke`` is.

    :param name: of the file.
    """
    return deployed(f"gke/{name}")
