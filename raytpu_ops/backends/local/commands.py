"""How a head and a host are started: their command lines and environments, as data for ``launch.py``.

A host gets the variables that GKE would inject, so the labels and resources are Ray's own work. Of the
caller's environment only a short list goes on: an Airflow process has secrets in its own.

Not here: the starting.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytpu_ops.backends.local import addresses
from raytpu_ops.backends.local.layout import HEAD
from raytpu_ops.backends.local.processes import (
    MARK_GRANT,
    MARK_HOST,
    MARK_LEASE,
    MARK_PART,
    MARK_ROOT,
    MARK_SLICE,
)
from raytpu_ops.backends.local.record import TOKEN, HostRecord, LeaseRecord, SliceRecord

#: What ``ray start`` is called as: the interpreter that runs us has Ray, its ``ray`` script may be elsewhere.
RAY_START = (sys.executable, "-m", "ray.scripts.scripts", "start")
#: The file below a process's folder that takes what it prints.
LOG = "log"

#: What goes on from the caller's environment. Proxies stay out: their URLs hold passwords, and all is local.
_PASSED = (
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PYTHONPATH",
    "SHELL",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "TZ",
    "USER",
    "VIRTUAL_ENV",
)
#: Ray's own settings, for every process of a lease.
_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # For Ray's C++ side on a slow machine. `ray start` itself waits 30 s for its node to register, whatever
    # this says (ray/_private/node.py, 2.60); a host that is later than that ends, and its log says so.
    "RAY_raylet_start_wait_time_s": "180",
    # How often a host asks for the head, some seconds apart, before it gives up: it starts at the same moment.
    "RAY_NUM_REDIS_GET_RETRIES": "90",
    # A dead raylet refuses connections at once; five refusals in a row, by default 3 s apart, make a node dead.
    # Asking more often finds the dead sooner and leaves the slow their time (an answer may take 10 s).
    "RAY_health_check_period_ms": "500",
    # SIGTERM to a host means "end"; Ray would drain it for up to 30 s (ray/_private/node.py, 2.60).
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # Titles that Ray gives its processes would overwrite the environment that we find them by.
    "SPT_NOENV": "1",
    # Metrics have no token and listen on all interfaces. Agents can be told to leave them alone; the dashboard
    # and the monitor can't, but go on without them when their port is none.
    "RAY_enable_metrics_collection": "0",
    "DASHBOARD_METRIC_PORT": "-1",
    "AUTOSCALER_METRIC_PORT": "-1",
    # Ray refuses a second node on macOS without it.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    # This machine has no TPU; libraries that look for one would wait for a metadata server.
    "JAX_PLATFORMS": "cpu",
}
#: Bytes of shared memory for objects: training on CPUs needs little, and every host takes its own.
_HEAD_OBJECTS, _HOST_OBJECTS = 256 * 2**20, 128 * 2**20
#: Seconds that a host waits for its predecessor where they start one after another.
_PREDECESSOR_LIMIT_S = 120.0


@dataclass(frozen=True)
class Commands:
    """Makes the commands of a lease's processes.

    :param ray_start: the program and its first arguments; tests put another one here.
    :param head_cpus: logical CPUs of the head: drivers and Serve's controller run there.
    :param host_cpus: logical CPUs of each host.
    :param pass_env: names of further variables that go on from the caller's environment.
    """

    ray_start: Sequence[str] = RAY_START
    head_cpus: int = 4
    host_cpus: int = 1
    pass_env: Collection[str] = ()

    def head(self, record: LeaseRecord) -> dict[str, Any]:
        """How the head is started."""
        arguments = [
            "--head",
            f"--node-ip-address={record.head_address}",
            f"--port={record.gcs_port}",
            f"--dashboard-host={record.head_address}",
            f"--dashboard-port={record.dashboard_port}",
            f"--ray-client-server-port={record.client_port}",
            f"--dashboard-agent-listen-port={record.agent_port}",
            f"--num-cpus={self.head_cpus}",
            f"--object-store-memory={_HEAD_OBJECTS}",
        ]
        return self._process(record, HEAD, arguments, {})

    def host(self, record: LeaseRecord, item: SliceRecord, host: HostRecord, after: str | None) -> dict[str, Any]:
        """How a host is started.

        :param after: the part that must be up before it; None where hosts start side by side.
        """
        shape = record.spec.shape
        arguments = [
            f"--address={record.head_address}:{record.gcs_port}",
            f"--node-ip-address={host.address}",
            f"--dashboard-agent-listen-port={host.agent_port}",
            f"--num-cpus={self.host_cpus}",
            f"--resources={json.dumps({'TPU': shape.chips_per_host})}",
            f"--object-store-memory={_HOST_OBJECTS}",
        ]
        marks = {MARK_SLICE: item.name, MARK_HOST: str(host.worker_id)}
        process = self._process(record, host.part, arguments, shape.host_env(item.name, host.label) | marks)
        process["delay_s"] = host.delay_s
        if after is not None:
            process["after"] = str(record.folder / after / "session_latest" / "sockets" / "raylet")
        return process

    def start(self, record: LeaseRecord, parts: Collection[str]) -> list[dict[str, Any]]:
        """How the named parts are started, in the order in which they must be."""
        together = record.block != addresses.ONLY_ADDRESS
        processes = [self.head(record)]
        before = HEAD
        for item, host in record.hosts:
            processes.append(self.host(record, item, host, None if together else before))
            before = host.part
        return [process for process in processes if Path(process["folder"]).name in parts]

    def marks(self, record: LeaseRecord) -> dict[str, str]:
        """The marks of every process of a lease, that which starts the others included."""
        return {
            MARK_LEASE: record.id,
            MARK_ROOT: record.root,
            MARK_GRANT: record.lease().model_dump_json(),
        }

    def environment(self) -> dict[str, str]:
        """The part of our own environment that goes on."""
        passed = {name: os.environ[name] for name in (*_PASSED, *self.pass_env) if name in os.environ}
        # A job's entrypoint says `python`: it must be the one that has Ray.
        return passed | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}

    def _process(
        self, record: LeaseRecord, part: str, arguments: Sequence[str], variables: dict[str, str]
    ) -> dict[str, Any]:
        folder = record.folder / part
        env = self.environment() | _RAY | self.marks(record) | variables
        env |= {MARK_PART: part, "RAY_AUTH_TOKEN_PATH": str(record.folder / TOKEN), "TMPDIR": str(folder / "tmp")}
        return {
            "folder": str(folder),
            "log": str(folder / LOG),
            "argv": [*self.ray_start, *arguments, f"--temp-dir={folder}", "--block", "--log-color=false"],
            "env": env,
            "delay_s": 0.0,
            "after": None,
            "after_limit_s": _PREDECESSOR_LIMIT_S,
        }
