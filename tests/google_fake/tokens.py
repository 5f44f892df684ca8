"""Who hands out tokens, and whose a token is: OAuth's endpoint, IAM credentials, self-signed JWTs.

No signature is checked: the tests' clients are honest.
"""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from typing import Any

from tests.google_fake import refusals
from tests.google_fake.clock import Clock
from tests.google_fake.trust import private_key


def _claims(token: str) -> dict[str, Any]:
    """What a JWT says; empty for another word."""
    parts = token.split(".")
    if len(parts) != 3:
        return {}
    body = parts[1] + "=" * (-len(parts[1]) % 4)
    try:
        found = json.loads(base64.urlsafe_b64decode(body))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Tokens:
    """Everybody who hands out tokens.

    :param clock: of the fake; the lifetime of a token is counted in real time by clients, so it plays no
        part here: `expire` says when a token is too old.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: Whom a token was handed out to, in order.
        self.given: list[str] = []
        self.lifetime_s = 3600
        self._owners: dict[str, str] = {}
        self._seen: set[str] = set()
        self._expired: set[str] = set()

    def new(self, principal: str) -> str:
        """A token for somebody."""
        self.given.append(principal)
        token = f"ya29.fake-{len(self.given)}"
        self._owners[token] = principal
        return token

    @property
    def known(self) -> set[str]:
        """Every token that was handed out, or that somebody came with."""
        return self._seen | set(self._owners)

    def expire(self) -> None:
        """F38: every token that there is, is too old from now on; newer ones are good."""
        self._expired |= self.known

    def principal(self, header: str) -> str:
        """Whose word a request is.

        :param header: `authorization`.
        :raises Refusal: nobody's.
        """
        kind, _, token = header.partition(" ")
        who = self._owners.get(token) or str(_claims(token).get("iss", ""))
        if kind.lower() != "bearer" or not who or token in self._expired:
            raise refusals.unauthenticated()
        self._seen.add(token)
        return who

    def from_assertion(self, assertion: str) -> dict[str, Any]:
        """OAuth: a signed assertion for a token."""
        who = str(_claims(assertion).get("iss", ""))
        if not who:
            raise refusals.invalid("Invalid JWT.")
        return {"access_token": self.new(who), "expires_in": self.lifetime_s, "token_type": "Bearer"}

    def for_another(self, email: str) -> dict[str, Any]:
        """IAM credentials: a token of another account."""
        ends = self._clock.now() + timedelta(seconds=self.lifetime_s)
        return {"accessToken": self.new(email), "expireTime": ends.strftime("%Y-%m-%dT%H:%M:%SZ")}


def service_account(project: str, token_uri: str, name: str = "airflow") -> dict[str, str]:
    """A service account's key, as the file that Google gives out.

    :param project: its project.
    :param token_uri: where it asks for tokens.
    :param name: before the at sign.
    """
    return {
        "type": "service_account",
        "project_id": project,
        "private_key_id": "1",
        "private_key": private_key(),
        "client_email": f"{name}@{project}.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": token_uri,
    }
