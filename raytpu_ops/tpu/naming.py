"""Names of everything that is created: readable, within each system's limit, and found again without a database.

A name is a readable prefix and a part of the owner's digest, so the same owner always gets the
same name and different owners get different ones. What a person chose is never cut: a name that is
too long is refused (:func:`check_name`), because cut names no longer match what hosts are told.

Limits: RayCluster 53, RayJob and RayService 47 characters (KubeRay derives pod and service names
from them), node pool 40 (GKE), label value 63 (Kubernetes; Google's labels are lower case besides).
Pure. Not here: who the owner is (``lease.py``).
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.words import shown

if TYPE_CHECKING:
    from raytpu_ops.tpu.lease import Owner

#: Begins every label that we put on an object. No domain: we own none.
LABEL_PREFIX = "raytpu-"
#: Epochs, attempts, slices and replacements beyond it are a mistake, and names keep room for this.
MAX_NUMBER = 9999

#: Hex digits of the owner's digest in a name: 48 bits.
_DIGEST = 12
_NUMBERED = len(f"-e{MAX_NUMBER}-a{MAX_NUMBER}")
_NAME = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?\Z")
_LABEL = re.compile(r"(?:[a-z0-9](?:[a-z0-9_-]*[a-z0-9])?)?\Z")
_SUBMISSION = re.compile(r"(?P<owner>[a-z](?:[a-z0-9-]*[a-z0-9])?)-e(?P<epoch>[0-9]{1,4})-a(?P<attempt>[0-9]{1,4})\Z")


class Kind(Enum):
    """What is named, with its word in errors and the most characters that it may have."""

    LEASE = ("lease", 40)
    NODE_POOL = ("node pool", 40)
    RAY_JOB = ("RayJob", 47)
    RAY_SERVICE = ("RayService", 47)
    RAY_CLUSTER = ("RayCluster", 53)
    SLICE = ("slice", 63)
    RUN = ("run", 63)

    def __init__(self, word: str, limit: int) -> None:
        self.word = word
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Submission:
    """What a submission's id says.

    :param owner: the readable part and the digest, the same for every submission of one owner.
    :param epoch: rises when a person clears the task.
    :param attempt: rises when an attempt failed and Airflow retries.
    """

    owner: str
    epoch: int
    attempt: int


def slug(text: str) -> str:
    """The text in lower-case ASCII letters, digits and single dashes; empty where nothing is left of it."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")


def _readable(owner: Owner, limit: int) -> str:
    """Dag and task in at most ``limit`` characters, starting with a letter; each keeps its half."""
    dag, task = slug(owner.dag_id) or "dag", slug(owner.task_id) or "task"
    if not dag[0].isalpha():
        dag = f"d{dag}"
    room = limit - 1
    half = room // 2
    kept_task = task[: max(half, room - len(dag))].strip("-")
    kept_dag = dag[: room - len(kept_task)].strip("-")
    return f"{kept_dag}-{kept_task}"


def _name(owner: Owner, limit: int, room: int = 0) -> str:
    """A name of at most ``limit - room`` characters."""
    return f"{_readable(owner, limit - room - 1 - _DIGEST)}-{owner.digest[:_DIGEST]}"


def _number(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
        raise InvalidSpec(f"{what}: must be a whole number from 0 to {MAX_NUMBER}, got {shown(value)}")
    return value


def lease_id(owner: Owner) -> str:
    """The name of the owner's lease, at most 40 characters; a RayCluster may carry it as it is."""
    return _name(owner, Kind.LEASE.limit)


def ray_cluster_name(owner: Owner) -> str:
    """The name of the owner's RayCluster, at most 53 characters: the lease's own."""
    return lease_id(owner)


def ray_job_name(owner: Owner) -> str:
    """The name of the owner's RayJob or RayService, at most 47 characters."""
    return _name(owner, Kind.RAY_JOB.limit)


def node_pool_name(owner: Owner, index: int, replacement: int = 0) -> str:
    """The name of the node pool of one slice, at most 40 characters.

    :param index: number of the slice in the lease, from 0.
    :param replacement: how often the slice has been replaced.
    """
    return f"{_name(owner, Kind.NODE_POOL.limit, room=_NUMBERED)}{_slice_suffix(index, replacement)}"


def with_room(owner: Owner, pools: int = 0) -> list[str]:
    """What an owner's things are called, with the room that there is, in words.

    :param pools: node pools that the lease has of its own; the last one has the longest name.
    """
    lease = lease_id(owner)
    found = [f"lease {lease} ({len(lease)} of {Kind.LEASE.limit} characters)"]
    if pools:
        pool = node_pool_name(owner, pools - 1)
        found.append(f"last node pool {pool} ({len(pool)} of {Kind.NODE_POOL.limit})")
    return found


def slice_name(lease: str, index: int, replacement: int = 0) -> str:
    """The name of one slice of a lease, the value of the label ``ray.io/tpu-slice-name``.

    :param lease: the lease's id.
    :param index: number of the slice in the lease, from 0.
    :param replacement: how often the slice has been replaced; a replacement never has an old name.
    """
    return f"{check_name(lease, Kind.LEASE)}{_slice_suffix(index, replacement)}"


def _slice_suffix(index: int, replacement: int) -> str:
    again = f"-r{_number(replacement, 'replacement')}" if replacement else ""
    return f"-s{_number(index, 'slice index')}{again}"


def submission_prefix(owner: Owner, epoch: int | None = None) -> str:
    """How the ids of the owner's submissions begin, of one epoch or of all."""
    every = f"{_name(owner, Kind.RAY_JOB.limit, room=_NUMBERED)}-e"
    return every if epoch is None else f"{every}{_number(epoch, 'epoch')}-a"


def submission_id(owner: Owner, epoch: int, attempt: int) -> str:
    """The id of a Ray job, known before it is submitted; at most 47 characters.

    :param epoch: rises when a person clears the task, stays over retries.
    :param attempt: rises when an attempt failed and Airflow retries.
    """
    return f"{submission_prefix(owner, epoch)}{_number(attempt, 'attempt')}"


def parse_submission_id(text: str) -> Submission | None:
    """What :func:`submission_id` put into an id; None for any other id."""
    match = _SUBMISSION.match(text)
    if not match:
        return None
    return Submission(owner=match["owner"], epoch=int(match["epoch"]), attempt=int(match["attempt"]))


def label_value(text: str) -> str:
    """The text as a label's value, at most 63 characters, safe for Kubernetes and for Google's labels.

    Text that is a label already stays as it is; other text gets a hash of the original, so that
    different texts stay different.
    """
    limit = 63
    if len(text) <= limit and _LABEL.match(text):
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    readable = re.sub(r"[^a-z0-9_-]+", "-", plain).strip("-_")[: limit - 1 - len(digest)].rstrip("-_")
    return f"{readable}-{digest}" if readable else digest


def owner_labels(owner: Owner) -> dict[str, str]:
    """The labels by which everything of an owner is found; ``raytpu-owner`` alone identifies it."""
    return {
        f"{LABEL_PREFIX}owner": owner.digest,
        f"{LABEL_PREFIX}dag": label_value(owner.dag_id),
        f"{LABEL_PREFIX}run": label_value(owner.run_id),
        f"{LABEL_PREFIX}task": label_value(owner.task_id),
        **({f"{LABEL_PREFIX}map-index": str(owner.map_index)} if owner.map_index >= 0 else {}),
        **({f"{LABEL_PREFIX}deployment": label_value(owner.deployment)} if owner.deployment else {}),
    }


def check_name(value: object, kind: Kind, field: str | None = None) -> str:
    """A name that a person chose, refused where it would have to be cut or cleaned.

    :param value: the name.
    :param kind: what it names.
    :param field: the argument that it came in, for the message; default: the kind's word.
    :raises InvalidSpec: with the limit and the length, or with what a name may hold.
    """
    where = field or f"{kind.word} name"
    if not isinstance(value, str):
        raise InvalidSpec(f"{where}: must be text, got {shown(value)} ({type(value).__name__})")
    if len(value) > kind.limit:
        raise InvalidSpec(
            f"{where}: {shown(value)} has {len(value)} characters, a {kind.word} name at most {kind.limit}; "
            "choose a shorter one"
        )
    if not _NAME.match(value):
        better = slug(value)[: kind.limit].strip("-")
        hint = f", such as {better!r}" if better and _NAME.match(better) else ""
        raise InvalidSpec(
            f"{where}: must be lower-case letters, digits and dashes, starting with a letter and not ending "
            f"with a dash{hint}, got {shown(value)}"
        )
    return value
