"""From ``module:function`` to the function, and from what it returned to plain JSON.

The two places where the user's code meets ours; each says what is wrong in the user's words.
"""

from __future__ import annotations

import math
import time
from importlib import import_module
from typing import Any

from raytpu_ops.runtime.console import say
from raytpu_ops.tpu.errors import UserCodeFailed


def import_target(target: str, what: str) -> Any:
    """The object that ``package.module:attribute`` names.

    :param target: checked by ``tpu/work.py``.
    :param what: the field that held it, for the error.
    :raises UserCodeFailed: when it is not there, or when importing it raises.
    """
    module, _, attribute = target.partition(":")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise UserCodeFailed(
            f"{what} {target!r}: there is no module {error.name!r} on the host; "
            "is its folder the job's working_dir, and its requirements in the image?"
        ) from error
    except AttributeError as error:
        raise UserCodeFailed(f"{what} {target!r} does not exist: {error}") from error
    except Exception as error:
        raise UserCodeFailed(f"{what} {target!r}: importing it raised {last_line(error)}") from error
    if not callable(found):
        raise UserCodeFailed(f"{what} {target!r} is a {type(found).__name__}, it must be callable")
    return found


def last_line(error: BaseException) -> str:
    """An exception as the last line of its traceback, on one line."""
    try:
        text = " ".join(str(error).split())
    except Exception as failed:  # noqa: BLE001 - the user's own __str__
        text = f"its text can't be had, {type(failed).__name__} in its __str__"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def failure_record(error: BaseException) -> dict[str, Any]:
    """An exception as plain JSON, with the fields of ``failures.Raised`` that a host knows."""
    return {
        "at": time.time(),
        "error": last_line(error),
        "kind": f"{type(error).__module__}.{type(error).__name__}",
        "ours": str(getattr(error, "failure_class", "")),
    }


def plain(value: Any, what: str) -> Any:
    """The value as plain JSON; scalars of numpy and jax become numbers, NaN and infinity null, which is said.

    :param what: what it is, for the error.
    :raises UserCodeFailed: when it holds something that JSON has no word for.
    """
    lost: list[float] = []
    found = _plain(value, what, lost)
    if lost:
        numbers = ", ".join(sorted({str(number) for number in lost}))
        say(f"warning: {what} holds {numbers}, for which JSON has no word: it is null in the result")
    return found


def _plain(value: Any, what: str, lost: list[float]) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            lost.append(value)
            return None
        return float(value)
    if isinstance(value, dict):
        return {str(key): _plain(item, what, lost) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, what, lost) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _plain(value.item(), what, lost)
    raise UserCodeFailed(
        f"{what} holds a {type(value).__name__}, which is no plain JSON: "
        "return numbers, text, lists and dicts, and write larger things to storage"
    )
