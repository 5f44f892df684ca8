"""When a release is over: at once where the lease was whole, and after some quiet where a climb may be at work.

A climb deletes a request that was refused or lost, sees it gone, and asks for the next one some seconds later. Who
releases in between sees nothing standing, and the chips would come back. Pure, for the moments of one release.
Not here: how things are told to go (``giving_back.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from raytpu_ops.backends.tpu_vm.giving_back import GivingBack
from raytpu_ops.backends.tpu_vm.granting import POLL_S

#: How long nothing may have stood until nobody asks anew: a climb looks every :data:`POLL_S`, and asks at once.
SETTLES_WITHIN = timedelta(seconds=3 * POLL_S)


@dataclass
class Settling:
    """One release over all its looks.

    :param climbed: whether another task may be asking for the lease anew; None before the first look.
    :param until: UTC, when it is over if nothing stands until then; None while something stands.
    """

    climbed: bool | None = None
    until: datetime | None = None

    def left(self, back: GivingBack, now: datetime) -> list[str]:
        """What is left after a look, in words; empty when the release is over.

        :param back: what the look found.
        :param now: when that was, UTC.
        """
        # What goes after it was told to go says nothing new.
        if self.climbed is None or back.removed:
            self.climbed = bool(self.climbed) or not (back.whole and all(back.whole))
        if back.left or not self.climbed:
            self.until = None
            return back.left
        self.until = self.until or now + SETTLES_WITHIN
        if now >= self.until:
            return []
        until = f"{self.until:%H:%M:%S} UTC"
        return [f"nothing that stands, but another task may be asking for it anew; looked at until {until}"]
