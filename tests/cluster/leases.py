"""The `gke` backend on the testbed or a named cluster: options for small machines, leases of a test's own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.tpu.capacity import AnyCapacity, ladder
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.spec import SliceSpec
from tests.cluster import needs

V4 = SliceSpec.of("v4", "2x2x2", num_slices=2)


def small(storage: str = "", **more: Any) -> dict[str, Any]:
    """Options for hosts that are played on two cores: little is asked for, and JAX runs on CPUs.

    :param storage: a folder of the nodes that every pod sees under the same path; a bucket needs no such thing.
    :param more: further options, over these and over those that a named cluster wants.
    """

    def template(container: str) -> dict[str, Any]:
        main: dict[str, Any] = {
            "name": container,
            "env": [{"name": "JAX_PLATFORMS", "value": "cpu"}, {"name": "OMP_NUM_THREADS", "value": "1"}],
        }
        pod: dict[str, Any] = {"terminationGracePeriodSeconds": 2, "containers": [main]}
        if storage.startswith("/"):
            main["volumeMounts"] = [{"name": "storage", "mountPath": storage}]
            pod["volumes"] = [{"name": "storage", "hostPath": {"path": storage}}]
        return {"spec": pod}

    return {
        "head": {"cpu": "100m", "memory": "3Gi"},
        "host": {"cpu": "100m", "memory": "512Mi"},
        "head_start_params": {"num-cpus": "4"},
        "host_start_params": {"num-cpus": "1"},
        "head_template": template("ray-head"),
        "host_template": template("ray-worker"),
        **needs.options(),
        **more,
    }


def backend(kubeconfig: Path, **options: Any) -> GkeBackend:
    """The backend as its users have it, with a kubeconfig."""
    return GkeBackend(KubeconfigAccess(str(kubeconfig)), **small(**options))


def owner(task: str, run: str = "manual__1") -> Owner:
    """A task that owns a lease."""
    return Owner(dag_id="cluster", run_id=run, task_id=task)


async def acquired(
    gke: GkeBackend, task: str, spec: SliceSpec = V4, capacity: Sequence[AnyCapacity] | None = None
) -> SliceLease:
    """A lease, planned and acquired as the operator does it."""
    plan = await gke.plan(spec, ladder(capacity), lease_for=timedelta(hours=1))
    return await gke.acquire(plan, owner(task))
