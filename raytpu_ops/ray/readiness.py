"""How whole slices are, judged by Ray's own labels and resources; and who keeps hosts busy.

Pure: it takes what ``cluster.py`` fetched. A slice counts as whole only when every host is there
once, with its own worker id, the labels of the shape and all its chips (F14, F19). Ray's
``get_num_ready_tpu_slices`` says other things in 2.60 (ray#66029), so it is not asked.

Not here: what only a backend knows, such as why a host's pod waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from raytpu_ops.ray.states import LABEL_POD_TYPE, LABEL_TOPOLOGY, LABEL_WORKER_ID, ChipUsage, Holder, RayNode
from raytpu_ops.tpu.readiness import HostReport, Readiness, SliceReport
from raytpu_ops.tpu.shapes import SliceShape
from raytpu_ops.tpu.spec import SliceSpec

#: Missing worker ids that a message lists before it counts the rest: a slice may have 1,536 hosts.
_LISTED = 8


def slices_report(
    spec: SliceSpec,
    slice_names: Sequence[str] | None,
    nodes: Sequence[RayNode],
    holders: Sequence[Holder] = (),
    usage: Mapping[str, ChipUsage] | None = None,
) -> Readiness:
    """How whole the slices are.

    :param spec: what was asked for.
    :param slice_names: names of the slices; None takes those of the spec's shape that Ray shows.
    :param nodes: every node that Ray remembers, the dead ones too.
    :param holders: who holds chips.
    :param usage: chips in use by node id, as Ray's monitor counts them; somewhat older than ``holders``.
    """
    shape = spec.shape
    named: dict[str, list[RayNode]] = defaultdict(list)
    for node in nodes:
        if node.slice_name is not None:
            named[node.slice_name].append(node)
    names = list(slice_names) if slice_names is not None else _discovered(spec, named)
    busy = _Busy(holders, usage or {})
    reports = [_slice_report(name, shape, named.get(name, ()), busy) for name in names]
    head_alive = any(node.is_head and node.alive for node in nodes)
    problems = [] if head_alive else ["Ray's head node is not alive"]
    if len(reports) < spec.num_slices:
        others = _other_shapes(shape, {name: named[name] for name in named if name not in names})
        problems.append(f"{len(reports)} of {spec.num_slices} slices have shown up in Ray{others}")
    if not all(report.whole for report in reports) or len(reports) < spec.num_slices:
        # One of these may be the host that is missed; on a shared cluster it may be anybody's.
        problems += _unlabelled(nodes)
    return Readiness(slices=reports, head_alive=head_alive, problems=problems)


def _discovered(spec: SliceSpec, named: Mapping[str, Sequence[RayNode]]) -> list[str]:
    """Names of slices of the shape, the most complete ones first, no more than were asked for."""
    hosts = {name: sum(_fits(spec.shape, node) for node in nodes if node.alive) for name, nodes in named.items()}
    found = sorted((name for name in hosts if hosts[name]), key=lambda name: (-hosts[name], name))
    return sorted(found[: spec.num_slices])


def _other_shapes(shape: SliceShape, named: Mapping[str, Sequence[RayNode]]) -> str:
    shapes = {
        name: f"{node.labels.get(LABEL_POD_TYPE)} {node.labels.get(LABEL_TOPOLOGY)}"
        for name, nodes in sorted(named.items())
        for node in nodes
        if node.alive and not _fits(shape, node)
    }
    listed = ", ".join(f"{name} is {other}" for name, other in list(shapes.items())[:_LISTED])
    return f"; {shape.pod_type} {shape.topology} is wanted, {listed}" if shapes else ""


def _fits(shape: SliceShape, node: RayNode) -> bool:
    return all(node.labels.get(label) == value for label, value in shape.ray_labels.items())


class _Busy:
    """Who holds what on which node."""

    def __init__(self, holders: Iterable[Holder], usage: Mapping[str, ChipUsage]) -> None:
        self._usage = usage
        self._by_node: dict[str, list[Holder]] = defaultdict(list)
        for holder in holders:
            self._by_node[holder.node_id].append(holder)

    def report(self, node: RayNode) -> HostReport:
        holders = self._by_node.get(node.node_id, [])
        named = sum(holder.chips for holder in holders)
        counted = self._usage[node.node_id].used if node.node_id in self._usage else 0.0
        held_by = [_held(holder) for holder in holders]
        if counted > named:
            held_by.append(f"{_amount(counted - named)} by somebody whom Ray does not name")
        # Half a chip is as good as none: nobody can reserve the host.
        free = int(node.chips - max(named, counted))
        return HostReport(
            node_id=node.node_id,
            address=node.address,
            worker_id=node.worker_id,
            chips=node.chips,
            chips_free=max(0, min(node.chips, free)),
            held_by=held_by,
        )


def _held(holder: Holder) -> str:
    return f"{_amount(holder.chips)} by {holder.who}" if holder.chips else holder.who


def _amount(chips: float) -> str:
    return f"{chips:g} chip{'' if chips == 1 else 's'}"


def _slice_report(name: str, shape: SliceShape, nodes: Sequence[RayNode], busy: _Busy) -> SliceReport:
    alive = sorted((node for node in nodes if node.alive), key=_order)
    by_id: dict[int, list[RayNode]] = defaultdict(list)
    for node in alive:
        if node.worker_id is not None:
            by_id[node.worker_id].append(node)
    absent = [number for number in range(shape.hosts) if number not in by_id]
    lost = _lost(absent, nodes)
    missing = [
        *_absent(absent, lost, shape),
        *(reason for node in alive for reason in _wrong(node, shape)),
        *(_twice(number, twins) for number, twins in sorted(by_id.items()) if len(twins) > 1),
    ]
    return SliceReport(
        name=name,
        hosts_wanted=shape.hosts,
        hosts=[busy.report(node) for node in alive],
        missing=missing,
        broken=bool(lost),
    )


def _order(node: RayNode) -> tuple[bool, int, str]:
    return node.worker_id is None, node.worker_id or 0, node.node_id


def _lost(absent: Sequence[int], nodes: Sequence[RayNode]) -> dict[int, RayNode]:
    """Hosts that were there and are gone. One that joined again under the same worker id is not among them."""
    dead = {node.worker_id: node for node in nodes if not node.alive}
    return {number: dead[number] for number in absent if number in dead}


def _absent(absent: Sequence[int], lost: Mapping[int, RayNode], shape: SliceShape) -> list[str]:
    reasons = []
    for number, node in lost.items():
        why = f" ({node.state_message})" if node.state_message else ""
        reasons.append(f"worker {number} at {node.address} was there and has died{why}")
    never = [number for number in absent if number not in lost]
    if len(never) == shape.hosts:
        reasons.append("none of its hosts has joined Ray" if shape.hosts > 1 else "its host has not joined Ray")
    elif never:
        listed = ", ".join(str(number) for number in never[:_LISTED])
        more = f" and {len(never) - _LISTED} more" if len(never) > _LISTED else ""
        reasons.append(f"worker{'s' if len(never) > 1 else ''} {listed}{more} of {shape.hosts} not there yet")
    return reasons


def _wrong(node: RayNode, shape: SliceShape) -> list[str]:
    """What is wrong with a host that carries the slice's name."""
    who = f"worker {node.worker_id} at {node.address}" if node.worker_id is not None else f"the host at {node.address}"
    reasons = []
    if node.worker_id is None:
        word = node.labels.get(LABEL_WORKER_ID)
        reasons.append(f"{who} has no worker id" if word is None else f"{who} has the worker id {word!r}")
    elif node.worker_id >= shape.hosts:
        reasons.append(f"{who}: a {shape.topology} slice has workers 0 to {shape.hosts - 1} only")
    for label, wanted in shape.ray_labels.items():
        seen = node.labels.get(label)
        if seen != wanted:
            reasons.append(f"{who} has {label}={seen}, {wanted} is wanted")
    if node.chips != shape.chips_per_host:
        reasons.append(f"{who} shows {_amount(node.chips)}, {shape.chips_per_host} are wanted")
    return reasons


def _twice(number: int, twins: Sequence[RayNode]) -> str:
    hosts = " and ".join(f"{twin.address} (node {twin.node_id[:12]})" for twin in twins)
    return f"worker id {number} is claimed by {hosts}"


def _unlabelled(nodes: Sequence[RayNode]) -> list[str]:
    return [
        f"the host at {node.address} has {_amount(node.chips)} and no slice name: "
        "TPU_NAME, TPU_WORKER_ID, TPU_ACCELERATOR_TYPE and TPU_TOPOLOGY were not set when Ray started there"
        for node in nodes
        if node.alive and node.chips > 0 and node.slice_name is None
    ]


def busy_hosts(nodes: Sequence[RayNode], holders: Sequence[Holder], *, besides: str | None = None) -> list[str]:
    """Hosts that somebody holds, and who, one line each (F46).

    :param besides: submission id of the job that asks; what it holds itself keeps nobody waiting.
    """
    busy = _Busy((holder for holder in holders if besides is None or holder.job != besides), {})
    lines = []
    for node in sorted(nodes, key=lambda node: (node.slice_name or "", _order(node))):
        report = busy.report(node)
        if node.alive and report.held_by:
            where = f"{node.slice_name} worker {node.worker_id}" if node.slice_name else "the host"
            lines.append(f"{where} at {node.address}: {', '.join(report.held_by)}")
    return lines


def dead_hosts(nodes: Sequence[RayNode]) -> list[str]:
    """TPU hosts that have died and did not come back, one line each."""
    alive = {(node.slice_name, node.worker_id) for node in nodes if node.alive}
    return [
        f"{node.slice_name} worker {node.worker_id} at {node.address} has died"
        for node in nodes
        if not node.alive and node.slice_name and (node.slice_name, node.worker_id) not in alive
    ]
