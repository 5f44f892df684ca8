"""Who acts at Google: a connection brings a key, an identity or a chain of accounts, and nothing of it shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

WHY = "needs the extra `google`: pip install 'raytpu-ops[google]', or make test-cluster"
pytest.importorskip("airflow.providers.google.common.hooks.base_google", reason=WHY)

from raytpu_ops.backends.google.access import CloudAccess
from raytpu_ops.backends.google.clients import GoogleApis
from raytpu_ops.hooks.google_cloud import ConnectionAccess, cloud_from
from raytpu_ops.tpu.errors import Misconfigured, RemoteUnavailable
from tests.google_fake import GoogleFake
from tests.google_fake.fake import CLUSTER, PROJECT
from tests.unit.hooks.fake_google import POD, REFRESH, Tokens

pytestmark = pytest.mark.core

Connect = Callable[..., str]
PERSON = "somebody@example.com"
TRAINER = f"trainer@{PROJECT}.iam.gserviceaccount.com"


@pytest.fixture
def google(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleFake]:
    """The APIs; tokens of this machine, and of accounts that others act as, are good there."""
    accounts = {"pod": POD, "trainer": TRAINER, "person": PERSON}
    with GoogleFake() as fake:

        def new(who: str) -> str:
            tokens.given.append(who)
            return fake.tokens.new(accounts.get(who, who))

        monkeypatch.setattr(tokens, "token", new)
        yield fake


def access(google: GoogleFake, **options: Any) -> CloudAccess:
    found, rest = cloud_from({"google_endpoints": google.endpoints, **options}, "tpu_vm")
    assert isinstance(found, ConnectionAccess)
    assert rest == {}
    return found


async def principal(google: GoogleFake, **options: Any) -> str:
    """Who asks, as Google sees it."""
    async with GoogleApis(access(google, **options), timeout_s=20) as apis:
        await apis.ask("get cluster", apis.container.get_cluster, name=CLUSTER)
        assert apis.project == PROJECT
    return google.calls[-1].principal


async def test_a_key_in_the_connection(google: GoogleFake, connect: Connect) -> None:
    connect("gcp", "google_cloud_platform", keyfile_dict=json.dumps(google.key()))
    assert await principal(google, gcp_conn_id="gcp") == f"airflow@{PROJECT}.iam.gserviceaccount.com"


async def test_a_key_file(google: GoogleFake, connect: Connect, tmp_path: Path) -> None:
    connect("gcp", "google_cloud_platform", key_path=str(google.key_file(tmp_path)))
    assert await principal(google, gcp_conn_id="gcp") == f"airflow@{PROJECT}.iam.gserviceaccount.com"


async def test_the_default_connection_needs_no_name(google: GoogleFake, connect: Connect) -> None:
    connect("google_cloud_default", "google_cloud_platform", keyfile_dict=json.dumps(google.key("pipelines")))
    assert await principal(google) == f"pipelines@{PROJECT}.iam.gserviceaccount.com"


async def test_workload_identity_is_what_an_empty_connection_means(google: GoogleFake, connect: Connect) -> None:
    connect("gcp", "google_cloud_platform")
    assert await principal(google, gcp_conn_id="gcp") == POD


async def test_without_any_connection_the_machines_own_credentials_count(google: GoogleFake) -> None:
    assert await principal(google) == POD


#: An empty connection, and none at all.
EMPTY = pytest.mark.parametrize("named", [True, False], ids=["empty connection", "no connection"])


def of_the_machine(connect: Connect, *, named: bool) -> dict[str, str]:
    """Options by which the machine's own credentials count."""
    return {"gcp_conn_id": connect("gcp", "google_cloud_platform")} if named else {}


@EMPTY
async def test_a_key_file_that_a_variable_names(
    google: GoogleFake, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """It goes before the metadata server, and brings its project."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(google.key_file(tmp_path, "file")))
    assert await principal(google, **of_the_machine(connect, named=named)) == f"file@{PROJECT}.iam.gserviceaccount.com"


@EMPTY
async def test_what_gcloud_left_when_a_person_logged_in(
    google: GoogleFake,
    tokens: Tokens,
    connect: Connect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: bool,
) -> None:
    """It says no project, and a file's quota project is none to make slices in."""
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tokens.login(tmp_path / "gcloud").parent))
    options = of_the_machine(connect, named=named)

    assert await principal(google, project_id=PROJECT, **options) == PERSON
    google.expire_tokens()
    assert await principal(google, project_id=PROJECT, **options) == PERSON

    with pytest.raises(Misconfigured, match="^project_id is missing: .* say it; set project_id$") as caught:
        await access(google, **options).project()
    assert ("connection 'gcp'" if named else "Google's default credentials of this machine") in str(caught.value)


async def test_a_login_that_was_withdrawn_is_named_at_once(
    google: GoogleFake, tokens: Tokens, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = tokens.login(tmp_path / "gcloud")
    login.write_text(login.read_text().replace(REFRESH, "1//withdrawn"))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(login.parent))
    with pytest.raises(Misconfigured, match="^connection 'gcp': Google gives out no token: ") as caught:
        await access(google, **of_the_machine(connect, named=True)).credentials()
    assert "1//withdrawn" not in str(caught.value)


@pytest.mark.parametrize("chain", [TRAINER, f"a@x.iam, {TRAINER}", ["a@x.iam", TRAINER]])
async def test_acting_as_another_account(
    google: GoogleFake, tokens: Tokens, connect: Connect, chain: str | list[str]
) -> None:
    connect("gcp", "google_cloud_platform")
    assert await principal(google, gcp_conn_id="gcp", impersonation_chain=chain) == TRAINER
    assert tokens.given == ["pod", "trainer"]


async def test_the_connection_may_say_the_chain_and_the_project(google: GoogleFake, connect: Connect) -> None:
    connect("gcp", "google_cloud_platform", impersonation_chain=TRAINER, project=PROJECT)
    assert await principal(google, gcp_conn_id="gcp") == TRAINER


async def test_a_token_that_is_too_old_is_renewed(google: GoogleFake, connect: Connect) -> None:
    """F38, for each way to a token."""
    connect("key", "google_cloud_platform", keyfile_dict=json.dumps(google.key()))
    connect("pod", "google_cloud_platform")
    for options in (
        {"gcp_conn_id": "key"},
        {"gcp_conn_id": "pod"},
        {"gcp_conn_id": "pod", "impersonation_chain": TRAINER},
    ):
        async with GoogleApis(access(google, **options), timeout_s=20) as apis:
            await apis.ask("get cluster", apis.container.get_cluster, name=CLUSTER)
            google.expire_tokens()
            await apis.ask("get cluster", apis.container.get_cluster, name=CLUSTER)


async def test_an_absent_connection_is_named(google: GoogleFake) -> None:
    for options in ({"gcp_conn_id": "nowhere"}, {"gcp_conn_id": "nowhere", "project_id": "p"}):
        with pytest.raises(Misconfigured, match="'nowhere' does not exist: add it with type 'google_cloud_platform'"):
            await access(google, **options).credentials()
    with pytest.raises(Misconfigured, match="'google_cloud_default' does not exist"):
        await access(google, impersonation_chain=TRAINER).credentials()


async def test_a_project_that_nobody_says(google: GoogleFake, connect: Connect) -> None:
    key = {name: value for name, value in google.key().items() if name != "project_id"}
    connect("gcp", "google_cloud_platform", keyfile_dict=json.dumps(key))
    with pytest.raises(Misconfigured, match="project_id is missing: neither the options nor connection 'gcp' say it"):
        await access(google, gcp_conn_id="gcp").project()
    assert await access(google, gcp_conn_id="gcp", project_id="mine").project() == "mine"


async def test_a_token_service_that_is_down_ends_no_wait(
    google: GoogleFake, tokens: Tokens, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect("gcp", "google_cloud_platform")
    tokens.refusal = (503, {"error": {"code": 503, "status": "UNAVAILABLE"}})
    with pytest.raises(RemoteUnavailable, match="connection 'gcp': Google gives out no token now"):
        await access(google, gcp_conn_id="gcp", impersonation_chain=TRAINER).credentials()
    tokens.refusal = (403, {"error": {"code": 403, "status": "PERMISSION_DENIED"}})
    with pytest.raises(Misconfigured, match=r"needs roles/iam\.serviceAccountTokenCreator"):
        await access(google, gcp_conn_id="gcp", impersonation_chain=TRAINER).credentials()


async def test_nothing_that_can_be_printed_holds_a_secret(
    google: GoogleFake, connect: Connect, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("DEBUG")
    connect("gcp", "google_cloud_platform", keyfile_dict=json.dumps(google.key()))
    found = access(google, gcp_conn_id="gcp", project_id=PROJECT, impersonation_chain=["a@x.iam", "b@x.iam"])
    assert dict(found.selectors) == {
        "project_id": PROJECT,
        "gcp_conn_id": "gcp",
        "impersonation_chain": "a@x.iam,b@x.iam",
        "google_endpoints": ",".join(f"{api}={google.endpoints[api]}" for api in sorted(google.endpoints)),
    }
    again, _ = cloud_from(found.selectors, "tpu_vm")
    assert (again.selectors, again.endpoints) == (found.selectors, found.endpoints)
    plain = access(google, gcp_conn_id="gcp")
    token = (await plain.credentials()).token
    google.deny("container.clusters.get")
    with pytest.raises(Misconfigured) as caught:
        async with GoogleApis(plain, timeout_s=20) as apis:
            await apis.ask("get cluster", apis.container.get_cluster, name=CLUSTER)
    argv = " ".join(psutil.Process().cmdline())
    for text in (f"{found!r}{plain!r}", caplog.text, str(caught.value), str(plain.selectors), argv):
        assert token not in text
        assert "PRIVATE KEY" not in text


async def test_a_broken_key_is_refused_without_its_text(google: GoogleFake, connect: Connect) -> None:
    key = {**google.key(), "private_key": "s3cret"}
    connect("gcp", "google_cloud_platform", keyfile_dict=json.dumps(key))
    with pytest.raises(Misconfigured, match="^connection 'gcp'") as caught:
        await access(google, gcp_conn_id="gcp").credentials()
    assert "s3cret" not in f"{caught.value} {caught.value.__cause__!r}"
