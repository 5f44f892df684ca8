"""A process that works on the leases of a local root, and kills itself with SIGKILL after a step of its choice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.local.cluster import Cluster
from raytpu_ops.tpu.lease import Owner

#: Acquires, or does what ``verb`` says; each step is a line in the log of ``raytpu_ops.backends.local``.
_PROGRAM = """
import json, logging, os, signal, sys
from raytpu_ops.backends.base import Plan
from raytpu_ops.backends.local.cluster import Cluster
from raytpu_ops.backends.local.commands import Commands
from raytpu_ops.backends.local.layout import Root
from raytpu_ops.tpu.lease import Owner

root, ray, grace_s, plan, owner, steps, verb = json.loads(sys.argv[1])

class Reaper(logging.Handler):
    left = steps
    def emit(self, record):
        if record.getMessage().startswith("step: "):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

logging.getLogger("raytpu_ops").setLevel(logging.DEBUG)
logging.getLogger("raytpu_ops").addHandler(Reaper())
cluster = Cluster(Root(root), Commands(tuple(ray)), grace_s=grace_s)
plan, owner = Plan.model_validate(plan), Owner.model_validate(owner)
lease_id = next((lease.id for lease in cluster.leases()), None)
if verb == "acquire":
    print(cluster.acquire(plan, owner).granted_at.isoformat())
elif verb == "repair":
    cluster.repair(lease_id)
else:
    cluster.release(lease_id)
"""


def start(cluster: Cluster, plan: Plan, owner: Owner, *, steps: int, verb: str = "acquire") -> subprocess.Popen[str]:
    """The process, which prints when the lease was granted.

    :param cluster: the leases; the process makes its own of the same root and commands.
    :param steps: after how many it kills itself; 0 for never.
    :param verb: ``acquire``, or ``repair`` or ``release`` of the one lease that there is.
    """
    job = [
        str(cluster.root.path),
        list(cluster.commands.ray_start),
        cluster.grace_s,
        plan.model_dump(mode="json"),
        owner.model_dump(mode="json"),
        steps,
        verb,
    ]
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, json.dumps(job)], stdout=subprocess.PIPE, text=True)


def killed(cluster: Cluster, plan: Plan, owner: Owner, *, steps: int, verb: str = "acquire") -> None:
    """Start it and wait until it has killed itself."""
    with start(cluster, plan, owner, steps=steps, verb=verb) as process:
        assert process.wait(120) == -signal.SIGKILL
