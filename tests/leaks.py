"""Where a secret may have been told: files of an Airflow (logs, XComs, rendered fields), command lines, labels.

Not here: which words are secret; the caller knows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

#: Seconds between two looks at the processes.
EVERY_S = 0.5


class Argv:
    """The command lines of all processes of the machine that are there between `__enter__` and `__exit__`.

    :ivar lines: each once.
    """

    def __init__(self) -> None:
        self.lines: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="argv", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.lines |= {" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])}
            if self._over.wait(EVERY_S):
                return


def leaks(secrets: Iterable[str], home: Path, **told: Any) -> list[str]:
    """The places in which a secret stands.

    :param secrets: words, none of them empty.
    :param home: an Airflow's folder, with its database and logs.
    :param told: anything else that was told, by what it is.
    """
    words = {one.encode() for one in secrets}
    assert words
    assert all(len(word) > 6 for word in words), "too short to be told from other words"
    files = [path for path in home.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" for path in files), f"{home} has no logs"
    assert any(path.name.startswith("airflow.db") for path in files), f"{home} has no database"
    texts = {str(path): path.read_bytes() for path in files} | {name: repr(one).encode() for name, one in told.items()}
    assert all(texts[name] not in (b"", b"[]", b"{}", b"set()") for name in told), "nothing was told there"
    return [name for name, text in texts.items() if any(word in text for word in words)]


def marks(objects: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Labels and annotations of objects of Kubernetes."""
    found = [one["metadata"] for one in objects]
    return [{key: one.get(key) for key in ("name", "labels", "annotations")} for one in found]
