"""Code as a package on the cluster, the user's and our own: the same content, the same name, sent once.

Ray's own job client does the same (ray/_private/runtime_env/packaging.py): a zip named
``_ray_pkg_<hash>.zip`` goes into the head's key-value store and is unpacked on each node that
needs it. Ours is packed the same way each time, so its hash says whether the cluster has it.

Not here: what runs from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pathspec

from raytpu_ops.ray.transport import Transport
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured

#: Ray's dashboard takes no larger request (DASHBOARD_CLIENT_MAX_SIZE in ray/_private/ray_constants.py).
MAX_PACKAGE_BYTES = 100 * 1024**2
#: What no cluster needs, in the syntax of ``.gitignore``.
ALWAYS_EXCLUDED = (
    ".git/",
    "__pycache__/",
    "*.pyc",
    ".venv/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    ".ipynb_checkpoints/",
    ".DS_Store",
)
#: Files with further patterns, in any folder, as Ray reads them.
IGNORE_FILES = (".gitignore", ".rayignore")
#: The folder that this package is installed in, and what of it runs on a cluster; the rest is the Airflow side.
RUNTIME_FOLDER = Path(__file__).parents[1]
RUNTIME_PARTS = ("__init__.py", "py.typed", "runtime", "tpu")
#: A zip cannot hold an earlier date, and a real one would change the hash.
_DATE = (1980, 1, 1, 0, 0, 0)
#: How much of a file is in memory at once.
_PIECE_BYTES = 1024**2
#: Seconds for the answer to an upload: Ray stores the package before it answers.
_UPLOAD_S = 300.0


async def upload(transport: Transport, path: str | Path, *, excludes: Sequence[str] = ()) -> str:
    """Pack a folder and upload it, unless the cluster has that very content.

    :param path: a folder, packed without what :data:`ALWAYS_EXCLUDED`, ``.gitignore`` and
        ``.rayignore`` name; or a ``.zip``, sent as it is.
    :param excludes: further patterns in the syntax of ``.gitignore``.
    :return: ``gcs://…``, for ``working_dir`` or ``py_modules`` of a runtime environment.
    :raises InvalidSpec: it does not exist, is empty or too large.
    :raises RemoteUnavailable: Ray does not answer.
    """
    return await _upload(transport, path, lambda: _packed(Path(path), tuple(excludes)))


async def upload_runtime(transport: Transport) -> str:
    """Upload what of this package runs on a cluster, unless the cluster has that very content.

    :return: ``gcs://…``, for ``py_modules`` of a runtime environment.
    :raises Misconfigured: this package is not installed as files.
    :raises RemoteUnavailable: Ray does not answer.
    """
    return await _upload(transport, RUNTIME_FOLDER, _packed_runtime)


async def _upload(transport: Transport, what: str | Path, pack: Callable[[], bytes]) -> str:
    try:
        content = await asyncio.to_thread(pack)
    except OSError as error:
        raise InvalidSpec(f"package {what}: a file of it cannot be read: {error}") from error
    name = f"_ray_pkg_{hashlib.sha256(content).hexdigest()[:40]}.zip"
    url = f"/api/packages/gcs/{name}"

    async def once() -> None:
        # Looking also pins the package for a while, so that it is not collected before the job starts.
        response = await transport.bare("GET", url)
        if response.status_code == 404:
            response = await transport.bare("PUT", url, content=content, timeout=_UPLOAD_S)
        transport.check(response)

    await transport.again(once)
    return f"gcs://{name}"


def _packed(path: Path, excludes: tuple[str, ...]) -> bytes:
    """The user's code, its files at the top, as Ray wants a ``working_dir``."""
    with tempfile.TemporaryFile(prefix="raytpu-package-") as file:
        if path.is_dir():
            write_zip(path, file, excludes=excludes)
        elif path.is_file() and path.suffix == ".zip" and zipfile.is_zipfile(path):
            if path.stat().st_size > MAX_PACKAGE_BYTES:
                raise InvalidSpec(f"package {path}: it has {_too_large()}")
            file.write(path.read_bytes())
        else:
            raise InvalidSpec(f"package {path}: it is no folder and no .zip on this machine")
        file.seek(0)
        return file.read()


def _packed_runtime() -> bytes:
    """Our own code below its own name, as Ray wants ``py_modules``: it puts the folder of the zip on the path."""
    if not RUNTIME_FOLDER.is_dir():
        raise Misconfigured(
            f"raytpu-ops is not installed as files ({RUNTIME_FOLDER} is no folder), so it cannot be sent to the "
            "cluster: install it with pip, or bake it into the image and say so with runtime='image'"
        )
    files = [
        (f"{RUNTIME_FOLDER.name}/{name}", source)
        for name, source in _files(RUNTIME_FOLDER, ())
        if name.partition("/")[0] in RUNTIME_PARTS
    ]
    with tempfile.TemporaryFile(prefix="raytpu-package-") as file:
        _write(RUNTIME_FOLDER, files, file)
        file.seek(0)
        return file.read()


def write_zip(folder: Path, file: IO[bytes], *, excludes: Sequence[str] = ()) -> None:
    """Write a folder as a zip that depends on names, contents and modes only.

    :param folder: its files stand at the top of the zip.
    :param file: where the zip goes.
    :param excludes: patterns in the syntax of ``.gitignore``.
    :raises InvalidSpec: nothing is left to pack, or too much.
    """
    _write(folder, _files(folder, excludes), file)


def _write(folder: Path, files: Iterable[tuple[str, Path]], file: IO[bytes]) -> None:
    sizes: dict[str, int] = {}
    with zipfile.ZipFile(file, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        for name, source in sorted(files):
            sizes[name] = 0
            with source.open("rb") as content, archive.open(_entry(name, source), "w") as target:
                while piece := content.read(_PIECE_BYTES):
                    target.write(piece)
                    sizes[name] += len(piece)
                    _check_size(folder, file.tell(), sizes)
    if not sizes:
        raise InvalidSpec(f"package {folder}: it holds no file that is not excluded; give the folder with your code")


def _entry(name: str, source: Path) -> zipfile.ZipInfo:
    about = source.stat()
    entry = zipfile.ZipInfo(name, date_time=_DATE)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.create_system = 3  # Unix, wherever it is packed
    entry.external_attr = (stat.S_IFREG | (0o755 if about.st_mode & stat.S_IXUSR else 0o644)) << 16
    entry.file_size = about.st_size  # decides early whether the entry needs zip64
    return entry


def _check_size(folder: Path, packed: int, sizes: dict[str, int]) -> None:
    if packed > MAX_PACKAGE_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        words = ", ".join(f"{name} ({_mib(sizes[name])})" for name in largest)
        raise InvalidSpec(f"package {folder}: packed it has {_too_large()} Largest so far: {words}")


@dataclass(frozen=True)
class _Ignored:
    """Patterns that hold below one folder."""

    base: Path
    spec: pathspec.GitIgnoreSpec

    def match(self, path: Path, *, is_dir: bool) -> bool | None:
        """Ignored, taken back by a ``!`` pattern, or not spoken of."""
        relative = path.relative_to(self.base).as_posix() + ("/" if is_dir else "")
        return self.spec.check_file(relative).include


def _files(folder: Path, excludes: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Names in the package and the files behind them; links are followed, in a circle only once."""
    root = folder.resolve()
    ours = _Ignored(root, pathspec.GitIgnoreSpec.from_lines([*ALWAYS_EXCLUDED, *excludes]))
    yield from _below(root, root, (), ours, frozenset({root}))


def _below(
    root: Path, folder: Path, ignored: tuple[_Ignored, ...], ours: _Ignored, above: frozenset[Path]
) -> Iterator[tuple[str, Path]]:
    ignored = (*ignored, *_ignore_files(folder))
    with os.scandir(folder) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    for child in children:
        path = Path(child.path)
        is_dir = child.is_dir()
        if ours.match(path, is_dir=is_dir) or _is_ignored(path, is_dir, ignored):
            continue
        if is_dir:
            real = path.resolve()
            if real not in above:
                yield from _below(root, path, ignored, ours, above | {real})
        elif child.is_file():  # no sockets, pipes or broken links
            yield path.relative_to(root).as_posix(), path


def _ignore_files(folder: Path) -> Iterator[_Ignored]:
    for name in IGNORE_FILES:
        file = folder / name
        if file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            yield _Ignored(folder, pathspec.GitIgnoreSpec.from_lines(lines))


def _is_ignored(path: Path, is_dir: bool, ignored: tuple[_Ignored, ...]) -> bool:
    # As in git, the nearest file that speaks of the path has the last word.
    for rules in reversed(ignored):
        said = rules.match(path, is_dir=is_dir)
        if said is not None:
            return said
    return False


def _mib(size: int) -> str:
    return f"{size / 1024**2:.1f} MiB"


def _too_large() -> str:
    return (
        f"more than the {_mib(MAX_PACKAGE_BYTES)} that Ray's dashboard takes; exclude data with a .rayignore file, "
        "or put it into storage that the hosts can read."
    )
