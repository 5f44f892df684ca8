"""Ends whoever makes the n-th call to Kubernetes or Google: before it is sent, or after it was answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kubernetes_asyncio.client.rest import RESTClientObject

from raytpu_ops.backends.google.clients import GoogleApis


class Killer:
    """Counts the calls of this process, and strikes at one of them.

    :ivar calls: how many calls there were.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self._at: tuple[int, bool] | None = None
        for place, name in ((RESTClientObject, "request"), (GoogleApis, "_through_door")):
            patch.setattr(place, name, self._counted(getattr(place, name)))

    def _counted(self, really: Any) -> Any:
        async def counted(*args: Any, **options: Any) -> Any:
            number, self.calls = self.calls, self.calls + 1
            self._strike(number, False)
            try:
                return await really(*args, **options)
            finally:  # a refusal is an answer as well
                self._strike(number, True)

        return counted

    def _strike(self, number: int, answered: bool) -> None:
        if self._at == (number, answered):
            raise asyncio.CancelledError

    def at(self, number: int, answered: bool) -> None:
        """Strike there, counted from now."""
        self.calls, self._at = 0, (number, answered)

    def rests(self) -> None:
        """Strike no more, and count from now."""
        self.calls, self._at = 0, None
