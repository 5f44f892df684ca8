"""The log of the driver: its own lines, the workers' lines, and the events for the Airflow side.

Every line goes out whole, whichever thread writes it, so an event always begins a line. Workers'
lines come over Ray's own log stream, which runs behind: whoever exits at once loses the tail. So
each worker ends its output with a mark, which is not printed, and :meth:`WorkerLines.drain` waits
until the mark of each of them has come by. The mark says how many lines the worker wrote, so that
lines that Ray's stream drops are counted and said.
Ray reads a worker's log while it is written and takes whatever is there for a line. So workers too
write whole lines, see :func:`use_whole_lines`.
Not here: what the events mean (``tpu/work.py``).
"""

from __future__ import annotations

import io
import os
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from raytpu_ops.tpu.work import Event, dump_event

#: Ends what a worker wrote to a stream; a word that follows says whose and which stream.
END_MARK = "raytpu-end-of-log "
#: How long without a line until the lines of a worker that was killed count as complete.
_QUIET_S = 1.0
#: Processes whose lines are Ray's own, as Ray's log stream names them in place of a pid.
_SYSTEM = frozenset({"autoscaler", "raylet", "gcs_server", "runtime_env"})
#: Lines by which Ray's stream learns whose the next ones are; it keeps them for itself (ray_constants.LOG_PREFIX_*).
_RAYS_OWN_LINES = (b":job_id:", b":task_name:", b":actor_name:")


class LineWriter(io.TextIOBase):
    """A text stream that writes whole lines, one write call each, from any number of threads.

    Python's own stream writes a line and its end separately, and Ray prints workers' lines from a
    thread of its own; two lines would run into each other.

    :param fd: the file descriptor to write to.
    """

    encoding = "utf-8"

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._open: dict[int, str] = {}

    def writable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """The descriptor that it writes to."""
        return self._fd

    @property
    def buffer(self) -> io.FileIO:
        """For bytes, as of any other text stream; they are written as they come."""
        return io.FileIO(self._fd, "wb", closefd=False)

    def reconfigure(self, **_options: Any) -> None:
        """Nothing: libraries ask a standard stream for UTF-8 and for lines, which this one writes."""

    def write(self, text: str) -> int:
        """Write the lines in ``text``; what follows the last line end waits for its own.

        A carriage return ends a line as well: a progress bar writes no other.
        """
        thread = threading.get_ident()
        text_open = self._open.pop(thread, "") + text
        end = max(text_open.rfind("\n"), text_open.rfind("\r")) + 1
        if rest := text_open[end:]:
            self._open[thread] = rest
        if end:
            self._put(text_open[:end])
        return len(text)

    def finish(self) -> None:
        """End the line that this thread has begun."""
        if self._open.get(threading.get_ident()):
            self.write("\n")

    def write_rest(self) -> None:
        """Write what any thread has begun, each as a line."""
        for thread in list(self._open):
            if rest := self._open.pop(thread, ""):
                self._put(f"{rest}\n")

    def _put(self, text: str) -> None:
        data = memoryview(text.encode("utf-8", "replace"))
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


def use_whole_lines() -> None:
    """Make this process print whole lines, on both streams.

    To be called on the driver before ray is imported, on a worker before the user's code is.
    """
    sys.stdout, sys.stderr = LineWriter(1), LineWriter(2)


def say(text: str) -> None:
    """A line of ours in the log."""
    print(f"[raytpu] {text}", flush=True)


def emit(event: Event) -> None:
    """A line for the Airflow side."""
    if isinstance(sys.stdout, LineWriter):
        sys.stdout.finish()
    print(dump_event(event), flush=True)


def end_of_log(run: str, who: str) -> None:
    """Called on a worker, when nothing more will be printed: end both of its streams.

    :param run: the run, so that a mark of an older one is never taken for it.
    :param who: the worker, without a slash.
    """
    for stream, fd, name in ((sys.stdout, 1, "out"), (sys.stderr, 2, "err")):
        with suppress(OSError, ValueError):  # the user's code may have closed it, and has told all then
            stream.write_rest() if isinstance(stream, LineWriter) else stream.flush()
        with suppress(OSError):
            os.write(fd, f"{END_MARK}{run}/{who}/{name} {_lines_in(fd)}\n".encode())


def _lines_in(fd: int) -> int:
    """How many lines Ray's stream has to deliver of the log that a descriptor writes; 0 where that cannot be read."""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return 0
        with Path(f"/proc/self/fd/{fd}").open("rb") as log:  # the folder's own name may be another by now
            return sum(not line.startswith(_RAYS_OWN_LINES) for line in log)
    except OSError:
        return 0


class WorkerLines:
    """Prints what workers write, each line once, with the host's name before it.

    :param run: names the run; marks of any other are lines like all others.
    :param name_of: the name of the host with that IP address, None where it has no name of its own.
    """

    def __init__(self, run: str, name_of: Callable[[str], str | None]) -> None:
        self._mark = f"{END_MARK}{run}/"
        self._name_of = name_of
        self._changed = threading.Condition()
        self._ended: set[str] = set()
        self._missing: dict[str, int] = {}
        self._came: Counter[tuple[Any, ...]] = Counter()
        self._last = time.monotonic()
        self._attached = False

    def attach(self) -> None:
        """Take over from Ray's own printer, which drops lines that look alike.

        Ray's stream has no public hook; where this one is not there any more, Ray's printer stays.
        """
        try:
            from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

            dispatcher.remove_handler("ray_print_logs")
            dispatcher.add_handler("raytpu", self.take)
        except (ImportError, AttributeError) as error:
            say(f"warning: workers' lines come as Ray prints them, the last ones may be missing ({error})")
            return
        self._attached = True

    def take(self, batch: dict[str, Any]) -> None:
        """Print a batch of lines as Ray's log stream delivers it."""
        if batch.get("pid") in _SYSTEM:
            from ray._private.worker import print_to_stdstream

            print_to_stdstream(batch, ignore_prefix=False)
            return
        prefix = self._prefix(batch)
        kept: list[str] = []
        ended: list[str] = []
        stream = (batch.get("ip"), batch.get("pid"), batch.get("is_err"))
        for line in batch["lines"]:
            text, mark, end = line.partition(self._mark)
            if text or not mark:
                self._came[stream] += 1
                # To whoever reads the log a carriage return is a line's end: what follows must not pass for ours.
                kept += [f"{prefix}{part}\n" for part in text.split("\r") if part] or [f"{prefix}\n"]
            if mark:
                whose, _, written = end.partition(" ")
                ended.append(whose)
                self._count(whose, int(written or 0) - self._came[stream])
        if kept:
            sys.stdout.write("".join(kept))
        with self._changed:
            self._ended.update(ended)
            self._last = time.monotonic()
            self._changed.notify_all()

    def _count(self, whose: str, missing: int) -> None:
        """Note how many lines of a worker's stream did not come. More came where a write held half a line."""
        if missing > 0:
            who = whose.partition("/")[0]
            self._missing[who] = self._missing.get(who, 0) + missing

    def _prefix(self, batch: dict[str, Any]) -> str:
        name = self._name_of(str(batch.get("ip")))
        if name is None:
            name = " ".join(str(word) for word in (batch.get("actor_name"), batch.get("task_name")) if word)
            name = f"{name} pid={batch.get('pid')}, ip={batch.get('ip')}".strip()
        return f"({name}) "

    def drain(self, workers: Iterable[str], within_s: float, *, all_ended: bool) -> None:
        """Wait until everything that workers printed is in the log.

        Prints a warning where it is not after that time.

        :param workers: workers that have ended their streams.
        :param within_s: how long to wait, in seconds.
        :param all_ended: there are no others. A worker that was killed ends nothing, and its lines
            count as complete when none has come for a while.
        """
        if not self._attached:
            return
        wanted = {f"{who}/{stream}" for who in workers for stream in ("out", "err")}
        until = time.monotonic() + within_s
        with self._changed:
            self._changed.wait_for(lambda: wanted <= self._ended, timeout=within_s)
            missing = wanted - self._ended
            quiet_at = max(self._last, time.monotonic()) + _QUIET_S
            while not all_ended and (left := min(until, quiet_at) - time.monotonic()) > 0:
                self._changed.wait(timeout=left)
                quiet_at = max(quiet_at, self._last + _QUIET_S)
        if missing:
            late = ", ".join(sorted({name.partition("/")[0] for name in missing}))
            say(f"warning: the last lines of worker {late} did not arrive within {within_s:.0f} s")
        for who, lines in sorted(self._missing.items()):
            say(f"warning: {lines} lines of worker {who} are missing above: Ray's log stream dropped them")
