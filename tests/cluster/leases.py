"""The `gke` backend on the testbed or a named cluster: options for small machines, leases of a test's own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.merge import merged
from raytpu_ops.flows.jobs import JobRequest, begin
from raytpu_ops.flows.leases import give_back, wait_whole
from raytpu_ops.flows.packages import runtime_env_with
from raytpu_ops.tpu.capacity import AnyCapacity, ladder
from raytpu_ops.tpu.deadlines import Schedule
from raytpu_ops.tpu.lease import Owner, SliceLease
from raytpu_ops.tpu.readiness import Readiness
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.tpu.work import CommandWork, dump_work
from tests.cluster import needs

RBAC = Path(__file__).parents[2] / "deploy" / "gke" / "rbac.yaml"
V4 = SliceSpec.of("v4", "2x2x2", num_slices=2)
ONE = SliceSpec.of("v4", "2x2x2")
#: Seconds that only a hang takes.
LIMIT_S = 600.0


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


def small_with(**pods: dict[str, Any]) -> dict[str, Any]:
    """The same, with these pod specs merged over their templates.

    :param pods: `head_template` and `host_template`.
    """
    options = small()
    return options | {key: merged(options[key], {"spec": spec}, key) for key, spec in pods.items()}


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


def schedule() -> Schedule:
    """Deadlines that only a hang reaches."""
    phases = ("queued", "provisioning", "labelled", "starting", "running")
    return Schedule.start(dict.fromkeys(phases, LIMIT_S))


async def whole(gke: GkeBackend, lease: SliceLease) -> Readiness:
    """The report of the lease once it is whole."""
    _, report = await wait_whole(gke, lease, schedule=schedule(), say=print)
    return report


async def requested(gke: GkeBackend, lease: SliceLease, *argv: str) -> JobRequest:
    """A job as the operator makes it: a program that runs on each host of one slice."""
    attempt = await begin(gke, lease, owner("work"), 0, schedule=schedule(), say=print)
    environment = await runtime_env_with(gke, lease, None, None, schedule=schedule(), say=print)
    work = CommandWork.of(argv=list(argv), spec=ONE, start_timeout_s=LIMIT_S)
    return JobRequest(attempt=attempt, work=dump_work(work), runtime_env=environment, schedule=schedule(), poll_s=0.5)


async def released(gke: GkeBackend, lease: SliceLease) -> None:
    """Give it back; nothing of it is left."""
    await give_back(gke, lease, by=datetime.now(UTC) + timedelta(minutes=3), say=print, poll_s=0.5)
