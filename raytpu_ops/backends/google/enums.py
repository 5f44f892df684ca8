"""Words of Google's enumerations, also those that are newer than the installed client.

Not here: what a word means (the backends).
"""

from __future__ import annotations

from typing import Any


def word_of(value: Any) -> str:
    """Google's word for a value; one that this client is too old for comes as a number, and so it is told.

    :param value: a field of one of Google's messages (proto-plus).
    """
    return str(getattr(value, "name", value))
