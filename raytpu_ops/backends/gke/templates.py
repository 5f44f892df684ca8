"""What a person's pod template may not do: refused while it costs nothing, not by Kubernetes or by a dead host later.

Pure. Not here: how a template is merged over ours (``merge.py``), and what our own says (``manifest.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.words import near, shown
from raytpu_ops.tpu.work import is_reserved

#: The fields of a pod template.
_PARTS = ("metadata", "spec")
#: Labels of TPU hosts that GKE's device plugin does not set everywhere: whoever plays hosts sets them in a template.
_TOLD = frozenset({"TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY"})


def check_shape(setting: str, template: Mapping[str, Any]) -> None:
    """Refuse what is no pod template, before it is merged.

    :param setting: the option's name.
    :param template: what the user wrote.
    :raises InvalidSpec: naming what is wrong.
    """
    for key, value in template.items():
        if key not in _PARTS:
            raise InvalidSpec(
                f"{setting}: a pod template has no {shown(key)}{near(key, _PARTS)}; there are {', '.join(_PARTS)}"
            )
        if value is not None and not isinstance(value, Mapping):
            raise InvalidSpec(f"{setting}.{key}: must be an object, got {type(value).__name__}")


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
                hint = near(str(name), [main])
                raise InvalidSpec(f"{setting}: container {shown(name)} has no image{hint}; Ray's own is {main!r}")
    [ray] = [one for one in pod["containers"] if one["name"] == main]
    for one in ray.get("env") or []:
        variable = str(one["name"])
        if is_reserved(variable) and variable not in _TOLD:
            raise InvalidSpec(f"{setting}: {variable} is set for each pod and must not be given")
