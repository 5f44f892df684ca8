"""Where the files of ``deploy`` are, for messages that tell somebody to apply one. Not here: what is in them."""

from __future__ import annotations

from pathlib import Path

import raytpu_ops


def deployed(name: str) -> str:
    """The path of a file: beside the package in a checkout, inside it in an installed wheel.

    :param name: of the file, below the folder: ``gke/rbac.yaml``.
    """
    package = Path(raytpu_ops.__file__).parent
    for folder in (package.parent / "deploy", package / "deploy"):
        if (folder / name).is_file():
            return str(folder / name)
    return f"deploy/{name}"
