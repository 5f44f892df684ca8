"""The user's code on its way to the cluster: uploaded once for each content, then named by URI."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from raytpu_ops.backends.base import Backend
from raytpu_ops.flows.leases import Say, reach
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.lease import SliceLease


async def runtime_env_with(
    backend: Backend,
    lease: SliceLease,
    runtime_env: dict[str, Any] | None,
    working_dir: str | None,
    *,
    by: datetime,
    say: Say,
) -> dict[str, Any]:
    """The runtime environment with the user's code in it.

    :param runtime_env: Ray's runtime environment, as the DAG author wrote it.
    :param working_dir: a folder of this machine, which is uploaded, or a URI, which is passed on.
    :param by: the instant, UTC, after which a Ray that does not answer is an error.
    :raises InvalidSpec: the folder does not exist, or the code is named twice.
    """
    env = dict(runtime_env or {})
    if working_dir is None:
        return env
    if "working_dir" in env:
        raise InvalidSpec("working_dir is set twice: as working_dir=… and in runtime_env; leave one out")
    if "://" in working_dir:
        return {**env, "working_dir": working_dir}
    folder = _folder(working_dir)
    async with backend.ray(lease) as client:
        uri = await reach(backend, lease, lambda: client.upload_package(folder), by=by, say=say)
    return {**env, "working_dir": uri}


def _folder(text: str) -> Path:
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise InvalidSpec(f"working_dir {text!r} is no folder on this machine; give the folder with your code")
    return folder
