"""What a driver has while it runs one piece of work."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime

from raytpu_ops.runtime.cluster import connect, host_names
from raytpu_ops.runtime.console import WorkerLines
from raytpu_ops.runtime.ledger import Ledger

#: How long the last lines of workers may be on their way, in seconds.
LAST_LINES_S = 20.0


@dataclass
class Session:
    """One run of the driver.

    :param run: names this run on its Ray cluster.
    :param address: of Ray's head.
    :param until: when the work must run on every host, by :func:`time.monotonic`.
    """

    run: str
    address: str
    until: float
    began: float = field(default_factory=time.monotonic)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        names = host_names()
        self.ledger = Ledger(self.run)
        self.lines = WorkerLines(self.run, names.get)
        self.lines.attach()

    @classmethod
    def open(cls, start_timeout_s: float) -> Session:
        """Connect to the cluster.

        :param start_timeout_s: seconds until the work must run on every host.
        """
        until = time.monotonic() + start_timeout_s
        return cls(run=uuid.uuid4().hex[:12], address=connect(), until=until)

    @property
    def waited_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def last_lines(self, workers: int) -> None:
        """Wait until what the workers printed is in the log.

        :param workers: how many there are, or were.
        """
        ended = self.ledger.read("ended")
        self.lines.drain(ended, LAST_LINES_S, all_ended=len(ended) == workers)

    def close(self) -> None:
        """Forget the run and disconnect; what it held on the cluster goes with it."""
        import ray

        self.ledger.clear()
        ray.shutdown()
