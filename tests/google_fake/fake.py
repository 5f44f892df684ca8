"""The handle that tests hold: start everything, see what was asked, let time pass, let things go wrong."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from google.cloud import container_v1, tpu_v2

from tests.google_fake.boots import BootsNodes
from tests.google_fake.clock import Clock
from tests.google_fake.container import Container
from tests.google_fake.faults import Faults
from tests.google_fake.gate import Call, Gate
from tests.google_fake.pool_life import Cluster
from tests.google_fake.rest import RestServer
from tests.google_fake.rpc import RpcServer
from tests.google_fake.tokens import Tokens, service_account
from tests.google_fake.tpu import Tpu
from tests.google_fake.trust import authority, private_key
from tests.google_fake.vms import BootsVms

if TYPE_CHECKING:
    from tests.testbed.client import Testbed

PROJECT = "tpu-project"
ZONE = "us-central2-b"
CLUSTER = f"projects/{PROJECT}/locations/{ZONE}/clusters/tpus"


class GoogleFake:
    """Google's APIs on loopback, between `__enter__` and `__exit__`.

    :param clock: the time; default: one that moves only by `advance`.
    :param cluster: a GKE cluster that is there from the start.
    :param zones: where its node pools may be; default: its own location.
    """

    def __init__(self, *, clock: Clock | None = None, cluster: str = CLUSTER, zones: Iterable[str] = ()) -> None:
        self.clock = clock or Clock()
        self.tokens = Tokens(self.clock)
        self.faults = Faults()
        self.gate = Gate(self.clock, self.tokens, self.faults)
        self.container = Container(self.clock, self.faults)
        self.tpu = Tpu(self.clock, self.faults)
        self.compute = self.container.compute
        self.add_cluster(cluster, zones)
        #: Where each API is reached, `host:port` by its short name.
        self.endpoints: dict[str, str] = {}
        self._rpc: RpcServer | None = None
        self._rest: RestServer | None = None
        self._ticker: threading.Thread | None = None
        self._bridges: list[BootsNodes | BootsVms] = []
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> Self:
        self._before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        self._rpc = RpcServer(
            self.gate,
            {
                "google.container.v1.ClusterManager": ("container", self.container.rpcs),
                "google.cloud.tpu.v2.Tpu": ("tpu", self.tpu.rpcs),
                "google.longrunning.Operations": ("tpu", self.tpu.operation_rpcs),
            },
        )
        self._rest = RestServer(self.gate, self.compute)
        self.endpoints |= {"container": self._rpc.endpoint, "tpu": self._rpc.endpoint}
        self.endpoints |= {"compute": self._rest.endpoint, "cloudresourcemanager": self._rest.endpoint}
        if self.clock.speed:
            self._ticker = threading.Thread(target=self.clock.run, name="google-fake-clock", daemon=True)
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for bridge in self._bridges:
            bridge.close()
        self.clock.close()
        if self._ticker is not None:
            self._ticker.join()
        if self._rpc is not None:
            self._rpc.stop()
        if self._rest is not None:
            self._rest.stop()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        wrong = [line for bridge in self._bridges for line in bridge.errors]
        if wrong and error is None:
            raise RuntimeError("\n".join(wrong))

    # What there is

    @property
    def ca_file(self) -> Path:
        """Trust in these servers; all fakes of a process have the same."""
        return authority().ca

    def key(self, name: str = "airflow", project: str = PROJECT) -> dict[str, str]:
        """A service account's key, as JSON."""
        return service_account(project, f"https://{self.endpoints['compute']}/token", name)

    @property
    def iam_endpoint(self) -> str:
        """Where one account gets a token of another, with `{}` for its address; google-auth's own form."""
        return f"https://{self.endpoints['compute']}/v1/projects/-/serviceAccounts/{{}}:generateAccessToken"

    def key_file(self, folder: Path, name: str = "airflow") -> Path:
        """Write a service account's key."""
        path = folder / f"{name}.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(self.key(name)))
        return path

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a process trusts these servers; set in this one while the fake is there.

        gRPC reads its own once in a process, at the first channel.
        """
        ca = str(self.ca_file)
        return {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": ca, "REQUESTS_CA_BUNDLE": ca, "SSL_CERT_FILE": ca}

    @property
    def secrets(self) -> set[str]:
        """What nobody may tell: tokens, and a line of the accounts' key."""
        return self.tokens.known | {private_key().splitlines()[1]}

    @property
    def calls(self) -> list[Call]:
        """Every request, in order."""
        return self.gate.calls

    def asked(self, method: str) -> list[Call]:
        """The requests of one method, in order."""
        return [call for call in self.gate.calls if call.method == method]

    def node_pools(self) -> dict[str, container_v1.NodePool]:
        """All node pools, by full name."""
        return self.container.pools()

    def queued_resources(self) -> dict[str, tpu_v2.QueuedResource]:
        """All queued resources, by full name."""
        return {name: one.resource for name, one in self.tpu.queued.items()}

    def nodes(self) -> dict[str, tpu_v2.Node]:
        """All TPU nodes, by full name."""
        return dict(self.tpu.nodes)

    # What a test does

    def add_cluster(self, name: str, zones: Iterable[str] = ()) -> Cluster:
        """A GKE cluster is there from now on.

        :param name: `projects/P/locations/L/clusters/C`.
        :param zones: where its pools may be; default: its own location.
        """
        cluster = Cluster(name, tuple(zones) or (name.split("/")[3],))
        self.container.clusters[name] = cluster
        return cluster

    def boots_nodes(self, testbed: Testbed, cluster: str = CLUSTER) -> BootsNodes:
        """Nodes of a cluster's pools are real kubelets from now on; the clock must run by itself.

        :param testbed: a run with nodes.
        :param cluster: whose API server the testbed's is.
        """
        if not self.clock.speed:
            raise ValueError("real nodes take real time: give the fake a Clock(speed=…)")
        bridge = BootsNodes(self.container, self.container.clusters[cluster], testbed)
        self.container.watchers.append(bridge)
        self._bridges.append(bridge)
        return bridge

    def boots_vms(self, *, shared: Iterable[Path] = ()) -> BootsVms:
        """TPU nodes are real processes from now on; the clock must run by itself.

        :param shared: folders of this machine that every VM sees and writes to, as if they were a bucket.
        """
        if not self.clock.speed:
            raise ValueError("real machines take real time: give the fake a Clock(speed=…)")
        bridge = BootsVms(self.tpu, shared)
        self.tpu.watchers.append(bridge)
        self._bridges.append(bridge)
        return bridge

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.advance(seconds)

    def deny(self, *permissions: str) -> None:
        """F32: nobody has these permissions."""
        self.gate.denied.update(permissions)

    def allow(self, *permissions: str) -> None:
        """They have them again; without arguments all."""
        self.gate.denied.difference_update(permissions or set(self.gate.denied))

    def grant_only(self, permissions: Iterable[str], principal: str = "*") -> None:
        """These permissions and no others, as a custom role gives them."""
        self.gate.granted[principal] = frozenset(permissions)

    def expire_tokens(self) -> None:
        """F38: all tokens are too old."""
        self.tokens.expire()

    def disable(self, api: str) -> None:
        """Nobody has enabled this API."""
        self.gate.off.add(api)
