"""Control groups of a run: one for each node and one for all programs, below one name for the whole run.

A kubelet wants its root to be there, in each hierarchy, before it starts. Version 1 (one hierarchy
for each controller) and version 2 (one for all) are both met.
"""

from __future__ import annotations

import errno
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
#: What one process beside a group weighs when CPUs are short, by the file that says it for a group.
_ONE_PROCESS = {"cpu.shares": 1024, "cpu.weight": 100}
#: Processes that a run weighs as much as, and each node in it. By default all pods of a run together would
#: weigh as much as one process beside it, and Ray would not start in its time.
WEIGHT = 16
#: Of the control plane and all kubelets together: they must not starve beside the pods that they care for.
PROGRAMS_WEIGHT = 64


def hierarchies(root: Path = ROOT) -> list[Path]:
    """The mounted hierarchies that a kubelet looks for its root in.

    :param root: where they are mounted.
    """
    return [root] if (root / "cgroup.controllers").exists() else _mounted(root, "cgroup")


def _mounted(root: Path, *kinds: str) -> list[Path]:
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return sorted({Path(where) for _, where, kind, *_ in mounts if kind in kinds and Path(where).parent == root})


def make(path: str, weight: int = WEIGHT) -> None:
    """Make a group in every hierarchy.

    :param path: below each hierarchy, `run/node`.
    :param weight: of the last part, in processes that it weighs as much as.
    """
    for hierarchy in hierarchies():
        group = hierarchy
        for part in Path(path).parts:
            _hand_down(group)
            parent, group = group, group / part
            group.mkdir(exist_ok=True)
            # Empty in a new group of version 1, and then no process may enter it.
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (group / name).exists() and not (hierarchy / "cgroup.controllers").exists():
                    (group / name).write_text((parent / name).read_text())
            for name, one in _ONE_PROCESS.items():
                if (group / name).exists():
                    (group / name).write_text(str(one * (weight if group == hierarchy / path else WEIGHT)))


def enter(path: str) -> None:
    """This process shares the CPUs as a member of a group, and so does all that it starts.

    :param path: of a group that `make` made.
    """
    for hierarchy in hierarchies():
        group = hierarchy / path
        if any((group / name).exists() for name in _ONE_PROCESS):
            (group / "cgroup.procs").write_text("0")


def _hand_down(group: Path) -> None:
    """Version 2: let groups below use the controllers that this one has."""
    offered = group / "cgroup.controllers"
    if offered.exists():
        for controller in offered.read_text().split():
            (group / "cgroup.subtree_control").write_text(f"+{controller}")


def remove(path: str, timeout: float = 10.0) -> list[str]:
    """Remove a group and all below it, in every hierarchy; their processes must have ended.

    :param path: below each hierarchy.
    :param timeout: seconds to wait for processes that are still ending.
    :return: the groups that are left, empty when all are gone.
    """
    deadline = time.monotonic() + timeout
    while True:
        # Where both versions are mounted, runc makes groups in version 2 as well.
        everywhere = {*hierarchies(), *_mounted(ROOT, "cgroup", "cgroup2")}
        left = [str(group) for hierarchy in everywhere for group in _remove(hierarchy / path)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _remove(top: Path) -> list[Path]:
    if not top.exists():
        return []
    left = []
    groups = sorted((one for one in top.rglob("*") if one.is_dir()), key=lambda one: -len(one.parts))
    for group in [*groups, top]:
        try:
            group.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                raise
            left.append(group)
    return left
