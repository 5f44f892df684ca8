"""What can be known before anything is made: permissions, reservations, quota, what a zone offers, cost.

What is surely wrong is refused; what may be wrong, or can't be told, is a note for the log. Nothing is made.
Not here: names and shapes, which ``tpu/`` and the backends check without asking anybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from raytpu_ops.backends.google.clients import GoogleApis
from raytpu_ops.backends.google.machines import Needs, machine_type, tight, too_much
from raytpu_ops.backends.google.price import cost_note
from raytpu_ops.backends.google.refusals import is_absent, is_denied, is_nowhere
from raytpu_ops.backends.google.roles import Role
from raytpu_ops.tpu.capacity import AnyCapacity, Reservation
from raytpu_ops.tpu.errors import Misconfigured, RayTpuError, RemoteUnavailable
from raytpu_ops.tpu.spec import SliceSpec

#: Generation -> the metric among a region's quotas that counts its chips, after the enum ``Quota.Metric`` of the
#: Compute API. Newer generations are counted by ``tpus_per_tpu_family``, which that API does not show; the
#: Cloud Quotas API does (https://cloud.google.com/sdk/gcloud/reference/beta/quotas/info/list), with a right of its own.
_METRICS = {"v4": "TPU_PODSLICE_V4", "v5e": "TPU_LITE_PODSLICE_V5"}
#: Kinds of capacity that are counted apart: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
_PREEMPTIBLE = ("spot", "flex_start", "queued")
#: Those that took their quota when they were made, and need none that is free:
#: https://cloud.google.com/compute/docs/instances/reservations-overview
_BOUGHT = ("reservation",)


async def preflight(
    apis: GoogleApis,
    spec: SliceSpec,
    ladder: Sequence[AnyCapacity],
    zones: Sequence[str],
    *,
    role: Role,
    lease_for: timedelta,
    project: str | None = None,
    permissions: Sequence[str] = (),
    runtime_version: str | None = None,
    host: Needs | None = None,
    also: Sequence[Callable[[], Awaitable[list[str]]]] = (),
    price_per_chip_hour: float | dict[str, float] | None = None,
) -> list[str]:
    """Check a plan against Google, a few calls side by side.

    :param zones: where the ladder is tried.
    :param role: what the account has to have (``roles.GKE``, ``roles.TPU_VM``).
    :param lease_for: the longest that the lease lasts.
    :param project: of the objects; default the access's own.
    :param permissions: needed on top of the role's (``roles.WORKLOAD_POLICY``).
    :param runtime_version: of TPU VMs; then it and the accelerator type are looked up in each zone.
    :param host: what the pod of each host asks for.
    :param also: looks of the backend's own, each of which brings notes.
    :param price_per_chip_hour: see ``price.py``.
    :return: notes, one line each.
    :raises Misconfigured: what is surely wrong, and what would be right.
    """
    notes = [cost_note(spec, lease_for, price_per_chip_hour)]
    try:
        await apis.prove()
    except RemoteUnavailable as error:
        return [*notes, f"Google was not asked: {error}"]
    project = project or apis.project
    looks: list[Awaitable[list[str]]] = [_permissions(apis, project, role, [*role.needed, *permissions])]
    looks += [
        _reservation(apis, project, rung, spec, zones, strict=runtime_version is None)
        for rung in ladder
        if isinstance(rung, Reservation)
    ]
    if runtime_version is None:
        looks += [_quota(apis, project, spec, ladder, zones), _machine_type(apis, project, spec, zones, host)]
    else:
        shown = _quotas_shown("tpu", project, "quotaId:TPU")
        notes.append(f"quota was not checked, Cloud TPU has its own, by zone or region: {shown}")
        looks.append(_offered(apis, project, spec, zones, runtime_version))
    looks += [look() for look in also]
    # All of them, even where one fails: a permission that is missing explains what the others say.
    for found in await asyncio.gather(*looks, return_exceptions=True):
        if isinstance(found, BaseException):
            if isinstance(found, Misconfigured) or not isinstance(found, RayTpuError):
                raise found
            notes.append(f"not checked: {found}")
        else:
            notes += found
    return notes


async def _permissions(apis: GoogleApis, project: str, role: Role, needed: Sequence[str]) -> list[str]:
    wanted = sorted({*needed, *role.looks})
    try:
        granted = await apis.permissions(wanted, project=project)
    except Misconfigured as error:
        return [f"permissions were not checked: {error}"]
    missing = [name for name in needed if name not in granted]
    if missing:
        raise Misconfigured(
            f"project {project}: the account lacks {', '.join(missing)}; the role {role.id} has them: "
            f"{role.how_to_grant(project)}"
        )
    blind = [name for name in role.looks if name not in granted]
    return [f"without {', '.join(blind)} less can be checked before slices are made"] if blind else []


async def _reservation(
    apis: GoogleApis, project: str, rung: Reservation, spec: SliceSpec, zones: Sequence[str], *, strict: bool
) -> list[str]:
    """:param strict: a reservation that Compute Engine does not know is an error; Cloud TPU has some of its own."""
    owner, _, name = rung.name.rpartition("/reservations/")
    owner = owner.removeprefix("projects/") or project
    notes: list[str] = []
    absent: list[str] = []
    problems: list[str] = []
    for zone in zones:
        try:
            found = await apis.compute(
                "GET", f"projects/{owner}/zones/{zone}/reservations/{name}", f"get reservation {name} in {zone}"
            )
        except RayTpuError as error:
            if is_absent(error):
                absent.append(zone)
            else:
                notes.append(f"reservation {name} in {zone} was not checked: {error}")
            continue
        problem, note = judged_reservation(found, spec, f"reservation {name} in {zone}")
        problems += [problem] if problem else []
        notes += [note] if note else []
    nowhere = len(absent) == len(zones)
    if len(absent) + len(problems) == len(zones) and (problems or strict):
        raise Misconfigured(
            "; ".join([*([f"there is no reservation {name} in {', '.join(absent)}"] if absent else []), *problems])
        )
    where = f"Compute Engine has no reservation {name} in {', '.join(absent)}"
    if absent:
        notes.append(f"{where}; Cloud TPU may have it" if nowhere else f"{where}: tries there will fail")
    return [*problems, *notes]


def judged_reservation(found: Mapping[str, Any], spec: SliceSpec, what: str) -> tuple[str | None, str | None]:
    """What a reservation has against what is needed.

    :param found: the Compute API's resource.
    :param what: the reservation, for messages.
    :return: what is surely wrong, and what a person should know.
    """
    shape = spec.shape
    status = str(found.get("status", "READY"))
    if status not in ("READY", "CREATING", "UPDATING"):
        return f"{what} is {status}", None
    specific = found.get("specificReservation")
    if specific is None:
        return _judged_aggregate(found, spec, what)
    machine_type = str(specific.get("instanceProperties", {}).get("machineType", ""))
    if machine_type and machine_type.rpartition("/")[2] != shape.machine_type:
        return f"{what} is for {machine_type.rpartition('/')[2]}, {shape} needs {shape.machine_type}", None
    count, in_use = int(specific.get("count", 0)), int(specific.get("inUseCount", 0))
    return _judged_size(what, "VMs", spec.hosts, count, in_use)


def _judged_aggregate(found: Mapping[str, Any], spec: SliceSpec, what: str) -> tuple[str | None, str | None]:
    """A reservation of chips, not of VMs."""
    aggregate = found.get("aggregateReservation")
    if aggregate is None:
        return None, f"{what} is of a kind whose size is not read here"
    count, in_use = (_chips(aggregate.get(key, [])) for key in ("reservedResources", "inUseResources"))
    return _judged_size(what, "chips", spec.chips, count, in_use)


def _chips(resources: Iterable[Mapping[str, Any]]) -> int:
    return sum(int(one.get("accelerator", {}).get("acceleratorCount", 0)) for one in resources)


def _judged_size(what: str, unit: str, needed: int, count: int, in_use: int) -> tuple[str | None, str | None]:
    if count < needed:
        return f"{what} has {count} {unit}, {needed} are needed: ask for fewer or smaller slices", None
    free = count - in_use
    if free < needed:
        return None, f"{what} has {free} of {count} {unit} free now, {needed} are needed"
    return None, f"{what} has {free} of {count} {unit} free, {needed} are needed"


def _quotas_shown(api: str, project: str, those: str) -> str:
    """What a person types to see quotas that the Compute API's regions do not have."""
    return f"gcloud beta quotas info list --service={api}.googleapis.com --project={project} --filter={those}"


async def _quota(
    apis: GoogleApis, project: str, spec: SliceSpec, ladder: Sequence[AnyCapacity], zones: Sequence[str]
) -> list[str]:
    metric = _METRICS.get(spec.generation)
    if metric is None:
        shown = _quotas_shown("compute", project, "metric:tpus_per_tpu_family")
        return [f"quota of {spec.generation} was not checked: {shown}"]
    notes: list[str] = []
    counted: dict[str, list[str]] = {}
    for kind in dict.fromkeys(rung.kind for rung in ladder if rung.kind not in _BOUGHT):
        counted.setdefault(f"PREEMPTIBLE_{metric}" if kind in _PREEMPTIBLE else metric, []).append(kind)
    if not counted:
        return []
    for region in dict.fromkeys(zone.rpartition("-")[0] for zone in zones):
        try:
            found = await apis.compute("GET", f"projects/{project}/regions/{region}", f"get region {region}")
        except RayTpuError as error:
            notes.append(f"quota in {region} was not checked: {error}")
            continue
        for quota in found.get("quotas", []):
            kinds = counted.get(quota.get("metric"))
            free = float(quota.get("limit", 0)) - float(quota.get("usage", 0))
            if kinds and free < spec.chips:
                notes.append(
                    f"quota {quota['metric']} in {region} leaves {free:g} of {quota.get('limit', 0):g} chips, "
                    f"{spec.chips} are needed: {', '.join(kinds)} will be refused there"
                )
    return notes


async def _machine_type(
    apis: GoogleApis, project: str, spec: SliceSpec, zones: Sequence[str], host: Needs | None
) -> list[str]:
    """What Compute Engine does not list for a zone, GKE makes no pools of there: "Invalid machine type … in zone"."""
    name = spec.shape.machine_type
    what = f"machine type {name}"
    notes: list[str] = []
    without: list[str] = []
    for zone in zones:
        try:
            found = await machine_type(apis, project, zone, name)
        except RayTpuError as error:
            notes.append(f"{what} in {zone} was not checked: {error}")
            continue
        if found is None:
            without.append(zone)
        elif host is not None:
            notes += _room(host, found, name)
    return [*dict.fromkeys(notes), *_lacking("Compute Engine", what, without, zones)]


def _room(host: Needs, machine: Mapping[str, Any], name: str) -> list[str]:
    """A pod that does not fit would wait, and its chips be paid for, until a deadline."""
    if excess := too_much(host, machine):
        raise Misconfigured(
            f"a host's pod asks for {' and '.join(excess)}, of which GKE keeps some: its {name} has no room for that; "
            "ask for less in the option host, or in host_template"
        )
    return [
        f"a host's pod asks for {one}: GKE and its own pods may leave less of a {name}" for one in tight(host, machine)
    ]


def _lacking(who: str, what: str, without: Sequence[str], zones: Sequence[str]) -> list[str]:
    """One zone that has it is enough."""
    if len(without) == len(zones):
        raise Misconfigured(f"{who} has no {what} in {', '.join(without)}: name another zone")
    return [f"{who} has no {what} in {zone}: it is tried in the other zones" for zone in without]


async def _offered(
    apis: GoogleApis, project: str, spec: SliceSpec, zones: Sequence[str], runtime_version: str
) -> list[str]:
    kinds = {
        f"accelerator type {spec.shape.pod_type}": (
            "acceleratorTypes",
            spec.shape.pod_type,
            apis.tpu.get_accelerator_type,
        ),
        f"runtime version {runtime_version}": ("runtimeVersions", runtime_version, apis.tpu.get_runtime_version),
    }
    notes: list[str] = []
    for what, (collection, name, method) in kinds.items():
        without: list[str] = []
        for zone in zones:
            try:
                found = await apis.ask_or_none(
                    f"get {what} in {zone}", method, name=f"projects/{project}/locations/{zone}/{collection}/{name}"
                )
            except RayTpuError as error:
                if is_nowhere(error):
                    raise Misconfigured(
                        f"zones: Cloud TPU is not in {zone}, or not for this project: take it off the list, or check "
                        f"its name: {error}"
                    ) from error
                if isinstance(error, Misconfigured) and not is_denied(error):
                    raise
                notes.append(f"{what} in {zone} was not checked: {error}")
                continue
            without += [zone] if found is None else []
        notes += _lacking("Cloud TPU", what, without, zones)
    return notes
