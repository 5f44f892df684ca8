"""Who may do what in the fake, whose tokens are good, and any error for any request."""

from __future__ import annotations

import pytest
import requests
from google.api_core import exceptions
from google.auth.credentials import Credentials
from google.auth.transport.requests import Request
from google.cloud import container_v1, tpu_v2

from tests.google_fake import Clock, GoogleFake
from tests.google_fake.fake import CLUSTER, PROJECT
from tests.unit.google.requests_to_google import PARENT, POOL, QUEUED, pool, queued

Gke = container_v1.ClusterManagerClient


def test_f32_creating_is_allowed_and_looking_is_not(google: GoogleFake, gke: Gke) -> None:
    google.deny("container.clusters.get", "container.operations.get")
    operation = gke.create_node_pool(parent=CLUSTER, node_pool=pool())
    with pytest.raises(exceptions.PermissionDenied, match='"container.clusters.get"') as refused:
        gke.get_node_pool(name=POOL)
    assert refused.value.reason == "IAM_PERMISSION_DENIED"
    with pytest.raises(exceptions.PermissionDenied):
        gke.get_operation(name=f"{PARENT}/operations/{operation.name}")
    google.allow("container.clusters.get")
    assert gke.get_node_pool(name=POOL).name == "pool-s0"


def test_f32_the_same_of_queued_resources(google: GoogleFake, tpu: tpu_v2.TpuClient) -> None:
    google.deny("tpu.nodes.get", "tpu.nodes.delete")
    tpu.create_queued_resource(parent=PARENT, queued_resource_id="qr", queued_resource=queued())
    for ask in (tpu.get_queued_resource, tpu.delete_queued_resource):
        with pytest.raises(exceptions.PermissionDenied, match="tpu.nodes"):
            ask(name=QUEUED)
    google.allow()
    assert tpu.get_queued_resource(name=QUEUED).name == QUEUED


def test_a_role_that_lacks_a_permission_is_found_out(google: GoogleFake, gke: Gke) -> None:
    google.grant_only(["container.clusters.update"])
    with pytest.raises(exceptions.PermissionDenied, match="actAs"):
        gke.create_node_pool(parent=CLUSTER, node_pool=pool())
    google.grant_only(["container.clusters.update", "iam.serviceAccounts.actAs"])
    gke.create_node_pool(parent=CLUSTER, node_pool=pool())


def test_f38_tokens_that_are_too_old_are_refused_until_there_is_a_newer_one(
    google: GoogleFake, credentials: Credentials, http: requests.Session
) -> None:
    region = f"https://{google.endpoints['compute']}/compute/v1/projects/{PROJECT}/regions/us-central2"
    assert http.get(region).status_code == 200
    google.expire_tokens()
    assert [http.get(region).status_code for _ in range(3)] == [401, 401, 401]
    credentials.refresh(Request())
    assert http.get(region).status_code == 200
    assert len(google.tokens.given) == 2


def test_f38_the_same_over_grpc(google: GoogleFake, credentials: Credentials) -> None:
    options = {"api_endpoint": google.endpoints["container"]}
    credentials.refresh(Request())

    def describe() -> container_v1.Cluster:
        with Gke(credentials=_Fixed(str(credentials.token)), client_options=options) as client:
            return client.get_cluster(name=CLUSTER)

    assert describe().name == "tpus"
    google.expire_tokens()
    with pytest.raises(exceptions.Unauthenticated):
        describe()
    credentials.refresh(Request())
    assert describe().name == "tpus"


def test_a_stranger_is_not_let_in(google: GoogleFake) -> None:
    region = f"https://{google.endpoints['compute']}/compute/v1/projects/{PROJECT}/regions/us-central2"
    assert requests.get(region, timeout=10).status_code == 401
    assert requests.get(region, timeout=10, headers={"Authorization": "Bearer guess"}).status_code == 401


def test_an_api_that_nobody_enabled_says_so(google: GoogleFake, gke: Gke, http: requests.Session) -> None:
    google.disable("container")
    google.disable("compute")
    with pytest.raises(exceptions.PermissionDenied, match="has not been used in project") as refused:
        gke.get_cluster(name=CLUSTER)
    assert refused.value.reason == "SERVICE_DISABLED"
    answer = http.get(f"https://{google.endpoints['compute']}/compute/v1/projects/{PROJECT}/regions/us-central2")
    assert (answer.status_code, answer.json()["error"]["errors"][0]["reason"]) == (403, "accessNotConfigured")


def test_an_organisation_forbids_it(google: GoogleFake, gke: Gke) -> None:
    google.faults.org_policy("CreateNodePool")
    with pytest.raises(exceptions.FailedPrecondition, match="Constraint constraints/"):
        gke.create_node_pool(parent=CLUSTER, node_pool=pool())


def test_any_error_meets_the_requests_that_are_meant(google: GoogleFake, gke: Gke) -> None:
    fault = google.faults.inject("container.Get*", "ABORTED", 2, when=lambda call: call.resource == POOL)
    google.container.put(CLUSTER, pool())
    gke.get_cluster(name=CLUSTER)
    for _ in range(2):
        with pytest.raises(exceptions.Aborted):
            gke.get_node_pool(name=POOL)
    gke.get_node_pool(name=POOL)
    assert fault.hits == 2
    assert [call.status for call in google.asked("GetNodePool")] == ["ABORTED", "ABORTED", "OK"]


def test_http_requests_are_cut_off_and_refused_too(google: GoogleFake, http: requests.Session) -> None:
    policies = f"https://{google.endpoints['compute']}/compute/v1/projects/{PROJECT}/regions/r/resourcePolicies"
    body = {"name": "w", "workloadPolicy": {"type": "HIGH_THROUGHPUT", "acceleratorTopology": "2x2x2"}}
    google.faults.cut("resourcePolicies.insert")
    with pytest.raises(requests.ConnectionError):
        http.post(policies, json=body)
    assert google.compute.made == [f"projects/{PROJECT}/regions/r/resourcePolicies/w"]
    google.faults.unavailable("compute.*")
    assert http.get(f"{policies}/w").status_code == 503
    assert http.post(policies, json=body).status_code == 409


def test_a_policy_that_a_pool_uses_cannot_be_deleted(google: GoogleFake, http: requests.Session) -> None:
    policies = (
        f"https://{google.endpoints['compute']}/compute/v1/projects/{PROJECT}/regions/us-central2/resourcePolicies"
    )
    google.compute.put_policy("w", "2x2x2", region="us-central2", project=PROJECT)
    google.container.put(CLUSTER, pool(placement_policy={"policy_name": "w"}))
    refused = http.delete(f"{policies}/w")
    assert refused.json()["error"]["errors"][0]["reason"] == "resourceInUseByAnotherResource"
    google.container.vanish(POOL)
    assert http.delete(f"{policies}/w").status_code == 200


def test_time_may_pass_with_each_request(credentials: Credentials) -> None:
    with GoogleFake(clock=Clock(per_call=100)) as google:
        google.container.put(CLUSTER, pool())
        options = {"api_endpoint": google.endpoints["container"]}
        with Gke(credentials=credentials, client_options=options) as client:
            client.delete_node_pool(name=POOL)
            client.get_node_pool(name=POOL)
            with pytest.raises(exceptions.NotFound):
                client.get_node_pool(name=POOL)


def test_time_may_pass_by_itself(credentials: Credentials) -> None:
    with GoogleFake(clock=Clock(speed=10_000)) as google:
        google.container.put(CLUSTER, pool())
        options = {"api_endpoint": google.endpoints["container"]}
        with Gke(credentials=credentials, client_options=options) as client:
            client.delete_node_pool(name=POOL)
            while google.node_pools():
                client.list_node_pools(parent=CLUSTER)


class _Fixed(Credentials):
    """A token that does not renew itself."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self.token = token

    def refresh(self, request: object) -> None:
        raise AssertionError("nobody asked for a new token")
