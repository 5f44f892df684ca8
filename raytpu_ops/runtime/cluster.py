"""The Ray cluster as the driver sees it: which hosts there are, which are gone, who holds the busy ones.

Not here: what follows from that for a run (``failures.py``).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from raytpu_ops.tpu.shapes import SliceShape

SLICE_NAME = "ray.io/tpu-slice-name"
WORKER_ID = "ray.io/tpu-worker-id"
POD_TYPE = "ray.io/tpu-pod-type"
#: How long one look at a host's port may take, and the pause between two looks at all of them.
_PROBE_S, _PAUSE_S = 2.0, 0.5
#: Runs in each worker process of the job before anything else.
_HOOK = "raytpu_ops.runtime.place.hide_kubernetes"
#: Where Ray's job agent leaves the job's runtime environment for its driver.
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: How many hosts are asked at a time.
_PROBES = 32


@dataclass(frozen=True)
class Host:
    """One TPU host.

    :param node_id: Ray's id of it.
    :param address: its IP address.
    :param port: where its raylet listens.
    :param slice_name: the slice that it is part of.
    :param worker_id: its number in the slice.
    :param pod_type: size of the slice, ``v4-16``.
    :param chips: chips that it has.
    :param alive: Ray counts it as alive.
    """

    node_id: str
    address: str
    port: int
    slice_name: str
    worker_id: int
    pod_type: str
    chips: int
    alive: bool

    @property
    def name(self) -> str:
        """How logs call it: ``slice-0 worker 1``."""
        return f"{self.slice_name} worker {self.worker_id}"

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def connect() -> str:
    """Connect this driver to the cluster that the job runs on.

    :return: the address of Ray's head.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS", "auto")
    # Actors of Ray Train ask Ray's state API, which looks for a cluster on its own when it is not
    # told, and gives up where a machine has several (2.60, PlacementGroupCleaner).
    env: dict[str, Any] = {"env_vars": {"RAY_ADDRESS": address}}
    if not _has_hook(os.environ.get(_JOB_CONFIG, "")):
        env["worker_process_setup_hook"] = _HOOK
    context = ray.init(address=address, runtime_env=env)
    return str(context.address_info["gcs_address"])


def _has_hook(config: str) -> bool:
    """Whether the job brings a hook for its workers of its own; Ray takes one only."""
    if not config:
        return False
    return bool((json.loads(config).get("runtime_env") or {}).get("worker_process_setup_hook"))


def tpu_hosts(pod_type: str | None = None) -> list[Host]:
    """Every host with TPU labels that the cluster knows, dead ones too, by slice and worker id.

    :param pod_type: only those of slices of this size.
    """
    import ray

    hosts = [host for node in ray.nodes() if (host := _host(node)) is not None]
    return sorted(
        (host for host in hosts if pod_type in (None, host.pod_type)),
        key=lambda host: (host.slice_name, host.worker_id, not host.alive),
    )


def _host(node: dict[str, Any]) -> Host | None:
    labels = node.get("Labels") or {}
    worker_id = str(labels.get(WORKER_ID, ""))
    if not labels.get(SLICE_NAME) or not worker_id.isdigit():
        return None
    return Host(
        node_id=node["NodeID"],
        address=node["NodeManagerAddress"],
        port=node["NodeManagerPort"],
        slice_name=labels[SLICE_NAME],
        worker_id=int(worker_id),
        pod_type=labels.get(POD_TYPE, ""),
        chips=int((node.get("Resources") or {}).get("TPU", 0)),
        alive=bool(node["Alive"]),
    )


def host_names() -> dict[str, str]:
    """Name of each TPU host by its IP address; addresses that several live hosts share are left out."""
    names = defaultdict(set)
    for host in tpu_hosts():
        if host.alive:
            names[host.address].add(host.name)
    return {address: found.pop() for address, found in names.items() if len(found) == 1}


def lost_hosts(hosts: Iterable[Host], grace_s: float = 0.0) -> list[Host]:
    """Which of these hosts are gone.

    Ray notices a host that vanished after some 15 seconds; its raylet refuses connections at once.
    Processes of a host also die one after another, the worker before the raylet.

    :param hosts: hosts that were there.
    :param grace_s: how long to go on looking while all of them seem to be there, in seconds.
    :return: the lost ones; a host that only does not answer counts once the grace is over.
    """
    hosts = list(hosts)
    until = time.monotonic() + grace_s
    while True:
        probes = _probe_all(hosts)
        lost = [host for host, answer in probes.items() if answer is False]
        over = time.monotonic() >= until
        if lost or over:
            silent = [host for host, answer in probes.items() if answer is None]
            return lost + silent if over and grace_s else lost
        time.sleep(_PAUSE_S)  # nothing announces that a process is about to die


def _probe_all(hosts: list[Host]) -> dict[Host, bool | None]:
    alive = {host.node_id for host in tpu_hosts() if host.alive}
    with ThreadPoolExecutor(max_workers=_PROBES) as pool:
        answers = pool.map(lambda host: _probe(host) if host.node_id in alive else False, hosts)
        return dict(zip(hosts, answers, strict=True))


def _probe(host: Host) -> bool | None:
    """Whether the host's raylet listens; None where nobody answered at all."""
    try:
        with socket.create_connection((host.address, host.port), timeout=_PROBE_S):
            return True
    except ConnectionError:
        return False
    except OSError:
        return None


def free_chips() -> dict[str, float]:
    """Chips that nobody holds, by node id."""
    from ray._private.state import available_resources_per_node

    return {node_id: amounts.get("TPU", 0.0) for node_id, amounts in available_resources_per_node().items()}


@dataclass(frozen=True)
class Holding:
    """Chips of one node that somebody holds.

    :param node_id: the node.
    :param chips: how many.
    :param by: who, in words.
    :param job_id: Ray's id of the job that it belongs to.
    :param group_id: the placement group that holds them, None for a lone actor or task.
    """

    node_id: str
    chips: float
    by: str
    job_id: str
    group_id: str | None = None


def holdings(address: str) -> list[Holding]:
    """Everybody who holds chips.

    :param address: of Ray's head.
    """
    from ray.util.placement_group import placement_group_table
    from ray.util.state import list_actors, list_jobs, list_placement_groups, list_tasks

    submissions = {job.job_id: job.submission_id for job in list_jobs(address=address)}
    creators = {group.placement_group_id: group.creator_job_id for group in list_placement_groups(address=address)}
    found: list[Holding] = []

    def add(node_id: str | None, chips: float | None, who: str, job_id: str, group_id: str | None = None) -> None:
        if node_id and chips:
            job = submissions.get(job_id) or job_id
            found.append(Holding(node_id, chips, f"{chips:g} chips by {who} of job {job}", job_id, group_id))

    for group_id, group in placement_group_table().items():
        if group["state"] != "CREATED":
            continue
        who = f"placement group {group['name'] or group_id[:12]}"
        for bundle, node_id in group["bundles_to_node_id"].items():
            add(node_id, group["bundles"].get(bundle, {}).get("TPU"), who, creators.get(group_id, "?"), group_id)
    # What runs inside a group asks for the group's own resources, not for "TPU".
    for actor in list_actors(address=address, detail=True, filters=[("state", "=", "ALIVE")]):
        chips = (actor.required_resources or {}).get("TPU")
        add(actor.node_id, chips, f"actor {actor.name or actor.class_name}", actor.job_id)
    for task in list_tasks(address=address, detail=True, filters=[("state", "=", "RUNNING")]):
        if task.type == "NORMAL_TASK":
            add(task.node_id, (task.required_resources or {}).get("TPU"), f"task {task.name}", task.job_id)
    return found


def whole_slices(shape: SliceShape) -> dict[str, list[Host]]:
    """Live hosts of each slice of that shape that has all of them."""
    slices: dict[str, list[Host]] = defaultdict(list)
    for host in tpu_hosts(shape.pod_type):
        if host.alive and host.chips >= shape.chips_per_host:
            slices[host.slice_name].append(host)
    wanted = set(range(shape.hosts))
    return {name: hosts for name, hosts in slices.items() if {host.worker_id for host in hosts} == wanted}
