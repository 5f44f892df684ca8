"""What Ray says about a lease, and what only the machine knows: which host process is dead, late, or starting.

Ray notices a dead host after a while and can't say why; we see it at once and have its log. Pure but
for reading the last lines of a dead host's log. Not here: fetching (``backend.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from raytpu_ops.backends.local.addresses import ONLY_ADDRESS
from raytpu_ops.backends.local.cluster import Part, tail
from raytpu_ops.backends.local.layout import HEAD
from raytpu_ops.backends.local.record import HostRecord, LeaseRecord, SliceRecord
from raytpu_ops.tpu.readiness import Readiness, SliceReport


def with_processes(ray: Readiness, record: LeaseRecord, parts: Mapping[str, Part]) -> Readiness:
    """Ray's report, completed by the state of the processes.

    :param ray: what Ray's labels say; ``head_alive`` False where Ray does not answer yet.
    :param record: the lease.
    :param parts: the process of each part.
    """
    head = parts[HEAD]
    by_name = {report.name: report for report in ray.slices}
    slices = [
        _slice(by_name.get(item.name) or SliceReport(name=item.name, hosts_wanted=len(item.hosts)), item, parts, ray)
        for item in record.slices
    ]
    if head.dead:
        # No other head can have its hosts: nothing of the lease becomes whole by waiting, and a repair starts all.
        problem = (
            f"the Ray head at {record.head_address} is dead ({_gone(head)}) and every job with it; {tail(head.log)}"
        )
        slices = [item.model_copy(update={"broken": True}) for item in slices]
        return ray.model_copy(update={"slices": slices, "problems": [problem], "head_alive": False})
    problems = ray.problems if ray.head_alive else [f"the Ray head at {record.head_address} {_starting(head)}"]
    return ray.model_copy(update={"slices": slices, "problems": problems})


def _slice(report: SliceReport, item: SliceRecord, parts: Mapping[str, Part], ray: Readiness) -> SliceReport:
    missing = list(report.missing)
    broken = report.broken
    for host in item.hosts:
        part = parts[host.part]
        if part.dead:
            broken = True
            missing.append(f"{_host(host)} is dead ({_gone(part)}); {tail(part.log)}")
        elif ray.head_alive and not _seen(report, host):
            missing.append(f"{_host(host)} {_starting(part)}")
    return report.model_copy(update={"missing": missing, "broken": broken})


def _seen(report: SliceReport, host: HostRecord) -> bool:
    """Ray has the host, whatever labels it carries."""
    if host.address == ONLY_ADDRESS:
        # All hosts share it, and Ray shows the machine's own address instead: only the id tells them apart.
        return any(there.worker_id == host.label for there in report.hosts)
    return any(there.address == host.address for there in report.hosts)


def _host(host: HostRecord) -> str:
    return f"worker {host.worker_id} at {host.address}"


def _gone(part: Part) -> str:
    return f"process {part.identity.pid} is gone" if part.identity else "it was never started"


def _starting(part: Part) -> str:
    if part.identity is None:
        return "was not started: acquire again"
    # Not "for 3 s": a report that says the same must read the same.
    since = datetime.fromtimestamp(part.identity.noted_at, UTC)
    return f"is starting since {since:%H:%M:%S} UTC, log {part.log}"
