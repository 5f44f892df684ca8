"""From ``module:function`` to the function, and from what it returned to plain JSON.

The two places where the user's code meets ours; each says what is wrong in the user's words.
"""

from __future__ import annotations

import math
import time
from importlib import import_module
from typing import Any

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
    text = " ".join(str(error).split())
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
    """The value as plain JSON; scalars of numpy and jax become numbers, NaN becomes null.

    :param what: what it is, for the error.
    :raises UserCodeFailed: when it holds something that JSON has no word for.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item, what) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, what) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return plain(value.item(), what)
    raise UserCodeFailed(
        f"{what} holds a {type(value).__name__}, which is no plain JSON: "
        "return numbers, text, lists and dicts, and write larger things to storage"
    )
