"""The report on a lease: for each slice what was wanted, what was seen, and in words what is missing."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from raytpu_ops.tpu.deadlines import Phase


class HostReport(BaseModel):
    """One host as Ray sees it.

    :param node_id: Ray's id of the node.
    :param address: its IP address.
    :param worker_id: its ``TPU_WORKER_ID`` label, None where the label is missing or no number.
    :param chips: chips that it has.
    :param chips_free: chips that nobody holds.
    :param held_by: who holds the others, in words.
    """

    model_config = ConfigDict(frozen=True)

    node_id: str
    address: str
    worker_id: int | None
    chips: int
    chips_free: int
    held_by: list[str] = Field(default_factory=list)


class SliceReport(BaseModel):
    """One slice.

    :param name: its name, as in the label ``ray.io/tpu-slice-name``.
    :param hosts_wanted: hosts that the shape has.
    :param hosts: the live hosts that carry its name.
    :param missing: what keeps it from being whole, in words; empty when it is.
    :param broken: it cannot become whole by waiting: a host that was there is gone.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    hosts_wanted: int
    hosts: list[HostReport] = Field(default_factory=list)
    missing: list[str] = Field(default_factory=list)
    broken: bool = False

    @property
    def whole(self) -> bool:
        """Every host is there, labelled, with its own worker id and all its chips."""
        return not self.missing and not self.broken

    @property
    def free(self) -> bool:
        """Whole, and nobody holds a chip of it."""
        return self.whole and all(host.chips_free == host.chips for host in self.hosts)


class Readiness(BaseModel):
    """The report on a whole lease.

    :param slices: one report a slice that was asked for.
    :param head_alive: Ray answers.
    :param headless: the head does not run, as whoever runs it says; one that is only silent may be busy.
    :param problems: what is wrong beyond single slices, in words.
    :param fatal: a reason for which waiting cannot help, None where it can.
    :param phase: what is waited for: a queue, hosts, or Ray's labels on them. Each has its own deadline.
    :param since: when that phase began, UTC, as the far side says; None where it does not say.
    :param taken_back: hosts that were there have no machines any more: others have to be given first.
    """

    model_config = ConfigDict(frozen=True)

    slices: list[SliceReport] = Field(default_factory=list)
    head_alive: bool = False
    headless: bool = False
    problems: list[str] = Field(default_factory=list)
    fatal: str | None = None
    phase: Phase = Phase.LABELLED
    since: AwareDatetime | None = None
    taken_back: bool = False

    @property
    def ready(self) -> bool:
        """Ray answers and every slice is whole."""
        return self.head_alive and bool(self.slices) and not self.problems and all(s.whole for s in self.slices)

    @property
    def stands(self) -> bool:
        """What runs on the slices may still have its head and all its hosts; one that is only late counts as there."""
        return self.stands_under((), len(self.slices))

    def stands_under(self, slices: Collection[str], count: int) -> bool:
        """The same of work that has some of the slices, whatever becomes of the others.

        :param slices: names of those that it has; one that the report lacks was replaced. Empty where nobody knows.
        :param count: how many it asked for: while nobody knows which it has, so many must stand, or all there are.
        """
        if self.fatal is not None or self.headless:
            return False
        if not self.slices:  # nobody could be asked: nothing is known of any
            return True
        standing = {s.name for s in self.slices if not s.broken and not self._is_made_anew(s)}
        return standing.issuperset(slices) if slices else len(standing) >= min(count, len(self.slices))

    def _is_made_anew(self, one: SliceReport) -> bool:
        """Whether it is among those whose hosts are queued for or made: where work ran on it, that is gone."""
        return self.phase in (Phase.QUEUED, Phase.PROVISIONING) and len(one.hosts) < one.hosts_wanted

    @property
    def lost(self) -> bool:
        """Nothing is left of what ran on the slices, and Ray can't be asked about it."""
        hostless = bool(self.slices) and all(s.broken for s in self.slices)
        return self.fatal is not None or self.headless or (hostless and not self.head_alive)

    @property
    def broken(self) -> list[str]:
        """Names of slices that cannot become whole by waiting."""
        return [s.name for s in self.slices if s.broken]

    def describe(self) -> str:
        """One line for a log or an error: what is there, what is missing."""
        seen = sum(len(s.hosts) for s in self.slices)
        wanted = sum(s.hosts_wanted for s in self.slices)
        whole = sum(s.whole for s in self.slices)
        lacks = [f"{s.name}: {reason}" for s in self.slices for reason in s.missing]
        lost = [f"{s.name}: broken, waiting cannot mend it" for s in self.slices if s.broken]
        tail = "; ".join([*self.problems, *lacks, *lost])
        head = f"{whole} of {len(self.slices)} slices whole, {seen} of {wanted} hosts labelled"
        return f"{head}; {tail}" if tail else head
