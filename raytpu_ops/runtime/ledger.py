"""What workers tell the driver, while they run and whatever becomes of them.

A few keys in the store of Ray's head: no actor to start and none that can die. Values are small
and plain JSON; the driver that began the run clears them. Not here: what the records say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from raytpu_ops.runtime.console import end_of_log

_NAMESPACE = b"raytpu"


@dataclass(frozen=True)
class Ledger:
    """The records of one run.

    :param run: names the run, on this Ray cluster and for all time.
    """

    run: str

    def put(self, kind: str, who: str, record: dict[str, Any]) -> None:
        """Write a record, over an older one.

        :param kind: what it is about.
        :param who: the worker that it is of.
        """
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(self._key(kind, who), json.dumps(record).encode(), overwrite=True, namespace=_NAMESPACE)

    def get(self, kind: str, who: str) -> dict[str, Any] | None:
        """The record, None where there is none."""
        from ray.experimental.internal_kv import _internal_kv_get

        value = _internal_kv_get(self._key(kind, who), namespace=_NAMESPACE)
        return None if value is None else json.loads(value)

    def read(self, kind: str) -> dict[str, dict[str, Any]]:
        """All records of a kind, by worker."""
        from ray.experimental.internal_kv import _internal_kv_list

        prefix = self._key(kind, "")
        names = [key.decode().removeprefix(prefix) for key in _internal_kv_list(prefix, namespace=_NAMESPACE)]
        records = {name: self.get(kind, name) for name in sorted(names)}
        return {name: record for name, record in records.items() if record is not None}

    def count(self, kind: str) -> int:
        """How many records of a kind there are."""
        from ray.experimental.internal_kv import _internal_kv_list

        return len(_internal_kv_list(self._key(kind, ""), namespace=_NAMESPACE))

    def clear(self) -> None:
        """Remove every record of the run."""
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(f"{self.run}/", del_by_prefix=True, namespace=_NAMESPACE)

    def _key(self, kind: str, who: str) -> str:
        return f"{self.run}/{kind}/{who}"


def end_log(run: str, who: str) -> None:
    """Called on a worker, when nothing more will be printed: end its log, and tell the driver that it has ended.

    :param run: the run.
    :param who: the worker.
    """
    end_of_log(run, who)
    Ledger(run).put("ended", who, {})
