"""`Testbed`: what a test holds. Brings a run up and down.

What can be done to a run while it is up is in `levers.py`; Kubernetes itself is reached with
Kubernetes' own client through `kubeconfig`, and faults that are plain Kubernetes (drain, cordon, a
finalizer) are in `faults.py`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

from tests.testbed import layout as runs
from tests.testbed import parts
from tests.testbed.layout import Layout, Options
from tests.testbed.levers import Levers, TestbedFailed

__all__ = ["Testbed", "TestbedFailed"]

_REPOSITORY = Path(__file__).parents[2]
#: Process 1 of a testbed; other kinds of run have others.
PROGRAM = "tests.testbed.inside"


class Testbed(Levers):
    """A run that is up.

    :param layout: its folder.
    """

    __test__ = False

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._keeper: subprocess.Popen[bytes] | None = None

    # Up and down

    @classmethod
    def up(
        cls,
        *nodes: str,
        control_plane: bool = False,
        kueue: bool = False,
        operator_gates: str = "",
        autoscale: Iterable[str] = (),
        autoscale_idle: float = 15,
        node_grace: int = 20,
        owner: int | None = None,
        within: float = 300,
        say: Callable[[str], None] = print,
        nice: int = 0,
    ) -> Testbed:
        """Start a run, and return when it is ready; what is absent is built first.

        :param nodes: node pools: `cpu`, `v4-2x2x2*2` (two slices, a pool each), `v6e-2x4@ct6e-standard-4t`.
        :param control_plane: no nodes, now or later; ready in seconds.
        :param kueue: with Kueue.
        :param operator_gates: KubeRay's feature gates, `RayMultiHostIndexing=false`.
        :param autoscale: node pools that come when pods wait for them: `v4-2x2x2*4`, up to four slices.
        :param autoscale_idle: seconds after which such a pool goes when nothing runs on it.
        :param node_grace: seconds after which a silent node is NotReady.
        :param owner: pid of the process that the run ends with; this one by default, 0 for none.
        :param within: seconds.
        :param say: told what is built, and what dead runs left.
        :param nice: niceness of builds.
        :raises TestbedUnavailable: when this machine cannot.
        :raises TestbedFailed: when it does not come up.
        """
        parts.ensure(nodes=not control_plane, kueue=kueue, say=say, nice=nice)
        runs.sweep(say)
        layout, lock = runs.new_run()
        options = Options(
            nodes, control_plane, kueue, operator_gates, tuple(autoscale), autoscale_idle, node_grace, venv=sys.prefix
        )
        layout.options.write_text(options.to_json())
        keeper = start_kept(layout, lock, owner=os.getpid() if owner is None else owner, within=within)
        testbed = cls(layout)
        testbed._keeper = keeper
        return testbed

    @classmethod
    def running(cls) -> list[Testbed]:
        """Every run of this user that is ready, whoever started it."""
        return [cls(one) for one in runs.all_runs() if _is_testbed(one.state()) and _keeper_of(one) is not None]

    def down(self, timeout: float = 60) -> None:
        """End the run and all that belongs to it.

        :param timeout: seconds.
        :raises TestbedFailed: when something is left.
        """
        self.close()
        end_kept(self.layout, self._keeper, timeout)

    def __enter__(self) -> Testbed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def server(self) -> str:
        """URL of the API server, on this machine's loopback."""
        return f"https://127.0.0.1:{self.layout.state()['port']}"


def start_kept(
    layout: Layout, lock: IO[str], *, owner: int, within: float, program: str = PROGRAM
) -> subprocess.Popen[bytes]:
    """Start a run and its keeper, and return when it is ready.

    :param layout: the run's folder.
    :param lock: of the folder; the keeper has it from now on.
    :param owner: pid of the process that the run ends with; 0 for none.
    :param within: seconds.
    :param program: module that is the run's process 1.
    :return: the keeper.
    :raises TestbedFailed: when it does not come up.
    """
    created = psutil.Process(owner).create_time() if owner else 0.0
    reading, writing = os.pipe()
    with lock, (layout.logs / "keeper.log").open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.testbed.keeper", str(layout.root), str(owner), str(created),
             str(writing), str(lock.fileno()), program],
            cwd=_REPOSITORY,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[writing, lock.fileno()],
            start_new_session=True,  # Ctrl-C is for the test; the keeper sees that its owner ends
        )  # fmt: skip
    os.close(writing)
    try:
        _await_handshake(reading, within)
    except BaseException:
        keeper.terminate()
        keeper.wait(60)
        raise
    finally:
        os.close(reading)
    return keeper


def end_kept(layout: Layout, child: subprocess.Popen[bytes] | None, timeout: float) -> None:
    """End a run and all that belongs to it.

    :param layout: the run's folder.
    :param child: its keeper, where this process started it.
    :param timeout: seconds.
    :raises TestbedFailed: when something is left.
    """
    keeper = _keeper_of(layout)
    if keeper is not None:
        keeper.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while layout.root.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if child is not None:
        code = child.wait(max(deadline - time.monotonic(), 1))
        if code != 0:
            raise TestbedFailed(f"the keeper of {layout.root} ended with {code}")
    if layout.root.exists():
        raise TestbedFailed(f"{layout.root} is left after {timeout:.0f} s")


def _is_testbed(state: dict[str, Any]) -> bool:
    return bool(state.get("ready")) and state.get("program") == PROGRAM


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH")]))
    # Pods are not ours to configure by accident: only what the testbed itself reads goes along.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TPU_", "AIRFLOW"))}
    return {**kept, "PYTHONPATH": path}


def _await_handshake(reading: int, within: float) -> None:
    ready, _, _ = select.select([reading], [], [], within)
    if not ready:
        raise TestbedFailed(f"the testbed is not up after {within:.0f} s")
    text = os.read(reading, 2**16)
    message = json.loads(text) if text else {"error": "the keeper ended before the run was up"}
    if "error" in message:
        raise TestbedFailed(f"the testbed did not come up: {message['error']}")


def _keeper_of(layout: Layout) -> psutil.Process | None:
    state = layout.state()
    try:
        keeper = psutil.Process(state["keeper"])
        return keeper if abs(keeper.create_time() - state["created"]) < 1 else None
    except (KeyError, psutil.NoSuchProcess):
        return None
