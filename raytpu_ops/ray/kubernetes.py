"""What a Kubernetes API server says that stands in front of Ray and lets a request not through.

Its service proxy answers with a JSON object of kind ``Status`` where it refuses a request itself or
reaches nothing behind it; whatever else comes through it is Ray's own answer.
Not here: calls to the API server itself, which are the backend's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

#: ``User "u" cannot get resource "services/proxy" in API group "" in the namespace "n"``.
_FORBIDDEN = re.compile(r'User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)"')
#: How it says that nobody behind it got the request; other failures may come after the request went through.
_UNDELIVERED = ("no endpoints available", "error trying to reach service: dial ")
_NAMESPACE = re.compile(r'in the namespace "([^"]+)"')


@dataclass(frozen=True)
class Status:
    """An answer of the API server itself.

    :param code: the HTTP status.
    :param message: its words.
    """

    code: int
    message: str

    @property
    def is_refusal(self) -> bool:
        """It does not let us in: asking again with the same credentials cannot help."""
        return self.code in (401, 403)

    @property
    def is_undelivered(self) -> bool:
        """The request certainly reached nobody behind the API server: it may be sent again, whatever it does."""
        return self.code == 429 or self.message.startswith(_UNDELIVERED)

    def refusal(self) -> str:
        """What is missing and the next step, in one line."""
        if self.code == 401:
            return (
                "it does not accept the credentials, also not renewed ones: check the kubeconfig or the connection "
                f"in kubernetes_conn_id ({self.message})"
            )
        found = _FORBIDDEN.search(self.message)
        if found is None:
            what = self.message
        else:
            namespace = _NAMESPACE.search(self.message)
            where = f" in namespace {namespace[1]!r}" if namespace else ""
            what = f"{found['user']!r} lacks the right to {found['verb']} {found['resource']}{where}"
        return f"{what}; grant it with the role in deploy/gke/rbac.yaml: `raytpu doctor --backend gke` shows how"


def status_of(code: int, text: str) -> Status | None:
    """The API server's own answer; None where it is somebody else's.

    :param code: the HTTP status.
    :param text: the body.
    """
    if not text.lstrip().startswith("{"):
        return None
    try:
        body = json.loads(text)
    except ValueError:
        return None
    if body.get("kind") != "Status" or "apiVersion" not in body:
        return None
    return Status(code, " ".join(str(body.get("message") or body.get("reason") or "no message").split()))
