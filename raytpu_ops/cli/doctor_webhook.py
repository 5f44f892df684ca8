"""Whether GKE's TPU webhook is there and works, found out by dry runs: nothing is created.

A dry run goes through admission as the real thing does. So a pod tells whether the webhook gives
worker ids, and, for those who may not create pods, a RayCluster with one host too many tells whether
it refuses what it must refuse. Not here: the webhook's rules for what we send it, which is the
backend's business (``backends/gke/manifest.py``).
"""

from __future__ import annotations

from typing import Any

from raytpu_ops.backends.gke.rights import RIGHTS, Right
from raytpu_ops.cli.doctor import Check, unseen
from raytpu_ops.cli.doctor_cluster import Answer, Cluster
from raytpu_ops.tpu.shapes import ACCELERATOR_LABEL, TOPOLOGY_LABEL

NAME = "TPU webhook"
_HELP = (
    "on GKE it comes with the Ray add-on (gcloud container clusters update CLUSTER --location LOCATION "
    "--update-addons RayOperator=ENABLED); elsewhere install cert-manager and then "
    "https://github.com/ai-on-gke/kuberay-tpu-webhook"
)
_CREATE_PODS = Right("", "pods", "", "create", "the dry run; the backend itself never creates a pod")
_CREATE_CLUSTERS = next(right for right in RIGHTS if (right.resource, right.verb) == ("rayclusters", "create"))
_MARK = {"app.kubernetes.io/name": "kuberay"}
#: A slice of two hosts with four chips each, whose second host is the one that we ask about.
_SELECTOR = {
    ACCELERATOR_LABEL: "tpu-v5-lite-podslice",
    TOPOLOGY_LABEL: "2x4",
}
_HOST = 1
_CONTAINER = "host"


async def check(cluster: Cluster) -> Check:
    """The TPU webhook, as well as it can be seen with the rights that there are."""
    registered = await _registered(cluster)
    if await cluster.may(_CREATE_PODS):
        answer = await cluster.ask("POST", f"/api/v1/namespaces/{cluster.namespace}/pods", _pod(), dryRun="All")
        return _of_pod(answer, registered)
    if await cluster.may(_CREATE_CLUSTERS):
        where = f"/apis/ray.io/v1/namespaces/{cluster.namespace}/rayclusters"
        answer = await cluster.ask("POST", where, _ray_cluster(), dryRun="All")
        return _of_cluster(answer, registered)
    if registered is None:
        return unseen(NAME, "may neither read webhooks nor create what they act on", "ask again once rights are there")
    if not registered:
        return Check(NAME, False, "none is registered for pods", _HELP)
    return Check(NAME, True, f"{registered[0]} is registered; whether it answers was not tried")


async def _registered(cluster: Cluster) -> list[str] | None:
    """Names of the mutating webhooks for pods that look like it; None where we may not know."""
    answer = await cluster.ask("GET", "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations")
    if not answer.ok:
        return None
    found = []
    for one in answer.items:
        for webhook in one.get("webhooks") or []:
            names = f"{one['metadata']['name']} {webhook['name']}"
            resources = [name for rule in webhook.get("rules") or [] for name in rule.get("resources") or []]
            if "tpu" in names and {"pods", "*", "*/*"} & set(resources):
                found.append(one["metadata"]["name"])
    return found


def _of_pod(answer: Answer, registered: list[str] | None) -> Check:
    if not answer.ok:
        return _refused(answer, registered, "pod")
    # Other webhooks add containers of their own.
    hosts = [container for container in answer.body["spec"]["containers"] if container["name"] == _CONTAINER]
    ids = [one.get("value") for host in hosts for one in host.get("env") or [] if one["name"] == "TPU_WORKER_ID"]
    if not ids:
        return _absent("pods get no TPU_WORKER_ID", registered)
    if ids != [str(_HOST)]:
        help_ = "install a newer one: this one counts hosts by itself, and has given two hosts the same id"
        return Check(NAME, False, f"gives host {_HOST} the TPU_WORKER_ID {ids[0]}", help_, needed=False)
    return Check(NAME, True, "gives each host its TPU_WORKER_ID")


def _of_cluster(answer: Answer, registered: list[str] | None) -> Check:
    if answer.ok:
        return _absent("a RayCluster with too many hosts for its topology was not refused", registered)
    if "Number of workers in worker group not equal" in answer.message:
        return Check(NAME, True, "refuses a RayCluster with too many hosts for its topology")
    return _refused(answer, registered, "RayCluster")


def _absent(what: str, registered: list[str] | None) -> Check:
    if registered:
        return Check(NAME, False, f"{what}, though {registered[0]} is registered", "look into the webhook's own log")
    return Check(NAME, False, what, _HELP)


def _refused(answer: Answer, registered: list[str] | None, what: str) -> Check:
    if "failed calling webhook" in answer.message:
        help_ = "see whether its pod runs and its certificate is valid; until it answers no slice can be made"
        return Check(NAME, False, answer.message, help_)
    if answer.status == 404:
        return unseen(NAME, "KubeRay or the namespace is not there", "ask again once it is")
    # A policy or a quota of this cluster came first, and the webhook was not reached.
    known = f"{registered[0]} is registered; " if registered else ""
    help_ = f"a {what} of the backend may meet the same refusal: see that this namespace lets Ray's pods in"
    return unseen(NAME, f"{known}the {what} of the dry run was refused: {answer.message}", help_)


def _pod() -> dict[str, Any]:
    labels = {
        **_MARK,
        "ray.io/cluster": "raytpu-doctor",
        "ray.io/group": "doctor",
        "ray.io/worker-group-replica-name": "doctor-0",
        "ray.io/worker-group-replica-index": "0",
        "ray.io/replica-host-index": str(_HOST),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "raytpu-doctor-", "labels": labels},
        "spec": _pod_spec(),
    }


def _pod_spec() -> dict[str, Any]:
    # As strict as the strictest of Kubernetes' pod security standards asks for.
    container = {
        "name": _CONTAINER,
        "image": "none",
        "resources": {
            "requests": {"cpu": "1", "memory": "1Gi", "google.com/tpu": "4"},
            "limits": {"cpu": "1", "memory": "1Gi", "google.com/tpu": "4"},
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "nodeSelector": _SELECTOR,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "automountServiceAccountToken": False,
        "containers": [container],
    }


def _ray_cluster() -> dict[str, Any]:
    worker = {
        "groupName": "doctor",
        "replicas": 1,
        "minReplicas": 1,
        "maxReplicas": 1,
        "numOfHosts": 3,  # 2x4 is eight chips: two hosts of four
        "rayStartParams": {},
        "template": {"metadata": {"labels": _MARK}, "spec": _pod_spec()},
    }
    head = {
        "rayStartParams": {},
        "template": {"metadata": {"labels": _MARK}, "spec": {"containers": [{"name": "head", "image": "none"}]}},
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"generateName": "raytpu-doctor-", "labels": _MARK},
        "spec": {"headGroupSpec": head, "workerGroupSpecs": [worker]},
    }
