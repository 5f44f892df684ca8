"""Namespaces and accounts with few rights, on any cluster, so that tests run with what a manifest grants.

Not here: the identities of the cluster's own programs (`controlplane.py`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from kubernetes import client

if TYPE_CHECKING:
    from tests.testbed.faults import KubernetesFaults

Manifest = dict[str, Any]
_RBAC = "rbac.authorization.k8s.io/v1"
_FIELD_MANAGER = "raytpu-testbed"


@contextmanager
def namespace(cluster: KubernetesFaults, name: str, *, wait: bool = True) -> Iterator[str]:
    """A namespace in which pods may be made; gone, with all that is in it, when this ends.

    :param cluster: where.
    :param name: of it.
    :param wait: until it is gone, which takes Kubernetes five seconds; else it is told to go.
    """
    from tests.testbed.faults import wait_until

    def answers(read: Any, *args: str) -> bool:
        try:
            read(*args)
        except client.ApiException as error:
            if error.status == 404:
                return False
            raise
        return True

    cluster.core.create_namespace({"metadata": {"name": name}})
    try:
        # Pods are refused until it is there.
        wait_until(
            lambda: answers(cluster.core.read_namespaced_service_account, "default", name),
            60,
            f"the namespace {name} has no service account",
        )
        yield name
    finally:
        cluster.core.delete_namespace(name)
        if wait:
            wait_until(
                lambda: not answers(cluster.core.read_namespace, name),
                180,
                f"the namespace {name} is still in deletion",
            )


def role(rules: Iterable[Manifest], name: str) -> list[Manifest]:
    """Manifests of an account that may do what some rules say, in one namespace.

    :param rules: of a Role: `apiGroups`, `resources`, `verbs`.
    :param name: of all three objects.
    """
    metadata = {"name": name}
    subject = {"kind": "ServiceAccount", "name": name}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": _RBAC, "kind": "Role", "metadata": metadata, "rules": list(rules)},
        {
            "apiVersion": _RBAC,
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": reference,
            "subjects": [subject],
        },
    ]


def kubeconfig_for(
    cluster: KubernetesFaults, rights: Path | Iterable[Manifest], where: str, account: str = ""
) -> Manifest:
    """Grant rights to a service account, and make a kubeconfig with its token.

    :param cluster: where.
    :param rights: a manifest with ServiceAccount, Role and RoleBinding, applied as it stands but for its
        namespace; or rules of a Role, for an account of their own. What is not in a namespace gets this one's
        name into its own, and goes when the namespace goes.
    :param where: the namespace.
    :param account: the ServiceAccount; the one that the manifest binds if left out.
    :return: the kubeconfig's content; a secret.
    """
    if isinstance(rights, Path):
        manifests = [one for one in yaml.safe_load_all(rights.read_text()) if one]
    else:
        manifests = role(rights, f"few-rights-{secrets.token_hex(3)}")
    account = account or _bound_account(manifests)
    owner = cluster.core.read_namespace(where).metadata.uid
    for one in manifests:
        _apply(cluster, _moved(one, where, owner), where)
    return _kubeconfig(cluster, where, account)


def _bound_account(manifests: list[Manifest]) -> str:
    bound = {
        subject["name"]
        for one in manifests
        if one["kind"] in ("RoleBinding", "ClusterRoleBinding")
        for subject in one.get("subjects") or []
        if subject["kind"] == "ServiceAccount"
    }
    if len(bound) != 1:
        raise ValueError(f"say which account: the manifest binds {', '.join(sorted(bound)) or 'none'}")
    return str(bound.pop())


def _moved(one: Manifest, where: str, owner: str) -> Manifest:
    moved: Manifest = json.loads(json.dumps(one))
    if one["kind"].startswith("Cluster"):
        moved["metadata"]["name"] += f"-{where}"
        moved["metadata"]["ownerReferences"] = [{"apiVersion": "v1", "kind": "Namespace", "name": where, "uid": owner}]
        if one.get("roleRef", {}).get("kind") == "ClusterRole":
            moved["roleRef"]["name"] += f"-{where}"
    else:
        moved["metadata"]["namespace"] = where
    for subject in moved.get("subjects") or []:
        if subject["kind"] == "ServiceAccount":
            subject["namespace"] = where
    return moved


def _apply(cluster: KubernetesFaults, one: Manifest, where: str) -> None:
    resource = cluster.dynamic.resources.get(api_version=one["apiVersion"], kind=one["kind"])
    resource.server_side_apply(
        body=one,
        name=one["metadata"]["name"],
        namespace=where if resource.namespaced else None,
        field_manager=_FIELD_MANAGER,
        force_conflicts=True,
    )


def _kubeconfig(cluster: KubernetesFaults, where: str, account: str) -> Manifest:
    request = client.AuthenticationV1TokenRequest(spec=client.V1TokenRequestSpec(audiences=[], expiration_seconds=7200))
    token = cluster.core.create_namespaced_service_account_token(account, where, request).status.token
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "cluster", "cluster": _cluster_entry(cluster.kubeconfig)}],
        "users": [{"name": account, "user": {"token": token}}],
        "contexts": [{"name": account, "context": {"cluster": "cluster", "user": account, "namespace": where}}],
        "current-context": account,
    }


def _cluster_entry(kubeconfig: Path) -> Manifest:
    """How the API server is reached and trusted, by the current context of a kubeconfig."""
    content = yaml.safe_load(kubeconfig.read_text())
    context = next(one["context"] for one in content["contexts"] if one["name"] == content["current-context"])
    entry: Manifest = dict(next(one["cluster"] for one in content["clusters"] if one["name"] == context["cluster"]))
    trust = entry.get("certificate-authority")
    if trust:  # as Kubernetes reads it: relative to the file that names it
        entry["certificate-authority"] = str(kubeconfig.parent / trust)
    return entry
