"""What Ray itself says of a RayCluster's hosts, asked through the API server without the package's own code."""

from __future__ import annotations

import base64
import json
from typing import NamedTuple

from kubernetes import client

from tests.testbed.faults import KubernetesFaults


class Labels(NamedTuple):
    """What Ray labelled a host with.

    :param slice_name: the slice.
    :param worker_id: the host's number in it.
    """

    slice_name: str
    worker_id: str


def ray_token(cluster: KubernetesFaults, name: str, namespace: str = "default") -> str:
    """The token of a RayCluster; empty while KubeRay has not made it.

    :param cluster: where.
    :param name: of the RayCluster.
    :param namespace: of the RayCluster.
    """
    try:
        secret = cluster.core.read_namespaced_secret(name, namespace)
    except client.ApiException as error:
        if error.status == 404:
            return ""
        raise
    return base64.b64decode(secret.data["auth_token"]).decode()


def ray_labels(cluster: KubernetesFaults, name: str, namespace: str = "default") -> dict[str, Labels]:
    """Address of each host that Ray has labelled -> its labels; nothing while Ray does not answer.

    :param cluster: where.
    :param name: of the RayCluster.
    :param namespace: of the RayCluster.
    """
    token = ray_token(cluster, name, namespace)
    status, body = cluster.proxied(namespace, f"{name}-head-svc:dashboard", "api/v0/nodes?detail=1", token)
    if status != 200:
        return {}
    nodes = (json.loads(body).get("data") or {}).get("result", {}).get("result", [])
    return {
        one["node_ip"]: Labels(one["labels"]["ray.io/tpu-slice-name"], one["labels"]["ray.io/tpu-worker-id"])
        for one in nodes
        if one["state"] == "ALIVE" and "ray.io/tpu-slice-name" in one["labels"]
    }
