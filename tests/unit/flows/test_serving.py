"""An application on a lease."""

from __future__ import annotations

from typing import Any

import pytest

from raytpu_ops.flows.serving import ServeRequest, http_options, remove_application, run_serve
from raytpu_ops.tpu.errors import DeadlineExceeded, InvalidSpec, Misconfigured, UserCodeFailed
from raytpu_ops.tpu.problems import read
from tests.unit.flows.conftest import schedule
from tests.unit.ray.fake_ray import application_row


def request(**changes: Any) -> ServeRequest:
    values: dict[str, Any] = {
        "name": "digits",
        "app": "digits.serve:app",
        "args": {"checkpoint": "/c"},
        "route_prefix": "/digits",
        "schedule": schedule(starting=30),
        "poll_s": 0.01,
    }
    return read(ServeRequest, {**values, **changes}, "RayServeOperator")


def turns(name: str, status: str, message: str = "") -> Any:
    """A step of the played Serve: that application is in that state now."""

    def step(serve: dict[str, Any]) -> None:
        if name in serve["applications"]:
            config = serve["applications"][name]["deployed_app_config"]
            serve["applications"][name] = application_row(name, status, message, config=config)

    return step


def nothing(_: dict[str, Any]) -> None:
    return None


async def test_an_application_is_deployed_with_its_slice_and_answers_at_its_url(ray, backend, lease):
    ray.serve_steps.extend([nothing, nothing, turns("digits", "RUNNING")])

    served = await run_serve(backend, lease, request(), say=print)

    assert served["url"] == "http://127.0.0.1:9/digits"
    assert served["application"] == "digits"
    [config] = ray.deployed[-1]["applications"]
    assert config["import_path"] == "raytpu_ops.runtime.serve:build"
    assert config["args"]["app"] == "digits.serve:app"
    assert config["args"]["args"] == {"checkpoint": "/c"}
    assert config["args"]["slice"]["topology"] == "2x2x2"
    assert ray.deployed[-1]["http_options"] == {"host": "127.0.0.1", "port": 9}
    assert ray.deployed[-1]["proxy_location"] == "HeadOnly"


async def test_what_is_deployed_already_stays(ray, backend, lease):
    other = {"name": "other", "import_path": "o:app", "route_prefix": "/other"}
    ray.serve["applications"]["other"] = application_row("other", "RUNNING", config=other)
    ray.serve_steps.extend([nothing, nothing, turns("digits", "RUNNING")])

    await run_serve(backend, lease, request(), say=print)

    assert {config["name"] for config in ray.deployed[-1]["applications"]} == {"digits", "other"}


async def test_an_application_that_cannot_be_built_fails_with_serves_message(ray, backend, lease):
    ray.serve_steps.extend([nothing, nothing, turns("digits", "DEPLOY_FAILED", "ModuleNotFoundError: digits")])

    with pytest.raises(UserCodeFailed, match="ModuleNotFoundError: digits"):
        await run_serve(backend, lease, request(), say=print)


async def test_one_that_never_runs_ends_at_its_deadline(ray, backend, lease):
    with pytest.raises(DeadlineExceeded, match="digits"):
        await run_serve(backend, lease, request(schedule=schedule(starting=0.2)), say=print)


async def test_a_retry_starts_a_failed_application_afresh(ray, backend, lease):
    ray.serve["applications"]["digits"] = application_row("digits", "DEPLOY_FAILED", config={"name": "digits"})
    told: list[str] = []

    with pytest.raises(DeadlineExceeded):
        await run_serve(backend, lease, request(schedule=schedule(starting=0.5)), say=told.append)

    assert ray.deployed[0]["applications"] == []
    assert any("removed, to start afresh" in line for line in told)


async def test_a_kill_takes_the_application_away_and_is_done_twice(ray, backend, lease):
    ray.serve["applications"]["digits"] = application_row("digits", "RUNNING", config={"name": "digits"})

    assert await remove_application(backend, lease, "digits") == "application digits: removed"
    assert await remove_application(backend, lease, "digits") == "application digits: was not there"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "has space"),
        ("name", ""),
        ("name", "x; rm -rf /"),
        ("app", "no_colon"),
        ("app", "os:system('x')"),
        ("route_prefix", "no-slash"),
        ("route_prefix", "/../etc"),
        ("poll_s", -1),
        ("unknown", 1),
    ],
)
def test_a_bad_request_is_refused_in_one_line(field, value):
    with pytest.raises(InvalidSpec) as refused:
        request(**{field: value})

    assert field in str(refused.value)
    assert "\n" not in str(refused.value)


def test_serve_listens_where_the_lease_says_and_else_at_its_address(lease):
    assert http_options(lease) == {"host": "127.0.0.1", "port": 9}
    behind = lease.ray.model_copy(
        update={"serve_address": "https://api/x:serve/proxy", "serve_listens": "0.0.0.0:8000"}
    )
    assert http_options(lease.model_copy(update={"ray": behind})) == {"host": "0.0.0.0", "port": 8000}
    for url, port in (("https://serve.example.net", 443), ("http://serve.example.net/x", 80)):
        without = lease.ray.model_copy(update={"serve_address": url, "serve_listens": None})
        assert http_options(lease.model_copy(update={"ray": without})) == {"host": "serve.example.net", "port": port}


async def test_no_task_deploys_over_the_application_of_another(ray, backend, lease):
    """The message names both; what serves goes on serving, even where it failed."""
    ray.serve_steps.extend([nothing, nothing, turns("digits", "RUNNING")])
    await run_serve(backend, lease, request(owner="d/first"), say=print)
    deployed = len(ray.deployed)

    with pytest.raises(Misconfigured, match="digits.* is d/first's, and d/second would replace it"):
        await run_serve(backend, lease, request(owner="d/second"), say=print)

    assert len(ray.deployed) == deployed
    assert ray.serve["applications"]["digits"]["deployed_app_config"]["args"]["owner"] == "d/first"


async def test_of_two_that_deploy_at_the_same_moment_one_is_red(ray, backend, lease):
    def anothers(serve: dict[str, Any]) -> None:
        config = serve["applications"]["digits"]["deployed_app_config"]
        config = {**config, "args": {**config["args"], "owner": "d/each[1]"}}
        serve["applications"]["digits"] = application_row("digits", "RUNNING", config=config)

    ray.serve_steps.extend([nothing, nothing, nothing, anothers])

    with pytest.raises(Misconfigured, match=r"is d/each\[1\]'s, and d/each\[0\] would replace it"):
        await run_serve(backend, lease, request(owner="d/each[0]"), say=print)


async def test_the_next_run_of_the_same_task_may_replace_its_own(ray, backend, lease):
    for checkpoint in ("/c", "/d"):
        ray.serve_steps.extend([nothing, nothing, turns("digits", "RUNNING")])
        await run_serve(backend, lease, request(owner="d/serve", args={"checkpoint": checkpoint}), say=print)

    assert ray.deployed[-1]["applications"][0]["args"]["args"] == {"checkpoint": "/d"}


async def test_the_application_of_another_task_is_not_taken_away(ray, backend, lease):
    ray.serve_steps.extend([nothing, nothing, turns("digits", "RUNNING")])
    await run_serve(backend, lease, request(owner="d/first"), say=print)

    assert "is d/first's" in await remove_application(backend, lease, "digits", "d/second")
    assert await remove_application(backend, lease, "digits", "d/first") == "application digits: removed"
