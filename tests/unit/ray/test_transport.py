"""Claims of the one door: which errors pass, which stay, and that the token never shows."""

from __future__ import annotations

import asyncio
import logging

import pytest

from raytpu_ops.ray.client import RayClient
from raytpu_ops.ray.transport import ATTEMPTS, RETRYABLE_ERRORS, RETRYABLE_STATUS
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, RayTpuError, RemoteUnavailable
from tests.unit.ray.fake_ray import GARBAGE, HANG, RESET, FakeRay, Fault, status

TOKEN = "s3cret-token-of-the-cluster"


async def no_pause(_: float) -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize("code", [*RETRYABLE_STATUS, 507, 520, 599])
async def test_statuses_that_pass_are_tried_again_until_there_is_an_answer(ray, client, code):
    ray.fails("GET /api/version", *[status(code)] * (ATTEMPTS - 1))
    assert (await client.version()).ray_version == "2.60.0"
    assert ray.count("GET /api/version") == ATTEMPTS


@pytest.mark.parametrize("fault", [GARBAGE, RESET], ids=["garbage", "reset"])
async def test_nonsense_and_cut_connections_are_tried_again(ray, client, fault):
    ray.fails("GET /api/version", fault, fault)
    assert (await client.version()).ray_version == "2.60.0"


async def test_a_hanging_answer_is_given_up_and_tried_again(ray):
    ray.fails("GET /api/version", HANG)
    async with RayClient(ray.address, timeout_s=1.5, sleep=no_pause) as client:
        assert (await client.version()).ray_version == "2.60.0"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (status(503, "no endpoints available"), "answered 503 to GET /api/version: no endpoints available"),
        (status(502, ""), "a proxy reaches nothing"),
        (GARBAGE, "no JSON: <html>hello from a proxy"),
        (RESET, "GET /api/version"),
    ],
    ids=["status", "status without text", "garbage", "reset"],
)
async def test_what_does_not_pass_within_seconds_leaves_as_transient_and_says_what_came(ray, client, fault, words):
    ray.fails("GET /api/version", *[fault] * 99)
    with pytest.raises(RemoteUnavailable) as caught:
        await client.version()
    assert words in str(caught.value)
    assert ray.count("GET /api/version") == ATTEMPTS


async def test_a_refused_connection_is_transient(ray):
    async with FakeRay() as gone:
        address = gone.address
    async with RayClient(address, sleep=no_pause) as client:
        with pytest.raises(RemoteUnavailable, match="refused or no such host"):
            await client.version()


@pytest.mark.parametrize("code", [400, 405, 410, 413, 415, 422, 501])
async def test_other_statuses_are_permanent_and_carry_the_servers_text(ray, client, code):
    ray.fails("GET /api/version", *[status(code, "Serve dependencies are not installed")] * 9)
    with pytest.raises(Misconfigured, match=f"answered {code} .*Serve dependencies are not installed"):
        await client.version()
    assert ray.count("GET /api/version") == 1


async def test_an_agents_refusal_that_ray_wraps_into_a_500_is_permanent(ray, client):
    text = (
        "Traceback (most recent call last):\n  File x\nRuntimeError: Request failed with status code 400: "
        "Traceback (most recent call last):\n  File y\nValueError: Invalid label selector key\n."
    )
    ray.fails("GET /api/version", *[status(500, text)] * 9)
    with pytest.raises(Misconfigured, match=r"500 to GET /api/version: ValueError: Invalid label selector key$"):
        await client.version()
    assert ray.count("GET /api/version") == 1


async def test_a_redirect_is_not_followed(ray, client):
    ray.fails("GET /api/version", status(307))
    with pytest.raises(Misconfigured, match=r"redirect to 'http://elsewhere.invalid/'"):
        await client.version()


@pytest.mark.parametrize("header", ["authorization", "x-ray-authorization"])
async def test_the_token_goes_into_the_header_that_was_asked_for(header):
    async with FakeRay(token=TOKEN) as ray, RayClient(ray.address, token=f" {TOKEN}\n", auth_header=header) as client:
        await client.version()
        request = ray.seen[-1]
        assert request.headers[header] == f"Bearer {TOKEN}"
        assert sum(TOKEN in value for value in request.headers.values()) == 1


@pytest.mark.parametrize(
    ("token", "words"),
    [(None, "401 .* no token was sent"), ("wrong-token", "403 .* the token that was sent is not the cluster's")],
)
async def test_a_refused_token_is_permanent_and_names_the_header(token, words):
    async with FakeRay(token=TOKEN) as ray, RayClient(ray.address, token=token, sleep=no_pause) as client:
        with pytest.raises(Misconfigured, match=f"{words} .header authorization.*x-ray-authorization"):
            await client.version()
        assert ray.count("GET") == 1
        with pytest.raises(Misconfigured, match="authorization"):
            await anext(client.follow_logs("x"))


async def test_the_token_is_in_no_log_message_or_repr(ray, caplog):
    caplog.set_level(logging.DEBUG)
    async with FakeRay(token="another") as strict, RayClient(strict.address, token=TOKEN, sleep=no_pause) as client:
        with pytest.raises(Misconfigured) as caught:
            await client.version()
        with pytest.raises(Misconfigured):
            await anext(client.follow_logs("x"))
        shown = [repr(client), repr(client._transport), str(caught.value), repr(caught.value), caplog.text]
    assert TOKEN not in "".join(shown)


@pytest.mark.parametrize(
    "address",
    ["", "localhost:8265", "ftp://h:1", "http://", "http://h:99999", "http://h:x", "http://h:1?a=b", "http://h:1#f",
     "http://a b:1", "http://h:1/\nx", "http://user:hunter2@h:1", "http://user:hunter2@h:99999", None, 8265],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_in_one_line_without_its_password(address):
    with pytest.raises(InvalidSpec) as caught:
        RayClient(address)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("token", ["", "  ", "two words", "line\nbreak", "t\x00", "tökén"])
def test_a_token_that_no_header_can_carry_is_refused_without_being_shown(token):
    with pytest.raises(InvalidSpec) as caught:
        RayClient("http://127.0.0.1:1", token=token)
    assert not token.strip() or token not in str(caught.value)


def test_the_address_keeps_a_proxys_path():
    assert RayClient("https://h/api/v1/namespaces/n/services/ray:8265/proxy/").address.endswith(":8265/proxy")


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("http://127.0.1.7:1", True), ("http://localhost:1", True), ("http://[::1]:1", True), ("http://10.0.0.1:1", False),
     ("http://ray.example:1", False)],
)  # fmt: skip
def test_a_proxy_of_the_environment_does_not_step_between_us_and_this_machine(address, loopback):
    assert RayClient(address)._transport.is_loopback is loopback


async def test_a_client_that_is_not_open_says_so(ray):
    with pytest.raises(RuntimeError, match="async with"):
        await RayClient(ray.address).version()


def test_every_transient_case_has_a_reason():
    assert all(reason for reason in [*RETRYABLE_STATUS.values(), *RETRYABLE_ERRORS.values()])


async def test_a_certificate_that_is_not_trusted_is_permanent(ray, client):
    import ssl

    import httpx

    error = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    error.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")
    found = client._transport.translate(error, "GET /x")
    assert isinstance(found, Misconfigured)
    assert "certificate is not trusted" in str(found)


@pytest.mark.parametrize("fault", [status(418), GARBAGE, status(500)], ids=lambda fault: f"{fault.kind}{fault.status}")
async def test_errors_of_every_method_are_ours(ray, client, fault: Fault):
    for method in ("GET", "POST", "PUT", "DELETE"):
        ray.fails(method, *[fault] * 99)
    calls = [client.version, client.nodes, client.holders, client.usage, client.jobs, client.serve_applications]
    for call in calls:
        with pytest.raises(RayTpuError):
            await call()
    for call_with_id in (client.job, client.stop_job, client.job_logs, client.delete_application):
        with pytest.raises(RayTpuError):
            await call_with_id("x")
