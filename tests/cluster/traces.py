"""What a run could leave on the machine: looked at before it, and compared after it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.testbed.client import Testbed
from tests.testbed.faults import wait_until
from tests.testbed.layout import Layout

_OWNER = """
import signal, sys, time
from tests.testbed.client import Testbed
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
nodes = sys.argv[1:]
testbed = Testbed.up(*nodes, control_plane=not nodes)
print(testbed.layout.root, flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class Traces:
    """The parts of a machine that a container runtime, a kubelet or a bridge would change."""

    links: frozenset[str]
    mounts: frozenset[str]
    namespaces: frozenset[str]
    rules: tuple[str, ...]
    folders: frozenset[str]

    @classmethod
    def now(cls) -> Traces:
        return cls(
            links=frozenset(path.name for path in Path("/sys/class/net").iterdir()),
            mounts=frozenset(
                line
                for line in Path("/proc/self/mounts").read_text().splitlines()
                if "kubelet" in line or "testbed" in line
            ),
            namespaces=frozenset(path.name for path in Path("/run/netns").glob("*")),
            rules=(*_rules("iptables-save"), *_rules("ip6tables-save")),
            folders=frozenset(
                path
                for path in ("/var/lib/kubelet", "/var/lib/cni", "/opt/containerd", "/run/containerd")
                if Path(path).exists()
            ),
        )


def _rules(command: str) -> Iterator[str]:
    """Every rule and chain of every table, but for the chains that a table has as soon as somebody looks at it."""
    table = ""
    for line in subprocess.run([command], capture_output=True, text=True, check=True).stdout.splitlines():
        if line.startswith("*"):
            table = line
        elif line.startswith(":"):
            chain, policy, _counters = line.split()
            if policy != "ACCEPT":
                yield f"{command} {table} {chain} {policy}"
        elif line.startswith("-"):
            yield f"{command} {table} {line}"


def processes_of(testbed: Testbed) -> list[psutil.Process]:
    """The keeper and everything below it, pods too."""
    keeper = psutil.Process(testbed.layout.state()["keeper"])
    return [keeper, *keeper.children(recursive=True)]


def cgroups_of(testbed: Testbed) -> list[str]:
    return [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{testbed.layout.cgroup}")]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; a dead one that nobody has waited for yet is none of them."""
    left = []
    for one in processes:
        try:
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                left.append(one)
        except psutil.NoSuchProcess:
            continue
    return left


@contextmanager
def owned_by_another(*nodes: str) -> Iterator[tuple[subprocess.Popen[str], Testbed]]:
    """A run whose owner is a process of its own; without nodes a control plane alone."""
    repository = Path(__file__).parents[2]
    command = [sys.executable, "-c", _OWNER, *nodes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=repository) as owner:
        assert owner.stdout is not None
        root = owner.stdout.readline().strip()
        assert root, f"the owner ended with {owner.wait(60)}"
        testbed = Testbed(Layout(Path(root)))
        try:
            yield owner, testbed
        finally:
            owner.kill()
            testbed.close()


def assert_gone(testbed: Testbed, processes: list[psutil.Process], within: float = 60) -> None:
    """No process, no folder, no control group of a run is left."""
    wait_until(lambda: not alive(processes), within, lambda: f"left: {alive(processes)}")
    wait_until(lambda: not testbed.layout.root.exists(), within, f"{testbed.layout.root} is left")
    assert cgroups_of(testbed) == []
