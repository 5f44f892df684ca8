"""What Google's refusals mean: one table from status codes, reasons and words to the errors of this package.

The same status means many things there: RESOURCE_EXHAUSTED is a zone without chips, a quota that is used
up, or too many requests a minute. So words decide first and the status decides where no word is known.
Not here: what to do about it (the backends), and Kubernetes (``gke/api.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from raytpu_ops.tpu.errors import CapacityUnavailable, Misconfigured, NotOffered, RayTpuError, RemoteUnavailable

if TYPE_CHECKING:
    from google.api_core.exceptions import GoogleAPICallError

#: Words of Google's that asking again does not change, in an answer that carries no status of its own.
_FINAL = ("PERMISSION_DENIED", "NOT_FOUND", "INVALID_ARGUMENT", "UNAUTHENTICATED")


class Row(NamedTuple):
    """One kind of refusal.

    :param name: what the tests call it.
    :param error: the class that it leads to.
    :param words: any of these in reasons or message (regular expression, case ignored).
    :param next_step: what a person can do; ends the message.
    """

    name: str
    error: type[RayTpuError]
    words: str
    next_step: str


#: Read from the top, the first row that matches counts. Where a text was seen stands beside its example in
#: ``tests/unit/google/test_refusals.py``.
ROWS: tuple[Row, ...] = (
    Row(
        "untrusted",
        Misconfigured,
        r"CERTIFICATE_VERIFY_FAILED",
        "the server's certificate is not trusted here: check google_endpoints and proxies on the way",
    ),
    # Before quotas, whose words it borrows.
    Row(
        "rate",
        RemoteUnavailable,
        r"RATE_LIMIT_EXCEEDED|rateLimitExceeded|per minute|too many (operations|requests)|concurrent operations quota",
        "",
    ),
    Row(
        "busy",
        RemoteUnavailable,
        r"running incompatible operation|\boperation \S+ is currently|is currently being (created|deleted|updated)",
        "",
    ),
    # What used it is on its way out.
    Row("in_use", RemoteUnavailable, r"resourceInUseByAnotherResource|is already being used by", ""),
    # Before organization policies, whose CONDITION_NOT_MET Compute Engine says of reservations too.
    Row(
        "reservation",
        CapacityUnavailable,
        r"insufficient reserved capacity|reservation.{0,160}(does not have (enough|available)|insufficient|exhausted)",
        "the reservation is full: release what uses it, or add a rung",
    ),
    Row(
        "not_offered",
        NotOffered,
        r"\breservation \S+ (was )?not found|/reservations/\S+ was not found|invalid machine type \S+ in zone"
        r"|specified reservations? .{0,80}do(es)? not exist|no available resources in specified reservations"
        r"|(was not found|does not exist|is not available) in zone",
        "that zone does not have it: name another zone, or another rung",
    ),
    Row(
        "org_policy",
        Misconfigured,
        r"\bconstraints/|CONDITION_NOT_MET|conditionNotMet|organization policy|org policy",
        "an organization policy forbids it: ask whoever keeps it, or change what is asked for",
    ),
    Row(
        "api_off",
        Misconfigured,
        r"SERVICE_DISABLED|accessNotConfigured|has not been used in project|API is disabled",
        "enable the API in that project: `gcloud services enable`, with its name",
    ),
    Row(
        "billing",
        Misconfigured,
        r"BILLING_DISABLED|billing account|billing to be enabled",
        "the project's billing account does not allow it",
    ),
    Row(
        "stock_out",
        CapacityUnavailable,
        r"STOCKOUT|RESOURCE_POOL_EXHAUSTED|resource_availability|does not have enough resources|no more capacity"
        r"|(VM instance|accelerator).{0,120} is currently unavailable",
        "try later, another zone or another rung",
    ),
    Row(
        "expired",
        CapacityUnavailable,
        r"within the allocation interval|request .{0,40}\bexpired",
        "nothing came free in time: let it wait longer, or add a zone or a rung",
    ),
    Row(
        "quota",
        CapacityUnavailable,
        r"QUOTA_EXCEEDED|quotaExceeded|quota limit|exceed(s|ed)? .{0,40}quota|insufficient .{0,20}quota"
        r"|\bquota '[^']+' (exceeded|exhausted)",
        "release what uses it, or have the quota raised",
    ),
    Row(
        "addresses",
        CapacityUnavailable,
        r"IP_SPACE_EXHAUSTED|\bIP space of \S+ is exhausted",
        "no address is free in that range: release what uses it, widen the subnetwork's range, or name another one",
    ),
    Row(
        "place",
        NotOffered,
        r"\blocation \S+ is not found|LOCATION_POLICY_VIOLATED|permission denied on 'locations/",
        "check the zone's name, and whether the project may use it",
    ),
    # Before what is not supported at all.
    Row("not_yet", RemoteUnavailable, r"is not supported when state is", ""),
    # Operations and pools carry such words with any code, or none.
    Row(
        "shape",
        Misconfigured,
        r"is not supported|invalid (value|machine type|argument)|bad request|not be specified",
        "",
    ),
)
#: gRPC code -> class, where no row matches. Numbers of google.rpc.Code.
_BY_CODE: dict[int, type[RayTpuError]] = {
    1: RemoteUnavailable,  # CANCELLED: the far side gave up
    2: RemoteUnavailable,  # UNKNOWN
    4: RemoteUnavailable,  # DEADLINE_EXCEEDED
    8: RemoteUnavailable,  # RESOURCE_EXHAUSTED without a word about chips or quota: too many requests
    10: RemoteUnavailable,  # ABORTED: lost against another request
    13: RemoteUnavailable,  # INTERNAL
    14: RemoteUnavailable,  # UNAVAILABLE
    15: RemoteUnavailable,  # DATA_LOSS
}
_UNKNOWN, _NOT_FOUND, _ALREADY_EXISTS, _DENIED, _UNAUTHENTICATED = 2, 5, 6, 7, 16
_NEXT_STEP = {
    _DENIED: "the account lacks a permission: deploy/google/ has the roles, `raytpu plan` says which are missing",
    _UNAUTHENTICATED: "a new token was refused as well: check the credentials and the machine's clock",
}
_OPERATION = re.compile(r"\b(operation-[\w-]+|projects/[\w./:-]+/operations/[\w-]+)")


def refused(error: BaseException, asked: str) -> RayTpuError:
    """The error that a failed call stands for. Raise it ``from`` the other one.

    :param error: of google-api-core, google-auth, or of the connection below.
    :param asked: verb and object, for the message.
    """
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import GoogleAuthError

    if isinstance(error, RayTpuError):
        return error
    if isinstance(error, GoogleAuthError):
        return not_proven(error, asked)
    if isinstance(error, GoogleAPICallError):
        found = _judged(_code_of(error), error.message, _words(error), asked)
        if isinstance(found, RemoteUnavailable):
            found.after_s = _retry_after_s(error)
        return found
    return RemoteUnavailable(f"Google, {asked}: {one_line(error)}")


def operation_failed(status: Any, asked: str) -> RayTpuError | None:
    """The error that an operation, or a queued resource, ended with.

    :param status: its ``error``: a ``google.rpc.Status``, or None.
    :param asked: verb and object, for the message.
    :return: None where there was none.
    """
    if status is None or not (status.code or status.message):
        return None
    return _judged(int(status.code), status.message, status.message, asked)


def ended(status: Any, asked: str) -> CapacityUnavailable | Misconfigured | None:
    """As :func:`operation_failed`, for what can be asked for elsewhere but never goes on.

    What is transient in an answer is a refusal here: nothing comes of it however long it is waited for.
    """
    error = operation_failed(status, asked)
    return error if error is None or isinstance(error, Misconfigured) else CapacityUnavailable(str(error))


def told(text: str, asked: str) -> RayTpuError:
    """The error behind words that carry no status, such as a node pool's ``status_message``.

    :param text: Google's words.
    :param asked: the object that says them.
    """
    return _judged(_UNKNOWN, text, text, asked)


def busy_with(error: BaseException) -> str | None:
    """The operation that has to end first (F04): its name, empty where Google does not say it; None otherwise.

    :param error: Google's, or ours that was raised from it.
    """
    found = google_error(error)
    if found is None or _row(_words(found)) is not _BUSY:
        return None
    match = _OPERATION.search(found.message or "")
    return match.group(1) if match else ""


def is_absent(error: BaseException) -> bool:
    """Whether Google says NOT_FOUND, the only word that means absent (F07)."""
    found = google_error(error)
    return found is not None and _code_of(found) == _NOT_FOUND


def is_there_already(error: BaseException) -> bool:
    """Whether Google says ALREADY_EXISTS (F03)."""
    found = google_error(error)
    return found is not None and _code_of(found) == _ALREADY_EXISTS


def is_denied(error: BaseException) -> bool:
    """Whether a permission is missing; an API that is off, or a policy, is another matter."""
    found = google_error(error)
    return found is not None and _code_of(found) == _DENIED and _row(_words(found)) is None


def is_not_yet(error: BaseException) -> bool:
    """Whether Google refuses something only while the object is in the state in which it is."""
    found = google_error(error)
    row = _row(_words(found)) if found is not None else None
    return row is not None and row.name == "not_yet"


def is_nowhere(error: BaseException) -> bool:
    """Whether there is no such zone, or not for this project."""
    found = google_error(error)
    row = _row(_words(found)) if found is not None else None
    return row is not None and row.name == "place"


def google_error(error: BaseException) -> GoogleAPICallError | None:
    """Google's own error: the given one or the cause of it."""
    from google.api_core.exceptions import GoogleAPICallError

    if isinstance(error, GoogleAPICallError):
        return error
    return error.__cause__ if isinstance(error.__cause__, GoogleAPICallError) else None


def not_proven(error: Any, who: str) -> RayTpuError:
    """No token was to be had.

    :param error: a ``GoogleAuthError``.
    :param who: whose credentials, for the message.
    """
    from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError

    text = one_line(error)
    if isinstance(error, DefaultCredentialsError):
        return Misconfigured(f"{who}: no credentials that work here: {text}")
    transient = error.retryable or isinstance(error, TransportError) or isinstance(error.__cause__, TransportError)
    # Acting as somebody else is refused and fails to answer with one and the same error.
    acting = isinstance(error, RefreshError) and "impersonated" in text
    if transient or (acting and not any(word in text for word in _FINAL)):
        return RemoteUnavailable(f"{who}: Google gives out no token now: {text}")
    hint = "; the account needs roles/iam.serviceAccountTokenCreator on the one it acts as" if acting else ""
    return Misconfigured(f"{who}: Google gives out no token: {text}{hint}")


def one_line(error: object) -> str:
    """Text of any error, in one line of bounded length."""
    return " ".join(str(error).split())[:500]


_BUSY = next(row for row in ROWS if row.name == "busy")


def _judged(code: int, message: str, words: str, asked: str) -> RayTpuError:
    row = _row(words)
    kind = row.error if row else _BY_CODE.get(code, Misconfigured)
    next_step = row.next_step if row else _NEXT_STEP.get(code, "")
    text = one_line(message).rstrip(".") or "no reason given"
    return kind(f"Google, {asked}: {text}{'; ' if next_step else ''}{next_step}")


def _retry_after_s(error: GoogleAPICallError) -> float:
    """RetryInfo, in seconds; zero where there is none."""
    for detail in error.details:
        if isinstance(detail, dict) and "retryDelay" in detail:  # REST
            return float(str(detail["retryDelay"]).removesuffix("s"))
        if hasattr(detail, "retry_delay"):
            return float(detail.retry_delay.ToTimedelta().total_seconds())
    return 0.0


def _row(words: str) -> Row | None:
    one_spaced = " ".join(words.split())
    return next((row for row in ROWS if re.search(row.words, one_spaced, re.IGNORECASE)), None)


def _words(error: GoogleAPICallError) -> str:
    return " ".join([*_reasons(error), error.message or ""])


def _code_of(error: GoogleAPICallError) -> int:
    """The number of google.rpc.Code; REST answers carry an HTTP status alone."""
    if error.grpc_status_code is not None:
        return int(error.grpc_status_code.value[0])
    by_http = {400: 3, 408: 4, 401: 16, 403: 7, 404: 5, 409: 6, 412: 9, 429: 8, 499: 1, 501: 12, 503: 14, 504: 4}
    return by_http.get(error.code or 0, 13 if (error.code or 500) >= 500 else 3)


def _reasons(error: GoogleAPICallError) -> Iterator[str]:
    """Machine-read words beside the message: ErrorInfo's reason, QuotaFailure's, REST's ``reason``."""
    if error.reason:
        yield error.reason
    for detail in error.details:
        if getattr(type(detail), "__name__", "") == "QuotaFailure" or (
            isinstance(detail, dict) and str(detail.get("@type", "")).endswith("QuotaFailure")
        ):
            yield "QUOTA_EXCEEDED"
    for entry in error.errors:
        if isinstance(entry, dict) and entry.get("reason"):
            yield str(entry["reason"])
