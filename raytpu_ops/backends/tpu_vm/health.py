"""How whole a lease is, judged by all that Google and Ray say at one moment.

A slice whose node is gone stays broken: a queued resource brings its nodes once, and Google replaces none of them
alone. So all slices are broken with it, and a repair has them granted anew. They are broken, too, where the queued
resource itself is gone, going or refused: another task may be replacing it just then, which a repair finds out. A host
whose VM is there and whose Ray is not is late: its startup script starts Ray again.
Pure. Not here: how any of it is fetched (``backend.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from raytpu_ops.backends.tpu_vm.objects import NodeView, QueuedView
from raytpu_ops.backends.tpu_vm.states import Meaning
from raytpu_ops.ray.readiness import slices_report
from raytpu_ops.ray.states import ChipUsage, Holder, RayNode
from raytpu_ops.tpu.deadlines import Phase
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.readiness import Readiness, SliceReport
from raytpu_ops.tpu.spec import SliceSpec

_QUEUED_WORDS = "has no capacity yet"


@dataclass(frozen=True)
class Seen:
    """What was seen of a lease at one moment.

    :param queued: the queued resource, None where there is none.
    :param nodes: the nodes that exist, by id.
    :param ray: Ray's nodes, None where Ray does not answer.
    :param silence: why Ray does not answer, in words.
    :param holders: who holds chips.
    :param usage: chips in use, by Ray's node id.
    :param said: what the VMs' startup scripts said last: a line for each worker, by the node's id.
    """

    queued: QueuedView | None
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    ray: Sequence[RayNode] | None = None
    silence: str = ""
    holders: Sequence[Holder] = ()
    usage: Mapping[str, ChipUsage] = field(default_factory=dict)
    said: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        """All VMs run, so Ray can be asked."""
        queued = self.queued
        return (
            queued is not None
            and queued.meaning is Meaning.THERE
            and all(name in self.nodes and self.nodes[name].meaning is Meaning.THERE for name in queued.node_ids)
        )


def judged(lease: SliceLease, seen: Seen) -> Readiness:
    """The report.

    :param lease: as whoever asks knows it.
    :param seen: what was seen.
    """
    queued = seen.queued
    spec, slices = lease.spec, lease.created["slice"]
    why = taken(lease, seen)
    if queued is None or why:
        # All of them, for they come and go together, and Ray's head with them.
        broken = [SliceReport(name=one, hosts_wanted=spec.shape.hosts, broken=True) for one in slices]
        return Readiness(slices=broken, problems=[why])
    if queued.meaning in (Meaning.QUEUED, Meaning.UNKNOWN):
        since = queued.record.climb.begun if queued.record else None
        return _waiting(spec, queued, Phase.QUEUED, since, [f"{queued} is {queued.state}"])
    made = [node.created for node in seen.nodes.values() if node.created is not None]
    if not seen.up:
        coming = [_of_node(node, seen.nodes) for node in queued.node_ids]
        return _waiting(spec, queued, Phase.PROVISIONING, min(made, default=None), coming)
    report = slices_report(spec, list(queued.node_ids), seen.ray or (), seen.holders, seen.usage)
    silent = [f"Ray does not answer: {seen.silence}"] if seen.ray is None else report.problems
    return Readiness(
        slices=[_with_words(one, queued.zone, seen) for one in report.slices],
        head_alive=report.head_alive and seen.ray is not None,
        problems=silent,
        phase=Phase.LABELLED,
        since=max(made, default=None),
    )


def _why(queued: QueuedView) -> str:
    if queued.meaning is Meaning.GOING:
        return "somebody deletes it"
    return str(getattr(queued.failure, "message", "") or "Google gives no reason")


def taken(lease: SliceLease, seen: Seen) -> str:
    """Why the slices that the lease names are Google's again, in words; empty where they are not."""
    queued = seen.queued
    if queued is None:
        return f"queued resource {lease.id} does not exist any more"
    if queued.meaning in (Meaning.REFUSED, Meaning.GOING):
        return f"{queued} is {queued.state}: {_why(queued)}"
    if list(queued.node_ids) != lease.created["slice"]:
        return f"{queued} was granted anew since, as {', '.join(queued.node_ids)}"
    if queued.meaning is Meaning.LOST:
        return f"{queued} is {queued.state}: Google took the slices back"
    gone = lost(queued, seen.nodes.values())
    return f"{'; '.join(gone)}: Google does not replace a node of a queued resource" if gone else ""


def lost(queued: QueuedView, nodes: Iterable[NodeView]) -> list[str]:
    """Slices that were granted and are gone, in words; while they come up the first time there are none.

    :param nodes: those of its nodes that exist.
    """
    if queued.meaning is not Meaning.THERE:
        return []
    there = {node.id: node for node in nodes}
    gone = [f"slice {name} does not exist any more" for name in queued.node_ids if name not in there]
    taken = [
        f"slice {node.id} is {node.words()}" for node in there.values() if node.meaning in (Meaning.LOST, Meaning.GOING)
    ]
    return [*gone, *taken]


def _waiting(
    spec: SliceSpec, queued: QueuedView, phase: Phase, since: datetime | None, problems: list[str]
) -> Readiness:
    word = _QUEUED_WORDS if phase is Phase.QUEUED else "is not up"
    slices = [SliceReport(name=one, hosts_wanted=spec.shape.hosts, missing=[word]) for one in queued.node_ids]
    return Readiness(slices=slices, problems=problems, phase=phase, since=since)


def _of_node(name: str, nodes: Mapping[str, NodeView]) -> str:
    return f"node {name} is {nodes[name].words()}" if name in nodes else f"node {name} is not made yet"


def _with_words(report: SliceReport, zone: str, seen: Seen) -> SliceReport:
    """The slice's report with what the VMs say that Ray does not have."""
    if report.whole:
        return report
    there = {host.worker_id for host in report.hosts}
    said = seen.said.get(report.name, ())
    missing = list(report.missing)
    for worker in range(report.hosts_wanted):
        if worker in there:
            continue
        line = said[worker] if worker < len(said) else ""
        missing.append(f"worker {worker} says: {line}" if line else _look(report.name, zone, worker))
    node = seen.nodes.get(report.name)
    if node is not None and node.words() != node.state:
        missing.append(f"its node is {node.words()}")
    return report.model_copy(update={"missing": missing})


def _look(node: str, zone: str, worker: int) -> str:
    return (
        f"worker {worker} has not said anything; its log: `gcloud compute tpus tpu-vm ssh {node} --zone {zone} "
        f"--worker {worker} --command 'sudo tail -n 50 /var/log/raytpu.log'`"
    )
