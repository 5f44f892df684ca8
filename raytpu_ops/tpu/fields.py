"""Types of fields that refuse what pydantic would quietly convert: durations, plain JSON, names, URLs.

``True`` is no second and no count here, ``"2"`` no number, NaN no duration; what cannot cross the
wire unchanged is refused where it is written.
"""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, Strict

from raytpu_ops.tpu.words import shown

__all__ = [
    "Count",
    "Duration",
    "Flag",
    "Instant",
    "Line",
    "PlainDict",
    "PlainJson",
    "Seconds",
    "Text",
    "Url",
    "Word",
    "matching",
]

#: Longer than any run of Airflow; a number beyond it is a slip of the keyboard (or milliseconds).
MAX_DURATION = timedelta(days=365)
#: Deeper JSON is a cycle or a mistake.
_MAX_DEPTH = 32
_TOO_LONG = f"must be at most {MAX_DURATION.days} days; durations are timedeltas or seconds"
_NOT_POSITIVE = "must be longer than zero"


def _duration(value: object) -> object:
    if isinstance(value, timedelta):
        duration = value
    elif isinstance(value, str) and value.startswith("P"):
        return value  # ISO 8601, as JSON writes a timedelta; pydantic reads it
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("must be a finite number of seconds or a timedelta")
        if abs(value) > MAX_DURATION.total_seconds():
            raise ValueError(_TOO_LONG if value > 0 else _NOT_POSITIVE)
        duration = timedelta(seconds=value)
    else:
        raise ValueError("must be a timedelta or a number of seconds")
    return duration


def _within_limits(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError(_NOT_POSITIVE)
    if value > MAX_DURATION:
        raise ValueError(_TOO_LONG)
    return value


def _one_line(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be one line of printable text")
    return value


def _wire_safe(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text that UTF-8 can write (it has a lone surrogate)") from None
    return value


def plain_json(value: object, where: str = "", depth: int = 0) -> Any:
    """The value as plain JSON: tuples become lists, everything else must be JSON already.

    :raises ValueError: for what would not arrive as it was written.
    """
    at = f"at {where}: " if where else ""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{at}is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, str):
        return _wire_safe(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{at}JSON has no {value}; leave it out or write null")
        return value
    if isinstance(value, list | tuple):
        return [plain_json(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(  # noqa: TRY004  pydantic turns only ValueError into a refusal
                    f"{at}keys must be text, got {type(key).__name__}"
                )
        return {
            _wire_safe(key): plain_json(item, f"{where}.{shown(key)[1:-1]}".lstrip("."), depth + 1)
            for key, item in value.items()
        }
    raise ValueError(
        f"{at}must be plain JSON (text, numbers, true, false, null, lists, dicts), got {type(value).__name__}"
    )


def matching(pattern: re.Pattern[str], wrong: str) -> AfterValidator:
    """Refuses text that does not begin with a match of the pattern.

    :param wrong: what it must be, for the message.
    """

    def check(value: str) -> str:
        if not pattern.match(value):
            raise ValueError(wrong)
        return value

    return AfterValidator(check)


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise ValueError("must be a URL such as 'http://host:8265'") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or " " in value:
        raise ValueError("must be a URL such as 'http://host:8265'")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must be a URL without a user name or password; they would be logged")
    return value


#: A positive ``timedelta``, given as one, as seconds, or as JSON wrote it.
Duration = Annotated[timedelta, BeforeValidator(_duration), AfterValidator(_within_limits)]
#: A positive, finite number of seconds.
Seconds = Annotated[float, Strict(), Field(gt=0, le=MAX_DURATION.total_seconds(), allow_inf_nan=False)]
#: A whole number; ``True`` and ``"2"`` are none.
Count = Annotated[int, Strict()]
Flag = Annotated[bool, Strict()]
#: Text that may have several lines.
Text = Annotated[str, Strict(), AfterValidator(_wire_safe)]
#: One printable line, not empty, of at most 250 characters (Airflow's limit for its ids).
Word = Annotated[str, Strict(), Field(min_length=1, max_length=250), AfterValidator(_one_line)]
#: One printable line that may be longer: a path, a location.
Line = Annotated[str, Strict(), Field(min_length=1, max_length=1000), AfterValidator(_one_line)]
#: Anything that is JSON as it stands.
PlainJson = Annotated[Any, BeforeValidator(plain_json)]
#: A JSON object.
PlainDict = Annotated[dict[str, Any], BeforeValidator(plain_json)]
#: An instant with its time zone.
Instant = AwareDatetime
#: ``http`` or ``https``, with a host and without credentials.
Url = Annotated[str, Strict(), Field(max_length=2000), AfterValidator(_one_line), AfterValidator(_http_url)]
