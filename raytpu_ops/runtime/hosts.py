"""One task on each host of reserved slices: a function, or a program without a shell.

The driver's side; what a host does is in ``on_host.py``.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

from raytpu_ops.runtime.cluster import lost_hosts
from raytpu_ops.runtime.console import emit
from raytpu_ops.runtime.failures import Died, Raised, judge
from raytpu_ops.runtime.on_host import run_on_host
from raytpu_ops.runtime.place import CurrentHost
from raytpu_ops.runtime.reserve import Reservation, reserved
from raytpu_ops.runtime.session import Session
from raytpu_ops.tpu.errors import DeadlineExceeded, Preempted, RayTpuError, UserCodeFailed
from raytpu_ops.tpu.work import CommandWork, Event, FunctionWork, dump_work

#: Pause between two looks at who has begun, and how long the others may take to end after a failure.
_LOOK_S, _WIND_UP_S = 0.2, 5.0
#: A result travels as one line of the log, and through XCom.
_RESULT_LIMIT = 1_000_000


def run_on_slices(work: FunctionWork | CommandWork, session: Session) -> dict[str, Any]:
    """Run it on every host, to the end of all of them.

    :return: ``hosts``, each with what it returned or its exit code, and the times.
    :raises RayTpuError: of the class that says why it failed.
    """
    with reserved(work.spec, session.until, f"raytpu-{session.run}", session.address) as reservation:
        tasks = _Tasks(work, session, reservation)
        try:
            tasks.wait_started()
            answers = tasks.wait_all()
        except RayTpuError:
            tasks.end()
            raise
        finally:
            session.last_lines(len(tasks.places))
    result = {
        "hosts": [{**_host_words(place), **answers[rank]} for rank, place in enumerate(tasks.places)],
        "slices": sorted({place.slice_name for place in tasks.places}),
        "started_at": session.started_at.isoformat(),
        "finished_at": datetime.now(UTC).isoformat(),
    }
    if (size := len(json.dumps(result))) > _RESULT_LIMIT:
        raise UserCodeFailed(
            f"{_what(work)}: its results take {size} bytes, at most {_RESULT_LIMIT} can be handed on; "
            "write them to storage and return where they are"
        )
    return result


def _host_words(host: CurrentHost) -> dict[str, Any]:
    return {"slice": host.slice_name, "worker_id": host.worker_id, "ip": host.address, "rank": host.rank}


def _what(work: FunctionWork | CommandWork) -> str:
    return work.function if isinstance(work, FunctionWork) else work.argv[0]


class _Tasks:
    """The tasks of one run.

    :param work: what each host does.
    :param session: the driver's session.
    :param reservation: where.
    """

    def __init__(self, work: FunctionWork | CommandWork, session: Session, reservation: Reservation) -> None:
        import ray

        self._work = work
        self._session = session
        self._hosts = reservation.hosts
        self.places = [
            CurrentHost(
                rank=rank,
                num_hosts=len(self._hosts),
                slice_name=place.host.slice_name,
                slice_index=place.slice_index,
                num_slices=work.spec.num_slices,
                worker_id=place.host.worker_id,
                address=place.host.address,
            )
            for rank, place in enumerate(reservation.places)
        ]
        # The process ends with its task: one that stays around would keep the chips that JAX opened.
        task = ray.remote(max_retries=0, max_calls=1)(run_on_host)
        env = {"runtime_env": {"env_vars": work.env}} if work.env else {}
        text, first = dump_work(work), self.places[0].address
        self._refs = {
            task.options(name=_what(work), **env, **place.options()).remote(text, session.run, host, first): host
            for place, host in zip(reservation.places, self.places, strict=True)
        }
        self._pending = list(self._refs)
        self._answers: dict[int, dict[str, Any]] = {}
        self._raised: list[Raised] = []
        self._died: list[Died] = []

    def wait_started(self) -> None:
        """Until it runs on every host, or has failed on one; some may have ended by then."""
        while self._session.ledger.count("worker") < len(self.places):
            if self._take(timeout=0.0) and (self._raised or self._died):
                return
            if time.monotonic() > self._session.until:
                raise self._not_started()
            time.sleep(_LOOK_S)  # the store on Ray's head cannot be waited on
        hosts = [_host_words(host) for host in self.places]
        emit(Event(event="started", data={"at": datetime.now(UTC).isoformat(), "hosts": hosts}))

    def wait_all(self) -> dict[int, dict[str, Any]]:
        """Until every host has ended well; the answers by rank.

        :raises RayTpuError: when one has not; the others are cancelled.
        """
        while self._pending and not self._raised and not self._died:
            self._take(timeout=None)
        if self._raised or self._died:
            raised, died = list(self._raised), list(self._died)
            self.end()  # what the cancelled ones answer does not count
            raise judge(_what(self._work), self._hosts, raised, died)
        return self._answers

    def _take(self, timeout: float | None) -> int:
        """Take the answers that are there, at least one within the timeout; how many came."""
        import ray

        if not self._pending:
            return 0
        done, self._pending = ray.wait(self._pending, num_returns=1, timeout=timeout, fetch_local=True)
        for ref in done:
            self._take_one(ref)
        return len(done)

    def _take_one(self, ref: Any) -> None:
        import ray

        host = self._refs[ref]
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            self._died.append(Died(host.name, " ".join(str(error).split())[:400]))
            return
        if "failure" in answer:
            self._raised.append(Raised(host=host.name, **answer["failure"]))
        else:
            self._answers[host.rank] = answer

    def end(self) -> None:
        """Have those that still run end: first as Ctrl-C would, so that they end their logs, then for good."""
        import ray

        for force in (False, True):
            for ref in self._pending:
                ray.cancel(ref, force=force)
            until = time.monotonic() + _WIND_UP_S
            while self._pending and time.monotonic() < until:
                self._take(timeout=max(0.0, until - time.monotonic()))

    def _not_started(self) -> RayTpuError:
        begun = {int(rank) for rank in self._session.ledger.read("worker")}
        missing = ", ".join(f"{host.name} ({host.address})" for host in self.places if host.rank not in begun)
        if lost := lost_hosts(self._hosts):
            return Preempted(f"{_what(self._work)}: {', '.join(map(str, lost))} died before it ran on every host")
        return DeadlineExceeded(
            f"{_what(self._work)}: reserved every host, but after {self._session.waited_s:.0f} s it does not run on "
            f"{missing}: its process does not come up there (runtime_env, image, memory?)"
        )
