"""Where the demo finds the example DAGs, and where it puts what is gone afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import raytpu_ops
from raytpu_ops.tpu.errors import Misconfigured

#: The DAG that the demo runs; its file tells the folder of the example DAGs from any other.
DAG_ID = "tpu_train_and_serve"


def example_dags() -> Path:
    """The folder of example DAGs: beside the package in a checkout, inside it in an installed wheel.

    :raises Misconfigured: it is in neither place.
    """
    package = Path(raytpu_ops.__file__).parent
    for folder in (package.parent / "dags", package / "example_dags"):
        if (folder / f"{DAG_ID}.py").is_file():
            return folder
    raise Misconfigured(f"the example DAGs are neither in {package.parent / 'dags'} nor in {package / 'example_dags'}")


def temporary_folder() -> Path:
    """A private folder with a short path, for a local backend's root."""
    return Path(tempfile.mkdtemp(prefix="rtd-", dir=short_temp()))


@contextmanager
def removed_on_error(folder: Path) -> Iterator[None]:
    """Inside, whatever is raised removes the folder: nobody else has begun to clean up yet."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def short_temp() -> Path:
    """The shortest temp folder there is: Ray's sockets are below it, and their paths may have 107 characters."""
    short = Path("/tmp")  # noqa: S108  whoever uses it makes a private folder inside
    return short if short.is_dir() else Path(tempfile.gettempdir())
