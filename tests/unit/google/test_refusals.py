"""What Google's refusals mean: every row of the table against words that people met, with where they said so."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace

import grpc
import httpx
import pytest
from google.api_core import exceptions
from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
from google.rpc import error_details_pb2 as details_pb2
from google.rpc import status_pb2

from raytpu_ops.backends.google import refusals
from raytpu_ops.backends.google.refusals import (
    ROWS,
    busy_with,
    is_absent,
    is_denied,
    is_there_already,
    operation_failed,
    refused,
    told,
)
from raytpu_ops.tpu.errors import CapacityUnavailable, Misconfigured, NotOffered, RayTpuError, RemoteUnavailable

Code = grpc.StatusCode


@dataclass(frozen=True)
class Said:
    """What Google said to somebody.

    :param where: the public report.
    :param code: gRPC's, None where the report has words alone.
    :param text: the message.
    :param error: what it means.
    :param row: the row that knows it; None where the code decides.
    """

    where: str
    code: grpc.StatusCode | None
    text: str
    error: type[RayTpuError]
    row: str | None

    def __str__(self) -> str:
        return f"{self.row or self.code}-{self.where.rpartition('github.com/')[2]}"


TERRAFORM = "https://github.com/hashicorp/terraform-provider-google"
SAID = [
    # Stock-outs
    Said(
        f"{TERRAFORM}/pull/10121",
        None,
        "Google Compute Engine: Not all instances running in IGM after 1m6.219216581s. Expected 40, running 1, "
        "transitioning 39. Current errors: [GCE_STOCKOUT]: Instance 'instance' creation failed: The zone "
        "'projects/redacted/zones/us-west1-b' does not have enough resources available to fulfill the request.",
        CapacityUnavailable,
        "stock_out",
    ),
    Said(
        f"{TERRAFORM}/issues/21243",
        Code.RESOURCE_EXHAUSTED,
        'There is no more capacity in the zone "us-central1-c"; you can try in another zone where Cloud TPU Nodes are '
        "offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x9f48947a7d57c8d]",
        CapacityUnavailable,
        "stock_out",
    ),
    Said(
        "https://github.com/kubernetes/k8s.io/issues/9834",
        None,
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS: A n1-standard-4 VM instance with 1 nvidia-tesla-t4 accelerator(s) "
        "is currently unavailable in the us-central1-b zone.",
        CapacityUnavailable,
        "stock_out",
    ),
    Said(
        "https://github.com/kubeflow/pipelines/issues/673",
        Code.UNKNOWN,
        "Try a different location, or try again later: Google Compute Engine does not have enough resources available "
        "to fulfill request: us-central1-a.",
        CapacityUnavailable,
        "stock_out",
    ),
    # Reservations
    Said(
        "https://github.com/skypilot-org/skypilot/issues/4579",
        Code.RESOURCE_EXHAUSTED,
        "Insufficient reserved capacity. Contact customer support to increase your reservation. "
        "[EID: 0x7adf6d58c08b0aa4]",
        CapacityUnavailable,
        "reservation",
    ),
    Said(
        "https://github.com/GoogleCloudPlatform/gsutil/issues/1000",
        Code.RESOURCE_EXHAUSTED,
        'Reservation does not have enough resources for the request: specific reservation "reservation" is '
        'insufficient for node pool "np4" at zone "us-central1-c": required 1 and short of 1 VM count of machine type '
        "n2-standard-2.",
        CapacityUnavailable,
        "reservation",
    ),
    Said(
        "https://github.com/GoogleCloudPlatform/cluster-toolkit/pull/5043",
        Code.NOT_FOUND,
        'Google Compute Engine: reservation "h4d-reservation/reservationBlocks/h4d-reservation-block-0001" not found '
        'for node pool "h4d-highmem-192-lssd-h4d-pool" at zone "us-central1-b".',
        NotOffered,
        "not_offered",
    ),
    *(
        Said(
            "https://github.com/kubernetes/autoscaler/tree/master/cluster-autoscaler/cloudprovider/gce",
            None,
            f"Current errors: [CONDITION_NOT_MET]: Instance 'gke-np-1' creation failed: {words}",
            error,
            row,
        )
        for words, error, row in (
            (
                "Specified reservation 'a' does not have available resources for the request.",
                CapacityUnavailable,
                "reservation",
            ),
            # It is for other machines.
            ("No available resources in specified reservations 'a'.", NotOffered, "not_offered"),
            ("Specified reservations [a] do not exist.", NotOffered, "not_offered"),
        )
    ),
    Said(
        "https://cloud.google.com/compute/docs/reference/rest/v1/reservations/get",
        Code.NOT_FOUND,
        "The resource 'projects/p/zones/us-east5-b/reservations/a' was not found",
        NotOffered,
        "not_offered",
    ),
    # Quota: region, zone, and in the words of each API
    Said(
        "https://github.com/marin-community/marin/pull/1612",
        Code.RESOURCE_EXHAUSTED,
        "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0 in region us-east5.",
        CapacityUnavailable,
        "quota",
    ),
    Said(
        "https://github.com/sayouzone/gemma3-sft/blob/882ffc61f5cd41238c66eb82702ad33756fa060e/tpu/tpu-test.md",
        Code.RESOURCE_EXHAUSTED,
        "Quota limit 'TPUV5sLitepodServingPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 4 in zone "
        "us-central1-a.",
        CapacityUnavailable,
        "quota",
    ),
    Said(
        "https://github.com/sayouzone/gemma3-sft/blob/882ffc61f5cd41238c66eb82702ad33756fa060e/tpu/tpu-pod-gemma3.md",
        None,
        "Quota 'TPUV5sLitepodServingPerProjectPerZoneForTPUAPI' exhausted. Limit 4 in zone us-central1-a",
        CapacityUnavailable,
        "quota",
    ),
    Said(
        "https://github.com/marin-community/marin/issues/87",
        None,
        "Quota 'TPUV4sPreemptiblePodPerProjectPerRegionForTPUAPI' exhausted.\n      Limit 20800 in region us-central2",
        CapacityUnavailable,
        "quota",
    ),
    Said(
        "https://github.com/kubernetes-sigs/sig-storage-local-static-provisioner/pull/526",
        Code.RESOURCE_EXHAUSTED,
        "Insufficient quota to satisfy the request: Not all instances running in IGM after 26.633785888s. Expected 3, "
        "running 0, transitioning 3. Current errors: [GCE_QUOTA_EXCEEDED]: Instance 'gke-e2e-default-pool-xwl9' "
        "creation failed: Quota 'IN_USE_ADDRESSES' exceeded.  Limit: 8.0 in region europe-central2.",
        CapacityUnavailable,
        "quota",
    ),
    Said(
        "https://github.com/kubeflow/kubeflow/issues/842",
        Code.PERMISSION_DENIED,
        "Insufficient regional quota to satisfy request for resource: \"IN_USE_ADDRESSES\". The request requires '2.0' "
        "and is short '1.0'. The regional quota is '32.0' with '1.0' available.",
        CapacityUnavailable,
        "quota",
    ),
    # Addresses
    Said(
        "https://github.com/hashicorp/terraform-cdk/issues/1964",
        Code.RESOURCE_EXHAUSTED,
        "Not all instances running in IGM after 24.159253228s. Expected 1, running 0, transitioning 1. Current errors: "
        "[IP_SPACE_EXHAUSTED]: Instance 'gke-dev-default-pool-4813919b-4f9v' creation failed: IP space of "
        "'projects/p/regions/europe-west1/subnetworks/subnet-dev-services-range-49c037f0c13a0320' is exhausted.",
        CapacityUnavailable,
        "addresses",
    ),
    Said(
        "https://github.com/Privatehive/gcp-hosted-github-runner/pull/7",
        Code.INVALID_ARGUMENT,
        "IP space of 'projects/p/regions/us-central1/subnetworks/spot-runner-subnetwork' is exhausted. Insufficient "
        "free IP addresses in the IP range '10.0.1.0/24'. Consider expanding the current IP range or selecting an "
        "alternative IP range.",
        CapacityUnavailable,
        "addresses",
    ),
    # Somebody has to wait
    Said(
        f"{TERRAFORM}/issues/15205",
        Code.RESOURCE_EXHAUSTED,
        'Too many operations: cluster "ClusterName" hits the concurrent operations quota 5, please try again later.',
        RemoteUnavailable,
        "rate",
    ),
    Said(
        "https://github.com/marin-community/marin/pull/6198",
        Code.RESOURCE_EXHAUSTED,
        "Quota limit 'Maximum number of CreateNode requests per minute' has been exceeded.",
        RemoteUnavailable,
        "rate",
    ),
    Said(
        "https://github.com/GoogleCloudPlatform/python-docs-samples/issues/3482",
        Code.RESOURCE_EXHAUSTED,
        "Quota exceeded for quota metric 'Write requests' and limit 'Write requests per minute' of service "
        "'cloudkms.googleapis.com' for consumer 'project_number:1012616486416'.",
        RemoteUnavailable,
        "rate",
    ),
    Said(
        f"{TERRAFORM}/issues/10366",
        Code.FAILED_PRECONDITION,
        "Operation operation-1637103489-a1b2c3d4 is currently deleting a node pool for cluster default-cluster. Please "
        "wait and try again once it is done.",
        RemoteUnavailable,
        "busy",
    ),
    Said(
        "https://github.com/rancher/gke-operator/issues/509",
        Code.FAILED_PRECONDITION,
        "Cluster is running incompatible operation operation-1706000000000-a1b2c3d4.",
        RemoteUnavailable,
        "busy",
    ),
    Said(
        f"{TERRAFORM}/issues/7638",
        Code.FAILED_PRECONDITION,
        "Cluster is currently being created, deleted, updated or repaired and cannot be updated.",
        RemoteUnavailable,
        "busy",
    ),
    Said(
        "https://github.com/GoogleCloudPlatform/slurm-gcp/pull/117",
        Code.INVALID_ARGUMENT,
        "The resource_policy resource 'p' cannot be deleted: resourceInUseByAnotherResource",
        RemoteUnavailable,
        "in_use",
    ),
    Said(
        "https://github.com/Cohere-Labs-Community/expedition-tayavision/blob/main/scripts/tpu/ops.sh",
        Code.FAILED_PRECONDITION,
        "DeleteQueuedResource is not supported when state is PROVISIONING (must be one of [ACCEPTED "
        "WAITING_FOR_RESOURCES SUSPENDED FAILED])",
        RemoteUnavailable,
        "not_yet",
    ),
    Said(f"{TERRAFORM}/issues/16147", Code.INTERNAL, "an internal error has occurred", RemoteUnavailable, None),
    # It can never work as written
    Said(
        f"{TERRAFORM}/issues/4989",
        None,
        "Current errors: [CONDITION_NOT_MET]: Instance 'gke-default-pool-c31c32c3-pmp1' creation failed: Constraint "
        "constraints/compute.vmCanIpForward violated for projects/xxxxxxx.",
        Misconfigured,
        "org_policy",
    ),
    Said(
        "https://github.com/gardener/gardener-extension-provider-gcp/issues/415",
        Code.FAILED_PRECONDITION,
        "Constraint constraints/compute.vmExternalIpAccess violated for project xxxx. Add instance to the "
        "constraint to use external IP with it.",
        Misconfigured,
        "org_policy",
    ),
    Said(
        "https://github.com/2i2c-org/infrastructure/pull/489",
        Code.PERMISSION_DENIED,
        "Artifact Registry API has not been used in project 291560455175 before or it is disabled. Enable it by "
        "visiting https://console.developers.google.com/apis/api/artifactregistry.googleapis.com/ then retry.",
        Misconfigured,
        "api_off",
    ),
    Said(
        "https://github.com/tensorflow/tpu/issues/124",
        Code.PERMISSION_DENIED,
        "cannot create a TPU Node on a project linked to a free-trial billing account",
        Misconfigured,
        "billing",
    ),
    Said(
        "https://github.com/tensorflow/tpu/issues/296",
        Code.PERMISSION_DENIED,
        "Permission 'tpu.nodes.get' denied on 'projects/p/locations/us-central1-b/nodes/ai'",
        Misconfigured,
        None,
    ),
    Said(
        "https://github.com/dstackai/gpuhunt/issues/98",
        Code.PERMISSION_DENIED,
        "Location europe-west1-b is not found or access is unauthorized.",
        NotOffered,
        "place",
    ),
    Said(
        "https://github.com/firezone/firezone/pull/7711",
        Code.PERMISSION_DENIED,
        "Permission denied on 'locations/me-central2' (or it may not exist).",
        NotOffered,
        "place",
    ),
    Said(
        "https://github.com/skypilot-org/skypilot/issues/3840",
        None,
        "Cloud TPU received a bad request. the accelerator v4-128 was not found in zone us-central2-b "
        "[EID: 0x945ef875d10e8e13]",
        NotOffered,
        "not_offered",
    ),
    Said(
        "https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation",
        Code.INVALID_ARGUMENT,
        "Machine type with name 'ct6e-standard-4t' does not exist in zone 'us-west1-a'.",
        NotOffered,
        "not_offered",
    ),
    Said(
        "https://github.com/keras-team/kinetic/issues/305",
        Code.INVALID_ARGUMENT,
        'Invalid machine type "e2-standard-4" in zone "us-central2-b": GCE_NOT_FOUND',
        NotOffered,
        "not_offered",
    ),
    Said(
        "https://github.com/vllm-project/ci-infra/pull/547",
        None,
        "Creation of a managed instance group with tpu7x-standard-4t machine type with placement policy is not "
        "supported. Use workload policy instead.",
        Misconfigured,
        "shape",
    ),
    Said(
        "https://github.com/AI-Hypercomputer/xpk/issues/751",
        Code.INVALID_ARGUMENT,
        "Google Compute Engine: Invalid value for field 'resource.resizeBy': '16'. Requested invalid target size '16' "
        "for a Managed Instance Group in the gang mode of size '8'. Should be equal to the gang size.",
        Misconfigured,
        "shape",
    ),
    Said(
        "https://github.com/AI-Hypercomputer/xpk/pull/825",
        Code.INVALID_ARGUMENT,
        "TPU topology can't be specified with single-host TPU slice pool; please remove the tpu_topology from the node "
        "pool creation request.",
        Misconfigured,
        None,
    ),
    Said(
        "https://cloud.google.com/tpu/docs/queued-resources",
        None,
        "the requested resources were not available within the allocation interval",
        CapacityUnavailable,
        "expired",
    ),
]


@pytest.mark.parametrize("said", SAID, ids=str)
def test_an_operation_or_a_pool_that_ends_so(said: Said) -> None:
    """F01."""
    if said.code is None:
        error = told(said.text, "create node pool a")
    else:
        found = operation_failed(status_pb2.Status(code=said.code.value[0], message=said.text), "create node pool a")
        assert found is not None
        error = found
    assert type(error) is said.error
    assert str(error).startswith("Google, create node pool a: ")
    assert "\n" not in str(error)


@pytest.mark.parametrize("said", [said for said in SAID if said.code is not None], ids=str)
def test_a_call_that_is_refused_so(said: Said) -> None:
    assert said.code is not None
    error = exceptions.from_grpc_status(said.code, said.text)
    assert type(refused(error, "create node pool a")) is said.error


@pytest.mark.parametrize("said", SAID, ids=str)
def test_words_are_known_by_one_row(said: Said) -> None:
    found = refusals._row(said.text)
    assert (found.name if found else None) == said.row


def test_every_row_has_an_example() -> None:
    # The TLS library's word; gRPC and requests hand it on.
    assert {row.name for row in ROWS} - {said.row for said in SAID} == {"untrusted"}


def test_a_certificate_that_is_not_trusted_ends_the_wait() -> None:
    text = "failed to connect to all addresses; last error: Ssl handshake failed: CERTIFICATE_VERIFY_FAILED"
    assert type(refused(exceptions.ServiceUnavailable(text), "get node pool a")) is Misconfigured


@pytest.mark.parametrize(
    "code", [Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.INTERNAL, Code.ABORTED, Code.CANCELLED, Code.UNKNOWN]
)
def test_a_far_side_that_is_not_able_to_answer_is_asked_again(code: grpc.StatusCode) -> None:
    assert type(refused(exceptions.from_grpc_status(code, "x"), "get node pool a")) is RemoteUnavailable


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_rest_answer_of_the_same_kind_is_asked_again(status: int) -> None:
    """F05."""
    assert type(refused(exceptions.from_http_status(status, "x"), "get reservation r")) is RemoteUnavailable


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 412])
def test_a_rest_answer_that_asking_again_does_not_change(status: int) -> None:
    assert type(refused(exceptions.from_http_status(status, "x"), "get reservation r")) is Misconfigured


def test_an_error_without_any_status_is_asked_again() -> None:
    assert type(refused(exceptions.GoogleAPICallError("odd"), "get node pool a")) is RemoteUnavailable
    assert type(refused(ConnectionResetError("reset"), "get node pool a")) is RemoteUnavailable


def test_a_missing_permission_says_where_the_roles_are() -> None:
    message = str(refused(exceptions.PermissionDenied("Permission 'tpu.nodes.get' denied"), "get node n"))
    assert "tpu.nodes.get" in message
    assert "deploy/google/" in message


def test_a_missing_permission_is_told_from_an_api_that_is_off() -> None:
    assert is_denied(exceptions.PermissionDenied("Permission 'tpu.nodes.get' denied"))
    assert not is_denied(exceptions.PermissionDenied("Cloud TPU API has not been used in project 1 before"))
    assert not is_denied(exceptions.NotFound("x"))


def test_machine_read_details_count_where_the_message_says_nothing() -> None:
    disabled = details_pb2.ErrorInfo(reason="SERVICE_DISABLED", domain="googleapis.com")
    off = exceptions.PermissionDenied("no", details=[disabled], error_info=disabled)
    assert "enable the API" in str(refused(off, "get node n"))
    quota = details_pb2.QuotaFailure(violations=[{"subject": "project:1", "description": "TPUs"}])
    full = exceptions.ResourceExhausted("no", details=[quota])
    assert type(refused(full, "create node n")) is CapacityUnavailable


def test_a_rest_answer_carries_the_same_details() -> None:
    payload = {
        "error": {
            "code": 403,
            "message": "no",
            "errors": [{"reason": "accessNotConfigured"}],
            "details": [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "SERVICE_DISABLED"}],
        }
    }
    error = exceptions.format_http_response_error(httpx.Response(403), "GET", "/compute/v1/x", payload)
    assert "enable the API" in str(refused(error, "get reservation r"))
    full = {"error": {"message": "no", "details": [{"@type": "type.googleapis.com/google.rpc.QuotaFailure"}]}}
    error = exceptions.format_http_response_error(httpx.Response(429), "POST", "/compute/v1/x", full)
    assert type(refused(error, "make policy p")) is CapacityUnavailable


def test_no_error_is_no_failure() -> None:
    assert operation_failed(None, "create node pool a") is None
    assert operation_failed(status_pb2.Status(), "create node pool a") is None


def test_an_operation_that_failed_without_a_word_failed_all_the_same() -> None:
    error = operation_failed(SimpleNamespace(code=3, message=""), "create node pool a")
    assert type(error) is Misconfigured
    assert "no reason given" in str(error)


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        ("Operation operation-1637-a1b2 is currently deleting a node pool for cluster c.", "operation-1637-a1b2"),
        ("Cluster is running incompatible operation operation-1706-a1b2c3d4.", "operation-1706-a1b2c3d4"),
        ("Cluster is currently being created, deleted, updated or repaired and cannot be updated.", ""),
        ("The node pool is not empty.", None),
    ],
)
def test_the_operation_that_has_to_end_first_is_named(text: str, operation: str | None) -> None:
    google = exceptions.FailedPrecondition(text)
    ours = refused(google, "create node pool a")
    ours.__cause__ = google
    assert busy_with(google) == busy_with(ours) == operation


def test_only_not_found_means_absent() -> None:
    assert is_absent(exceptions.NotFound("x"))
    assert is_absent(exceptions.from_http_status(404, "x"))
    for other in (
        exceptions.PermissionDenied("x"),
        exceptions.ServiceUnavailable("x"),
        exceptions.PreconditionFailed("x"),
    ):
        assert not is_absent(other)
    assert not is_absent(RemoteUnavailable("404"))


def test_a_name_that_is_taken_is_told_from_a_lost_race() -> None:
    assert is_there_already(exceptions.AlreadyExists("x"))
    assert not is_there_already(exceptions.Aborted("x"))
    assert type(refused(exceptions.Aborted("x"), "create node pool a")) is RemoteUnavailable


def test_google_may_say_when_to_come_back() -> None:
    info = details_pb2.RetryInfo()
    info.retry_delay.FromMilliseconds(1500)
    rest = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "30s"}
    for details, seconds in (([info], 1.5), ([rest], 30), ([], 0)):
        error = refused(exceptions.TooManyRequests("x", details=details), "get node pool a")
        assert isinstance(error, RemoteUnavailable)
        assert error.after_s == seconds


def test_no_token_is_a_matter_of_configuration_or_of_an_outage() -> None:
    assert type(refusals.not_proven(DefaultCredentialsError("none"), "who")) is Misconfigured
    assert type(refusals.not_proven(RefreshError("invalid_grant"), "who")) is Misconfigured
    assert type(refusals.not_proven(TransportError("down"), "who")) is RemoteUnavailable
    acting = RefreshError("Unable to acquire impersonated credentials", "503")
    assert type(refusals.not_proven(acting, "who")) is RemoteUnavailable
    denied = RefreshError("Unable to acquire impersonated credentials", "PERMISSION_DENIED")
    assert "serviceAccountTokenCreator" in str(refusals.not_proven(denied, "who"))


def test_messages_are_bounded_but_read_to_their_end() -> None:
    error = told("x" * 3000 + " [GCE_STOCKOUT]", "create node pool a")
    assert type(error) is CapacityUnavailable
    assert len(str(error)) < 800


def test_rows_are_regular_expressions_that_match_something() -> None:
    for row in ROWS:
        assert re.compile(row.words).search("") is None, f"{row.name} matches everything"
