"""A person's pod template merged over ours, by the rules of ``kubectl patch``'s strategic merge.

Lists whose items have a key are merged by it, other lists are replaced, null removes a field. It differs in two things:
tolerations and ``envFrom`` are added to, and there are no directives (``$patch``), which are refused before.
Source: patchMergeKey in Kubernetes' core/v1 types. Not here: what our own template says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytpu_ops.tpu.errors import InvalidSpec

#: Field name of a list in a pod template -> the key of its items.
KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}
#: Lists that are added to: leaving out ours would take the pods off their nodes.
_ADDED = frozenset({"tolerations", "envFrom"})


def merged(base: Mapping[str, Any], over: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The template with the overrides in it; neither argument is changed.

    :param base: our template.
    :param over: what a person wrote.
    :param where: the setting's name, for errors.
    :raises InvalidSpec: an item of a keyed list lacks its key, or a list stands where an object must.
    """
    out = dict(base)
    for field, value in over.items():
        path = f"{where}.{field}"
        if value is None:
            out.pop(field, None)
        elif isinstance(value, Mapping):
            below = out.get(field)
            out[field] = merged(below if isinstance(below, Mapping) else {}, value, path)
        elif isinstance(value, list):
            out[field] = _list(field, out.get(field) or [], value, path)
        else:
            out[field] = value
    return out


def _list(field: str, base: list[Any], over: list[Any], where: str) -> list[Any]:
    if field in _ADDED:
        return [*base, *(item for item in over if item not in base)]
    key = KEYS.get(field)
    if key is None:
        return list(over)
    out = {item[key]: item for item in base}
    for index, item in enumerate(over):
        if not isinstance(item, Mapping) or not isinstance(item.get(key), str | int):
            raise InvalidSpec(f"{where}[{index}]: must be an object with {key!r}, by which it is merged")
        out[item[key]] = merged(out.get(item[key], {}), item, f"{where}[{item[key]}]")
    return list(out.values())
