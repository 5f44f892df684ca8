"""What any backend's options may say of Ray: a version that knows slices, and more for ``ray start``.

Not here: what a backend itself says to ``ray start``; it names that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Annotated

from pydantic import AfterValidator

from raytpu_ops.tpu.fields import Word

#: The oldest Ray whose slices are first-class.
OLDEST_RAY = (2, 55)
_VERSION = re.compile(r"([0-9]+)\.([0-9]+)\.[0-9]+\Z")
_FLAG = re.compile(r"[a-z][a-z0-9-]*\Z")


def _new_enough(value: str) -> str:
    match = _VERSION.match(value)
    if not match:
        raise ValueError("must be a version such as '2.60.0'")
    if (int(match[1]), int(match[2])) < OLDEST_RAY:
        raise ValueError(f"must be {'.'.join(map(str, OLDEST_RAY))} or newer: slices are first-class since")
    return value


RayVersion = Annotated[Word, AfterValidator(_new_enough)]


def start_parameters(ours: Collection[str]) -> Callable[[dict[str, str]], dict[str, str]]:
    """The validator of further options of ``ray start``.

    :param ours: what the backend itself says to it, which is refused.
    """

    def check(value: dict[str, str]) -> dict[str, str]:
        for key in value:
            if not _FLAG.match(key):
                raise ValueError("must be options of `ray start` without the dashes before them, such as 'num-cpus'")
            if key in ours:
                raise ValueError(f"{key} is what the backend itself says to `ray start`")
        return value

    return check
