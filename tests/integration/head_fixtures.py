"""One Ray head for every test that needs no more than that.

Its interpreter has no raytpu_ops: the client's tests run nothing of it, and the others bring it along.
"""

from __future__ import annotations

import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.ray_head import RayHead
from tests.session import SESSION_DIR


def interpreter_without_ours(folder: Path) -> Path:
    """A virtual environment with everything that this one has, but for raytpu_ops."""
    venv.create(folder, symlinks=True)
    theirs = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "raytpu_ops" not in entry.name and not (theirs / entry.name).exists():
            (theirs / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def head() -> Iterator[RayHead]:
    """A head that runs; whoever kills it starts it again."""
    folder = SESSION_DIR / "rh"
    folder.mkdir()
    head = RayHead(folder, interpreter_without_ours(folder / "venv"))
    try:
        head.start()
        yield head
    finally:
        head.kill()
