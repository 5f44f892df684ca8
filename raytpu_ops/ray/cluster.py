"""The cluster as Ray's dashboard sees it: version, nodes, and who holds which chips.

Not here: whether that is what was wanted (``readiness.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raytpu_ops.ray import jobs
from raytpu_ops.ray.states import ChipUsage, Holder, JobInfo, RayNode, RayVersion, instant
from raytpu_ops.ray.transport import Transport
from raytpu_ops.tpu.errors import RemoteUnavailable

#: Ray's own ceiling for one answer (util/state/common.py); its default of 100 cuts larger clusters short.
_LIMIT = 10_000
#: The resource that a chip is.
_TPU = "TPU"


async def version(transport: Transport) -> RayVersion:
    """What runs there."""
    answer = await transport.json("/api/version")
    if not isinstance(answer, Mapping) or not isinstance(answer.get("ray_version"), str):
        raise RemoteUnavailable(f"GET /api/version: no Ray dashboard answered: {str(answer)[:200]}")
    return RayVersion(ray_version=answer["ray_version"], session_name=answer.get("session_name"))


async def nodes(transport: Transport) -> list[RayNode]:
    """Every node that Ray remembers, the dead ones too."""
    return [_node_of(row) for row in await state_of(transport, "nodes")]


def _node_of(row: Mapping[str, Any]) -> RayNode:
    return RayNode(
        node_id=str(row.get("node_id") or ""),
        address=str(row.get("node_ip") or ""),
        alive=row.get("state") == "ALIVE",
        is_head=row.get("is_head_node") is True,
        labels={str(key): str(value) for key, value in (row.get("labels") or {}).items()},
        resources=_numbers(row.get("resources_total")),
        state_message=str(row.get("state_message") or ""),
        started_at=instant(row.get("start_time_ms")),
    )


async def usage(transport: Transport) -> dict[str, ChipUsage]:
    """Chips in use by node id, as the monitor on the head last counted them, some seconds ago.

    :return: nothing where no monitor runs; only nodes with chips.
    """
    answer = await transport.json("/api/cluster_status")
    by_node: Any = answer
    for key in ("data", "clusterStatus", "loadMetricsReport", "usageByNode"):
        by_node = by_node.get(key) if isinstance(by_node, Mapping) else None
    if not isinstance(by_node, Mapping):
        return {}
    pairs = {node_id: resources.get(_TPU) for node_id, resources in by_node.items() if isinstance(resources, Mapping)}
    return {
        node_id: ChipUsage(used=float(pair[0]), total=float(pair[1]))
        for node_id, pair in pairs.items()
        if isinstance(pair, Sequence) and len(pair) == 2
    }


async def holders(transport: Transport) -> list[Holder]:
    """Who holds chips, or the head resource of a slice, on which node.

    Placement groups show at once; actors and tasks inside one hold nothing beyond it.
    """
    groups, actors, tasks, every_job = await asyncio.gather(
        state_of(transport, "placement_groups"),
        state_of(transport, "actors", state="ALIVE"),
        state_of(transport, "tasks", state="RUNNING"),
        jobs.listed(transport),
    )
    names = _job_names(every_job)
    return [*_of_groups(groups, names), *_of_actors(actors, names), *_of_tasks(tasks, names)]


def _job_names(every_job: Sequence[JobInfo]) -> dict[str, str]:
    return {job.job_id: job.submission_id for job in every_job if job.job_id and job.submission_id}


def _of_groups(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Iterator[Holder]:
    for row in rows:
        # A pending group names no node; one that is rescheduled keeps what is left of it.
        if row.get("state") not in ("CREATED", "RESCHEDULING"):
            continue
        name = row.get("name") or f"{str(row.get('placement_group_id'))[:12]} (no name)"
        for bundle in row.get("bundles") or ():
            yield from _holder(
                bundle.get("node_id"), bundle.get("unit_resources"), f"placement group {name}", row, names
            )


def _of_actors(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Iterator[Holder]:
    for row in rows:
        if row.get("placement_group_id"):
            continue
        name = f" {row['name']!r}" if row.get("name") else ""
        who = f"actor {row.get('class_name')}{name} (pid {row.get('pid')})"
        yield from _holder(row.get("node_id"), row.get("required_resources"), who, row, names)


def _of_tasks(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Iterator[Holder]:
    for row in rows:
        # What an actor's method needs, its actor holds.
        if row.get("placement_group_id") or row.get("actor_id"):
            continue
        who = f"task {row.get('name')} (pid {row.get('worker_pid')})"
        yield from _holder(row.get("node_id"), row.get("required_resources"), who, row, names)


def _holder(
    node_id: object, resources: object, who: str, row: Mapping[str, Any], names: Mapping[str, str]
) -> Iterator[Holder]:
    if not isinstance(node_id, str) or not node_id:
        return
    held = _numbers(resources)
    ray_job = str(row.get("creator_job_id") or row.get("job_id") or "")
    job = names.get(ray_job)
    of = f" of job {job}" if job else f" of Ray job {ray_job}" if ray_job else ""
    if held.get(_TPU, 0) > 0:
        yield Holder(node_id=node_id, chips=held[_TPU], who=f"{who}{of}", job=job)
    elif any(name.startswith("TPU-") and name.endswith("-head") for name, much in held.items() if much > 0):
        # It holds no chip, but nobody else can reserve the slice while it is there.
        yield Holder(node_id=node_id, chips=0.0, who=f"{who}{of} (reserves the slice)", job=job)


async def state_of(transport: Transport, kind: str, **equal: str) -> list[Mapping[str, Any]]:
    """Rows of Ray's state API, filtered over there: a cluster may have run a million tasks."""
    params: dict[str, str | int] = {"detail": 1, "limit": _LIMIT}
    for key, value in equal.items():
        params |= {"filter_keys": key, "filter_predicates": "=", "filter_values": value}
    answer = await transport.json(f"/api/v0/{kind}", params=params)
    rows: Any = answer
    for key in ("data", "result", "result"):
        rows = rows.get(key) if isinstance(rows, Mapping) else None
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        said = answer.get("msg") if isinstance(answer, Mapping) else None
        raise RemoteUnavailable(f"GET /api/v0/{kind}: no rows in the answer: {said or str(answer)[:200]}")
    return rows


def _numbers(resources: object) -> dict[str, float]:
    if not isinstance(resources, Mapping):
        return {}
    return {
        str(name): float(amount)
        for name, amount in resources.items()
        if isinstance(amount, int | float) and not isinstance(amount, bool)
    }
