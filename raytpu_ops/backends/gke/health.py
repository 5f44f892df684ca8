"""How whole a lease is, judged by all that KubeRay, Kubernetes, Kueue and Ray say at one moment.

Ready takes all of it: KubeRay's conditions of the spec as it is now, every pod ready, and Ray's own
labels on every host. ``state: ready`` alone has been true with pods pending (kuberay#2188), pods
have been ready long before Ray labelled them, and Ray remembers hosts that are gone.
Pure. Not here: how any of it is fetched (``backend.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from raytpu_ops.backends.gke.manifest import GROUP
from raytpu_ops.backends.gke.objects import ClusterView, PodView, WorkloadView, first_hosts_since
from raytpu_ops.backends.gke.queued import RequestView
from raytpu_ops.ray.readiness import slices_report
from raytpu_ops.ray.states import ChipUsage, Holder, RayNode
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.readiness import Readiness, SliceReport
from raytpu_ops.tpu.spec import SliceSpec

#: Kubernetes writes whole seconds, and two machines' clocks differ a little.
_CLOCKS = timedelta(seconds=2)


@dataclass(frozen=True)
class Seen:
    """What was seen of a lease at one moment.

    :param cluster: the RayCluster, None where there is none.
    :param at: the moment, UTC.
    :param pods: its pods.
    :param workload: Kueue's Workload of it, None where there is none.
    :param nodes: Ray's nodes, None where Ray does not answer.
    :param silence: why Ray does not answer, in words.
    :param holders: who holds chips.
    :param usage: chips in use, by Ray's node id.
    :param last_lines: what the pods wrote that end again and again, by pod.
    :param requests: the ProvisioningRequests for its nodes, where these are queued for.
    :param lost_pools: the lease's own node pools that will never be, or are no more, in words.
    :param pools_silence: why nothing is known of its own node pools, in words.
    """

    cluster: ClusterView | None
    at: datetime = field(kw_only=True)
    pods: Sequence[PodView] = ()
    workload: WorkloadView | None = None
    nodes: Sequence[RayNode] | None = None
    silence: str = ""
    holders: Sequence[Holder] = ()
    usage: Mapping[str, ChipUsage] = field(default_factory=dict)
    last_lines: Mapping[str, Sequence[str]] = field(default_factory=dict)
    requests: Sequence[RequestView] = ()
    lost_pools: Sequence[str] = ()
    pools_silence: str = ""

    @property
    def head(self) -> PodView | None:
        """The head's pod."""
        heads = [pod for pod in self.pods if pod.is_head]
        return min(heads, key=lambda pod: pod.deleting, default=None)

    @property
    def hosts(self) -> list[PodView]:
        """Pods of the hosts."""
        return [pod for pod in self.pods if not pod.is_head]

    @property
    def answering(self) -> bool:
        """Ray can be asked: its head is there and ready."""
        return self.head is not None and self.head.ready and not self.head.deleting

    @property
    def headless(self) -> bool:
        """No head runs, and no job outlives its head; one that runs and is not ready may be busy."""
        head = self.head
        return head is None or head.deleting or head.is_over or head.running_since is None


def judged(spec: SliceSpec, name: str, seen: Seen) -> Readiness:
    """The report.

    :param spec: what was asked for.
    :param name: of the RayCluster, for messages.
    :param seen: what was seen.
    """
    cluster = seen.cluster
    if cluster is None:
        return Readiness(fatal=f"RayCluster {name} does not exist any more")
    if cluster.deleting:
        return Readiness(fatal=f"RayCluster {name} is being deleted")
    phase, since = _phase(spec, cluster, seen)
    slices = _slices(spec, seen.hosts)
    if _is_held(cluster, seen.workload):
        reports = [SliceReport(name=one, hosts_wanted=spec.shape.hosts, missing=["has no quota yet"]) for one in slices]
        return Readiness(slices=reports, problems=[_queued(cluster, seen.workload)], phase=phase, since=since)
    current = _current(seen)
    report = slices_report(spec, list(slices), current, seen.holders, seen.usage)
    reports = _without_pools([_with_pods(one, slices[one.name], seen) for one in report.slices], seen.lost_pools)
    if seen.head is not None and seen.head.is_lost(seen.at):
        # KubeRay makes no other head while that pod is there, and the hosts' Ray ends without one.
        reports = [one.model_copy(update={"broken": True}) for one in reports]
    problems = _problems(spec, cluster, seen, reports) if seen.nodes is None else [*report.problems]
    if seen.nodes is not None:
        problems += [*_stale(seen, current), *_problems(spec, cluster, seen, reports)]
    return Readiness(
        slices=reports,
        head_alive=report.head_alive and seen.nodes is not None,
        headless=seen.headless,
        problems=problems,
        phase=phase,
        since=since,
        # Once they were all there (F12).
        taken_back=cluster.provisioned and _without_node(seen),
    )


def _phase(spec: SliceSpec, cluster: ClusterView, seen: Seen) -> tuple[Phase, datetime | None]:
    """What the lease waits for, and since when."""
    workload = seen.workload
    if _is_held(cluster, workload):
        return Phase.QUEUED, (workload.queued_since if workload else None) or cluster.created
    granted = _latest([cluster.created, workload.admitted if workload else None])
    pods = [pod for pod in seen.pods if not pod.deleting]
    heads = sum(pod.is_head for pod in pods)
    if not heads or len(pods) - heads < spec.hosts or not all(pod.is_placed for pod in pods):
        queued = [one.created for one in seen.requests if one.waits]
        if queued and not seen.lost_pools:
            return Phase.QUEUED, _latest([granted, *queued])
        waiting = [pod.created for pod in pods if not pod.is_placed]
        came = [one.provisioned.since for one in seen.requests if one.provisioned]
        if cluster.flex_start and _without_node(seen):
            came.append(first_hosts_since([pod for pod in pods if not pod.is_head], spec.num_slices))
            if came[-1] is None:
                return Phase.QUEUED, _latest([granted, *waiting])
        return Phase.PROVISIONING, _latest([granted, *waiting, *came])
    placed = [pod.scheduled.since for pod in pods if pod.scheduled]
    return Phase.LABELLED, _latest([granted, *placed])


def _without_node(seen: Seen) -> bool:
    """A host's pod waits for a node."""
    return any(not pod.deleting and not pod.is_placed for pod in seen.hosts)


def _is_held(cluster: ClusterView, workload: WorkloadView | None) -> bool:
    """Its pods are unwanted now: Kueue queues it, or its node pools are not all there."""
    return cluster.suspended or bool(cluster.queue and workload is not None and workload.admitted is None)


def _latest(instants: Sequence[datetime | None]) -> datetime | None:
    return max((one for one in instants if one is not None), default=None)


def _queued(cluster: ClusterView, workload: WorkloadView | None) -> str:
    if cluster.climb:
        return f"its node pools are not all there yet, {cluster.climb} is being tried"
    if not cluster.queue:
        return f"RayCluster {cluster.name} is suspended, and not by a queue: somebody set spec.suspend"
    where = f"queued by Kueue in LocalQueue {cluster.queue}"
    if workload is None:
        return f"{where}: Kueue has not looked at it yet; is there such a LocalQueue in the namespace?"
    evicted = f" (it was admitted before and lost its quota: {workload.evicted})" if workload.evicted else ""
    return f"{where}: {workload.why or 'no reason is given yet'}{evicted}"


def _slices(spec: SliceSpec, hosts: Sequence[PodView]) -> dict[str, list[PodView]]:
    """The pods of each slice, by its name; slices that have no pod yet are empty."""
    replicas: dict[int, list[PodView]] = defaultdict(list)
    for pod in hosts:
        if pod.replica is not None:
            replicas[pod.replica].append(pod)
    # One whose pods are all on their way out has been replaced, or is about to be.
    staying = sorted(
        replicas, key=lambda number: (all(pod.deleting for pod in replicas[number]), -len(replicas[number]), number)
    )[: spec.num_slices]
    free = (number for number in range(2 * spec.num_slices) if number not in staying)
    numbers = sorted([*staying, *(next(free) for _ in range(spec.num_slices - len(staying)))])
    return {_slice_name(number, replicas.get(number, [])): replicas.get(number, []) for number in numbers}


def _slice_name(number: int, pods: Sequence[PodView]) -> str:
    return next((pod.slice_name for pod in pods if pod.slice_name), f"{GROUP}-{number}")


def _current(seen: Seen) -> list[RayNode]:
    """Ray's nodes that are what runs in the pods now; earlier lives of a pod or an address are left out."""
    runs = {pod.ip: pod.running_since for pod in seen.pods if pod.ip and pod.running_since and not pod.deleting}
    return [
        node
        for node in seen.nodes or ()
        if node.address in runs and (node.started_at is None or node.started_at >= runs[node.address] - _CLOCKS)
    ]


def _stale(seen: Seen, current: Sequence[RayNode]) -> list[str]:
    """Hosts that Ray still counts on and that are gone: it would reserve them for the next job."""
    known = {node.node_id for node in current}
    gone = [node for node in seen.nodes or () if node.alive and node.slice_name and node.node_id not in known]
    return [
        f"Ray has not noticed yet that {node.slice_name} worker {node.worker_id} at {node.address} is gone"
        for node in gone
    ]


def _with_pods(report: SliceReport, pods: Sequence[PodView], seen: Seen) -> SliceReport:
    """The slice's report with what its pods say: which of them waits, and why."""
    labelled = {host.address for host in report.hosts}
    missing = list(report.missing)
    if len(pods) < report.hosts_wanted:
        missing.append(f"KubeRay has made {len(pods)} of its {report.hosts_wanted} pods")
    missing += [
        f"pod {pod.name}{_number(pod)} {_words(pod, seen)}"
        for pod in sorted(pods, key=lambda pod: (pod.host is None, pod.host or 0, pod.name))
        if pod.deleting or pod.is_over or pod.ip not in labelled
    ]
    missing += _twins(pods)
    over = any(pod.is_lost(seen.at) or (pod.is_over and not pod.deleting) for pod in pods)
    return report.model_copy(update={"missing": missing, "broken": report.broken or over})


def _without_pools(reports: list[SliceReport], lost: Sequence[str]) -> list[SliceReport]:
    """Slices whose node pool is lost: which pool was whose nobody says, so those that lack most come first."""
    lacking = sorted((one for one in reports if not one.whole), key=lambda one: len(one.hosts))
    told = {one.name: words for one, words in zip(lacking, lost, strict=False)}
    return [
        one.model_copy(update={"missing": [*one.missing, told[one.name]], "broken": True}) if one.name in told else one
        for one in reports
    ]


def _number(pod: PodView) -> str:
    number = pod.worker_id if pod.worker_id is not None else pod.host
    return "" if number is None else f" (worker {number})"


def _twins(pods: Sequence[PodView]) -> list[str]:
    """Pods of one slice that were given the same worker id (F19)."""
    by_id: dict[str, list[str]] = defaultdict(list)
    for pod in pods:
        if pod.worker_id is not None and not pod.deleting:
            by_id[pod.worker_id].append(pod.name)
    return [
        f"pods {' and '.join(sorted(names))} all have TPU_WORKER_ID {number}"
        for number, names in sorted(by_id.items())
        if len(names) > 1
    ]


def _problems(spec: SliceSpec, cluster: ClusterView, seen: Seen, reports: Sequence[SliceReport]) -> list[str]:
    """What keeps it from being ready beyond single slices."""
    found = [seen.pools_silence] if seen.pools_silence else []
    found += [one.words() for one in seen.requests if one.waits]
    if not cluster.seen:
        found.append("KubeRay has not looked at the RayCluster yet; does its operator watch the namespace?")
    if cluster.failure:
        found.append(f"KubeRay: {cluster.failure}")
    head = seen.head
    if head is None:
        found.append("KubeRay has not made the head's pod yet")
    elif not seen.answering:
        found.append(f"head pod {head.name} {_words(head, seen)}")
    elif seen.silence:
        found.append(f"Ray does not answer: {seen.silence}")
    if not found and all(report.whole for report in reports):
        found += _lagging(spec, cluster)
    return found


def _lagging(spec: SliceSpec, cluster: ClusterView) -> list[str]:
    """KubeRay's own conditions, where all else is as it should be."""
    if cluster.desired_workers != spec.hosts:
        return [f"KubeRay wants {cluster.desired_workers} host pods, the lease {spec.hosts}"]
    if cluster.ready_workers != spec.hosts:
        return [f"KubeRay counts {cluster.ready_workers} of {spec.hosts} host pods as ready"]
    if not cluster.head_ready:
        return ["KubeRay does not count the head's pod as ready"]
    return [] if cluster.provisioned else ["KubeRay does not count the RayCluster as provisioned"]


def _words(pod: PodView, seen: Seen) -> str:
    """Why it is not ready, with what was seen beside."""
    lines = seen.last_lines.get(pod.name)
    said = f"; its last words: {' | '.join(lines)}" if lines else ""
    return f"{pod.words()}{', and its host is gone' if pod.is_lost(seen.at) else ''}{said}"
