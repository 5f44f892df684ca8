"""What goes wrong, one call for each way.

Here: answers that are errors, requests that are carried out though nobody hears of it, and fates of pools
and queued resources that are made later. What befalls things that exist (preemption, a node that vanishes)
is asked of `container` and `tpu` directly. What a test's F-number is played by:

F01 `stockout`, `exhausted` · F02 `lost`, `cut` · F03 `container.put`, `tpu.put`: something of that name is there
F04 `container.occupy` · F05 `too_many` · F06 `late`, and the operation of each fate · F07 `unavailable`, `internal`
F08 the time that a deletion takes, `container.delays`, and `container.put` of a STOPPING pool
F09 nothing: a queued resource that nobody asks about stays by itself · F10 `tpu.delays`
F11 a fate of a queued resource: FAILED until somebody deletes it; `tpu.preempt`: SUSPENDED
F12 `container.preempt`, `container.vanish`, `tpu.preempt`, `tpu.set_node` · F38 `GoogleFake.expire_tokens`
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.rpc import status_pb2

from tests.google_fake import refusals
from tests.google_fake.refusals import Code, CutOff, Refusal

if TYPE_CHECKING:
    from tests.google_fake.gate import Call

Wrong = Refusal | CutOff


@dataclass
class Fault:
    """An answer that is an error.

    :param method: `CreateNodePool`, `container.Get*`, `tpu.*`.
    :param error: what the client gets.
    :param times: how often; None for ever.
    :param when: only requests for which this is true.
    :param after: the request is carried out all the same, only its answer is lost.
    """

    method: str
    error: Wrong
    times: int | None = 1
    when: Callable[[Call], bool] = lambda call: True
    after: bool = False
    hits: int = 0

    def takes(self, call: Call) -> bool:
        """Whether it is this request's turn."""
        names = (call.method, f"{call.api}.{call.method}")
        left = self.times is None or self.hits < self.times
        return left and any(fnmatch.fnmatchcase(name, self.method) for name in names) and self.when(call)


@dataclass
class Fate:
    """How the making of a pool or a queued resource ends.

    :param error: the error that its operation, or the queued resource, ends with.
    :param name: pattern of the ids that it befalls.
    :param zone: pattern of the zones.
    :param times: how often; None for ever.
    :param kind: word for the condition's code: `GCE_STOCKOUT`, `GCE_QUOTA_EXCEEDED`.
    :param late: only the operation says it; a queued resource is not there any more by then.
    """

    error: status_pb2.Status
    name: str = "*"
    zone: str = "*"
    times: int | None = 1
    kind: str = ""
    late: bool = False
    hits: int = 0

    def befalls(self, name: str, zone: str) -> bool:
        """Whether it is this one's turn; counts."""
        fits = fnmatch.fnmatchcase(name, self.name) and fnmatch.fnmatchcase(zone, self.zone)
        if not fits or (self.times is not None and self.hits >= self.times):
            return False
        self.hits += 1
        return True


@dataclass
class Faults:
    """All that goes wrong from now on; `clear` ends it."""

    answers: list[Fault] = field(default_factory=list)
    fates: list[Fate] = field(default_factory=list)

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        self.answers.clear()
        self.fates.clear()

    def inject(
        self,
        method: str,
        error: Wrong | Code | str,
        times: int | None = 1,
        *,
        when: Callable[[Call], bool] = lambda call: True,
        after: bool = False,
        message: str = "Injected by a test.",
    ) -> Fault:
        """Any error for any request.

        :param method: pattern, with or without the API: `CreateNodePool`, `tpu.*`.
        :param error: an error of `refusals`, or a code (`UNAVAILABLE`).
        :param times: how often; None for ever.
        :param when: only requests for which this is true.
        :param after: the request is carried out all the same.
        :param message: of a code.
        """
        if isinstance(error, str):
            error = Code[error]
        if isinstance(error, Code):
            error = Refusal(error, message, reason=_REASONS.get(error, "backendError"))
        fault = Fault(method, error, times, when, after)
        self.answers.append(fault)
        return fault

    def take(self, call: Call) -> Fault | None:
        """The fault of this request; counts."""
        found = next((fault for fault in self.answers if fault.takes(call)), None)
        if found is not None:
            found.hits += 1
        return found

    # Answers

    def lost(self, method: str, times: int | None = 1) -> Fault:
        """F02: it is done, and the client hears of a time-out."""
        return self.inject(method, Refusal(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"), times, after=True)

    def cut(self, method: str, times: int | None = 1) -> Fault:
        """The connection ends after the request was taken."""
        return self.inject(method, CutOff(), times, after=True)

    def too_many(self, method: str = "*", times: int | None = 1, *, retry_after: float | None = None) -> Fault:
        """F05: 429, with or without the word when to come back."""
        api = method.partition(".")[0] if "." in method else "container"
        return self.inject(method, refusals.too_many(api, retry_after=retry_after), times)

    def unavailable(self, method: str = "*", times: int | None = 1) -> Fault:
        """F07: 503."""
        return self.inject(method, Refusal(Code.UNAVAILABLE, "The service is currently unavailable."), times)

    def internal(self, method: str = "*", times: int | None = 1) -> Fault:
        """F07: 500."""
        return self.inject(method, Refusal(Code.INTERNAL, "Internal error encountered."), times)

    def org_policy(self, method: str, constraint: str = "constraints/gcp.restrictTPUUsage") -> Fault:
        """The organisation forbids it."""
        return self.inject(method, refusals.org_policy(constraint, "tpu-project"), None)

    # Fates

    def fate(self, error: Refusal, *, name: str = "*", zone: str = "*", times: int | None = 1, kind: str = "") -> Fate:
        """The next pool or queued resource ends in an error."""
        found = Fate(error.status, name, zone, times, kind)
        self.fates.append(found)
        return found

    def fate_of(self, name: str, zone: str) -> Fate | None:
        """What befalls this one; counts."""
        return next((fate for fate in self.fates if fate.befalls(name, zone)), None)

    def late(self, error: Refusal, *, zone: str = "*", times: int | None = 1) -> Fate:
        """F06: the next queued resource is taken, and comes to nothing: its operation is DONE with the error."""
        found = Fate(error.status, zone=zone, times=times, late=True)
        self.fates.append(found)
        return found

    def stockout(self, *, name: str = "*", zone: str = "*", times: int | None = 1) -> Fate:
        """F01, F06: no machines; the operation is DONE with an error, and a pool exists in ERROR.

        hashicorp/terraform-provider-google#10121 and #6287 for pools; #21243 for TPU VMs, whose error this is
        when a queued resource meets the same fate.
        """
        return self.fate(
            Refusal(
                Code.RESOURCE_EXHAUSTED,
                "Google Compute Engine: Not all instances running in IGM after 1m6.219216581s. Expected {hosts}, "
                "running 0, transitioning {hosts}. Current errors: [GCE_STOCKOUT]: Instance '{instance}' creation "
                "failed: The zone 'projects/{project}/zones/{zone}' does not have enough resources available to "
                "fulfill the request. '(resource type:compute)'.",
            ),
            name=name,
            zone=zone,
            times=times,
            kind="GCE_STOCKOUT",
        )

    def exhausted(self, *, name: str = "*", zone: str = "*", times: int | None = 1) -> Fate:
        """The newer words for a stock-out: kubernetes/k8s.io#9834."""
        return self.fate(
            Refusal(
                Code.RESOURCE_EXHAUSTED,
                "Google Compute Engine: Not all instances running in IGM after 35.4s. Expected {hosts}, running 0, "
                "transitioning {hosts}. Current errors: [ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS]: Instance "
                "'{instance}' creation failed: The zone 'projects/{project}/zones/{zone}' does not have enough "
                "resources available to fulfill the request.  '(resource type:compute)'.",
            ),
            name=name,
            zone=zone,
            times=times,
            kind="GCE_STOCKOUT",
        )

    def quota(self, scope: str = "region", *, name: str = "*", zone: str = "*", times: int | None = 1) -> Fate:
        """Quota is used up.

        :param scope: `region`, `zone` or `reservation`.
        """
        text = {
            # hashicorp-education/learn-terraform-provision-gke-cluster#22: words of Compute Engine
            "region": "Google Compute Engine: Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 0.0 in region {region}.",
            # sayouzone/gemma3-sft, tpu/tpu-test.md: words of Cloud TPU
            "zone": "Quota limit 'TPUV5sLitepodServingPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 4 in zone "
            "{zone}.",
            "reservation": "Google Compute Engine: Specified reservation '{reservation}' does not have available "
            "resources for the request.",
        }[scope]
        kind = "GCE_STOCKOUT" if scope == "reservation" else "GCE_QUOTA_EXCEEDED"
        return self.fate(Refusal(Code.RESOURCE_EXHAUSTED, text), name=name, zone=zone, times=times, kind=kind)


_REASONS = {
    Code.NOT_FOUND: "notFound",
    Code.PERMISSION_DENIED: "forbidden",
    Code.RESOURCE_EXHAUSTED: "rateLimitExceeded",
    Code.INVALID_ARGUMENT: "badRequest",
}
