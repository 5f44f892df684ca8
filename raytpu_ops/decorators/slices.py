"""``with tpu_slices(…) as lease:``, the whole life of a lease around the tasks that use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.empty import EmptyOperator

from raytpu_ops.operators.tpu_slices import ProvisionTpuSlicesOperator, ReleaseTpuSlicesOperator
from raytpu_ops.sensors.tpu_slices import TpuSlicesReadySensor
from raytpu_ops.tpu.deadlines import Deadlines

if TYPE_CHECKING:
    from airflow.sdk import XComArg


@contextmanager
def tpu_slices(
    generation: str,
    *,
    topology: str | None = None,
    num_slices: int | str = 1,
    machine_type: str | None = None,
    capacity: Any = None,
    backend: str | None = None,
    backend_options: dict[str, Any] | None = None,
    ray_tpu_conn_id: str | None = None,
    lease_for: timedelta | float = timedelta(hours=24),
    deadlines: Deadlines | dict[str, Any] | None = None,
    deferrable: bool = True,
    prefix: str = "",
    **task_args: Any,
) -> Iterator[XComArg]:
    """Slices for the tasks of the ``with`` body, acquired before them and released after them.

    Expands to the tasks ``provision`` (setup), ``labelled``, ``release`` (teardown) and ``released``.
    The release runs whatever became of the body, and does not colour the run: a run whose body
    failed is red however well its release went. ``released`` is an empty task behind the release,
    by which a release that leaves something behind makes the run red too.

    :param generation: ``v6e``, ``v4`` … ; see :class:`ProvisionTpuSlicesOperator` for this and the
        parameters up to ``lease_for``.
    :param deadlines: for the phases of the lease: ``queued``, ``provisioning``, ``labelled``, ``releasing``.
    :param deferrable: wait in the triggerer.
    :param prefix: put before the three task ids, for a second lease in one DAG.
    :param task_args: arguments of all these tasks, such as ``retries``.
    :return: the lease, for the ``lease`` parameter of the tasks in the body.
    """
    Deadlines.of(deadlines)
    provision = ProvisionTpuSlicesOperator(
        task_id=f"{prefix}provision",
        generation=generation,
        topology=topology,
        num_slices=num_slices,
        machine_type=machine_type,
        capacity=capacity,
        backend=backend,
        backend_options=backend_options,
        ray_tpu_conn_id=ray_tpu_conn_id,
        lease_for=lease_for,
        deferrable=deferrable,
        **task_args,
    )
    release = ReleaseTpuSlicesOperator(
        task_id=f"{prefix}release",
        lease=provision.output,
        provision_task_id=provision.task_id,
        backend=backend,
        backend_options=backend_options,
        ray_tpu_conn_id=ray_tpu_conn_id,
        deadlines=deadlines,
        deferrable=deferrable,
        **task_args,
    )
    # Not on_failure_fail_dagrun: with it Airflow counts the teardown as the run's only leaf, and a
    # release that succeeds would hide work that failed (airflow/models/dagrun.py, is_effective_leaf).
    with release.as_teardown(setups=provision):
        labelled = TpuSlicesReadySensor(
            task_id=f"{prefix}labelled",
            lease=provision.output,
            deadlines=deadlines,
            deferrable=deferrable,
            **task_args,
        )
        yield labelled.output
    release >> EmptyOperator(task_id=f"{prefix}released", **task_args)
