"""``raytpu doctor`` for the ``local`` backend: whether this machine can play TPU hosts, and run the demo."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from raytpu_ops.cli.doctor import Check, package
from raytpu_ops.demo.places import example_dags
from raytpu_ops.tpu.errors import RayTpuError

#: Oldest versions that do what we need; ``pyproject.toml`` says why.
_OLDEST = {
    "apache-airflow": (3, 3),
    "ray": (2, 55),
    "jax": (0, 7),
    "flax": (0, 10),
    "optax": (0, 2),
    "orbax-checkpoint": (0, 11),
    "scikit-learn": (1, 5),
}
_LOCAL = "pip install 'raytpu-ops[local]'"
#: Head, four hosts and their workers while they train, and Airflow: 6 GB were seen.
_MEMORY_GB = 8
_CORES = 2


def checks(root: Path | None) -> list[Check]:
    """Look at everything; nothing is changed.

    :param root: root folder of the local backend; None for the user's own.
    """
    looks: list[Callable[[], Check]] = [_python, _python_path]
    looks += [lambda name=name: _package(name) for name in _OLDEST]  # type: ignore[misc]
    looks += [lambda: _root(root), _loopback, _cores, _memory, _bytecode, _dags]
    return [look() for look in looks]


def _python() -> Check:
    version = ".".join(str(part) for part in sys.version_info[:3])
    ok = sys.version_info >= (3, 11)
    return Check("python", ok, version, "" if ok else "install Python 3.11 or newer")


def _python_path() -> Check:
    from raytpu_ops.backends.local.layout import check_words

    try:
        check_words("this Python", sys.executable)
    except RayTpuError as error:
        return Check("path of python", False, sys.executable, str(error))
    return Check("path of python", True, sys.executable)


def _package(name: str) -> Check:
    oldest = _OLDEST[name]
    how = f"pip install 'apache-airflow>={oldest[0]}.{oldest[1]}'" if name == "apache-airflow" else _LOCAL
    return package(name, oldest, how)


def _root(root: Path | None) -> Check:
    from raytpu_ops.backends.local.layout import Root

    place = Root(root)
    try:
        place.check()
    except RayTpuError as error:
        return Check("local root", False, str(place.path), str(error))
    return Check("local root", True, str(place.path))


def _loopback() -> Check:
    try:
        with socket.socket() as one:
            one.bind(("127.77.0.1", 0))
    except OSError as error:
        return Check(
            "loopback addresses",
            False,
            f"127.77.0.1: {error.strerror or error}",
            "hosts start one after another on 127.0.0.1, which takes longer; "
            "on macOS: sudo ifconfig lo0 alias 127.77.0.1",
            needed=False,
        )
    return Check("loopback addresses", True, "each host can have an address of its own")


def _cores() -> Check:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    ok = count >= _CORES
    help_ = "" if ok else f"with fewer than {_CORES} cores the demo may run into its deadlines"
    return Check("cores", ok, str(count), help_, needed=False)


def _memory() -> Check:
    free = psutil.virtual_memory().available / 2**30
    ok = free >= _MEMORY_GB
    help_ = "" if ok else f"the demo takes about {_MEMORY_GB} GiB; end something, or take fewer slices"
    return Check("free memory", ok, f"{free:.1f} GiB", help_, needed=False)


def _bytecode() -> Check:
    ok = not os.environ.get("PYTHONDONTWRITEBYTECODE")
    help_ = "" if ok else "unset it: every Ray process compiles Ray anew, a start takes twice as long"
    return Check("byte code", ok, "is written" if ok else "PYTHONDONTWRITEBYTECODE is set", help_, needed=False)


def _dags() -> Check:
    try:
        return Check("example DAGs", True, str(example_dags()))
    except RayTpuError as error:
        return Check("example DAGs", False, "not found", str(error))
