"""A Kubernetes cluster as `raytpu doctor` sees it, played over HTTP: all is well until a test says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import kmock
import yaml

ACCOUNT = "system:serviceaccount:raytpu:raytpu-airflow"
PODS = "/api/v1/namespaces/raytpu/pods"
RAY_CLUSTERS = "/apis/ray.io/v1/namespaces/raytpu/rayclusters"
DEPLOYMENTS = "/apis/apps/v1/deployments"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
WHO = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
NODES = "/api/v1/nodes"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
WRONG_HOSTS = "admission webhook denied: Number of workers in worker group not equal to specified topology"

#: Status and body; or what makes the body out of a request.
Reaction = tuple[int, Any] | Callable[[kmock.Request], Any]


def refusal(status: int, message: str) -> Reaction:
    return status, {"kind": "Status", "message": message, "code": status}


def deployment(image: str = "kuberay/operator:v1.6.2", *args: str, available: int = 1) -> dict[str, Any]:
    container = {"name": "kuberay-operator", "image": image, "command": ["/manager"], "args": list(args)}
    return {
        "metadata": {"namespace": "ray-system", "name": "kuberay-operator"},
        "spec": {"template": {"spec": {"containers": [container]}}},
        "status": {"availableReplicas": available},
    }


def webhook(name: str = "kuberay-tpu-mutating-webhook-cfg", resource: str = "pods") -> dict[str, Any]:
    one = {"name": "kuberay-tpu-webhook.ray-system.svc", "rules": [{"resources": [resource]}]}
    return {"metadata": {"name": name}, "webhooks": [one]}


TAINT = {"key": "google.com/tpu", "value": "present", "effect": "NoSchedule"}


def node(pool: str, topology: str = "2x2x2", chips: str = "4", without: Collection[str] = ()) -> dict[str, Any]:
    """A host of a slice, without some of GKE's labels."""
    labels = {
        "cloud.google.com/gke-nodepool": pool,
        "cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice",
        "cloud.google.com/gke-tpu-topology": topology,
    }
    return {
        "metadata": {
            "name": f"{pool}-x",
            "labels": {key: value for key, value in labels.items() if key.rsplit("/")[-1] not in without},
        },
        "spec": {"taints": [TAINT]},
        "status": {"allocatable": {"cpu": "240", "memory": "400Gi", "google.com/tpu": chips}},
    }


def plain_node(cpu: str = "3920m", memory: str = "13906988Ki", *taints: dict[str, str]) -> dict[str, Any]:
    """A node without TPUs, by default an n2-standard-4."""
    return {
        "metadata": {"name": "plain"},
        "spec": {"taints": list(taints)} if taints else {},
        "status": {"allocatable": {"cpu": cpu, "memory": memory}},
    }


def nodes(*of_the_cluster: dict[str, Any]) -> Reaction:
    """Their list, or those of it that a selector of one label leaves."""

    def listed(request: kmock.Request) -> Any:
        selector = request.params.get("labelSelector")
        return {
            "items": [one for one in of_the_cluster if not selector or selector in one["metadata"].get("labels", {})]
        }

    return listed


def admitted(body: dict[str, Any], worker_id: str | None) -> dict[str, Any]:
    """A pod as the webhook hands it back."""
    added = [] if worker_id is None else [{"name": "TPU_WORKER_ID", "value": worker_id}]
    body["spec"]["containers"][0]["env"] = added
    return body


class FakeCluster:
    """An API server of a cluster where all is well, until a test says otherwise."""

    def __init__(self) -> None:
        self.user = ACCOUNT
        #: Verbs with a resource that are refused: `"create pods"`.
        self.refused = {"create pods"}
        properties = {"spec": {"properties": {"authOptions": {}, "rayVersion": {}}}}
        self.answers: dict[str, Reaction] = {
            f"post {REVIEWS}": self._access_review,
            f"post {WHO}": lambda _: {"status": {"userInfo": {"username": self.user}}},
            "get /version": (200, {"gitVersion": "v1.33.1-gke.7"}),
            "get /api/v1/namespaces/raytpu": (200, {"status": {"phase": "Active"}}),
            "get /apis/ray.io": (200, {"versions": [{"version": "v1"}, {"version": "v1alpha1"}]}),
            "get /openapi/v3/apis/ray.io/v1": (
                200,
                {"components": {"schemas": {"io.ray.v1.RayCluster": {"properties": properties}}}},
            ),
            f"get {DEPLOYMENTS}": (200, {"items": [deployment()]}),
            f"get {WEBHOOKS}": (200, {"items": [webhook()]}),
            f"post {RAY_CLUSTERS}": refusal(403, WRONG_HOSTS),
            f"post {PODS}": lambda request: admitted(request.data, "1"),
            "get /apis/autoscaling.x-k8s.io": (200, {"versions": [{"version": "v1"}]}),
            "get /apis/kueue.x-k8s.io": (200, {"versions": [{"version": "v1beta1"}]}),
            f"get {NODES}": nodes(node("pool-a"), node("pool-a"), node("pool-b"), plain_node()),
        }

    def _access_review(self, request: kmock.Request) -> Any:
        asked = request.data["spec"]["resourceAttributes"]
        assert asked["namespace"] == "raytpu"
        resource = f"{asked['resource']}/{asked['subresource']}".rstrip("/")
        return {"status": {"allowed": f"{asked['verb']} {resource}" not in self.refused}}

    def install(self, handler: kmock.RawHandler) -> None:
        for where, reaction in self.answers.items():
            if callable(reaction):
                handler[where] << reaction
            else:
                handler[where] << reaction[0] << reaction[1]
        handler.fallback << 404 << {"message": "not found"}


def kubeconfig(folder: Path, server: str) -> Path:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "one", "cluster": {"server": server}}],
        "users": [{"name": "one", "user": {"token": "of-a-test"}}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
        "current-context": "one",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(content))
    return path
