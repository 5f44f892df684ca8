"""Code on its way to the cluster, the user's and our own: uploaded once for each content, then named by URI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raytpu_ops.backends.base import Backend, Say
from raytpu_ops.flows.leases import reach
from raytpu_ops.tpu.deadlines import Schedule
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.problems import read
from raytpu_ops.tpu.work import Code


async def runtime_env_with(
    backend: Backend,
    lease: SliceLease,
    runtime_env: dict[str, Any] | None,
    working_dir: str | None,
    *,
    schedule: Schedule,
    say: Say,
) -> dict[str, Any]:
    """The runtime environment with the user's code in it, and with ours where the cluster may lack it.

    :param runtime_env: Ray's runtime environment, as the DAG author wrote it.
    :param working_dir: a folder of this machine, which is uploaded, or a URI, which is passed on.
    :param schedule: how long Ray may take to answer.
    :raises InvalidSpec: the folder does not exist, or the code is named twice.
    """
    code = read(Code, {"working_dir": working_dir, "runtime_env": runtime_env or {}}, "code")
    env = dict(code.runtime_env)
    if working_dir is not None:
        env["working_dir"] = working_dir
    folder = folder_of(working_dir)
    modules = list(env.get("py_modules") or [])
    if folder is None and not backend.ships_runtime:
        return env

    async def upload() -> dict[str, Any]:
        found = dict(env)
        if folder is not None:
            found["working_dir"] = await client.upload_package(folder)
        if backend.ships_runtime:
            # Behind the user's own: whoever brings another raytpu_ops means it.
            found["py_modules"] = [*modules, await client.upload_runtime()]
        return found

    async with backend.ray(lease) as client:
        return await reach(backend, lease, upload, schedule=schedule, say=say)


def folder_of(working_dir: str | None) -> Path | None:
    """The folder that is to be uploaded; None where there is none, or a URI.

    :raises InvalidSpec: it does not exist on this machine.
    """
    if working_dir is None or "://" in working_dir:
        return None
    folder = Path(working_dir).expanduser()
    if not folder.is_dir():
        raise InvalidSpec(f"working_dir {working_dir!r} is no folder on this machine; give the folder with your code")
    return folder
