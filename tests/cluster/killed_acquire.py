"""One `acquire` in a process of its own, which kills itself at one point of it.

Points are counted: before the first call to the API server, after it, before the second, and so on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from raytpu_ops.backends.gke.api import KubeApi
from tests.cluster.leases import acquired, backend


def main(kubeconfig: str, namespace: str, task: str, kill_at: int) -> None:
    """Acquire, and die on the way where `kill_at` is a point on it."""
    original: Callable[..., Awaitable[Any]] = KubeApi._answer
    points = iter(range(10**6))

    def point() -> None:
        if next(points) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    async def counted(self: KubeApi, *args: Any) -> Any:
        point()
        answer = await original(self, *args)
        point()
        return answer

    KubeApi._answer = counted  # type: ignore[method-assign,assignment]
    asyncio.run(acquired(backend(Path(kubeconfig), namespace=namespace), task))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
