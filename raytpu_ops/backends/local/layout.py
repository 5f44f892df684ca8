"""Where leases live on disk: a root folder, one short folder a lease, locks beside them.

Nobody but the user may enter the root, for whoever can write there decides what runs, and whoever can
read there has the tokens. It goes away with the last lease. Not here: what is in a lease's folder
(``record.py``).
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, RemoteUnavailable

#: The environment variable that names the root.
ROOT_VARIABLE = "RAYTPU_LOCAL_ROOT"
#: The head's folder within a lease's.
HEAD = "h"
#: The record's file within a lease's folder; the last one to be removed.
RECORD = "lease.json"
_LOCKS = ".lock"
#: The lock for choices that leases must not make at the same time.
ROOT_LOCK = "root"

#: The longest socket that Ray makes below a temp dir of 2.60: its session's name with a pid of up to
#: seven digits, and the longest name that the dashboard gives a socket (validate_socket_filepath in
#: ray/_private/utils.py has the limit, dashboard/subprocesses/utils.py the names).
_LONGEST_SOCKET = "/session_2026-01-01_00-00-00_000000_1234567/sockets/dash_TaskEventsHead"
_LIMIT = 103 if sys.platform == "darwin" else 107


def default_root() -> Path:
    """The root where nobody names one: per user, and short, because socket paths are."""
    named = os.environ.get(ROOT_VARIABLE)
    if named:
        return Path(named)
    # macOS' own temp folder is too long for sockets.
    temp = "/tmp" if Path("/tmp").is_dir() else tempfile.gettempdir()  # noqa: S108 - mode and owner are checked
    return Path(temp) / f"raytpu-{os.getuid()}"


def check_words(what: str, path: str | os.PathLike[str]) -> None:
    """Refuse a path that Ray cannot start processes with: it puts paths into command lines without quotes.

    :param what: what the path is, for the error.
    :raises Misconfigured: naming the path.
    """
    if found := re.search(r"[^\w@%+=:,./~-]", os.fspath(path)):
        raise Misconfigured(
            f"{what} {os.fspath(path)!r} has {found.group()!r} in it: Ray starts its processes through a shell without "
            "quotes and would look for something else; use a path without spaces and the like"
        )


def short_name(lease_id: str) -> str:
    """The name of a lease's folder: six letters of its digest, because socket paths are short."""
    digest = hashlib.sha256(lease_id.encode()).digest()
    return base64.b32encode(digest).decode().lower()[:6]


class Root:
    """The root folder.

    :param path: the folder; None or an empty text, as a form sends it, for :func:`default_root`.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(os.path.realpath(path or default_root()))

    def check(self) -> None:
        """Check that the root can be used, without creating it.

        :raises InvalidSpec: when its path is too long for Ray's sockets.
        :raises Misconfigured: when it is not ours alone, could not be created, or has a space in its path.
        """
        check_words("local root", self.path)
        room = _LIMIT - len(_LONGEST_SOCKET) - len(f"/{short_name('')}/{HEAD}")
        if len(os.fsencode(self.path)) > room:
            raise InvalidSpec(
                f"local root {self.path} has {len(os.fsencode(self.path))} characters, at most {room} leave room for "
                f"Ray's sockets (a path of {_LIMIT} in all); set {ROOT_VARIABLE} to a shorter folder such as /tmp/rt"
            )
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            if not os.access(self.path.parent, os.W_OK | os.X_OK):
                raise Misconfigured(
                    f"local root {self.path} can't be created: {self.path.parent} is no folder that this user may "
                    f"write to; set {ROOT_VARIABLE} to a folder that is"
                ) from None
            return
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise Misconfigured(
                f"local root {self.path} must be a folder of this user that nobody else may enter (mode 0700), it has "
                f"mode {stat.filemode(status.st_mode)} and owner {status.st_uid}; set {ROOT_VARIABLE} to another one"
            )

    def check_ours(self) -> None:
        """Check that it is a root, or can become one: a slip of the tongue must not look like a root without leases.

        :raises InvalidSpec: when the folder is there, with things in it that are not ours; else as :meth:`check`.
        """
        self.check()
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / f"{ROOT_LOCK}{_LOCKS}").exists():
            raise InvalidSpec(f"{self.path} is no root of the local backend: what is in it is not ours")

    def ensure(self) -> None:
        """Check the root and create it where it is missing."""
        self.check()
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.check()

    def folder(self, lease_id: str) -> Path:
        """A lease's folder, which may not be there."""
        return self.path / short_name(lease_id)

    def folders(self) -> list[Path]:
        """The folders of all leases."""
        try:
            return sorted(entry for entry in self.path.iterdir() if entry.is_dir())
        except FileNotFoundError:
            return []

    @contextmanager
    def locked(self, name: str, *, limit_s: float = 60.0) -> Iterator[None]:
        """Hold a lock while in the context; the kernel frees it when its holder dies.

        :param name: :data:`ROOT_LOCK`, or the name of a lease's folder.
        :param limit_s: seconds to wait for another holder.
        :raises RemoteUnavailable: when another process holds it that long.
        """
        path = self.path / f"{name}{_LOCKS}"
        deadline = time.monotonic() + limit_s
        while (handle := self._try_lock(path)) is None:
            if time.monotonic() > deadline:
                raise RemoteUnavailable(f"{path} is held by another process since {limit_s:.0f} s; try again later")
            time.sleep(0.02)  # flock can't wait with a limit
        try:
            yield
        finally:
            os.close(handle)

    def _try_lock(self, path: Path) -> int | None:
        self.ensure()
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            return None  # the last lease's release removed the root just now
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A holder may have removed the file before it let go: then we locked a file without a name.
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(handle)
        return None

    def drop_lock(self, name: str) -> None:
        """Remove a lock's file; only its holder may."""
        (self.path / f"{name}{_LOCKS}").unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove the root when nothing is left in it. Call it without holding the root's lock."""
        if not self.path.is_dir():
            return
        with self.locked(ROOT_LOCK):
            if any(entry.name != f"{ROOT_LOCK}{_LOCKS}" for entry in self.path.iterdir()):
                return
            self.drop_lock(ROOT_LOCK)
            with suppress(OSError):  # somebody who waits for the lock made it anew: then it is theirs to tidy
                self.path.rmdir()


def remove_folder(folder: Path) -> list[str]:
    """Remove a lease's folder, its record last, so that a removal that was cut short is found again.

    :return: what is left and why; empty when nothing is.
    """
    left: list[str] = []
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name == RECORD)
    except FileNotFoundError:
        return []
    for entry in entries:
        if entry.name == RECORD and left:
            break
        try:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        except OSError as error:
            left.append(f"{entry}: {error.strerror or error}")
    if not left:
        folder.rmdir()
    return left
