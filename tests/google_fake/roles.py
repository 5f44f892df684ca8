"""Compares a custom role with what was really asked: no permission missing, none that nothing needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from raytpu_ops.backends.google.roles import Role
from tests.google_fake.fake import GoogleFake

REPOSITORY = Path(__file__).parent.parent.parent
#: Granted on the account that machines run as, not by these roles.
ELSEWHERE = frozenset({"iam.serviceAccounts.actAs"})


def role_file(role: Role) -> dict[str, Any]:
    """The role as `gcloud iam roles create` reads it."""
    found: dict[str, Any] = yaml.safe_load((REPOSITORY / "deploy" / role.file).read_text())
    return found


class Watch:
    """Everybody has that role and no other, and what requests need is written down.

    :param google: the fake.
    :param role: of `deploy/google/`.
    """

    def __init__(self, google: GoogleFake, role: Role) -> None:
        self.held = frozenset(role_file(role)["includedPermissions"])
        self.needed: set[str] = set()
        google.grant_only(self.held | ELSEWHERE)
        may = google.gate.may

        def watched(principal: str, permission: str) -> bool:
            if google.gate.calls[-1].method != "testIamPermissions":
                self.needed.add(permission)
            return may(principal, permission)

        google.gate.may = watched  # type: ignore[method-assign]

    @property
    def unused(self) -> set[str]:
        """What the role has and nothing needed."""
        return set(self.held - self.needed)

    @property
    def missing(self) -> set[str]:
        """What was needed and the role does not have."""
        return self.needed - self.held - ELSEWHERE
