"""Whether what a job or an application stands on is still there: its slices, its driver's host.

A run that has lost a host may hang instead of failing (F20), and a job whose driver died with the
head may be called RUNNING for ever (F22). So this is asked beside the state, now and then. What
runs gets a while to say by itself what befell it, for it knows more.

Not here: what follows from it (``follow.py``, ``verdicts.py``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime

from raytpu_ops.ray.client import RayClient
from raytpu_ops.ray.verdicts import HOSTS_LOST
from raytpu_ops.tpu.errors import RemoteUnavailable

#: Seconds between two checks.
CHECK_EVERY_S = 10.0
#: Seconds for which something must be amiss before it counts.
GRACE_S = 60.0


class Lost(Exception):
    """What it stood on is gone; the message says what."""


class Health:
    """Checks in measured steps.

    :param client: asked for the nodes.
    :param slices_whole: whether the slices still have their head and every host; None where nobody can say.
    :param clock: the time, UTC.
    """

    def __init__(
        self,
        client: RayClient,
        slices_whole: Callable[[], Awaitable[bool]] | None,
        *,
        clock: Callable[[], datetime],
    ) -> None:
        self._client = client
        self._slices_whole = slices_whole
        self._clock = clock
        self._checked: datetime | None = None
        self._amiss: datetime | None = None
        self._words = ""
        #: The node of the job's driver, once it is known.
        self.driver_node_id: str | None = None

    async def check(self) -> str | None:
        """What is lost, in words, once that has lasted :data:`GRACE_S`; None while all is well."""
        now = self._clock()
        if self._checked is None or (now - self._checked).total_seconds() >= CHECK_EVERY_S:
            self._checked = now
            self._words = await self._amiss_words()
            if not self._words:
                self._amiss = None
            elif self._amiss is None:
                self._amiss = now
        if self._amiss is None:
            return None
        return self._words if (now - self._amiss).total_seconds() >= GRACE_S else None

    async def whole(self) -> bool | None:
        """Whether the slices are whole at this moment; None where nobody can say."""
        if self._slices_whole is None:
            return None
        try:
            return await self._slices_whole()
        except RemoteUnavailable:
            return None

    async def _amiss_words(self) -> str:
        if await self.whole() is False:
            return HOSTS_LOST
        if self.driver_node_id is None:
            return ""
        try:
            nodes = await self._client.nodes()
        except RemoteUnavailable:
            return ""  # Ray does not answer at all, which says nothing about one host
        driver = [node for node in nodes if node.node_id == self.driver_node_id]
        if any(node.alive for node in driver):
            return ""
        where = f" at {driver[0].address}" if driver else ""
        return f"the host{where} on which its driver ran has died"
