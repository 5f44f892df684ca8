"""Words for error messages: a value shown on one line, and the nearest right word.

Standard library only. Not here: pydantic's errors (``problems.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

#: How much of a refused value an error repeats.
SHOWN_CHARACTERS = 60
#: What stands before the host of a URL: a user's name, and mostly a password.
_CREDENTIALS = re.compile(r"//[^/\s]*@")
#: A longer word is nobody's slip of the keyboard, and comparing it costs time.
_COMPARED_CHARACTERS = 64


def shown(value: object) -> str:
    """The value for an error message: its repr on one line of printable ASCII, cut where it is long.

    Nothing of it is a URL's user or password.

    :param value: anything.
    """
    try:
        text = _CREDENTIALS.sub("//***@", " ".join(ascii(value).split()))
    except Exception as error:  # noqa: BLE001  the repr of a user's own class may raise anything
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"


def near(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` where one of ``known`` is close to ``word``, else nothing."""
    close = get_close_matches(word[:_COMPARED_CHARACTERS], list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
