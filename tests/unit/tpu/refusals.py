"""What a refusal must look like, and rude values to be refused.

Not here: the cases; those are in the test modules.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raytpu_ops.tpu.errors import InvalidSpec

#: What is called, the field that the error must name, and a part of what would be right.
Case = tuple[Callable[[], object], str, str]

SHELL = "$(touch /tmp/pwned); `id` && rm -rf / #"
LONG = "x" * 10_000
#: A spec that is right, for everything around it.
SPEC = {"generation": "v4", "topology": "2x2x2"}
GENERATIONS = "v4, v5e, v5p, v6e, 7x"
CUBES = "2x2x1, 2x2x2, 2x2x4, 2x4x4 and AxBxC"
#: What belongs to a library, a traceback or a secret, and never into the line.
LEAKS = ["pydantic", "errors.pydantic.dev", "Traceback", "validation error", "Field required", "hunter2", 'File "']


class Rude:
    """Raises whatever is asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def numbered(groups: dict[str, list[Case]]) -> list[object]:
    """The cases as parameters of a test, each with its group and place for a name."""
    return [
        pytest.param(case, id=f"{kind}-{number}") for kind, cases in groups.items() for number, case in enumerate(cases)
    ]


def assert_refused_in_one_clear_line(case: Case) -> None:
    """The call raises our error; its one line names the field and what would be right, and leaks nothing."""
    build, where, right = case
    with pytest.raises(InvalidSpec) as refused:
        build()
    line = str(refused.value)
    assert type(refused.value) is InvalidSpec
    assert line.isprintable(), line
    assert len(line) < 600, line
    assert where in ": ".join(line.split(": ")[:2]), line
    assert right in line
    assert [leak for leak in LEAKS if leak in line] == []
    # A traceback in the task log shows this line alone, not the library's report on the whole input.
    assert refused.value.__cause__ is None
    assert refused.value.__context__ is None or refused.value.__suppress_context__
