"""What a Kubernetes API server answers, and which of our errors that is where it is no success.

Pure. Not here: who asks (``api.py``), and what objects mean (``objects.py``).
"""

from __future__ import annotations

import json
from typing import Any

from raytpu_ops.tpu.errors import CapacityUnavailable, Misconfigured, RayTpuError, RemoteUnavailable

Object = dict[str, Any]

#: What the server answers while it, a webhook or etcd restarts, or when it has too much to do.
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
#: In answers of 500 and 403 that will never go away by themselves.
_BAD_PATCH = ("failed to create typed patch object", "field not declared in schema")
_QUOTA = "exceeded quota"
#: How it says that an object of that name is another one by now: at its door, and from its storage.
_ANOTHER = ("UID in the precondition", "UID in precondition")
#: Paths that the server does not have: its own words, and those of clients that stand in front of it.
_NO_SUCH_KIND = ("page not found", "could not find the requested resource")
_ROLE = "deploy/gke/rbac.yaml holds the rights that are needed; `raytpu doctor --backend gke` says which are missing"


def refused(status: int, body: bytes, asked: str) -> RayTpuError:
    """The error that an answer stands for.

    :param status: the HTTP status, which is no success.
    :param body: the answer: a ``Status`` of Kubernetes, or anything.
    :param asked: verb and object, for the message.
    """
    message = _message(body)
    answer = f"Kubernetes refused to {asked} ({status}): {message}"
    if any(words in message for words in _BAD_PATCH):
        return Misconfigured(
            f"{answer}; KubeRay there does not know that field: it is misspelt in a template, or KubeRay is older "
            "than 1.5"
        )
    if status in _TRANSIENT or status >= 500:
        return RemoteUnavailable(f"Kubernetes is not able to {asked} now ({status}): {message}")
    if status == 403 and _QUOTA in message:
        return CapacityUnavailable(
            f"{answer}; the namespace's ResourceQuota is used up: release leases or have it raised"
        )
    return Misconfigured(f"{answer}; {_next_step(status, message)}")


def _next_step(status: int, message: str) -> str:
    """What a person can do about an answer that asking again does not change."""
    if status == 401 or "system:anonymous" in message:
        return "credentials, also renewed ones, are not valid there: check the kubeconfig or the connection"
    if "being terminated" in message:
        return "the namespace is being deleted: name another one in the option namespace"
    if status == 403 and " cannot " in message:
        return _ROLE
    if "admission webhook" in message or "denied" in message:
        return (
            "a rule of that cluster wants it otherwise: change the option that it speaks of, or ask who made the rule"
        )
    if status == 404 and message.startswith("namespaces "):
        return "create it with `kubectl create namespace`, or name another one in the option namespace"
    if status == 404 and any(words in message for words in _NO_SUCH_KIND):
        return "KubeRay is not installed there, it brings the kind RayCluster; or that is no API server"
    return "change the option or the template that leads to it; `raytpu doctor --backend gke` checks the rest"


def is_success(status: int) -> bool:
    """Whether what was asked for was done."""
    return 200 <= status < 300


def is_absent(status: int, body: bytes, name: str) -> bool:
    """Whether it says that the object of that name does not exist, or is another one by now."""
    if status == 404:
        return _details(body).get("name") == name
    return status == 409 and any(words in _message(body) for words in _ANOTHER)


def parsed(status: int, body: bytes, asked: str) -> Object:
    """The object that a success brought.

    :raises RayTpuError: for anything else. The message never shows a body that was a success: it may be a Secret.
    """
    if not is_success(status):
        raise refused(status, body, asked)
    found = _json(body)
    if not isinstance(found.get("metadata"), dict):
        raise RemoteUnavailable(
            f"Kubernetes was asked to {asked}, and what answered is no Kubernetes: {len(body)} bytes that are no "
            "object of it; does a proxy stand in between?"
        )
    return found


def items_of(answer: Object, asked: str) -> list[Object]:
    """The objects of a list.

    :raises RemoteUnavailable: it is none.
    """
    items = answer.get("items")
    if not isinstance(items, list):
        raise RemoteUnavailable(f"Kubernetes was asked to {asked}, and the answer is no list")
    return items


def _json(body: bytes) -> Object:
    """The body as a JSON object; empty where it is none."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _details(body: bytes) -> Object:
    found = _json(body).get("details")
    return found if isinstance(found, dict) else {}


def _message(body: bytes) -> str:
    text = _json(body).get("message") or body.decode(errors="replace") or "no text"
    return " ".join(str(text).split())[:800]


def words_of(error: Exception) -> str:
    """An error of a library in one line."""
    return " ".join(str(error).split()) or type(error).__name__
