"""Code on its way to the cluster: the user's stays the user's, ours joins it where the image may lack it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytpu_ops.flows.packages import runtime_env_with
from raytpu_ops.tpu.errors import InvalidSpec
from tests.unit.flows.conftest import schedule
from tests.unit.ray.fake_ray import status


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("x = 1\n")
    return str(tmp_path)


async def made(backend: Any, lease: Any, runtime_env: Any = None, working_dir: str | None = None) -> dict[str, Any]:
    return await runtime_env_with(backend, lease, runtime_env, working_dir, schedule=schedule(), say=print)


async def test_a_folder_becomes_a_uri_and_the_rest_stays(ray, backend, lease, code):
    env = {"pip": ["einops"], "env_vars": {"A": "1"}}
    found = await made(backend, lease, env, code)
    assert found.pop("working_dir").removeprefix("gcs://") in ray.packages
    assert found == env
    assert "working_dir" not in env


@pytest.mark.parametrize("env", [None, {"pip": ["einops"]}])
@pytest.mark.parametrize("working_dir", [None, "gs://bucket/code.zip"])
async def test_where_nothing_is_to_be_sent_ray_is_not_asked(ray, backend, lease, env, working_dir):
    wanted = {**(env or {}), **({"working_dir": working_dir} if working_dir else {})}
    assert await made(backend, lease, env, working_dir) == wanted
    assert ray.requests == []


async def test_our_own_code_joins_where_the_image_may_lack_it(ray, backend, lease, code):
    backend.ships_runtime = True
    found = await made(backend, lease, None, code)
    [uri] = found["py_modules"]
    assert uri.removeprefix("gcs://") in ray.packages
    assert uri != found["working_dir"]
    assert await made(backend, lease, {"py_modules": None}) == {"py_modules": [uri]}
    assert ray.count("PUT /api/packages") == 2, "each content once"


async def test_the_users_own_modules_come_first(backend, lease):
    backend.ships_runtime = True
    env = {"py_modules": ["gs://bucket/lib.zip"], "working_dir": "gs://bucket/code.zip"}
    found = await made(backend, lease, env)
    assert found["py_modules"][:-1] == env["py_modules"] == ["gs://bucket/lib.zip"]
    assert found["py_modules"][-1].startswith("gcs://_ray_pkg_")
    assert found["working_dir"] == "gs://bucket/code.zip"


async def test_an_upload_goes_on_while_ray_does_not_answer(ray, backend, lease, code):
    backend.ships_runtime = True
    ray.fails("GET /api/packages", *[status(503)] * 6)
    assert len(await made(backend, lease, None, code)) == 2


@pytest.mark.parametrize(
    ("env", "working_dir", "words"),
    [
        ({"working_dir": "gs://b/c.zip"}, "gs://b/d.zip", "working_dir is set twice"),
        (None, "/nowhere/at/all", "'/nowhere/at/all' is no folder on this machine"),
        ({"py_modules": "gs://b/c.zip"}, None, "py_modules must be a list of URIs, got a str"),
    ],
)
async def test_what_cannot_be_meant_is_refused_before_ray_is_asked(ray, backend, lease, env, working_dir, words):
    with pytest.raises(InvalidSpec, match=words):
        await made(backend, lease, env, working_dir)
    assert ray.requests == []
