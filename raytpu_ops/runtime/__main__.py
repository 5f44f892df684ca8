"""The driver of every job: reads the work, runs it, says how it ended, and exits non-zero where it failed."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from raytpu_ops.runtime.console import emit, say, use_whole_lines
from raytpu_ops.tpu.errors import FailureClass, JobStopped, Misconfigured, RayTpuError
from raytpu_ops.tpu.work import WORK_VARIABLE, Event, TrainWork, load_work


class _Stop(BaseException):
    """Somebody stops the job: Ray sends SIGTERM, and SIGKILL three seconds later."""


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Run the work that the environment holds.

    :return: the exit code.
    """
    try:
        result = _run(environ)
    except RayTpuError as error:
        return _failed(error)
    except _Stop:
        return _failed(JobStopped("the job was stopped from outside"))
    except Exception as error:  # noqa: BLE001 - the last door: whatever it is, the Airflow side must read it
        traceback.print_exc()
        return _failed(
            Misconfigured(
                f"the driver failed: {type(error).__name__}: {' '.join(str(error).split())}; this is a fault of "
                "raytpu_ops.runtime or of the versions in the image, its traceback is above"
            )
        )
    emit(Event(event="result", data=result))
    return 0


def _run(environ: Mapping[str, str]) -> dict[str, Any]:
    if WORK_VARIABLE not in environ:
        raise Misconfigured(f"the variable {WORK_VARIABLE} is not set: this job must be submitted by raytpu-ops")
    work = load_work(environ[WORK_VARIABLE])
    from raytpu_ops.runtime.session import Session

    session = Session.open(work.start_timeout_s)
    signal.signal(signal.SIGTERM, _stop)  # after Ray, which sets its own
    try:
        if isinstance(work, TrainWork):
            from raytpu_ops.runtime.train import run_train

            return run_train(work, session)
        from raytpu_ops.runtime.hosts import run_on_slices

        return run_on_slices(work, session)
    finally:
        session.close()


def _stop(_signal: int, _frame: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stop


def _failed(error: RayTpuError) -> int:
    say(f"failed: {error.failure_class}: {error}")
    emit(Event(event="failed", failure_class=FailureClass(error.failure_class), message=str(error)))
    return 1


if __name__ == "__main__":
    os.environ["RAY_DEDUP_LOGS"] = "0"
    use_whole_lines()
    code = main()
    sys.stdout.flush()
    # Not sys.exit: a thread that Ray left waiting must not keep a finished job from ending.
    os._exit(code)
