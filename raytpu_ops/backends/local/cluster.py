"""A lease's processes: made, adopted, mended and ended, so that a kill at any moment leaves no riddle.

The order of steps is the point. The record is written before anything starts; each process notes its
own identity before it does anything; what runs and is not in the record is ended; what is in the
record and never ran is started; what ran and is dead is never started again under its old name,
because Ray would take the newcomer for the dead one. Blocking, and fast: labels are waited for by
whoever observes.

Not here: the protocol's words (``backend.py``), what Ray says (``health.py``).
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from raytpu_ops.backends.base import Plan, Released
from raytpu_ops.backends.local import addresses, launch, processes
from raytpu_ops.backends.local.commands import LOG, Commands
from raytpu_ops.backends.local.faults import Faults
from raytpu_ops.backends.local.launch import write_atomically
from raytpu_ops.backends.local.layout import HEAD, ROOT_LOCK, Root, remove_folder
from raytpu_ops.backends.local.record import LeaseRecord, make_token, read_token
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.errors import Misconfigured, Preempted, RemoteUnavailable
from raytpu_ops.tpu.lease import Owner, SliceLease

#: Steps are debug lines: a log shows how far a killed process came.
log = logging.getLogger(__name__)

_LAUNCH = "launch.json"
_LAUNCH_LOG = "launch.log"
#: Seconds for the small program that starts the others; it needs milliseconds on an idle machine.
_LAUNCH_LIMIT_S = 60.0


@dataclass(frozen=True)
class Part:
    """One process of a lease as the system sees it.

    :param identity: who was started, None where nobody ever was.
    :param alive: it runs.
    :param log: what it printed.
    """

    identity: processes.ProcessId | None
    alive: bool
    log: Path

    @property
    def dead(self) -> bool:
        """It ran and does not any more."""
        return self.identity is not None and not self.alive


class Cluster:
    """The leases of one root.

    :param root: where they live.
    :param commands: how their processes are started.
    :param grace_s: seconds between SIGTERM and SIGKILL at release.
    """

    def __init__(self, root: Root, commands: Commands, *, grace_s: float = 1.5) -> None:
        self.root = root
        self.commands = commands
        self.grace_s = grace_s

    def acquire(self, plan: Plan, owner: Owner) -> LeaseRecord:
        """Adopt what the owner has, finish what is half made, else make it; roll back on failure.

        :raises CapacityUnavailable: a fault says so.
        :raises Misconfigured: the owner's cluster runs with another spec.
        """
        lease_id = naming.lease_id(owner)
        folder = self.root.folder(lease_id)
        try:
            with self.root.locked(folder.name):
                record = self._adopt(plan, lease_id)
                try:
                    return self._mend(record or self._create(plan, owner, lease_id))
                except BaseException:
                    log.debug("step: rolling back %s", lease_id)
                    self._discard(lease_id)
                    raise
        finally:
            self.root.tidy()

    def repair(self, lease_id: str, broken: Collection[str] = ()) -> LeaseRecord:
        """Replace each slice that lost a host by a whole new one under a fresh name.

        A head that is dead starts anew where it was, and every slice with it: what holds the lease finds it there.

        :param broken: names of further slices that count as broken.
        :raises Preempted: everything is gone, so there is nothing to repair.
        """
        with self.root.locked(self.root.folder(lease_id).name):
            record = self.read(lease_id)
            if record is None:
                raise Preempted(f"lease {lease_id} has no record: it can't be repaired, release it and provision again")
            return self._mend(record, broken)

    def release(self, lease_id: str) -> Released:
        """End every process of a lease and remove its folder; what is gone already is a success."""
        folder = self.root.folder(lease_id)
        if not self.root.path.exists() and not self._members(lease_id):
            return Released()
        with self.root.locked(folder.name):
            released = self._discard(lease_id)
        self.root.tidy()
        return released

    def read(self, lease_id: str) -> LeaseRecord | None:
        """The record of a lease; None where there is none."""
        record = LeaseRecord.read(self.root.folder(lease_id))
        return record if record is not None and record.id == lease_id else None

    def leases(self) -> list[SliceLease]:
        """Every lease of the root: those with a record, and those whose processes alone are left."""
        records = [record for folder in self.root.folders() if (record := LeaseRecord.read(folder))]
        found = {record.id: record.lease() for record in records}
        for member in processes.marked(self.root.path):
            if member.lease_id in found or processes.MARK_GRANT not in member.marks:
                continue
            try:
                found[member.lease_id] = SliceLease.from_xcom(json.loads(member.marks[processes.MARK_GRANT]))
            except ValueError as error:  # no JSON, or InvalidSpec: it must not hide the other leases
                log.warning("%s carries a lease of another version: %s", processes.describe(member.process), error)
        return [found[lease_id] for lease_id in sorted(found)]

    def part(self, record: LeaseRecord, part: str) -> Part:
        """How one process of a lease is."""
        folder = record.folder / part
        identity = processes.read_identity(folder)
        return Part(identity, identity is not None and identity.alive(), folder / LOG)

    def kill(self, record: LeaseRecord, parts: Collection[str]) -> list[str]:
        """SIGKILL the whole process trees of some parts; what is left, in words."""
        return processes.end(lambda: self._members(record.id, parts), grace_s=0, limit_s=10)

    def _adopt(self, plan: Plan, lease_id: str) -> LeaseRecord | None:
        """The record that can be gone on with; None after remains of anything else were removed."""
        folder = self.root.folder(lease_id)
        record = LeaseRecord.read(folder)
        if record is not None and record.id != lease_id:
            raise Misconfigured(f"{folder} belongs to lease {record.id}, not to {lease_id}: release that one first")
        alive = self._members(lease_id)
        if record is None:
            reason = "no record" if alive or folder.exists() else ""
        elif self.part(record, HEAD).dead:
            reason = "its head is dead"
        elif read_token(folder) is None:
            reason = "its token is gone"
        elif record.spec != plan.spec:
            if alive:
                raise Misconfigured(
                    f"lease {lease_id} of {record.owner.key} runs with {record.spec}, but {plan.spec} is asked for: "
                    f"release it first (raytpu release {lease_id} --backend local), or go back to its spec"
                )
            reason = "it had another spec and nothing of it runs"
        else:
            log.info("adopting lease %s", lease_id)
            return record
        if reason:
            log.info("lease %s starts afresh: %s", lease_id, reason)
            left = self._end(lease_id)
            left += remove_folder(folder)
            if left:
                raise RemoteUnavailable(f"remains of lease {lease_id} can't be removed: {'; '.join(left)}")
        return None

    def _create(self, plan: Plan, owner: Owner, lease_id: str) -> LeaseRecord:
        """Write down a lease of which nothing runs yet."""
        folder = self.root.folder(lease_id)
        with self.root.locked(ROOT_LOCK):
            faults = Faults(self.root)
            rung, attempts = faults.grant(plan.ladder)
            others = [record for path in self.root.folders() if (record := LeaseRecord.read(path))]
            only = not addresses.has_blocks()
            # The root is part of it: the same owner's lease in another root, in a test say, may start right now.
            seed = f"{self.root.path}/{lease_id}"
            block = addresses.ONLY_ADDRESS if only else addresses.choose_block(seed, {r.block for r in others})
            ports = addresses.free_ports(seed, {port for record in others for port in record.ports})
            now = datetime.now(UTC)
            record = LeaseRecord(
                id=lease_id,
                owner=owner,
                spec=plan.spec,
                capacity=rung.model_dump(mode="json"),
                attempts=attempts,
                granted_at=now,
                expires_at=now + plan.lease_for,
                root=str(self.root.path),
                block=block,
                head_address=addresses.of_head(block),
                gcs_port=next(ports),
                dashboard_port=next(ports),
                serve_port=next(ports),
                client_port=next(ports),
                agent_port=next(ports),
            )
            for index in range(plan.spec.num_slices):
                record = faults.applied(record.with_slice(index), index)
            folder.mkdir(mode=0o700)
            log.debug("step: folder made")
            make_token(folder)
            log.debug("step: token written")
            record.write()
            log.debug("step: record written")
        return record

    def _mend(self, record: LeaseRecord, broken: Collection[str] = ()) -> LeaseRecord:
        """Make the processes what the record says, after broken slices got fresh ones in the record."""
        headless = self.part(record, HEAD).dead
        for item in record.slices:
            if headless or item.name in broken or any(self.part(record, host.part).dead for host in item.hosts):
                log.info("slice %s of lease %s is broken: it is replaced whole", item.name, record.id)
                with self.root.locked(ROOT_LOCK):
                    fresh = record.with_slice(item.index, replacement=item.replacement + 1)
                    record = Faults(self.root).applied(fresh, item.index)
                    record.write()
                log.debug("step: slice replaced in the record")
        self._end_strays(record)
        if headless:
            log.info("the head of lease %s is dead: it starts anew", record.id)
            self._end_parts(record, {HEAD})
        self._start_missing(record)
        return record

    def _end_strays(self, record: LeaseRecord) -> None:
        """End what runs for the lease and is not in its record: hosts of slices that were replaced."""
        known = set(record.parts)
        marks = processes.marked(self.root.path, lease_id=record.id)
        strays = {member.marks[processes.MARK_PART] for member in marks if processes.MARK_PART in member.marks} - known
        strays |= {path.name for path in record.folder.iterdir() if path.is_dir()} - known
        if strays:
            self._end_parts(record, strays)
            log.debug("step: strays ended")

    def _end_parts(self, record: LeaseRecord, parts: Collection[str]) -> None:
        """End what is left of some parts and remove their folders."""
        # Politely: a raylet that is told to end says so to the head, one that is killed is missed only later.
        left = processes.end(lambda: self._members(record.id, parts), grace_s=self.grace_s, limit_s=10)
        for part in parts:
            left += remove_folder(record.folder / part)
        if left:
            raise RemoteUnavailable(f"what lease {record.id} replaced can't be removed: {'; '.join(left)}")

    def _start_missing(self, record: LeaseRecord) -> None:
        """Start every process of the record that never ran."""
        missing = [part for part in record.parts if self.part(record, part).identity is None]
        if not missing:
            return
        for part in missing:
            (record.folder / part / "tmp").mkdir(mode=0o700, parents=True, exist_ok=True)
        plan = record.folder / _LAUNCH
        write_atomically(plan, json.dumps(self.commands.start(record, missing)))
        log.debug("step: launch planned")
        self._launch(record, plan)
        log.debug("step: launched")
        deadline = time.monotonic() + _LAUNCH_LIMIT_S
        while any(self.part(record, part).identity is None for part in missing):
            if time.monotonic() > deadline:
                raise RemoteUnavailable(
                    f"lease {record.id}: its processes did not start; {tail(record.folder / _LAUNCH_LOG)}"
                )
            time.sleep(0.02)  # each writes its identity within milliseconds; a folder can't be waited on
        log.debug("step: all identities noted")

    def _launch(self, record: LeaseRecord, plan: Path) -> None:
        output = record.folder / _LAUNCH_LOG
        with output.open("ab") as out:
            try:
                code = subprocess.run(
                    [sys.executable, "-I", "-S", launch.__file__, str(plan)],
                    env=self.commands.marks(record),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    timeout=_LAUNCH_LIMIT_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired as error:
                raise RemoteUnavailable(f"lease {record.id}: starting its processes took too long") from error
        if code:
            raise RemoteUnavailable(f"lease {record.id}: its processes could not be started; {tail(output)}")

    def _discard(self, lease_id: str) -> Released:
        """End a lease's processes and remove its folder; needs the lease's lock, and drops it."""
        folder = self.root.folder(lease_id)
        record = self.read(lease_id)
        count = len(self._members(lease_id))
        left = self._end(lease_id)
        log.debug("step: processes ended")
        removed = [f"{count - len(left)} processes of lease {lease_id}"] if count > len(left) else []
        stranger = record is None and LeaseRecord.read(folder) is not None  # another lease with the same short name
        if not left and not stranger:
            there = folder.exists()
            left += remove_folder(folder)
            removed += [f"folder {folder}"] if there and not left else []
        if not left:
            self.root.drop_lock(folder.name)
        return Released(removed=removed, left=left)

    def _end(self, lease_id: str) -> list[str]:
        return processes.end(lambda: self._members(lease_id), grace_s=self.grace_s, limit_s=10)

    def _members(self, lease_id: str, parts: Collection[str] | None = None) -> list[psutil.Process]:
        """Everything that runs for a lease, or for some parts of it, found by marks, notes and parentage."""
        found = [
            member.process
            for member in processes.marked(self.root.path, lease_id=lease_id)
            if parts is None or member.marks.get(processes.MARK_PART) in parts
        ]
        folder = self.root.folder(lease_id)
        for name in parts if parts is not None else [path.name for path in _subfolders(folder)]:
            identity = processes.read_identity(folder / name)
            if identity is not None and identity.alive():
                found.append(psutil.Process(identity.pid))
        return processes.with_descendants(found)


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def tail(path: Path, lines: int = 3, limit: int = 400) -> str:
    """The last lines of a log on one line, for an error; says so where there is none.

    :param lines: how many; a traceback's own last line says what the others lead to.
    :param limit: characters of them that are shown, the last ones.
    """
    try:
        text = path.read_bytes()[-4000:].decode(errors="replace")
    except FileNotFoundError:
        return f"{path} was never written"
    last = [line.strip() for line in text.splitlines() if line.strip()][-lines:]
    words = " | ".join(last)
    words = words if len(words) <= limit else f"…{words[-limit:]}"
    return f"last lines of {path}: {words}" if last else f"{path} is empty"
