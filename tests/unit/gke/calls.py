"""Every call of the backend to the API server, by what the server sees of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from raytpu_ops.backends.gke.api import KubeApi

MANIFEST = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "one"}, "spec": {}}
REQUEST = {
    "apiVersion": "autoscaling.x-k8s.io/v1",
    "kind": "ProvisioningRequest",
    "metadata": {"name": "one", "uid": "u"},
    "spec": {},
}
TEMPLATE = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "one"}, "template": {}}

Call = Callable[[KubeApi], Awaitable[Any]]

CALLS: dict[str, Call] = {
    "get rayclusters": lambda api: api.ray_cluster("one"),
    "list rayclusters": lambda api: api.ray_clusters("raytpu-owner"),
    "patch rayclusters": lambda api: api.apply_ray_cluster(MANIFEST),
    "delete rayclusters": lambda api: api.delete_ray_cluster("one", "u"),
    "list pods": lambda api: api.pods("one"),
    "delete pods": lambda api: api.delete_pod("one", "u"),
    "get pods/log": lambda api: api.last_lines("one", "ray-head"),
    "get secrets": lambda api: api.token("one"),
    "list workloads": lambda api: api.workload("u"),
    "list provisioningrequests": lambda api: api.provisioning_requests("raytpu-owner"),
    "patch provisioningrequests": lambda api: api.apply_provisioning_request(REQUEST),
    "delete provisioningrequests": lambda api: api.delete_provisioning_request(REQUEST),
    "patch podtemplates": lambda api: api.apply_pod_template(TEMPLATE),
}
every_call = pytest.mark.parametrize("call", CALLS)
