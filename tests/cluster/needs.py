"""What a test needs of this machine or of a cluster; where that is absent it is skipped, with the reason by name.

A cluster that somebody named (`RAYTPU_TEST_KUBECONFIG`) and that cannot be used is no reason to skip: it fails.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.testbed.faults import KubernetesFaults

VARIABLE = "RAYTPU_TEST_KUBECONFIG"
#: JSON of backend options for that cluster, over those for the testbed: image, templates, service account.
OPTIONS = "RAYTPU_TEST_OPTIONS"
#: Where its pods keep checkpoints: a bucket, or a folder of its nodes, which they mount.
STORAGE = "RAYTPU_TEST_STORAGE"


def a_testbed(*, nodes: bool, kueue: bool = False) -> None:
    """Parts that are built, and a machine that they run on.

    :param nodes: with kubelets.
    :param kueue: with Kueue.
    """
    if os.environ.get(VARIABLE):
        pytest.skip(f"needs the testbed's own levers, and {VARIABLE} names another cluster")
    for module in ("kubernetes", "grpc"):
        pytest.importorskip(module, reason="the testbed needs the extra `dev`")
    from tests.testbed import parts

    reason = parts.unready(nodes=nodes, kueue=kueue)
    if reason:  # half an hour of compiling is nothing to start by surprise
        pytest.skip(reason)


def given_kubeconfig() -> Path | None:
    """The kubeconfig of the cluster that the suite is pointed at; None for the testbed."""
    given = os.environ.get(VARIABLE)
    if not given:
        return None
    path = Path(given).expanduser()
    if not path.is_file():
        pytest.fail(f"{VARIABLE}={given} is no file")
    return path


def options() -> dict[str, Any]:
    """Options of the backend that the cluster wants."""
    found = json.loads(os.environ.get(OPTIONS) or "{}")
    if not isinstance(found, dict):
        pytest.fail(f"{OPTIONS} is no JSON object")
    return found


def storage(cluster: KubernetesFaults) -> str:
    """Where pods keep checkpoints so that all of them, and this machine's Airflow, know them by one name.

    :param cluster: the testbed, which has a folder for it, or another one.
    """
    from tests.testbed.client import Testbed

    if isinstance(cluster, Testbed):
        return str(cluster.shared)
    found = os.environ.get(STORAGE)
    if not found:
        pytest.skip(f"{STORAGE} does not say where pods of the cluster of {cluster.kubeconfig} keep checkpoints")
    return found


def kuberay(cluster: KubernetesFaults) -> None:
    """A cluster that knows RayClusters.

    :param cluster: that somebody named.
    """
    from kubernetes.dynamic.exceptions import ResourceNotFoundError

    try:
        cluster.dynamic.resources.get(api_version="ray.io/v1", kind="RayCluster")
    except ResourceNotFoundError:
        pytest.fail(f"the cluster of {cluster.kubeconfig} knows no RayCluster: install KubeRay there")


def kueue(cluster: KubernetesFaults) -> None:
    """Kueue.

    :param cluster: that somebody named.
    """
    from kubernetes.dynamic.exceptions import ResourceNotFoundError

    try:
        cluster.dynamic.resources.get(api_version="kueue.x-k8s.io/v1beta2", kind="Workload")
    except ResourceNotFoundError:
        pytest.skip(f"no Kueue with kueue.x-k8s.io/v1beta2 in the cluster of {cluster.kubeconfig}")


def tpu_nodes(cluster: KubernetesFaults, accelerator: str, topology: str, hosts: int) -> None:
    """Nodes that a slice fits on.

    :param cluster: where.
    :param accelerator: value of GKE's label, `tpu-v4-podslice`.
    :param topology: value of GKE's label, `2x2x2`.
    :param hosts: how many.
    """
    wanted = f"cloud.google.com/gke-tpu-accelerator={accelerator},cloud.google.com/gke-tpu-topology={topology}"
    there = len(cluster.nodes(wanted))
    if there < hosts:
        pytest.skip(f"{there} of {hosts} nodes with {wanted} in the cluster of {cluster.kubeconfig}")


def tpu_webhook(cluster: KubernetesFaults) -> None:
    """GKE's TPU webhook, or one that plays it.

    :param cluster: where.
    """
    from kubernetes import client

    found = client.AdmissionregistrationV1Api(cluster.api).list_mutating_webhook_configuration().items
    if not any("tpu-webhook" in one.metadata.name for one in found):
        pytest.skip(f"no TPU webhook in the cluster of {cluster.kubeconfig}")
