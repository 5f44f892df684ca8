"""The errors of this package: one tree, one class for each kind of failure.

    RayTpuError
    ├── Misconfigured            the request can never work as written
    │   ├── InvalidSpec          (also a ValueError) refused before anything was created
    │   └── NotOffered           not in that zone; a ladder has others
    ├── CapacityUnavailable      nobody had the chips; worth another rung or another try
    ├── Preempted                the slice was there and is not any more
    ├── UserCodeFailed           the code that was submitted raised
    ├── JobStopped               somebody stopped the job
    ├── DeadlineExceeded         a phase took longer than its deadline
    └── RemoteUnavailable        the far side does not answer; a wait goes on, its deadline decides

A retry policy, a trigger's event and a person read the same word, :attr:`RayTpuError.failure_class`.
Not here: which remote state leads to which class; that is ``ray/verdicts.py``'s table and its
siblings in the backends.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class FailureClass(StrEnum):
    """Why work ended without success, in the words that events, logs and retry policies share."""

    CAPACITY_UNAVAILABLE = "CapacityUnavailable"
    PREEMPTED = "Preempted"
    MISCONFIGURED = "Misconfigured"
    USER_CODE_FAILED = "UserCodeFailed"
    JOB_STOPPED = "JobStopped"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    REMOTE_UNAVAILABLE = "RemoteUnavailable"


class RayTpuError(Exception):
    """Base of every error that this package raises on purpose.

    The message names the object, its state and the next step.

    :param message: the whole story in one line, fit for a task log.
    """

    failure_class: FailureClass = FailureClass.MISCONFIGURED

    def as_event(self) -> dict[str, Any]:
        """Plain JSON that a trigger can send; :func:`from_event` turns it back into the error."""
        return {
            "failure_class": str(self.failure_class),
            "message": str(self),
            "refused": isinstance(self, InvalidSpec),
        }


class Misconfigured(RayTpuError):
    """The request can never work as written: permissions, versions, names, shapes."""

    failure_class = FailureClass.MISCONFIGURED


class InvalidSpec(Misconfigured, ValueError):
    """A value was refused before anything was created; the message says where and what would be right."""


class NotOffered(Misconfigured):
    """A zone does not have what is asked for: the reservation, the machine, or the zone itself for this project."""


class CapacityUnavailable(RayTpuError):
    """No chips could be had: stock-out, quota, reservation full."""

    failure_class = FailureClass.CAPACITY_UNAVAILABLE


class Preempted(RayTpuError):
    """Hosts that were granted are gone, and what ran on them with them."""

    failure_class = FailureClass.PREEMPTED


class UserCodeFailed(RayTpuError):
    """The submitted code raised or exited non-zero; its traceback is in the task log."""

    failure_class = FailureClass.USER_CODE_FAILED


class JobStopped(RayTpuError):
    """The Ray job was stopped from outside; nobody knows how much of its work is done."""

    failure_class = FailureClass.JOB_STOPPED


class DeadlineExceeded(RayTpuError):
    """A phase outlived its deadline; the message says which, and what was still missing."""

    failure_class = FailureClass.DEADLINE_EXCEEDED


class RemoteUnavailable(RayTpuError):
    """The far side refused, timed out or answered nonsense: transient until a deadline says otherwise.

    :ivar after_s: seconds after which it wants to be asked again; zero where it does not say.
    """

    failure_class = FailureClass.REMOTE_UNAVAILABLE
    after_s: float = 0.0


_BY_CLASS: dict[FailureClass, type[RayTpuError]] = {
    error.failure_class: error
    for error in (
        Misconfigured,
        CapacityUnavailable,
        Preempted,
        UserCodeFailed,
        JobStopped,
        DeadlineExceeded,
        RemoteUnavailable,
    )
}


def error_for(failure_class: FailureClass | str, message: str) -> RayTpuError:
    """The typed error for a failure class.

    :param failure_class: a :class:`FailureClass` or its value.
    :param message: the message of the error.
    :raises ValueError: when the class is not one of ours.
    """
    return _BY_CLASS[FailureClass(failure_class)](message)


def from_event(event: dict[str, Any]) -> RayTpuError:
    """The error that :meth:`RayTpuError.as_event` described."""
    return (
        InvalidSpec(event["message"]) if event.get("refused") else error_for(event["failure_class"], event["message"])
    )
