"""What a person's pod template may not do: refused while it costs nothing, not by Kubernetes or by a dead host later.

Pure. Not here: how a template is merged over ours (``merge.py``), and what our own says (``manifest.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytpu_ops.backends.gke.merge import KEYS
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.words import near, shown
from raytpu_ops.tpu.work import is_reserved

#: The fields of a pod template.
_PARTS = ("metadata", "spec")
#: Labels of TPU hosts that GKE's device plugin does not set everywhere: whoever plays hosts sets them in a template.
_TOLD = frozenset({"TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY"})
#: Plain types of fields, in the library's words -> in ours, and in Python's.
_PLAIN: dict[str, tuple[str, tuple[type, ...]]] = {
    "str": ("text", (str,)),
    "int": ("a whole number", (int,)),
    "bool": ("true or false", (bool,)),
}
#: Amounts: Kubernetes takes numbers for them too.
_QUANTITIES = frozenset({"requests", "limits", "overhead", "sizeLimit", "divisor"})


def check_shape(setting: str, template: Mapping[str, Any]) -> None:
    """Refuse what is no pod template, before it is merged.

    :param setting: the option's name.
    :param template: what the user wrote.
    :raises InvalidSpec: naming what is wrong.
    """
    for key in template:
        if key not in _PARTS:
            raise InvalidSpec(
                f"{setting}: a pod template has no {shown(key)}{near(key, _PARTS)}; there are {', '.join(_PARTS)}"
            )
    _refuse_directives(template, setting)
    if template:
        _check_type(template, "V1PodTemplateSpec", setting)


def _refuse_directives(value: object, path: str) -> None:
    """Those of ``kubectl patch``: they would go to the API server as fields."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            if str(key).startswith("$"):
                raise InvalidSpec(
                    f"{path}: {shown(key)} is not known here: null removes a field, an item is merged by its key"
                )
            _refuse_directives(below, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_directives(item, f"{path}[{index}]")


def _check_type(value: object, kind: str, path: str, field: str = "") -> None:
    """Refuse what is of another type than Kubernetes' field; fields that the client library does not know pass.

    :param kind: the type, as the library's models name it.
    :param path: of the value, for errors.
    :param field: the innermost field of the path.
    """
    part = _part_of(kind)
    if kind.startswith("list["):
        keyed = f" of objects with {KEYS[field]!r}" if field in KEYS else ""
        if not isinstance(value, list):
            raise _wrong(path, f"a list{keyed}", value)
        for index, item in enumerate(value):
            _check_type(item, part, f"{path}[{index}]", field)
    elif kind.startswith(("dict(", "V1", "Core")):
        if not isinstance(value, Mapping):
            raise _wrong(path, "an object", value)
        known = _fields_of(kind)
        for key, below in value.items():
            # Null removes what ours says.
            if below is not None and (key in known or part):
                _check_type(below, known.get(key, part), f"{path}.{key}", field if part else key)
    elif kind in _PLAIN:
        words, plain = _PLAIN[kind]
        wanted = (*plain, int, float) if field in _QUANTITIES else plain
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in plain):
            raise _wrong(path, words, value)


def _part_of(kind: str) -> str:
    """The type of what is in a ``list[…]`` or under any key of a ``dict(str, …)``; empty for others."""
    if kind.startswith("list["):
        return kind[len("list[") : -1]
    return kind[len("dict(") : -1].partition(", ")[2] if kind.startswith("dict(") else ""


def _fields_of(kind: str) -> dict[str, str]:
    """The fields of an object and their types."""
    from kubernetes_asyncio.client import models

    if kind.startswith("dict("):
        return {}
    model = getattr(models, kind)
    return {field: model.openapi_types[name] for name, field in model.attribute_map.items()}


def _wrong(path: str, wanted: str, value: object) -> InvalidSpec:
    # Not the value: it may be a variable's.
    return InvalidSpec(f"{path}: must be {wanted}, got {type(value).__name__}")


def check_containers(setting: str, pod: Mapping[str, Any], main: str) -> None:
    """Refuse containers that can't start, or that have variables which are not the user's.

    :param setting: the option's name.
    :param pod: the spec, merged.
    :param main: name of Ray's container.
    :raises InvalidSpec: naming the container.
    """
    for field in ("initContainers", "containers"):
        for container in pod.get(field) or []:
            name = container["name"]
            if not container.get("image"):
                if name == main:
                    raise InvalidSpec(
                        f"{setting}: container {main!r} has no image; leave the field out: the option image says it"
                    )
                hint = near(str(name), [main])
                raise InvalidSpec(f"{setting}: container {shown(name)} has no image{hint}; Ray's own is {main!r}")
    [ray] = [one for one in pod["containers"] if one["name"] == main]
    for one in ray.get("env") or []:
        variable = str(one["name"])
        if is_reserved(variable) and variable not in _TOLD:
            raise InvalidSpec(f"{setting}: {variable} is set for each pod and must not be given")
