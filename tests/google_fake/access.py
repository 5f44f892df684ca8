"""A `CloudAccess` that needs no key, no file and no network, for tests that ask much and are not about tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from google.oauth2.credentials import Credentials

if TYPE_CHECKING:
    from tests.google_fake.fake import GoogleFake


class FakeAccess:
    """Somebody who may act, with tokens straight from the fake.

    :param google: the fake.
    :param principal: who.
    """

    def __init__(self, google: GoogleFake, principal: str = "airflow@tpu-project.iam.gserviceaccount.com") -> None:
        self.selectors: Mapping[str, str] = {}
        self.endpoints: Mapping[str, str] = google.endpoints
        self._google = google
        self._principal = principal
        self._found: Credentials | None = None

    async def project(self) -> str:
        """The project that the fake begins with."""
        return "tpu-project"

    async def credentials(self, *, renew: bool = False) -> Credentials:
        """The same token until a new one is asked for."""
        if self._found is None or renew:
            self._found = Credentials(token=self._google.tokens.new(self._principal))
        return self._found
