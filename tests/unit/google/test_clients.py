"""One door to Google's APIs: tokens are renewed once, calls are bounded, errors are ours, absence is an answer."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.auth.credentials import Credentials

from raytpu_ops.backends.google.access import CloudAccess, DefaultAccess
from raytpu_ops.backends.google.clients import GoogleApis
from raytpu_ops.backends.google.refusals import busy_with
from raytpu_ops.tpu.errors import CapacityUnavailable, InvalidSpec, Misconfigured, RemoteUnavailable
from tests.google_fake import GoogleFake
from tests.google_fake.fake import CLUSTER, PROJECT, ZONE
from tests.unit.google.requests_to_google import PARENT, pool, queued

POOL = f"{CLUSTER}/nodePools/pool-s0"


@pytest.fixture
def access(google: GoogleFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DefaultAccess:
    """A key file, as ``GOOGLE_APPLICATION_CREDENTIALS`` names it."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(google.key_file(tmp_path)))
    return DefaultAccess(endpoints=google.endpoints)


@pytest.fixture
async def apis(access: DefaultAccess) -> AsyncIterator[GoogleApis]:
    async with GoogleApis(access, timeout_s=20) as found:
        yield found


async def test_every_api_is_asked_as_the_account_of_the_key(google: GoogleFake, apis: GoogleApis) -> None:
    google.compute.add_reservation("r", "ct4p-hightpu-4t", 4, zone=ZONE, project=PROJECT)
    assert (await apis.ask("get cluster", apis.container.get_cluster, name=CLUSTER)).name == "tpus"
    assert await apis.ask_all("list nodes", apis.tpu.list_nodes, "nodes", parent=PARENT) == []
    found = await apis.compute("GET", f"zones/{ZONE}/reservations/r", "get reservation r")
    assert found["specificReservation"]["count"] in (4, "4")
    assert await apis.permissions(["tpu.nodes.get"]) == ["tpu.nodes.get"]
    assert apis.project == PROJECT
    assert {call.principal for call in google.calls} == {f"airflow@{PROJECT}.iam.gserviceaccount.com"}
    assert len(google.tokens.given) == 1


async def test_only_not_found_means_absent(google: GoogleFake, apis: GoogleApis) -> None:
    """F07."""
    ask = lambda: apis.ask_or_none("get node pool", apis.container.get_node_pool, name=POOL)  # noqa: E731
    reservation = lambda: apis.compute_or_none(f"zones/{ZONE}/reservations/r", "get reservation r")  # noqa: E731
    assert await ask() is None
    assert await reservation() is None
    google.faults.unavailable("GetNodePool")
    with pytest.raises(RemoteUnavailable, match="get node pool"):
        await ask()
    google.faults.internal("reservations.get")
    with pytest.raises(RemoteUnavailable, match="get reservation r"):
        await reservation()
    google.deny("container.clusters.get", "compute.reservations.get")
    with pytest.raises(Misconfigured, match=r"container\.clusters\.get"):
        await ask()
    with pytest.raises(Misconfigured, match=r"compute\.reservations\.get"):
        await reservation()


async def test_a_token_that_is_too_old_is_renewed_once_and_the_call_goes_on(
    google: GoogleFake, apis: GoogleApis
) -> None:
    """F38."""
    await apis.ask("get cluster", apis.container.get_cluster, name=CLUSTER)
    for renewals, call in enumerate(
        [
            lambda: apis.ask("get cluster", apis.container.get_cluster, name=CLUSTER),
            lambda: apis.ask_all("list nodes", apis.tpu.list_nodes, "nodes", parent=PARENT),
            lambda: apis.permissions(["tpu.nodes.get"]),
        ],
        start=1,
    ):
        google.expire_tokens()
        await call()
        assert len(google.tokens.given) == 1 + renewals


async def test_an_account_that_stays_refused_ends_the_wait(google: GoogleFake, apis: GoogleApis) -> None:
    google.faults.inject("GetCluster", "UNAUTHENTICATED", None)
    with pytest.raises(Misconfigured, match="a new token was refused as well"):
        await apis.ask("get cluster", apis.container.get_cluster, name=CLUSTER)
    assert len(google.asked("GetCluster")) == 2


async def test_no_other_failure_is_tried_again_behind_the_callers_back(google: GoogleFake, apis: GoogleApis) -> None:
    """F02."""
    google.faults.unavailable("GetCluster")
    with pytest.raises(RemoteUnavailable):
        await apis.ask("get cluster", apis.container.get_cluster, name=CLUSTER)
    assert len(google.asked("GetCluster")) == 1


async def test_an_answer_that_is_lost_is_an_outage_and_the_pool_is_made(google: GoogleFake, apis: GoogleApis) -> None:
    """F02."""
    for lose in (google.faults.cut, google.faults.lost):
        lose("CreateNodePool")
        with pytest.raises(RemoteUnavailable):
            await apis.ask("create node pool", apis.container.create_node_pool, parent=CLUSTER, node_pool=pool())
        assert POOL in google.node_pools()
        google.advance(300)
        await apis.ask("delete node pool", apis.container.delete_node_pool, name=POOL)
        google.advance(300)


async def test_the_operation_that_is_in_the_way_is_named(google: GoogleFake, apis: GoogleApis) -> None:
    """F04."""
    operation = await apis.ask("create", apis.container.create_node_pool, parent=CLUSTER, node_pool=pool())
    with pytest.raises(RemoteUnavailable) as caught:
        await apis.ask("create", apis.container.create_node_pool, parent=CLUSTER, node_pool=pool(name="pool-s1"))
    assert busy_with(caught.value) == operation.name


async def test_an_api_that_nobody_enabled_ends_the_wait(google: GoogleFake, apis: GoogleApis) -> None:
    google.disable("tpu")
    google.disable("compute")
    with pytest.raises(Misconfigured, match="enable the API"):
        await apis.ask("list nodes", apis.tpu.list_nodes, parent=PARENT)
    with pytest.raises(Misconfigured, match="enable the API"):
        await apis.compute("GET", f"zones/{ZONE}/reservations/r", "get reservation r")


def _listing(*pages: tuple[list[str], list[str]]) -> Any:
    """A list method whose pages have these nodes, and these places that did not answer."""

    class Pager:
        @property
        async def pages(self) -> AsyncIterator[Any]:
            for nodes, unreachable in pages:
                yield SimpleNamespace(nodes=nodes, unreachable=unreachable)

    async def list_nodes(**fields: Any) -> Pager:
        return Pager()

    return list_nodes


async def test_pages_are_read_to_the_end(apis: GoogleApis) -> None:
    assert await apis.ask_all("list", _listing((["a"], []), (["b", "c"], [])), "nodes") == ["a", "b", "c"]


async def test_a_list_with_a_hole_is_no_list(apis: GoogleApis) -> None:
    """F07: what a zone that did not answer has would count as absent."""
    with pytest.raises(RemoteUnavailable, match="us-central2-b"):
        await apis.ask_all("list", _listing((["a"], ["projects/p/locations/us-central2-b"]), (["b"], [])), "nodes")


async def test_nobody_at_the_address_is_an_outage(google: GoogleFake, access: DefaultAccess) -> None:
    access.endpoints = dict.fromkeys(google.endpoints, "localhost:1")
    async with GoogleApis(access, timeout_s=5) as apis:
        with pytest.raises(RemoteUnavailable):
            await apis.ask("get cluster", apis.container.get_cluster, name=CLUSTER)
        with pytest.raises(RemoteUnavailable):
            await apis.permissions(["tpu.nodes.get"])


async def test_a_page_that_is_no_json_is_an_outage(google: GoogleFake, apis: GoogleApis) -> None:
    with pytest.raises(Misconfigured):  # the fake's own 404 page, as a wrong address has it
        await apis.compute("GET", "nothing/like/this", "get nothing")


async def test_nothing_of_a_token_is_in_errors_names_or_the_log_of_googles_own_clients(
    google: GoogleFake, access: DefaultAccess, apis: GoogleApis, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("google")
    caplog.set_level("DEBUG")
    caplog.set_level("DEBUG", logger="google")
    log.addHandler(caplog.handler)  # as GOOGLE_SDK_PYTHON_LOGGING_SCOPE=google does; it reaches no other logger
    try:
        await apis.ask("get cluster", apis.container.get_cluster, name=CLUSTER)
        node = queued({"metadata": {"raytpu-token": "ray-s3cret"}})
        fields = {"parent": PARENT, "queued_resource_id": "q", "queued_resource": node}
        await apis.ask("create", apis.tpu.create_queued_resource, **fields)
        await apis.permissions(["tpu.nodes.get"])
    finally:
        log.removeHandler(caplog.handler)
    google.deny("container.clusters.get")
    with pytest.raises(Misconfigured) as caught:
        await apis.ask("get cluster", apis.container.get_cluster, name=CLUSTER)
    token = (await access.credentials()).token
    logged = "".join(str(vars(record)) for record in caplog.records)
    assert "google.container.v1.ClusterManager" in logged, "their debug log is on"
    for text in (str(caught.value), repr(access), repr(apis), str(access.selectors), logged):
        assert token not in text
        assert "PRIVATE KEY" not in text
        assert "ray-s3cret" not in text


class TestDefaultAccess:
    async def test_options_say_which_project(self, google: GoogleFake, access: DefaultAccess) -> None:
        assert await access.project() == PROJECT
        named = DefaultAccess("other", endpoints={"tpu": "localhost:1"})
        assert await named.project() == "other"
        assert named.selectors == {"project_id": "other", "google_endpoints": "tpu=localhost:1"}
        assert isinstance(named, CloudAccess)

    async def test_valid_credentials_are_fetched_once(self, google: GoogleFake, access: DefaultAccess) -> None:
        first = await access.credentials()
        assert await access.credentials() is first
        assert len(google.tokens.given) == 1
        renewed = await access.credentials(renew=True)
        assert isinstance(renewed, Credentials)
        assert len(google.tokens.given) == 2

    async def test_no_credentials_at_all(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
        with pytest.raises(Misconfigured, match="no credentials that work here"):
            await DefaultAccess().credentials()
        (tmp_path / "none.json").write_text("{]")
        with pytest.raises(Misconfigured, match="Google's default credentials"):
            await DefaultAccess().project()

    async def test_an_account_that_was_deleted(self, google: GoogleFake, access: DefaultAccess) -> None:
        access.endpoints = google.endpoints
        await access.credentials()
        google.tokens.from_assertion = lambda assertion: (_ for _ in ()).throw(_gone())  # type: ignore[method-assign]
        with pytest.raises(Misconfigured, match="Google gives out no token"):
            await access.credentials(renew=True)

    def test_an_api_that_is_none(self) -> None:
        with pytest.raises(InvalidSpec, match="there is no API 'gke'"):
            DefaultAccess(endpoints={"gke": "localhost:1"})


def _gone() -> Exception:
    from tests.google_fake import refusals

    return refusals.invalid("Invalid grant: account not found")


def test_a_bundle_that_can_not_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from raytpu_ops.backends.google.clients import _trust

    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with pytest.raises(Misconfigured, match="REQUESTS_CA_BUNDLE"):
        _trust()
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    assert _trust() is True
    assert "REQUESTS_CA_BUNDLE" not in os.environ


async def test_a_stock_out_is_capacity(google: GoogleFake, apis: GoogleApis) -> None:
    google.faults.quota("zone")
    fate = google.faults.fates[0].error
    google.faults.clear()
    google.faults.inject("CreateQueuedResource", "RESOURCE_EXHAUSTED", message=fate.message)
    with pytest.raises(CapacityUnavailable, match="quota"):
        await apis.ask(
            "create", apis.tpu.create_queued_resource, parent=PARENT, queued_resource_id="q", queued_resource=queued()
        )
