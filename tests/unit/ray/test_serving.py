"""Claims of serving.py: one application is deployed or taken away, the others stay."""

from __future__ import annotations

from typing import Any

import pytest

from raytpu_ops.ray.states import DeploymentStatus, ServeStatus
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, RemoteUnavailable
from tests.unit.ray.fake_ray import application_row, status

APP: dict[str, Any] = {"name": "digits", "import_path": "m:app", "route_prefix": "/digits", "args": {"a": 1}}
OTHER: dict[str, Any] = {"name": "other", "import_path": "o:app", "route_prefix": "/other"}


async def test_the_first_deployment_listens_on_this_machine_only(ray, client):
    """Ray's REST API would listen on every address."""
    await client.deploy(APP)
    (config,) = ray.deployed
    assert config["applications"] == [APP]
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert config["proxy_location"] == "HeadOnly"


async def test_the_caller_says_where_it_listens(ray, client):
    await client.deploy(APP, http_options={"host": "127.0.1.9", "port": 8123}, proxy_location="EveryNode")
    assert ray.deployed[0]["http_options"] == {"host": "127.0.1.9", "port": 8123}
    assert ray.deployed[0]["proxy_location"] == "EveryNode"


async def test_a_running_serve_keeps_its_options(ray, client):
    ray.serve |= {"http_options": {"host": "h", "port": 1}, "proxy_location": "EveryNode", "target_capacity": 50.0}
    await client.deploy(APP, http_options={"host": "x", "port": 2})
    (config,) = ray.deployed
    assert (config["http_options"]["port"], config["proxy_location"], config["target_capacity"]) == (
        1,
        "EveryNode",
        50.0,
    )


async def test_other_applications_stay(ray, client):
    await client.deploy(OTHER)
    await client.deploy(APP)
    assert ray.deployed[1]["applications"] == [OTHER, APP]
    assert sorted(await client.serve_applications()) == ["digits", "other"]


async def test_a_new_config_takes_the_place_of_the_old_one(ray, client):
    await client.deploy(APP)
    await client.deploy(APP | {"args": {"a": 2}})
    assert ray.deployed[1]["applications"] == [APP | {"args": {"a": 2}}]


async def test_what_is_being_deleted_is_not_raised_from_the_dead(ray, client):
    ray.serve["applications"]["other"] = application_row("other", "DELETING", config=OTHER)
    ray.serve["applications"]["code"] = application_row("code", "RUNNING")
    await client.deploy(APP)
    assert ray.deployed[0]["applications"] == [APP]


async def test_a_deployment_that_another_one_swept_away_is_sent_again(ray, client):
    """Two deploy at the same moment; each sends what it has read."""

    def swept(serve: dict[str, Any]) -> None:
        serve["applications"] = {"other": application_row("other", "DEPLOYING", config=OTHER)}

    ray.serve_steps.extend([lambda _: None, swept])
    await client.deploy(APP)
    assert ray.deployed[-1]["applications"] == [OTHER, APP]
    assert sorted(await client.serve_applications()) == ["digits", "other"]


async def test_a_deployment_that_another_one_is_sweeping_away_is_sent_again(ray, client):
    """Serve lists it, but only until it is gone."""

    def swept(serve: dict[str, Any]) -> None:
        serve["applications"]["digits"]["status"] = "DELETING"
        serve["applications"]["other"] = application_row("other", "DEPLOYING", config=OTHER)

    ray.serve_steps.extend([lambda _: None, swept])
    await client.deploy(APP)
    assert ray.deployed[-1]["applications"] == [OTHER, APP]


async def test_what_was_deployed_while_an_answer_was_lost_is_sent_along_the_next_time(ray, client):
    def deployed_by_another(serve: dict[str, Any]) -> None:
        serve["applications"]["other"] = application_row("other", "RUNNING", config=OTHER)

    ray.serve_steps.extend([lambda _: None, deployed_by_another])
    ray.fails("PUT /api/serve", status(502, "bad gateway"))
    await client.deploy(APP)
    assert [config["applications"] for config in ray.deployed] == [[OTHER, APP]]


async def test_taking_one_away_looks_again_before_it_asks_again(ray, client):
    def deployed_by_another(serve: dict[str, Any]) -> None:
        serve["applications"]["other"] = application_row("other", "RUNNING", config=OTHER)

    await client.deploy(APP)
    ray.serve_steps.extend([lambda _: None, deployed_by_another])
    ray.fails("PUT /api/serve", status(502, "bad gateway"))
    assert await client.delete_application("digits") is True
    assert list(await client.serve_applications()) == ["other"]


@pytest.mark.parametrize("state", ["ALIVE", "RESTARTING"])
async def test_no_serve_is_not_believed_while_its_controller_is_there(ray, client, state):
    """Ray's dashboard says so too when it could not ask; to deploy then would end what runs."""
    ray.rows["actors"] = [{"name": "SERVE_CONTROLLER_ACTOR", "state": state}]
    with pytest.raises(RemoteUnavailable, match=f"controller is {state}, but Ray's dashboard at .* shows no Serve"):
        await client.deploy(APP)
    assert ray.deployed == []
    ray.rows["actors"][0]["state"] = "DEAD"
    await client.deploy(APP)
    assert len(ray.deployed) == 1


async def test_a_deployment_that_never_shows_is_an_error(ray, client):
    ray.serve_steps.extend([lambda serve: serve["applications"].clear()] * 99)
    with pytest.raises(RemoteUnavailable, match="digits: Serve took it 3 times and does not list it"):
        await client.deploy(APP)


@pytest.mark.parametrize("application", [{}, {"name": "x"}, {"import_path": "m:a"}, {"name": "", "import_path": "m:a"}])
async def test_an_application_without_name_or_code_is_refused_before_it_is_sent(ray, client, application):
    with pytest.raises(InvalidSpec, match="needs a name and an import_path"):
        await client.deploy(application)
    assert ray.requests == []


async def test_what_serve_refuses_is_permanent_in_its_words(ray, client):
    ray.fails("PUT /api/serve", *[status(400, "1 validation error for ServeDeploySchema: route_prefix")] * 9)
    with pytest.raises(Misconfigured, match="400 .*ServeDeploySchema: route_prefix"):
        await client.deploy(APP)
    assert ray.count("PUT") == 1


async def test_one_application_is_taken_away(ray, client):
    await client.deploy(OTHER)
    await client.deploy(APP)
    assert await client.delete_application("digits") is True
    assert list(await client.serve_applications()) == ["other"]
    assert await client.delete_application("digits") is False


async def test_what_python_code_deployed_is_not_claimed_to_be_taken_away(ray, client):
    ray.serve["applications"]["code"] = application_row("code", "RUNNING")
    with pytest.raises(Misconfigured, match=r"serve\.delete\('code'\)"):
        await client.delete_application("code")


async def test_states_arrive_as_types(ray, client):
    ray.serve["applications"] = {
        "a": application_row("a", "RUNNING", config=APP),
        "b": application_row("b", "PAUSED", "for lunch"),
    }
    applications = await client.serve_applications()
    a, b = applications["a"], applications["b"]
    assert (a.status, a.route_prefix, a.config) == (ServeStatus.RUNNING, "/a", APP)
    assert (a.deployments[0].status, dict(a.deployments[0].replicas)) == (
        DeploymentStatus.HEALTHY,
        {"RUNNING": 1, "STARTING": 1},
    )
    assert (b.status, b.status_word, b.message) == (ServeStatus.UNKNOWN, "PAUSED", "for lunch")


async def test_no_serve_no_applications(client):
    assert await client.serve_applications() == {}
    assert await client.delete_application("x") is False


@pytest.mark.parametrize("text", ["[]", "{}", '{"applications": []}'])
async def test_an_answer_without_applications_is_transient(ray, client, text):
    ray.fails("GET /api/serve", *[status(200, text)] * 9)
    with pytest.raises(RemoteUnavailable, match="no applications in the answer"):
        await client.serve_applications()
