"""A spec and a rung become a queued resource: one for the whole lease, whatever the number of slices.

One request, because Google then grants all slices or none, and because only slices that were asked for together
are told of each other: their VMs' ``tpu-env`` has ``MEGASCALE_COORDINATOR_ADDRESS``, the address of worker 0 of
the first slice, which is where JAX looks for its coordinator (``jax/_src/clusters/cloud_tpu_cluster.py``) and
the startup script for Ray's head. So the VMs need no right to any API, and nobody has to tell them later.

Pure: nothing is asked and nothing is sent. Source: the types of Cloud TPU's API v2 (google-cloud-tpu 1.28).
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import Any

from raytpu_ops.backends.ladder import Step, check_queue
from raytpu_ops.backends.tpu_vm.record import RECORD, TOKEN, Record
from raytpu_ops.backends.tpu_vm.settings import Settings
from raytpu_ops.backends.tpu_vm.startup import script
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.capacity import AnyCapacity
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.spec import SliceSpec

Json = dict[str, Any]

#: Our generation -> ``AcceleratorConfig.Type``. It ends here: later generations are to be had on GKE alone.
TYPES = {"v4": "V4", "v5e": "V5LITE_POD", "v5p": "V5P", "v6e": "V6E"}
#: The TPU software that Google names for each generation: https://cloud.google.com/tpu/docs/runtimes
RUNTIME_VERSIONS = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
#: Google refuses a shorter one, and what is left of a deadline can be nothing.
_SHORTEST_WAIT = timedelta(minutes=1)


def check(spec: SliceSpec) -> None:
    """Refuse what Cloud TPU does not have, and what no task could use.

    :raises InvalidSpec: the generation, hosts of four chips where it has one of eight, or a topology that Ray lacks.
    """
    shape = spec.shape
    if shape.generation.name not in TYPES:
        raise InvalidSpec(
            f"spec: Cloud TPU VMs end at v6e, there is no {shape.generation.name}: use backend 'gke', or one of "
            f"{', '.join(TYPES)}"
        )
    eight = dict(shape.generation.machine_types).get(8)
    if shape.chips == 8 and shape.chips_per_host == 4 and eight:
        raise InvalidSpec(
            f"spec: a Cloud TPU VM of {shape.generation.name} {shape.topology} is one host of 8 chips: say "
            f"machine_type={eight!r}, or use backend 'gke' for hosts of 4"
        )
    shape.check_reserved()


def check_rung(rung: AnyCapacity, where: str) -> None:
    """Refuse a kind of capacity that the API v2 does not have, and a wait for what is withdrawn meanwhile.

    :raises InvalidSpec: for flex-start, and for a queue that is waited for longer than the place in it is good for.
    """
    if rung.kind == "flex_start":
        raise InvalidSpec(
            f"{where}: the Cloud TPU API v2 has no flex-start; use backend 'gke' for it, or Queued(valid_for) here"
        )
    check_queue(rung, where)


def runtime_version(spec: SliceSpec, settings: Settings) -> str:
    """The TPU software version of the VMs."""
    return settings.runtime_version or RUNTIME_VERSIONS[spec.shape.generation.name]


def node_prefix(lease_id: str, begun: datetime) -> str:
    """How the node ids of one request begin.

    A request that comes after another has other nodes: a node that lingers never blocks its replacement (F12), and
    a Ray that outlives both does not take the new slice for the old one.

    :param lease_id: of the lease.
    :param begun: when the step began.
    """
    return f"{lease_id}-{hashlib.sha256(begun.isoformat().encode()).hexdigest()[:4]}"


def node_ids(prefix: str, num_slices: int) -> list[str]:
    """The nodes' ids, which Ray shows as names of the slices; several are numbered by Google like this."""
    return [f"{prefix}-{number}" for number in range(num_slices)]


def queued_resource(project: str, step: Step, record: Record, settings: Settings, token: str, now: datetime) -> Json:
    """The request, as the fields of ``tpu_v2.QueuedResource``.

    :param project: id of the project.
    :param step: the rung and the zone.
    :param record: what is written on it.
    :param settings: the backend's options.
    :param token: Ray's; it goes into the VMs' metadata and nowhere else.
    :param now: the time, UTC.
    """
    parent = f"projects/{project}/locations/{step.zone}"
    prefix = node_prefix(naming.lease_id(record.owner), record.climb.begun)
    slices = record.spec.num_slices
    spec: Json = {"parent": parent, "node": _node(step, record, settings, token)}
    if slices == 1:
        spec["node_id"] = node_ids(prefix, 1)[0]
    else:
        spec["multislice_params"] = {"node_count": slices, "node_id_prefix": prefix}
    return {
        "tpu": {"node_spec": [spec]},
        "queueing_policy": {"valid_until_duration": _valid_for(step.rung, record, now)},
        **_tier(project, step),
    }


def _valid_for(rung: AnyCapacity, record: Record, now: datetime) -> timedelta:
    """Google withdraws what nobody waits for any more: a request must not be granted days after its task died."""
    left = max(record.until - now, _SHORTEST_WAIT)
    return min(rung.valid_for, left) if rung.kind == "queued" else left


def _tier(project: str, step: Step) -> Json:
    """None at all is on demand, the default: https://cloud.google.com/tpu/docs/quota, "Flags for TPU creation".

    The API has two, for what may be taken back and what may not; the second one with a reservation's name only.
    """
    rung = step.rung
    if rung.kind == "spot":
        return {"spot": {}}
    if rung.kind == "reservation":
        # A shared one's name has the project that bought it; the zone is ours to put in.
        owner, name = project, rung.name
        if "/" in name:
            _, owner, _, name = name.split("/")
        return {
            "guaranteed": {},
            "reservation_name": f"projects/{owner}/locations/{step.zone}/reservations/{name}",
        }
    return {}


def _node(step: Step, record: Record, settings: Settings, token: str) -> Json:
    shape = record.spec.shape
    network = {
        "network": settings.network,
        "subnetwork": settings.subnetwork,
        "enable_external_ips": settings.external_ip,
    }
    node: Json = {
        "accelerator_config": {"type_": TYPES[shape.generation.name], "topology": shape.topology},
        "runtime_version": runtime_version(record.spec, settings),
        "network_config": {key: value for key, value in network.items() if value is not None},
        "labels": {**settings.labels, **naming.owner_labels(record.owner)},
        "metadata": {
            "startup-script": script(record.spec, settings),
            # The script says here how far it is; the API shows it to whoever may look at the node.
            "enable-guest-attributes": "TRUE",
            RECORD: record.model_dump_json(),
            TOKEN: token,
        },
        "tags": settings.tags,
    }
    if settings.service_account:
        scope = "https://www.googleapis.com/auth/cloud-platform"  # what the account may do is IAM's business
        node["service_account"] = {"email": settings.service_account, "scope": [scope]}
    if step.rung.kind in ("spot", "reservation"):
        node["scheduling_config"] = {"spot" if step.rung.kind == "spot" else "reserved": True}
    return node
