"""Google's own clients against the fake: nothing goes wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.api_core import exceptions
from google.cloud import container_v1, tpu_v2
from google.oauth2 import service_account

from tests.google_fake import GoogleFake
from tests.google_fake.fake import CLUSTER, PROJECT, ZONE

Status = container_v1.NodePool.Status
State = tpu_v2.QueuedResourceState.State
PARENT = f"projects/{PROJECT}/locations/{ZONE}"


@pytest.fixture
def google() -> Iterator[GoogleFake]:
    with GoogleFake() as fake:
        yield fake


@pytest.fixture
def gke(google: GoogleFake) -> container_v1.ClusterManagerClient:
    credentials = service_account.Credentials.from_service_account_info(google.key())
    options = {"api_endpoint": google.endpoints["container"]}
    return container_v1.ClusterManagerClient(credentials=credentials, client_options=options)


@pytest.fixture
def tpu(google: GoogleFake) -> tpu_v2.TpuClient:
    credentials = service_account.Credentials.from_service_account_info(google.key())
    return tpu_v2.TpuClient(credentials=credentials, client_options={"api_endpoint": google.endpoints["tpu"]})


def pool(**more: object) -> container_v1.NodePool:
    return container_v1.NodePool(
        {
            "name": "pool-s0",
            "initial_node_count": 4,
            "config": {"machine_type": "ct6e-standard-4t"},
            "placement_policy": {"type_": "COMPACT", "tpu_topology": "4x4"},
            **more,
        }
    )


def test_a_node_pool_comes_and_goes(google: GoogleFake, gke: container_v1.ClusterManagerClient) -> None:
    name = f"{CLUSTER}/nodePools/pool-s0"
    operation = gke.create_node_pool(parent=CLUSTER, node_pool=pool())
    full = f"{PARENT}/operations/{operation.name}"
    assert gke.get_node_pool(name=name).status == Status.PROVISIONING
    assert gke.get_operation(name=full).status == container_v1.Operation.Status.RUNNING

    google.advance(120)
    assert gke.get_node_pool(name=name).status == Status.RUNNING
    assert gke.get_operation(name=full).status == container_v1.Operation.Status.DONE
    assert [one.name for one in gke.list_node_pools(parent=CLUSTER).node_pools] == ["pool-s0"]

    gke.delete_node_pool(name=name)
    assert google.node_pools()[name].status == Status.STOPPING
    google.advance(120)
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


def queued(count: int = 1) -> tpu_v2.QueuedResource:
    name = {"node_id": "qr"} if count == 1 else {"multislice_params": {"node_count": count, "node_id_prefix": "qr"}}
    node = {
        "accelerator_config": {"type_": "V4", "topology": "2x2x2"},
        "runtime_version": "tpu-ubuntu2204-base",
        "labels": {"raytpu-owner": "abc"},
        "metadata": {"startup-script": "true"},
    }
    return tpu_v2.QueuedResource({"tpu": {"node_spec": [{"parent": PARENT, **name, "node": node}]}, "spot": {}})


def test_a_queued_resource_comes_and_goes(google: GoogleFake, tpu: tpu_v2.TpuClient) -> None:
    operation = tpu.create_queued_resource(parent=PARENT, queued_resource_id="qr", queued_resource=queued(2))
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

    with pytest.raises(exceptions.FailedPrecondition, match="force"):
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
