"""What Airflow reads about this package at start-up: connection type, links. Imports nothing else.

The keys are those of Airflow's ``provider_info.schema.json`` (3.3) and of what its ProvidersManager
reads beyond it: ``conn-fields`` and ``ui-field-behaviour`` make the connection form.
"""

from __future__ import annotations

from typing import Any

from raytpu_ops import __version__


def _text(label: str, description: str, **schema: Any) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": ["string", "null"], **schema}}


def _box(label: str, description: str) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": ["boolean", "null"]}}


#: What a person fills in; whatever else a backend takes goes into the form's JSON of extra fields.
_FIELDS = {
    "backend": _text(
        "Backend",
        "Who grants the slices: 'local' lets this machine play the TPU hosts, 'gke' is KubeRay on GKE or on any "
        "other Kubernetes with TPU nodes, 'tpu_vm' are Cloud TPU VMs.",
        enum=["local", "gke", "tpu_vm"],
        default="local",
    ),
    "root": _text(
        "Root folder (local)",
        "Where the local backend keeps its leases; empty for a folder of the user's own in the temp folder. Short, "
        "because Ray puts sockets below it.",
        maxLength=60,
    ),
    "namespace": _text("Namespace (gke)", "Where RayClusters are made; empty for 'default'.", maxLength=63),
    "image": _text("Image (gke)", "Image of Ray's head and hosts; empty for the stock Ray image."),
    "queue": _text("Kueue queue (gke)", "A LocalQueue in which RayClusters wait for quota.", maxLength=63),
    "cluster_name": _text(
        "GKE cluster (gke)",
        "The cluster's name, with its location below. Leave both empty for a cluster that a Kubernetes connection or "
        "a kubeconfig names, or that Airflow itself runs in.",
    ),
    "location": _text("Location (gke)", "The GKE cluster's region or zone."),
    "node_pools": _text(
        "Node pools (gke)",
        'JSON such as {"zones": ["us-east5-b"]}: make a node pool for each slice and delete it on release. Empty for '
        "nodes that exist or that an autoscaler brings.",
    ),
    "zones": _text("Zones (tpu_vm)", "Where slices may be, separated by commas, in the order in which they are tried."),
    "project_id": _text("Project (gke, tpu_vm)", "The project at Google; empty for the Google connection's."),
    "gcp_conn_id": _text(
        "Google connection (gke, tpu_vm)", "Who asks; empty for 'google_cloud_default', or what the machine has."
    ),
    "impersonation_chain": _text(
        "Act as (gke, tpu_vm)", "Service accounts to act as, separated by commas; the last one is shown to Google."
    ),
    "use_internal_ip": _box("Private address (gke)", "Talk to the control plane's private address."),
    "use_dns_endpoint": _box("DNS endpoint (gke)", "Talk to the control plane's DNS name."),
    "kubernetes_conn_id": _text(
        "Kubernetes connection (gke)", "A connection of type Kubernetes that leads to the cluster instead."
    ),
    "kubeconfig": _text("Kubeconfig (gke)", "Path of a kubeconfig on every machine of Airflow instead."),
    "context": _text("Context (gke)", "Of that kubeconfig, or of the Kubernetes connection's."),
}


def get_provider_info() -> dict[str, Any]:
    """The provider's metadata, for the ``apache_airflow_provider`` entry point."""
    return {
        "package-name": "raytpu-ops",
        "name": "Ray on TPU",
        "description": "Provisions Cloud TPU slices, proves them ready, trains and serves on them with Ray, "
        "and releases them.",
        "versions": [__version__],
        "connection-types": [
            {
                "connection-type": "ray_tpu",
                "hook-class-name": "raytpu_ops.hooks.ray_tpu.RayTpuHook",
                "hook-name": "Ray on TPU",
                "conn-fields": _FIELDS,
                "ui-field-behaviour": {
                    "hidden-fields": ["host", "port", "login", "password", "schema"],
                    "relabeling": {},
                    "placeholders": {},
                },
            }
        ],
        "config": {
            "raytpu": {
                "description": "Ray on TPU",
                "options": {
                    "deployment": {
                        "description": "A name for this Airflow, where several run the same DAG on one cluster or in "
                        "one project: it becomes part of whose a lease is, so that none touches another's slices. "
                        "Change it only while no lease is held.",
                        "version_added": None,
                        "type": "string",
                        "example": "staging",
                        "default": "",
                    }
                },
            }
        },
        "extra-links": ["raytpu_ops.links.ray_dashboard.RayDashboardLink"],
    }
