"""``raytpu plan``: what a lease would be made of, what Google says of it beforehand, and what it may cost.

Nothing is made. Without credentials it says what could not be asked, and still refuses what can't work.
Not here: the judgement; that is the backends' own ``plan``, the same as the provisioning task's.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from raytpu_ops.backends.base import Backend, Plan, make_backend
from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.google.fields import region_of
from raytpu_ops.backends.google.price import checked_price, cost_note
from raytpu_ops.cli.backends import Where, hook_of, refuse_others
from raytpu_ops.tpu.capacity import AnyCapacity, ladder
from raytpu_ops.tpu.errors import InvalidSpec, RayTpuError
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.tpu.words import shown

if TYPE_CHECKING:
    from raytpu_ops.backends.gke.settings import Settings
    from raytpu_ops.backends.google.access import CloudAccess

_DURATION = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>[smhd])\Z")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
#: Kind of capacity -> the field that the part behind the "=" is for.
_FIELDS = {"reservation": "name", "flex_start": "max_run_duration", "queued": "valid_for"}
#: Stands for the cluster that nobody named; nobody is asked about it.
_SOME_CLUSTER = "projects/PROJECT/locations/{region}/clusters/some-cluster"
_UNNAMED = "no cluster is named: pass --cluster"


@dataclass(frozen=True)
class Google:
    """What the options say about the cloud.

    :param conn_id: an Airflow connection that says it all.
    :param project: its id; None for the credentials' own.
    :param cluster: gke: path of the cluster.
    :param zones: where slices may be.
    :param price: of a chip for an hour.
    """

    conn_id: str | None = None
    project: str | None = None
    cluster: str | None = None
    zones: Sequence[str] = field(default_factory=list)
    price: float | None = None


def show(
    spec: SliceSpec,
    capacity: Sequence[str],
    where: Where,
    google: Google,
    *,
    lease_for: timedelta,
    owner: Owner,
    as_json: bool,
) -> None:
    """Print the plan.

    :param capacity: rungs, each a word or ``word=value``.
    :param owner: whose names are shown, and looked for.
    :raises RayTpuError: it is refused; the message says why and what would be right.
    """
    rungs = ladder([rung(word) for word in capacity] or None)
    checked_price(google.price)
    plan = asyncio.run(_planned(spec, rungs, where, google, lease_for, owner))
    if as_json:
        print(json.dumps(plan.model_dump(mode="json"), indent=2))
        return
    _print(plan)


async def _planned(
    spec: SliceSpec, rungs: Sequence[AnyCapacity], where: Where, google: Google, lease_for: timedelta, owner: Owner
) -> Plan:
    given = {"--namespace": where.namespace, "--cluster": google.cluster, "--zone": google.zones}
    refuse_others(where.backend, {**given, "--project": google.project, "--root": where.root})
    backend = await _by_connection(where, google) if google.conn_id else await _by_options(where, google)
    plan = await backend.plan(spec, rungs, lease_for=lease_for, owner=owner)
    notes = list(plan.notes)
    if google.price is not None and not any("chip-hours" in note for note in notes):
        # Nodes that somebody else pays for: their cost is worth knowing all the same.
        notes.append(cost_note(spec, lease_for, google.price))
    if where.backend == "gke" and not (google.conn_id or google.cluster or google.zones):
        notes.append(_unasked(google.price))
    return plan.model_copy(update={"notes": notes})


def _unasked(price: float | None) -> str:
    """What nobody was asked about, where neither a cluster nor zones are named, and how it is."""
    what = "permissions, reservations, quota" + (" and zones" if price is not None else ", zones and cost")
    how = "--cluster and --zone plan node pools and ask Google, --conn-id plans by an Airflow connection"
    return f"nobody was asked about {what}: {how}{'' if price is not None else '; --price-per-chip-hour counts'}"


async def _by_connection(where: Where, google: Google) -> Backend:
    """The connection's backend with the options over it; nobody asks Google where its account can't be proven here."""
    assert google.conn_id is not None, "called where one is named"
    options: dict[str, Any] = {}
    if where.backend == "tpu_vm":
        options = {"zones": list(google.zones), "price_per_chip_hour": google.price}
    elif where.backend == "gke":
        options = {"namespace": where.namespace}
    elif where.root:
        options = {"root": str(where.root)}
    if google.project:
        options["project_id"] = google.project
    options = {key: value for key, value in options.items() if value}
    hook = hook_of(google.conn_id, where.backend, options)
    if isinstance(hook.backend, GkeBackend):
        pools = _pools_over(hook.backend.settings, google)
        if pools is not None:
            options["node_pools"] = pools
            hook = hook_of(google.conn_id, where.backend, options)
    if hook.cloud is None:
        return hook.backend
    why = await _unproven(hook.cloud)
    return hook_of(google.conn_id, where.backend, options, _nobody(why)).backend if why else hook.backend


def _pools_over(settings: Settings, google: Google) -> dict[str, Any] | None:
    """The connection's node pools with what the options say over them; None where nobody asks for other ones."""
    given = _node_pools(google)
    if settings.node_pools is None:
        return given if google.zones or google.cluster else None
    return {**settings.node_pools.model_dump(exclude_unset=True), **given} if given else None


async def _by_options(where: Where, google: Google) -> Backend:
    if where.backend == "tpu_vm":
        if not google.zones:
            raise InvalidSpec("--zone: backend 'tpu_vm' needs to know where; repeat it for several zones")
        options: dict[str, Any] = {"price_per_chip_hour": google.price} if google.price else {}
        return make_backend("tpu_vm", cloud=await _account(google), zones=list(google.zones), **options)
    if where.backend == "gke":
        if google.project and not google.cluster:
            raise InvalidSpec("--project: for --backend gke only with --cluster or --conn-id: nobody else is asked")
        options = {"namespace": where.namespace} if where.namespace else {}
        if not google.cluster and not google.zones:
            return make_backend("gke", **options)  # on nodes that exist, or that the cluster's autoscaler brings
        cloud = await _account(google) if google.cluster else _nobody(_UNNAMED)
        pools = _node_pools(google)
        if not google.cluster:
            pools["cluster"] = _SOME_CLUSTER.format(region=region_of(google.zones[0]))
        return make_backend("gke", cloud=cloud, node_pools=pools, **options)
    return where.open()


def _node_pools(google: Google) -> dict[str, Any]:
    given = {
        "cluster": google.cluster,
        "zones": list(google.zones),
        "price_per_chip_hour": google.price,
    }
    return {key: value for key, value in given.items() if value}


async def _account(google: Google) -> CloudAccess:
    """Who asks; nobody where this machine has no credentials."""
    from raytpu_ops.backends.google.access import DefaultAccess

    access = DefaultAccess(google.project)
    why = await _unproven(access)
    return _nobody(why) if why else access


async def _unproven(access: CloudAccess) -> str:
    """Why Google can't be asked from here; nothing where it can."""
    try:
        await access.credentials()
        await access.project()
    except RayTpuError as error:
        return str(error)
    return ""


def _nobody(why: str) -> CloudAccess:
    from raytpu_ops.backends.google.access import NoAccess

    return NoAccess(why)


def rung(word: str) -> dict[str, Any] | str:
    """A rung as it is typed: ``spot``, ``reservation=NAME``, ``flex_start=24h``, ``queued=2h``.

    :raises InvalidSpec: a part that is missing.
    """
    kind, equals, value = word.partition("=")
    kind = kind.strip().lower().replace("-", "_")
    if kind not in _FIELDS:
        return word
    if not equals or not value.strip():
        raise InvalidSpec(
            f"--capacity: {kind} needs a value, as in {kind}={'24h' if kind != 'reservation' else 'NAME'}"
        )
    given: Any = value.strip()
    if kind != "reservation":
        match = _DURATION.match(given)
        if not match:
            raise InvalidSpec(f"--capacity: {shown(given)} is no duration; write 90m, 24h or 7d")
        given = float(match["number"]) * _SECONDS[match["unit"]]
    return {"kind": kind, _FIELDS[kind]: given}


def _print(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    spec, shape = plan.spec, plan.spec.shape
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = [
        ("slices", f"{spec.num_slices} x {shape}"),
        ("hosts", f"{spec.hosts}, {shape.chips_per_host} chip{'s' if shape.chips_per_host > 1 else ''} on each"),
        ("chips", str(spec.chips)),
        ("capacity", ", then ".join(_said(one) for one in plan.ladder)),
        ("backend", plan.backend),
    ]
    for what, lines in (("makes", plan.creates), ("names", plan.names), ("notes", plan.notes)):
        rows += [(what if number == 0 else "", line) for number, line in enumerate(lines)]
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def _said(one: AnyCapacity) -> str:
    if one.kind == "reservation":
        return f"{one.kind} {one.name}"
    if one.kind == "flex_start":
        return f"{one.kind} for {one.max_run_duration}"
    if one.kind == "queued":
        return f"{one.kind} for at most {one.valid_for}"
    return one.kind
