"""Ray's words as enums on arrival, with the groups that we test for beside them, and frozen records.

A word that Ray may add one day becomes ``UNKNOWN``: neither success nor failure; the word itself is
kept for the log. Not here: what a state means to us (``verdicts.py``) and how it is fetched
(``client.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

#: Labels that Ray puts on a TPU host's node at ``ray start`` (ray/_private/accelerators/tpu.py).
LABEL_SLICE_NAME = "ray.io/tpu-slice-name"
LABEL_WORKER_ID = "ray.io/tpu-worker-id"
LABEL_TOPOLOGY = "ray.io/tpu-topology"
LABEL_POD_TYPE = "ray.io/tpu-pod-type"
LABEL_ACCELERATOR_TYPE = "ray.io/accelerator-type"


class _Word(StrEnum):
    """An enum that takes any word; one that it does not know becomes ``UNKNOWN``."""

    @classmethod
    def of(cls, word: object) -> Self:
        """The member of that name, ``UNKNOWN`` for any other."""
        try:
            return cls(str(word))
        except ValueError:
            return cls("UNKNOWN")


class JobStatus(_Word):
    """ray/dashboard/modules/job/common.py, ``JobStatus``."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"

    @property
    def is_terminal(self) -> bool:
        """No further state can come."""
        return self in TERMINAL_JOB


#: A job never leaves these.
TERMINAL_JOB = frozenset({JobStatus.STOPPED, JobStatus.SUCCEEDED, JobStatus.FAILED})


class JobErrorType(_Word):
    """Why Ray itself gave a job up: ray/dashboard/modules/job/common.py, ``JobErrorType``."""

    RUNTIME_ENV_SETUP_FAILURE = "RUNTIME_ENV_SETUP_FAILURE"
    JOB_SUPERVISOR_ACTOR_START_TIMEOUT = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
    JOB_SUPERVISOR_ACTOR_START_FAILURE = "JOB_SUPERVISOR_ACTOR_START_FAILURE"
    JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE = "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE"
    JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE = "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE"
    JOB_SUPERVISOR_ACTOR_DIED = "JOB_SUPERVISOR_ACTOR_DIED"
    JOB_ENTRYPOINT_COMMAND_START_ERROR = "JOB_ENTRYPOINT_COMMAND_START_ERROR"
    JOB_ENTRYPOINT_COMMAND_ERROR = "JOB_ENTRYPOINT_COMMAND_ERROR"
    UNKNOWN = "UNKNOWN"


class ServeStatus(_Word):
    """State of a Serve application: ray/serve/_private/common.py, ``ApplicationStatus``."""

    NOT_STARTED = "NOT_STARTED"
    DEPLOYING = "DEPLOYING"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    RUNNING = "RUNNING"
    UNHEALTHY = "UNHEALTHY"
    DELETING = "DELETING"
    UNKNOWN = "UNKNOWN"


class DeploymentStatus(_Word):
    """State of one deployment of an application: ray/serve/_private/common.py."""

    UPDATING = "UPDATING"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    UPSCALING = "UPSCALING"
    DOWNSCALING = "DOWNSCALING"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class RayVersion:
    """What ``GET /api/version`` says.

    :param ray_version: ``2.60.0``.
    :param session_name: changes when the head starts afresh: the head's identity (F22).
    """

    ray_version: str
    session_name: str | None


@dataclass(frozen=True)
class JobSubmission:
    """A job to be submitted. The entrypoint goes through a shell on the head: keep it a constant.

    :param submission_id: its name, known before it is submitted.
    :param entrypoint: the command.
    :param runtime_env: Ray's runtime environment: ``working_dir``, ``env_vars``, ``pip``.
    :param metadata: plain strings kept with the job.
    :param entrypoint_num_cpus: logical CPUs that the driver holds; 0 keeps it on the head.
    :param entrypoint_resources: custom resources that the driver holds.
    :param entrypoint_label_selector: labels of the node for the driver.
    """

    submission_id: str
    entrypoint: str
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    entrypoint_num_cpus: float = 0
    entrypoint_resources: Mapping[str, float] = field(default_factory=dict)
    entrypoint_label_selector: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class JobInfo:
    """What ``GET /api/jobs/{id}`` says.

    :param status_word: the status as Ray wrote it, which matters when it is UNKNOWN to us.
    :param error_type: why Ray itself gave it up, None where it did not.
    """

    submission_id: str
    status: JobStatus
    status_word: str = ""
    message: str = ""
    error_type: JobErrorType | None = None
    entrypoint: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    job_id: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    driver_exit_code: int | None = None
    driver_node_id: str | None = None


@dataclass(frozen=True)
class RayNode:
    """What ``GET /api/v0/nodes`` says about a node; ``started_at`` is when its raylet joined, UTC."""

    node_id: str
    address: str
    alive: bool
    is_head: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    state_message: str = ""
    started_at: datetime | None = None

    @property
    def chips(self) -> int:
        """TPU chips of the host."""
        return int(self.resources.get("TPU", 0))

    @property
    def slice_name(self) -> str | None:
        """The slice that it belongs to, None where it carries no name."""
        return self.labels.get(LABEL_SLICE_NAME) or None

    @property
    def worker_id(self) -> int | None:
        """Its ``TPU_WORKER_ID``, None where the label is missing or no number."""
        word = self.labels.get(LABEL_WORKER_ID, "")
        return int(word) if word.isascii() and word.isdecimal() else None


@dataclass(frozen=True)
class Holder:
    """Somebody who holds chips of a host.

    :param node_id: the host.
    :param chips: how many; 0 for one who holds only the slice's head resource, and so reserves it.
    :param who: in words: placement group, actor or task, and the job that made it.
    :param job: submission id of that job, None where nobody submitted it.
    """

    node_id: str
    chips: float
    who: str
    job: str | None = None


@dataclass(frozen=True)
class ChipUsage:
    """Chips of one node: how many somebody holds, how many there are."""

    used: float
    total: float


@dataclass(frozen=True)
class ServeDeployment:
    """One deployment of an application."""

    name: str
    status: DeploymentStatus
    message: str = ""
    replicas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ServeApplication:
    """One application as ``GET /api/serve/applications/`` shows it."""

    name: str
    status: ServeStatus
    status_word: str = ""
    message: str = ""
    route_prefix: str | None = None
    deployments: tuple[ServeDeployment, ...] = ()
    config: Mapping[str, Any] | None = None


def instant(milliseconds: object) -> datetime | None:
    """Ray's Unix milliseconds as UTC; None for anything that is none."""
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float) or milliseconds <= 0:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
