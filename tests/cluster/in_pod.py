"""What a task of an Airflow in the same cluster does with a lease, from the first call to the last, in a pod.

Nobody says how the cluster is reached: no kubeconfig, the pod's own service account. The backend's options come as
JSON in one variable; what came of it goes out as the last line.
Not here: the pod (`test_gke_in_cluster.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.flows.jobs import run_job
from tests.cluster.leases import ONE, acquired, released, requested, whole

#: The variable with the options.
OPTIONS = "RAYTPU_TEST_IN_POD"
#: Says on each host where the code is that runs there.
WHERE = "import raytpu_ops.runtime; print('our code is', raytpu_ops.runtime.__file__)"


async def life(gke: GkeBackend) -> dict[str, Any]:
    """Acquire, wait, one job, release."""
    lease = await acquired(gke, "in-pod", ONE)
    try:
        await whole(gke, lease)
        lines: list[str] = []
        request = await requested(gke, lease, "python", "-c", WHERE)
        result = await run_job(gke, lease, request, emit=lines.append, say=print)
    finally:
        await released(gke, lease)
    return {
        "place": lease.place,
        "dashboard": result["dashboard"],
        "hosts": len(result["hosts"]),
        "lease": lease.id,
        "lines": lines,
        "runtime_env": request.runtime_env,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(life(GkeBackend(**json.loads(os.environ[OPTIONS]))))))
