"""The host's side of ``run_on_slices``: finds its place, runs the user's code, never raises."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

from raytpu_ops.runtime import place
from raytpu_ops.runtime.console import use_whole_lines
from raytpu_ops.runtime.ledger import Ledger, end_log
from raytpu_ops.runtime.targets import failure_record, import_target, plain
from raytpu_ops.tpu.errors import RayTpuError, UserCodeFailed
from raytpu_ops.tpu.work import CommandWork, FunctionWork, load_work

#: From Linux' ``prctl.h``.
_PR_SET_PDEATHSIG = 1


def run_on_host(text: str, run: str, host: place.CurrentHost, first_address: str) -> dict[str, Any]:
    """Run the work on this host.

    :param text: the work's JSON.
    :param run: the run's name in the ledger.
    :param host: where this is.
    :param first_address: IP address of the first host, where the others find each other.
    :return: ``value`` or ``exit_code``; ``failure`` with the fields of ``failures.Raised`` where it failed.
    """
    work = load_work(text)
    assert isinstance(work, FunctionWork | CommandWork)
    use_whole_lines()
    try:
        _settle(run, host, first_address)
        return _run_command(work) if isinstance(work, CommandWork) else _run_function(work)
    except BaseException as error:  # noqa: BLE001 - it travels to the driver, a cancelled task's interrupt too
        if isinstance(error, RayTpuError) and error.__cause__ is None:
            print(error, file=sys.stderr)  # a traceback of ours would tell the user nothing
        elif not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
        return {"failure": failure_record(error)}
    finally:
        end_log(run, str(host.rank))


def _settle(run: str, host: place.CurrentHost, first_address: str) -> None:
    """Set the variables by which slices find each other, and say that this host has begun."""
    ledger = Ledger(run)

    def coordinator() -> str | None:
        first = ledger.get("worker", "0")
        return None if first is None else str(first["coordinator"])

    if host.num_slices > 1:
        from ray.util.tpu import get_tpu_coordinator_env_vars

        os.environ.update(get_tpu_coordinator_env_vars(first_address, host.num_slices, host.slice_index))
    place.enter(dataclasses.replace(host, _coordinator=coordinator))
    # Where JAX of the other hosts finds this one, in case that the function wants it.
    listens = {"coordinator": f"{host.address}:{place.free_port(host.address)}"} if host.rank == 0 else {}
    ledger.put("worker", str(host.rank), {"rank": host.rank, "megascale": place.megascale(), **listens})


def _run_function(work: FunctionWork) -> dict[str, Any]:
    value = import_target(work.function, "function")(*work.args, **work.kwargs)
    return {"value": plain(value, f"what {work.function} returned")}


def _run_command(work: CommandWork) -> dict[str, Any]:
    """Run the program with its output in this process's log, line by line."""
    try:
        program = subprocess.Popen(
            work.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=_die_with_parent(),
        )
    except OSError as error:
        raise UserCodeFailed(f"{work.argv[0]!r} cannot be run: {error}") from error
    with program:
        assert program.stdout is not None
        try:
            for line in program.stdout:
                print(line, end="", flush=True)
            code = program.wait()
        except BaseException:
            program.kill()
            raise
    if code != 0:
        how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
        raise UserCodeFailed(f"{work.argv[0]} {how}")
    return {"exit_code": code}


def _die_with_parent() -> Callable[[], None] | None:
    """What the program does before it begins, so that it ends when Ray kills the task; only Linux can."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl  # loaded here: between fork and exec nothing may allocate or lock

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return ask
