"""Claims of the credentials on the wire: renewed where they are refused, and shown to nobody else (F38)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from raytpu_ops.ray import logs
from raytpu_ops.ray.client import RayClient
from raytpu_ops.ray.credentials import BearerToken, Credentials
from raytpu_ops.ray.transport import ATTEMPTS
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, RemoteUnavailable
from tests.unit.ray.credentials import Rotating, tls_pair
from tests.unit.ray.fake_ray import FakeJob, FakeRay, Tail, becomes, kubernetes_status, status
from tests.unit.ray.tunnel import Tunnel

PROXY = "/api/v1/namespaces/team-a/services/train-head-svc:dashboard/proxy"
LINES = [f"line {number}" for number in range(100)]
LOG = "\n".join(LINES) + "\n"


async def no_pause(_: float) -> None:
    await asyncio.sleep(0.001)


def client_of(ray: FakeRay, credentials: Credentials | None) -> RayClient:
    return RayClient(ray.address, credentials=credentials, timeout_s=20, sleep=no_pause)


# --- renewal ---


async def test_a_token_that_expires_between_two_requests_is_renewed_once():
    ours = Rotating("first", "second", "third", ray="ray-token")
    async with FakeRay("ray-token", prefix=PROXY, front={"first"}) as ray, client_of(ray, ours) as client:
        await client.version()
        ray.front = {"second"}
        assert (await client.version()).ray_version == "2.60.0"
        assert await client.usage() == {}
    assert ours.renewals == 1
    assert ray.count("GET") == 4, "one of them refused"


async def test_a_body_is_sent_again_whole(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\n")
    async with FakeRay(front={"second"}) as ray, client_of(ray, Rotating("first", "second")) as client:
        uri = await client.upload_package(tmp_path)
        ray.front = {"third"}
        async with client_of(ray, Rotating("second", "third")) as another:
            ray.packages.clear()
            assert await another.upload_package(tmp_path) == uri
        assert len(ray.packages[uri.removeprefix("gcs://")]) > 100


async def test_a_log_goes_on_when_the_token_expires_between_two_tails():
    ours = Rotating("first", "second")
    async with FakeRay(front={"first"}) as ray, client_of(ray, ours) as client:

        def expires(_: FakeJob) -> None:
            ray.front = {"second"}

        job = ray.jobs["a-1"] = FakeJob(
            status="RUNNING", log=LOG, tails=deque([Tail(upto=300)]), further_tails=Tail(once=True)
        )
        job.at_each_look(expires, becomes("SUCCEEDED", "the end"))
        assert [line async for line in client.follow_logs("a-1")] == [*LINES, "the end"]
    assert ours.renewals == 1
    assert job.tail_connections == 2, "the second tail came through, with the renewed token"


async def test_the_tail_and_the_whole_log_are_asked_for_again_with_the_renewed_token():
    async with FakeRay(front={"second"}) as ray:
        ray.jobs["a-1"] = FakeJob(status="SUCCEEDED", log=LOG)
        async with client_of(ray, Rotating("first", "second")) as client:
            assert "".join([piece async for piece in logs.tail(client._transport, "a-1")]) == LOG
        async with client_of(ray, Rotating("first", "second")) as client:
            assert await client.job_logs("a-1") == LOG


@pytest.mark.parametrize("tokens", [("first", "second"), ("first",)], ids=["renewed", "there is no other"])
async def test_credentials_that_stay_refused_are_an_error_about_kubernetes(tokens):
    ours = Rotating(*tokens)
    async with FakeRay(front={"another"}, prefix=PROXY) as ray, client_of(ray, ours) as client:
        with pytest.raises(Misconfigured, match=r"Kubernetes in front of Ray .* 401 to GET /api/version: .*kubeconfig"):
            await client.version()
        assert (ray.count("GET"), ours.renewals) == (len(tokens), 1)
        with pytest.raises(Misconfigured, match="401"):
            await anext(logs.tail(client._transport, "a-1"))


async def test_refused_headers_do_not_travel_with_the_new_ones():
    class Changing(Rotating):
        async def headers(self, *, renew: bool = False):
            await super().headers(renew=renew)
            return {"x-ray-authorization": "Bearer t"} if renew or self.renewals else {"authorization": "Bearer t"}

    async with FakeRay(front=None) as ray, client_of(ray, Changing("t")) as client:
        ray.fails("GET /api/version", kubernetes_status(401, "Unauthorized"))
        await client.version()
    first, second = (request.headers for request in ray.seen)
    assert "authorization" in first
    assert "authorization" not in second


async def test_credentials_that_cannot_be_had_for_the_moment_are_asked_for_again():
    gone = [RemoteUnavailable("the metadata server does not answer") for _ in range(ATTEMPTS)]
    ours = Rotating("t", failures=gone[: ATTEMPTS - 1])
    async with FakeRay(front={"t"}) as ray, client_of(ray, ours) as client:
        assert (await client.version()).ray_version == "2.60.0"
        ours.failures = gone
        with pytest.raises(RemoteUnavailable, match="metadata server"):
            await client.version()
        ours.failures = [Misconfigured("no such key file")]
        with pytest.raises(Misconfigured, match="no such key file"):
            await client.version()


# --- TLS ---


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    return tls_pair(tmp_path_factory.mktemp("pki"))


async def test_https_on_this_machine_with_an_authority_of_its_own(pair):
    server, trusted = pair
    ours = Rotating("t", trusts=trusted, failures=[RemoteUnavailable("not now")])
    async with FakeRay(prefix=PROXY, tls=server, front={"t"}) as ray, client_of(ray, ours) as client:
        ray.jobs["a-1"] = FakeJob(status="SUCCEEDED", log=LOG)
        assert ray.address.startswith("https://127.0.0.1:")
        assert (await client.version()).ray_version == "2.60.0"
        assert "".join([piece async for piece in logs.tail(client._transport, "a-1")]) == LOG
        assert await client.job_logs("a-1") == LOG
    assert {request.path.removesuffix("/api/version") for request in ray.seen[:1]} == {PROXY}


async def test_requests_and_the_tail_of_a_log_go_through_the_proxy_that_the_credentials_know(pair):
    server, trusted = pair
    ours = Rotating("t", trusts=trusted)
    async with (
        Tunnel() as tunnel,
        FakeRay(prefix=PROXY, tls=server, front={"t"}) as ray,
        client_of(ray, ours) as client,
    ):
        ours.way = tunnel.url
        ray.jobs["a-1"] = FakeJob(status="SUCCEEDED", log=LOG)
        assert (await client.version()).ray_version == "2.60.0"
        assert "".join([piece async for piece in logs.tail(client._transport, "a-1")]) == LOG
        assert tunnel.targets == [urlsplit(ray.address).netloc] * 2


async def test_a_server_that_the_machine_does_not_know_is_not_talked_to(pair):
    async with FakeRay(tls=pair[0]) as ray, client_of(ray, BearerToken("s3cret")) as client:
        with pytest.raises(Misconfigured, match="its certificate is not trusted"):
            await client.version()
        with pytest.raises(RemoteUnavailable, match=r"(?i)certificate"):
            await anext(logs.tail(client._transport, "a-1"))
        assert ray.seen == []


# --- what the API server answers by itself ---

FORBIDDEN = (
    'services "train-head-svc:dashboard" is forbidden: User "system:serviceaccount:airflow:worker" cannot create '
    'resource "services/proxy" in API group "" in the namespace "team-a"'
)


@pytest.mark.parametrize(
    ("code", "message", "words"),
    [
        (403, FORBIDDEN, "'system:serviceaccount:airflow:worker' lacks the right to create services/proxy in namespace "
         "'team-a'; grant it with the role in deploy/gke/rbac.yaml: .raytpu doctor --backend gke. shows how"),
        (403, "services is forbidden: other words", "is forbidden: other words; grant it .* deploy/gke/rbac.yaml: .*"),
        (400, "the server rejected our request", "the server rejected our request"),
    ],
    ids=["rights", "other words", "bad request"],
)  # fmt: skip
async def test_a_refusal_of_the_api_server_is_permanent_and_about_kubernetes(ray, client, code, message, words):
    ray.fails("GET", *[kubernetes_status(code, message)] * 9)
    with pytest.raises(Misconfigured, match=rf"Kubernetes in front of Ray at .* answered {code} .*{words}$") as caught:
        await client.version()
    assert ray.count("GET") == 1
    assert "token" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (404, 'services "train-head-svc" not found'),
        (503, 'no endpoints available for service "train-head-svc:dashboard"'),
        (503, "error trying to reach service: dial tcp 10.0.0.7:8265: connect: connection refused"),
        (429, "too many requests, please try again later"),
        (500, "etcdserver: leader changed"),
    ],
)
async def test_what_passes_by_itself_is_transient_and_in_the_api_servers_words(ray, client, code, message):
    ray.fails("GET", *[kubernetes_status(code, message)] * 9)
    with pytest.raises(RemoteUnavailable) as caught:
        await client.job("a-1")
    assert str(caught.value).endswith(f"answered {code} to GET /api/jobs/a-1: {message}")
    assert ray.count("GET") == ATTEMPTS


@pytest.mark.parametrize(
    "text", ['{"kind": "Status"}', '{"kind"', '["Status"]', '{"kind": "Other", "apiVersion": "v1"}']
)
async def test_what_only_looks_like_an_api_server_is_rays_own_answer(ray, client, text):
    ray.fails("GET", *[status(403, text)] * 9)
    with pytest.raises(Misconfigured, match="^Ray at "):
        await client.version()


# --- nothing is shown ---


async def test_no_secret_is_in_a_log_message_or_repr(caplog):
    caplog.set_level(logging.DEBUG)
    ours = Rotating("s3cret-one", "s3cret-two", ray="s3cret-three")
    async with FakeRay("other", front={"nobody"}) as ray, client_of(ray, ours) as client:
        with pytest.raises(Misconfigured) as caught:
            await client.version()
        with pytest.raises(Misconfigured):
            await anext(logs.tail(client._transport, "x"))
        ray.front = {"s3cret-two"}
        with pytest.raises(Misconfigured, match=r"403.*not the cluster's .header authorization, x-ray-authorization"):
            await client.version()
        shown = [repr(client), repr(client._transport), str(caught.value), caplog.text, repr(BearerToken("s3cret"))]
    assert "s3cret" not in "".join(shown)


def test_a_token_that_is_given_twice_is_refused():
    with pytest.raises(InvalidSpec, match="given twice"):
        RayClient("http://127.0.0.1:1", token="a", credentials=BearerToken("b"))


def test_a_bearer_token_is_credentials():
    assert isinstance(BearerToken("a"), Credentials)
