"""What every test gets: a private Airflow home, private folders, and a look for what was left behind."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.session import SESSION_DIR, prepare_environment

prepare_environment()

HERE = Path(__file__).parent
_NUMBERS = itertools.count()
#: The ways of :func:`way`, the longest first.
LONGEST = ("nodes", "nodes from Google", "one cluster", "airflow+ray", "ray", "others", "gke", "airflow")
#: Variables by whose values a process tells that it belongs to this session.
_OWN = ("AIRFLOW_HOME", "RAYTPU_LOCAL_ROOT", "RAYTPU_ROOT")

pytest_plugins = [f"tests.integration.{path.stem}" for path in sorted((HERE / "integration").glob("*_fixtures.py"))]


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder with a path short enough for Ray's sockets; gone after the test."""
    folder = SESSION_DIR / f"t{next(_NUMBERS)}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def airflow_db() -> None:
    """The tables of this session's Airflow, for tests that need them in this process (``dag.test()``)."""
    from airflow.utils.db import initdb

    initdb()


@pytest.fixture(autouse=True)
def _no_task_is_left(request: pytest.FixtureRequest) -> None:
    """An async test that leaves a task of the event loop running has forgotten something."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_watched_loop")


@pytest.fixture
async def _watched_loop() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, f"tasks left on the event loop: {', '.join(str(task) for task in left)}"


def _left_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ() if process.uids().real == os.getuid() else {}
        except psutil.Error:
            continue
        ours = any(environ.get(name, "").startswith(str(SESSION_DIR)) for name in _OWN)
        if ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


_LEFT: pytest.StashKey[list[str]] = pytest.StashKey()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail the session when it leaves a process, then end that process and remove our folder.

    After the last fixture is gone and before the summary is printed.
    """
    yield
    config = session.config
    left = _left_processes()
    told = config.stash.setdefault(_LEFT, [])
    told += [f"{process.pid} {' '.join(process.cmdline())[:200]}" for process in left]
    for process in left:
        process.kill()
    if hasattr(config, "workeroutput"):
        config.workeroutput["left"] = told  # one of several side by side: the session that began them fails
    elif told and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    shutil.rmtree(SESSION_DIR, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what a session that ran for us has left."""
    node.config.stash.setdefault(_LEFT, []).extend(getattr(node, "workeroutput", {}).get("left", []))


def way(file: str, text: str) -> str:
    """Which way a file of tests goes; whoever distributes does not collect, so it knows a test by its file alone.

    Of ``tests/cluster`` there are more ways: each may start nodes of its own.
    Where ``RAYTPU_TEST_KUBECONFIG`` names a cluster there is one, for all of them use the same nodes.

    :param file: its path in the repository.
    :param text: what it says.
    """
    if file.startswith("tests/cluster/"):
        if os.environ.get("RAYTPU_TEST_KUBECONFIG"):
            return "one cluster"
        if re.search(r"\b(slices: Testbed|kubernetes: KubernetesFaults)", text):
            return "nodes from Google" if "GoogleFake" in text else "nodes"
    if file.startswith("tests/unit/gke/"):
        return "gke"  # half of the time that plain tests take
    return "+".join(mark for mark in ("airflow", "ray") if f"pytest.mark.{mark}" in text) or "others"


@functools.cache
def _way_of(root: Path, nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return way(file, (root / file).read_text())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The ways that take longest begin first, else the last of them would run alone at the end."""
    ways = [_way_of(config.rootpath, item.nodeid) for item in items]
    order = sorted(range(len(items)), key=lambda index: LONGEST.index(ways[index]))
    items[:] = [items[index] for index in order]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``-n 3``: tests of a real Airflow with Ray go one way, those of one of them alone two others, the rest two more.

    Each way is a session of its own, with its own folders, ports, Airflow and Ray. Airflow's tests wait much and
    Ray's compute much, so they take little longer together than one of them alone.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByNeed(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _way_of(config.rootpath, nodeid)

    # By the number of tests the shortest would come first.
    config.option.loadscopereorder = False
    return ByNeed(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what was left."""
    told = config.stash.get(_LEFT, [])
    if told:
        terminalreporter.section("processes left behind", red=True)
        for line in told:
            terminalreporter.write_line(line)
