"""What is wrong as written in a mapped task, before it runs.

Airflow makes the instances of ``.partial(…).expand(…)`` when they run, which in a ``tpu_slices`` block is with slices
that are paid for. Not here: what is right; the operators know that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.definitions.mappedoperator import MappedOperator

from raytpu_ops.operators.base import RayTpuOperator

if TYPE_CHECKING:
    from airflow.sdk.definitions._internal.abstractoperator import AbstractOperator

#: Stands for what another task returns, which nobody can judge yet.
_RETURNED = "{{ returned }}"


def check_mapped(tasks: Iterable[AbstractOperator]) -> None:
    """Judge what is plain in those of the tasks that are mapped, and of this package.

    :raises InvalidSpec: an instance can never work as written.
    """
    for task in tasks:
        if isinstance(task, MappedOperator) and issubclass(task.operator_class, RayTpuOperator):
            for arguments in _instances(task):
                task.unmap(arguments)


def _instances(task: MappedOperator) -> Iterator[Mapping[str, Any]]:
    """Arguments of instances in which each value that is written comes once; none where too little is written."""
    mapped: Any = task.expand_input.value
    if isinstance(mapped, Sequence):  # `expand_kwargs` with a list
        yield from (row for row in mapped if isinstance(row, Mapping))
    elif isinstance(mapped, Mapping) and all(name in task.template_fields or _written(mapped[name]) for name in mapped):
        columns = {name: _values(mapped[name]) for name in mapped}
        for row in range(max(map(len, columns.values())) if all(columns.values()) else 0):
            yield {name: values[min(row, len(values) - 1)] for name, values in columns.items()}


def _written(values: object) -> bool:
    return not hasattr(values, "resolve")


def _values(values: Any) -> list[Any]:
    if not _written(values):
        return [_RETURNED]
    return list(values.items() if isinstance(values, Mapping) else values)
