"""User input becomes models here, and what is refused becomes one line: where, what, what arrived.

A DAG author never meets the text of a validation library. Not here: what is right; the models and
the catalogue know that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.words import near, shown

#: Fields whose values may be secret: an error says of what type they are, never what they hold.
_PRIVATE = frozenset(
    {"env", "token", "config", "args", "kwargs", "argv", "address", "serve_address", "storage", "runtime_env"}
)

M = TypeVar("M", bound=BaseModel)


class Checked(BaseModel):
    """Base of what a DAG author may write: frozen, no unknown fields, and its constructor refuses in one line."""

    # Schemas are built at first use: a DAG file that is parsed again and again pays for what it uses.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    def __init__(self, **data: Any) -> None:
        """:raises InvalidSpec: one line: where, what is wrong, what would be right."""
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise refused(error, type(self).__name__, type(self).model_fields) from None

    # Nested models are then validated by pydantic itself, which knows the path to the field. Where
    # a version of pydantic does not know the mark, it calls the constructor, and only the path is lost.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def read(model: type[M], value: object, what: str, called: Mapping[str, str] | None = None) -> M:
    """Validate user input as a model.

    :param model: the model's class.
    :param value: an instance of it, or a mapping of its fields.
    :param what: what is read, in a word; begins the error message.
    :param called: what the author calls fields that have another name here.
    :raises InvalidSpec: one line: where, what is wrong, what would be right.
    """
    if isinstance(value, model):
        return value
    if not isinstance(value, Mapping):
        raise InvalidSpec(
            f"{what}: must be a {model.__name__} or a dict of its fields "
            f"({', '.join(model.model_fields)}), got {type(value).__name__}"
        )
    try:
        return model.model_validate(dict(value))
    except ValidationError as error:
        raise refused(error, what, model.model_fields, called) from None


def refused(
    error: ValidationError, what: str, fields: Iterable[str] = (), called: Mapping[str, str] | None = None
) -> InvalidSpec:
    """A pydantic error as ours. Raise it ``from None``: pydantic's own text would repeat the whole input.

    :param error: what pydantic raised.
    :param what: what was read, in a word.
    :param fields: the fields there are at the top.
    :param called: what the author calls fields that have another name here.
    """
    cause = _cause(error)
    return InvalidSpec(str(cause) if cause else f"{what}: {first_problem(error, fields, called)}")


def _cause(error: ValidationError) -> InvalidSpec | None:
    """Where the first problem is one of ours, raised by a validator: it says everything already."""
    cause = _first(error).get("ctx", {}).get("error")
    return cause if isinstance(cause, InvalidSpec) else None


def _first(error: ValidationError) -> ErrorDetails:
    """The problem to name: a misspelt field explains one that is missing, so unknown fields go first."""
    problems = error.errors(include_url=False)
    return next((problem for problem in problems if problem["type"] in ("extra_forbidden", "invalid_key")), problems[0])


def first_problem(error: ValidationError, fields: Iterable[str] = (), called: Mapping[str, str] | None = None) -> str:
    """One line out of a pydantic error: where, what, and what arrived.

    :param error: what pydantic raised.
    :param fields: the fields there are at the top, to be named where an unknown one was given.
    :param called: what the author calls fields that have another name here.
    """
    problem = _first(error)
    names = called or {}
    place = [
        names.get(part, part) if isinstance(part, str) and not at else part for at, part in enumerate(problem["loc"])
    ]
    where = ".".join(_part(part) for part in place if part != "[key]")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}{': ' if where else ''}{_what(problem, list(fields))}{more}"


def _part(part: int | str) -> str:
    return part if isinstance(part, str) and part.isidentifier() and len(part) <= 64 else shown(part)


def _what(problem: ErrorDetails, fields: list[str]) -> str:
    """The problem in words, without its place."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        # Only the fields at the top are known here.
        known = fields if len(problem["loc"]) == 1 else []
        there = f"; there are {', '.join(known)}" if known else ""
        return f"there is no such field{near(str(problem['loc'][-1]), known)}{there}"
    if kind == "union_tag_not_found":
        return "must say its kind, as in {'kind': ...}"
    if kind == "union_tag_invalid":
        return f"kind {shown(context['tag'])} is none of {context['expected_tags']}"
    if kind == "json_invalid":
        return f"is not JSON: {problem['msg'].removeprefix('Invalid JSON: ')}"
    message = " ".join(problem["msg"].removeprefix("Value error, ").removeprefix("Input ").split())
    private = any(part in _PRIVATE for part in problem["loc"])
    if kind == "value_error" and (private or ", got " in message):
        return message
    if kind != "value_error":  # pydantic's own sentences begin with a capital, ours go on after the colon
        message = f"{message[:1].lower()}{message[1:]}"
    value = problem["input"]
    hint = "; is it a template that was not rendered?" if isinstance(value, str) and "{{" in value else ""
    return f"{message}, got {type(value).__name__ if private else shown(value)}{hint}"
