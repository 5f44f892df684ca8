"""Google's own clients against the fake: nothing goes wrong."""

from __future__ import annotations

import pytest
import requests
from google.api_core import exceptions
from google.auth import impersonated_credentials
from google.auth.credentials import Credentials
from google.cloud import container_v1, tpu_v2

from tests.google_fake import GoogleFake
from tests.google_fake.fake import CLUSTER, PROJECT, ZONE
from tests.unit.google.requests_to_google import PARENT, pool, queued

Status = container_v1.NodePool.Status
State = tpu_v2.QueuedResourceState.State


def test_a_node_pool_comes_and_goes(google: GoogleFake, gke: container_v1.ClusterManagerClient) -> None:
    name = f"{CLUSTER}/nodePools/pool-s0"
    operation = gke.create_node_pool(parent=CLUSTER, node_pool=pool())
    full = f"{PARENT}/operations/{operation.name}"
    assert gke.get_node_pool(name=name).status == Status.PROVISIONING
    assert gke.get_operation(name=full).status == container_v1.Operation.Status.RUNNING

    google.advance(200)
    assert gke.get_node_pool(name=name).status == Status.RUNNING
    assert gke.get_operation(name=full).status == container_v1.Operation.Status.DONE
    assert [one.name for one in gke.list_node_pools(parent=CLUSTER).node_pools] == ["default-pool", "pool-s0"]

    gke.delete_node_pool(name=name)
    assert google.node_pools()[name].status == Status.STOPPING
    google.advance(200)
    with pytest.raises(exceptions.NotFound, match="Not found"):
        gke.get_node_pool(name=name)
    assert google.node_pools() == {}
    assert len(gke.list_operations(parent=PARENT).operations) == 2


def test_every_request_is_on_record(google: GoogleFake, gke: container_v1.ClusterManagerClient) -> None:
    gke.get_cluster(name=CLUSTER)
    with pytest.raises(exceptions.NotFound):
        gke.get_node_pool(name=f"{CLUSTER}/nodePools/none")
    first, second = google.calls
    assert (first.api, first.method, first.resource, first.status) == ("container", "GetCluster", CLUSTER, "OK")
    assert first.principal == f"airflow@{PROJECT}.iam.gserviceaccount.com"
    assert first.permissions == ("container.clusters.get",)
    assert second.status == "NOT_FOUND"


def test_a_queued_resource_comes_and_goes(google: GoogleFake, tpu: tpu_v2.TpuClient) -> None:
    operation = tpu.create_queued_resource(parent=PARENT, queued_resource_id="qr", queued_resource=queued(slices=2))
    name = f"{PARENT}/queuedResources/qr"
    seen = []
    for _ in range(60):
        state = tpu.get_queued_resource(name=name).state.state
        if state not in seen:
            seen.append(state)
        google.advance(5)
    assert seen == [
        State.CREATING,
        State.ACCEPTED,
        State.WAITING_FOR_RESOURCES,
        State.PROVISIONING,
        State.ACTIVE,
    ]
    assert operation.done()
    assert operation.result().name == name
    nodes = list(tpu.list_nodes(parent=PARENT))
    assert [node.name.rpartition("/")[2] for node in nodes] == ["qr-0", "qr-1"]
    assert all(node.state == tpu_v2.Node.State.READY for node in nodes)
    assert [len(node.network_endpoints) for node in nodes] == [2, 2]
    assert tpu.get_node(name=nodes[0].name).queued_resource == name

    with pytest.raises(exceptions.FailedPrecondition, match="not supported when state is ACTIVE"):
        tpu.delete_queued_resource(name=name)
    gone = tpu.delete_queued_resource(request={"name": name, "force": True})
    google.advance(60)
    gone.result()
    assert (google.queued_resources(), google.nodes()) == ({}, {})


def test_a_zone_lists_its_accelerators_and_runtimes(google: GoogleFake, tpu: tpu_v2.TpuClient) -> None:
    types = {one.type_ for one in tpu.list_accelerator_types(parent=PARENT)}
    assert {"v4-8", "v4-16", "v5litepod-16", "v5p-16", "v6e-16"} <= types
    versions = {one.version for one in tpu.list_runtime_versions(parent=PARENT)}
    assert {"tpu-ubuntu2204-base", "v2-alpha-tpuv6e"} <= versions


def test_compute_engine_shows_reservations_quota_and_policies(google: GoogleFake, http: requests.Session) -> None:
    base = f"https://{google.endpoints['compute']}/compute/v1/projects/{PROJECT}"
    google.compute.add_reservation("team-a", "ct6e-standard-4t", 8, zone=ZONE, project=PROJECT, in_use=3)
    google.compute.quotas["us-central2"] = {"TPU_PODSLICE_V4": (32, 8)}

    found = http.get(f"{base}/zones/{ZONE}/reservations/team-a").json()["specificReservation"]
    assert (found["count"], found["inUseCount"]) == ("8", "3")
    assert found["instanceProperties"] == {"machineType": "ct6e-standard-4t"}
    assert len(http.get(f"{base}/zones/{ZONE}/reservations").json()["items"]) == 1
    quotas = http.get(f"{base}/regions/us-central2").json()["quotas"]
    assert quotas == [{"metric": "TPU_PODSLICE_V4", "limit": 32, "usage": 8}]

    policies = f"{base}/regions/us-central2/resourcePolicies"
    body = {"name": "w", "workloadPolicy": {"type": "HIGH_THROUGHPUT", "acceleratorTopology": "2x2x2"}}
    operation = http.post(policies, json=body).json()
    where = f"{base}/regions/us-central2/operations/{operation['name']}"
    assert http.get(where).json()["status"] == "RUNNING"
    google.advance(10)
    assert http.get(where).json()["status"] == "DONE"
    assert http.get(f"{policies}/w").json()["workloadPolicy"]["acceleratorTopology"] == "2x2x2"
    http.delete(f"{policies}/w")
    google.advance(10)
    answer = http.get(f"{policies}/w")
    assert (answer.status_code, answer.json()["error"]["errors"][0]["reason"]) == (404, "notFound")


def test_who_may_do_what_can_be_asked(google: GoogleFake, http: requests.Session) -> None:
    url = f"https://{google.endpoints['cloudresourcemanager']}/v3/projects/{PROJECT}:testIamPermissions"
    wanted = {"permissions": ["container.clusters.get", "tpu.nodes.get"]}
    assert http.post(url, json=wanted).json() == wanted
    google.deny("tpu.nodes.get")
    assert http.post(url, json=wanted).json() == {"permissions": ["container.clusters.get"]}
    google.grant_only([])
    assert http.post(url, json=wanted).json() == {}


def test_an_account_acts_as_another(google: GoogleFake, credentials: Credentials) -> None:
    other = f"trainer@{PROJECT}.iam.gserviceaccount.com"
    found = impersonated_credentials.Credentials(
        credentials,
        target_principal=other,
        target_scopes=["https://www.googleapis.com/auth/cloud-platform"],
        iam_endpoint_override=google.iam_endpoint.format(other),
    )
    options = {"api_endpoint": google.endpoints["container"]}
    with container_v1.ClusterManagerClient(credentials=found, client_options=options) as client:
        client.get_cluster(name=CLUSTER)
    assert google.calls[-1].principal == other
    assert google.tokens.given == [f"airflow@{PROJECT}.iam.gserviceaccount.com", other]


async def test_the_async_clients_come_in_as_well(google: GoogleFake, credentials: Credentials) -> None:
    options = {"api_endpoint": google.endpoints["container"]}
    async with container_v1.ClusterManagerAsyncClient(credentials=credentials, client_options=options) as client:
        assert (await client.get_cluster(name=CLUSTER)).name == "tpus"
