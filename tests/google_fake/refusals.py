"""How Google says no: status codes, texts and `google.rpc` details, as people have reported them.

The public report that a text is taken from stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

Code = grpc.StatusCode


class Refusal(Exception):
    """An answer that is an error.

    :param code: gRPC's code; HTTP's follows from it.
    :param message: what a person reads.
    :param details: messages of `google.rpc`.
    :param reason: the word that the old JSON errors of Compute Engine have.
    """

    def __init__(self, code: Code, message: str, details: Sequence[Message] = (), *, reason: str = "") -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.details = tuple(details)
        self.reason = reason

    @property
    def status(self) -> status_pb2.Status:
        """As `google.rpc.Status`, as operations and trailers carry it."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            status.details.add().Pack(detail)
        return status


class CutOff(Exception):
    """The connection ends without an answer."""


def info(reason: str, domain: str = "googleapis.com", **metadata: str) -> error_details_pb2.ErrorInfo:
    """`ErrorInfo`, by which machines tell errors apart."""
    return error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata)


def invalid(message: str) -> Refusal:
    """The request makes no sense."""
    return Refusal(Code.INVALID_ARGUMENT, message, reason="badRequest")


def not_found(resource: str) -> Refusal:
    """There is no such thing."""
    return Refusal(Code.NOT_FOUND, f"Not found: {resource}.", reason="notFound")


def exists(resource: str) -> Refusal:
    """terraform-provider-google#20087: a name is taken."""
    return Refusal(Code.ALREADY_EXISTS, f"Already exists: {resource}.", reason="alreadyExists")


def not_in_state(method: str, state: str, states: Sequence[str]) -> Refusal:
    """What several people's scripts for queued resources look for, with their code 9."""
    return Refusal(
        Code.FAILED_PRECONDITION,
        f"{method} is not supported when state is {state} (must be one of [{' '.join(states)}])",
        reason="conditionNotMet",
    )


def busy(operation: str) -> Refusal:
    """rancher/gke-operator#509: the cluster does one thing at a time."""
    return Refusal(
        Code.FAILED_PRECONDITION,
        f"Cluster is running incompatible operation {operation}.",
        [error_details_pb2.RequestInfo(request_id="0xbc082b8846774fe9")],
        reason="failedPrecondition",
    )


def busy_doing(operation: str, what: str, cluster: str) -> Refusal:
    """terraform-provider-google#10366: the same in older words."""
    return Refusal(
        Code.FAILED_PRECONDITION,
        f"Operation {operation} is currently {what} for cluster {cluster}. Please wait and try again once it is done.",
        reason="failedPrecondition",
    )


def denied(api: str, permission: str, resource: str) -> Refusal:
    """A permission is missing; each API has its own words for it."""
    message = {
        "container": f'Required "{permission}" permission(s) for "{resource}".',
        "compute": f"Required '{permission}' permission for '{resource}'",
    }.get(
        api, f"Permission '{permission}' denied on resource '//{api}.googleapis.com/{resource}' (or it may not exist)."
    )
    detail = info("IAM_PERMISSION_DENIED", "iam.googleapis.com", permission=permission, resource=resource)
    return Refusal(Code.PERMISSION_DENIED, message, [detail], reason="forbidden")


def api_off(api: str, project: str) -> Refusal:
    """terraform-provider-google#12154 and many others: nobody has enabled the API."""
    name = {"container": "Kubernetes Engine API", "tpu": "Cloud TPU API", "compute": "Compute Engine API"}.get(api, api)
    host = f"{api}.googleapis.com"
    return Refusal(
        Code.PERMISSION_DENIED,
        f"{name} has not been used in project {project} before or it is disabled. Enable it by visiting "
        f"https://console.developers.google.com/apis/api/{host}/overview?project={project} then retry. If you enabled "
        "this API recently, wait a few minutes for the action to propagate to our systems and retry.",
        [info("SERVICE_DISABLED", service=host, consumer=f"projects/{project}")],
        reason="accessNotConfigured",
    )


def unauthenticated() -> Refusal:
    """The token is missing, unknown or too old (apache/airflow#31648)."""
    return Refusal(
        Code.UNAUTHENTICATED,
        "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or other valid "
        "authentication credential. See https://developers.google.com/identity/sign-in/web/devconsole-project.",
        [info("ACCESS_TOKEN_EXPIRED")],
        reason="authError",
    )


def too_many(api: str, *, retry_after: float | None = None) -> Refusal:
    """python-docs-samples#3482: too many requests in a minute.

    :param retry_after: seconds for `RetryInfo`, which is not always there.
    """
    details: list[Message] = [
        info("RATE_LIMIT_EXCEEDED", service=f"{api}.googleapis.com", quota_limit="WritesPerMinutePerProject")
    ]
    if retry_after is not None:
        delay = Duration()
        delay.FromMilliseconds(round(retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return Refusal(
        Code.RESOURCE_EXHAUSTED,
        f"Quota exceeded for quota metric 'Write requests' and limit 'Write requests per minute' of service "
        f"'{api}.googleapis.com' for consumer 'project_number:1234567890'.",
        details,
        reason="rateLimitExceeded",
    )


def too_many_operations(cluster: str) -> Refusal:
    """terraform-provider-google#15205: a cluster has too much to do."""
    return Refusal(
        Code.RESOURCE_EXHAUSTED,
        f'Too many operations: cluster "{cluster}" hits the concurrent operations quota 5, please try again later.',
        reason="rateLimitExceeded",
    )


def org_policy(constraint: str, project: str) -> Refusal:
    """The organisation forbids it (terraform-provider-google#12270)."""
    return Refusal(
        Code.FAILED_PRECONDITION,
        f"Constraint {constraint} violated for project {project}. See https://cloud.google.com/resource-manager/docs/"
        "organization-policy/org-policy-constraints for more information.",
        [
            error_details_pb2.PreconditionFailure(
                violations=[{"type": constraint, "subject": "orgpolicy:projects/" + project}]
            )
        ],
        reason="conditionNotMet",
    )
