"""What GKE refuses about a node pool before it makes one, and what it accepts and then fails to make.

Sources: "Plan TPUs in GKE", "TPU multi-host", "flex-start" and "TPU7x (Ironwood)" in Google Cloud's
documentation; words from AI-Hypercomputer/xpk#825 and, for TPU7x, vllm-project/ci-infra#547.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from google.cloud import container_v1 as gke

from tests.google_fake import refusals
from tests.google_fake.faults import Fate
from tests.google_fake.refusals import Code, Refusal

#: Machine type -> chips on it, by what its name begins with; the number before the last `t` is chips.
_TPU = re.compile(r"(?P<family>ct4p|ct5lp|ct5p|ct6e|tpu7x)-[a-z]+-(?P<chips>[0-9]+)t\Z")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")
_TOPOLOGY = re.compile(r"[0-9]+(x[0-9]+){1,2}\Z")
_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}\Z")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}\Z")
_NODE_LABEL = re.compile(r"(([A-Za-z0-9][A-Za-z0-9_.-]{0,61})?[A-Za-z0-9])?\Z")
_NODE_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?([A-Za-z0-9][A-Za-z0-9_.-]{0,61})?[A-Za-z0-9]\Z")
_SPECIFIC = gke.ReservationAffinity.Type.SPECIFIC_RESERVATION
#: Instance metadata that users may not set, and the most that a value may hold, bytes.
_OWN_METADATA = frozenset(
    {"cluster-location", "cluster-name", "cluster-uid", "configure-sh", "kube-env", "startup-script"}
)
_METADATA_LIMIT = 256 * 1024
#: A week, the longest that flex-start capacity runs.
_LONGEST_S = 7 * 24 * 3600


def check_name(name: str) -> None:
    """Refuse a name that no pool may have."""
    if not _NAME.match(name) or len(name) > 40:
        raise refusals.invalid(
            f'Invalid value for field "node_pool.name": "{name}". Must be 1-40 characters, match the regular '
            "expression [a-z]([-a-z0-9]*[a-z0-9])? ."
        )


def check(pool: gke.NodePool, zones: Sequence[str], policies: Iterable[str]) -> None:
    """Refuse what makes no sense.

    :param zones: of the cluster.
    :param policies: workload policies that there are.
    :raises Refusal: with what is wrong.
    """
    config = pool.config
    check_labels(config.resource_labels, "node_pool.config.resource_labels")
    _check_node_labels(config.labels)
    _check_metadata(config.metadata)
    for zone in pool.locations:
        if zone not in zones:
            raise refusals.invalid(f'Location "{zone}" is not within the cluster\'s region, or not one of its zones.')
    if config.spot and config.preemptible:
        raise refusals.invalid("Cannot specify both spot and preemptible.")
    _check_tpu(pool, policies)
    if config.flex_start:
        _check_flex(pool)
    if pool.queued_provisioning.enabled:
        _check_queued(pool)
    _check_reservation(pool)
    _check_run_duration(pool)


def late_failure(pool: gke.NodePool) -> Fate | None:
    """F42: what is accepted and ends in ERROR."""
    machine = _TPU.match(pool.config.machine_type)
    if machine and machine["family"] == "tpu7x" and pool.placement_policy.tpu_topology:
        text = (
            f"Creation of a managed instance group with {pool.config.machine_type} machine type with placement policy "
            "is not supported. Use workload policy instead."
        )
        return Fate(Refusal(Code.INVALID_ARGUMENT, text).status)
    return None


def hosts_of(machine_type: str, topology: str) -> int | None:
    """Hosts of a slice; None where no such slice is."""
    machine = _TPU.match(machine_type)
    if machine is None or not _TOPOLOGY.match(topology):
        return None
    chips = 1
    for part in topology.split("x"):
        chips *= int(part)
    hosts, rest = divmod(chips, int(machine["chips"]))
    flat = machine["family"] in ("ct5lp", "ct6e")
    return hosts if not rest and hosts and (topology.count("x") == 1) == flat else None


def _check_tpu(pool: gke.NodePool, policies: Iterable[str]) -> None:
    machine_type, policy = pool.config.machine_type, pool.placement_policy
    machine = _TPU.match(machine_type)
    if machine is None:
        if machine_type.startswith(("ct", "tpu")):
            raise refusals.invalid(f'Machine type with name "{machine_type}" does not exist in zone.')
        if policy.tpu_topology:
            raise refusals.invalid(f"TPU topology cannot be set for machine type {machine_type}, which has no TPUs.")
        return
    if policy.policy_name and policy.tpu_topology and machine["family"] != "tpu7x":
        raise refusals.invalid("Placement policy name and TPU topology cannot both be set.")
    if policy.policy_name and policy.policy_name.rpartition("/")[2] not in {one.rpartition("/")[2] for one in policies}:
        raise refusals.not_found(f"resource policy {policy.policy_name}")
    if policy.tpu_topology:
        _check_topology(pool, machine_type)
    if len(pool.locations) > 1 and (policy.tpu_topology or policy.policy_name):
        raise refusals.invalid("Multi-host TPU node pools must be in exactly one zone.")


def _check_topology(pool: gke.NodePool, machine_type: str) -> None:
    policy = pool.placement_policy
    if policy.type_ != gke.NodePool.PlacementPolicy.Type.COMPACT:
        raise refusals.invalid("TPU topology requires placement policy type COMPACT.")
    hosts = hosts_of(machine_type, policy.tpu_topology)
    if hosts is None:
        raise refusals.invalid(
            f'Invalid TPU topology "{policy.tpu_topology}" for machine type "{machine_type}". '
            "See https://cloud.google.com/kubernetes-engine/docs/concepts/tpus for topologies."
        )
    if hosts == 1:
        raise refusals.invalid(
            "TPU topology can't be specified with single-host TPU slice pool; please remove the tpu_topology from the "
            "node pool creation request."
        )
    if _wanted(pool) != hosts:
        raise refusals.invalid(
            f"TPU topology {policy.tpu_topology} of machine type {machine_type} needs {hosts} nodes, "
            f"the node pool has {_wanted(pool)}."
        )


def _wanted(pool: gke.NodePool) -> int:
    """Nodes that the pool has, or may get from the autoscaler."""
    scaling = pool.autoscaling
    return max(
        pool.initial_node_count, scaling.total_max_node_count or scaling.max_node_count if scaling.enabled else 0
    )


def _check_flex(pool: gke.NodePool) -> None:
    scaling = pool.autoscaling
    if not scaling.enabled or pool.initial_node_count or scaling.min_node_count or scaling.total_min_node_count:
        raise refusals.invalid("Flex-start node pools must have autoscaling enabled and start with zero nodes.")
    if scaling.location_policy != gke.NodePoolAutoscaling.LocationPolicy.ANY:
        raise refusals.invalid("Flex-start node pools must use location policy ANY.")
    if pool.config.reservation_affinity.consume_reservation_type != gke.ReservationAffinity.Type.NO_RESERVATION:
        raise refusals.invalid("Flex-start node pools must have reservation affinity NO_RESERVATION.")
    if pool.management.auto_repair:
        raise refusals.invalid("Flex-start node pools must have auto-repair disabled.")
    if pool.config.spot or pool.config.preemptible:
        raise refusals.invalid("Flex-start cannot be combined with Spot VMs.")


def _check_queued(pool: gke.NodePool) -> None:
    if not pool.autoscaling.enabled or pool.initial_node_count:
        raise refusals.invalid("Queued provisioning requires autoscaling and an initial node count of zero.")
    if pool.config.spot:
        raise refusals.invalid("Queued provisioning cannot be combined with Spot VMs.")


def _check_run_duration(pool: gke.NodePool) -> None:
    seconds = pool.config.max_run_duration.total_seconds() if pool.config.max_run_duration else 0
    if seconds > _LONGEST_S:
        raise refusals.invalid("Max run duration must be at most 7 days.")


def _check_reservation(pool: gke.NodePool) -> None:
    affinity = pool.config.reservation_affinity
    if affinity.consume_reservation_type == _SPECIFIC:
        if affinity.key != "compute.googleapis.com/reservation-name" or len(affinity.values) != 1:
            raise refusals.invalid(
                "A specific reservation needs the key compute.googleapis.com/reservation-name and one value."
            )
        if pool.config.spot:
            raise refusals.invalid("Spot VMs cannot consume reservations.")


def _check_node_labels(labels: Mapping[str, str]) -> None:
    for key, value in labels.items():
        if key.startswith(("kubernetes.io/", "k8s.io/")) or not _NODE_KEY.match(key):
            raise refusals.invalid(f'Invalid node label key "{key}".')
        if not _NODE_LABEL.match(value):
            raise refusals.invalid(f'Invalid node label value "{value}" of "{key}".')


def _check_metadata(metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        if key in _OWN_METADATA:
            raise refusals.invalid(f'Metadata key "{key}" is reserved for use by GKE.')
        if not re.match(r"[a-zA-Z0-9-_]{1,127}\Z", key):
            raise refusals.invalid(f'Metadata key "{key}" must match [a-zA-Z0-9-_]+ and be less than 128 bytes.')
        if len(value.encode()) > _METADATA_LIMIT:
            raise refusals.invalid(f'Metadata value of "{key}" is longer than 256 KiB.')


def check_labels(labels: Mapping[str, str], where: str) -> None:
    """Refuse labels that no resource of Google may have."""
    if len(labels) > 64:
        raise refusals.invalid(f"{where}: at most 64 labels.")
    for key, value in labels.items():
        if not _LABEL_KEY.match(key):
            raise refusals.invalid(
                f"{where}: Label keys must start with a lowercase letter and hold only lowercase letters, numbers, "
                f'dashes and underscores, at most 63 characters: "{key}".'
            )
        if not _LABEL_VALUE.match(value):
            raise refusals.invalid(
                f"{where}: Label values hold only lowercase letters, numbers, dashes and underscores, at most 63 "
                f'characters: "{value}".'
            )
