"""Node pools of the fake bring real kubelets: made there, they boot on the testbed; deleted or taken back, they die.

Also what GKE's autoscaler does for a pool that begins with no nodes: they come when pods wait that fit nowhere
else. Not here: how a node boots (`tests/testbed`).
"""

from __future__ import annotations

import base64
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from google.cloud import container_v1 as gke

from raytpu_ops.tpu.shapes import catalogue
from tests.google_fake import queued
from tests.google_fake.pool_life import Cluster, Status
from tests.testbed import scaling_rules
from tests.testbed.nodes import TPU_TAINT, Pool
from tests.waiting import eventually

if TYPE_CHECKING:
    from tests.google_fake.pool_life import Pools
    from tests.testbed.client import Testbed

_EFFECTS = {"NO_SCHEDULE": "NoSchedule", "PREFER_NO_SCHEDULE": "PreferNoSchedule", "NO_EXECUTE": "NoExecute"}
#: Seconds between two looks at pods that wait.
_INTERVAL_S = 0.5
_SPECIFIC = gke.ReservationAffinity.Type.SPECIFIC_RESERVATION


class BootsNodes:
    """The nodes of one cluster's pools.

    :param pools: of the fake.
    :param cluster: whose pools these are; its API server is the testbed's from now on.
    :param testbed: where nodes boot.
    """

    def __init__(self, pools: Pools, cluster: Cluster, testbed: Testbed) -> None:
        self._pools, self._cluster, self._testbed = pools, cluster, testbed
        self._last: dict[str, threading.Thread] = {}
        self._booted: set[str] = set()
        #: What went wrong in here; the fake raises it at its end.
        self.errors: list[str] = []
        self._closed = threading.Event()
        cluster.endpoint = testbed.server.removeprefix("https://")
        cluster.ca = base64.b64encode((testbed.layout.pki / "ca.crt").read_bytes()).decode()
        self.queue = queued.Queue(pools, cluster)
        # Pods come as fast as this machine lets them.
        self.queue.booked *= pools.clock.speed
        self._bring_kind()
        self._scaler = threading.Thread(target=self._scale, name="google-fake-autoscaler", daemon=True)
        self._scaler.start()

    def _bring_kind(self) -> None:
        """GKE has the kind ProvisioningRequest."""
        made = queued.definition()
        kinds = self._testbed.dynamic.resources.get(api_version=made["apiVersion"], kind=made["kind"])
        if not any(one.metadata.name == made["metadata"]["name"] for one in kinds.get().items):
            kinds.create(body=made)

        def is_known() -> bool:
            status = kinds.get(name=made["metadata"]["name"]).to_dict().get("status") or {}
            return any(one["type"] == "Established" and one["status"] == "True" for one in status.get("conditions", []))

        eventually(is_known, "the kind ProvisioningRequest is known")

    def close(self) -> None:
        """Let go of the testbed: nodes that are left go, and nothing comes any more."""
        self._closed.set()
        self._scaler.join()
        with self._pools.clock.lock:
            names = list(self._last)
        for name in names:
            self._then(name, lambda name=name: self._remove(name))  # type: ignore[misc]
        for thread in list(self._last.values()):
            thread.join()

    # The watcher

    def grown(self, cluster: Cluster, pool: gke.NodePool) -> None:
        """Its nodes boot."""
        if cluster is self._cluster:
            wanted = self._pool(pool)
            self._then(pool.name, lambda: self._boot(wanted))

    def shrunk(self, cluster: Cluster, pool: gke.NodePool) -> None:
        """Its nodes die."""
        if cluster is self._cluster:
            self._then(pool.name, lambda: self._remove(pool.name))

    def busy(self, cluster: Cluster, pool: gke.NodePool) -> bool:
        """Whether nodes are coming or going."""
        thread = self._last.get(pool.name)
        return cluster is self._cluster and thread is not None and thread.is_alive()

    # Work, one thing after the other for each pool, side by side for several

    def _then(self, name: str, do: Callable[[], None]) -> None:
        before = self._last.get(name)

        def work() -> None:
            if before is not None:
                before.join()
            try:
                do()
            except Exception:  # noqa: BLE001 - nobody waits for a thread's error, so it is kept
                self.errors.append(f"node pool {name}: {traceback.format_exc()}")

        self._last[name] = threading.Thread(target=work, name=f"google-fake-{name}", daemon=True)
        self._last[name].start()

    def _boot(self, wanted: dict[str, Any]) -> None:
        self._booted.add(wanted["name"])
        self._testbed.add_pool(**wanted)

    def _remove(self, name: str) -> None:
        if name in self._booted:
            self._testbed.remove_pool(name)
            self._booted.discard(name)

    # What GKE makes of a pool

    def _pool(self, pool: gke.NodePool) -> dict[str, Any]:
        config = pool.config
        topology = self._topology(pool)
        spot = config.spot or config.preemptible
        affinity = config.reservation_affinity
        zone = pool.locations[0]
        labels = {
            **({"cloud.google.com/gke-spot": "true"} if spot else {}),
            **({"cloud.google.com/gke-flex-start": "true"} if config.flex_start else {}),
            **({"cloud.google.com/gke-queued": "true"} if pool.queued_provisioning.enabled else {}),
            **(
                {"cloud.google.com/reservation-name": affinity.values[0].rpartition("/")[2]}
                if affinity.consume_reservation_type == _SPECIFIC
                else {}
            ),
            "topology.kubernetes.io/zone": zone,
            "topology.kubernetes.io/region": zone.rpartition("-")[0],
            **config.labels,
        }
        taints = [{"key": one.key, "value": one.value, "effect": _EFFECTS[one.effect.name]} for one in config.taints]
        if topology and not any(one["key"] == TPU_TAINT["key"] for one in taints):
            taints.append(TPU_TAINT)
        if pool.queued_provisioning.enabled:
            taints.append({"key": "cloud.google.com/gke-queued", "value": "true", "effect": "NoSchedule"})
        return {
            "name": pool.name,
            "hosts": self._cluster.sizes[pool.name] or self._most(pool),
            "machine_type": config.machine_type,
            "topology": topology,
            "labels": labels,
            "taints": taints,
        }

    def _topology(self, pool: gke.NodePool) -> str:
        """Of the slice; each node is one where the pool has no placement."""
        placement = pool.placement_policy
        if placement.tpu_topology:
            return placement.tpu_topology
        if placement.policy_name:
            name = placement.policy_name.rpartition("/")[2]
            found = [one for path, one in self._pools.compute.policies.items() if path.endswith(f"/{name}")]
            return str(found[0]["workloadPolicy"]["acceleratorTopology"])
        alone = [one for one in catalogue() if one.machine_type == pool.config.machine_type and one.single_host]
        return alone[0].topology if alone else ""

    # The autoscaler

    @staticmethod
    def _most(pool: gke.NodePool) -> int:
        scaling = pool.autoscaling
        return (scaling.total_max_node_count or scaling.max_node_count) if scaling.enabled else 0

    def _scale(self) -> None:
        asked: set[str] = set()
        while not self._closed.wait(_INTERVAL_S):
            try:
                self._look(asked)
                self._queued()
            except Exception:  # noqa: BLE001 - it ends with the thread, so it is kept for the fake's end
                self.errors.append(f"autoscaler: {traceback.format_exc()}")
                return

    def _look(self, asked: set[str]) -> None:
        """Ask for the nodes of pools that have none and that somebody waits for.

        :param asked: etags of pools whose nodes are on their way.
        """
        with self._pools.clock.lock:
            scaled = [pool for pool in self._cluster.pools.values() if self._most(pool)]
            empty = [pool for pool in scaled if not self._cluster.sizes[pool.name] and pool.status == Status.RUNNING]
        asked &= {pool.etag for pool in empty}
        empty = [pool for pool in empty if pool.etag not in asked and not pool.queued_provisioning.enabled]
        if not empty:
            return
        pods = self._testbed.dynamic.resources.get(api_version="v1", kind="Pod").get().to_dict()["items"]
        for group in scaling_rules.waiting(pods).values():
            fits = next((pool for pool in empty if self._helps(pool, group[0])), None)
            if fits is not None:
                empty.remove(fits)
                asked.add(fits.etag)
                self._pools.scale_up(f"{self._cluster.name}/nodePools/{fits.name}", self._most(fits))

    def _queued(self) -> None:
        """Go on with the queue, in each namespace."""
        resources = self._testbed.dynamic.resources
        requests = resources.get(api_version=queued.API, kind=queued.KIND)
        found = requests.get().to_dict()["items"]
        for namespace in {one["metadata"]["namespace"] for one in found}:
            listed = resources.get(api_version="v1", kind="PodTemplate").get(namespace=namespace).to_dict()["items"]
            templates = {one["metadata"]["name"]: one for one in listed}
            own = [one for one in found if one["metadata"]["namespace"] == namespace]
            for name, rows in self.queue.look(own, templates, self._is_used).items():
                requests.status.patch(
                    name=name,
                    namespace=namespace,
                    body={"status": {"conditions": rows}},
                    content_type="application/merge-patch+json",
                )

    def _is_used(self, pool: str) -> bool:
        pods = self._testbed.dynamic.resources.get(api_version="v1", kind="Pod").get().to_dict()["items"]
        return any((pod["spec"].get("nodeName") or "").startswith(pool) for pod in pods)

    def _helps(self, pool: gke.NodePool, pod: dict[str, Any]) -> bool:
        wanted = self._pool(pool)
        booted = Pool.named(**wanted)
        selector = pod["spec"].get("nodeSelector") or {}
        labels = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", **booted.node_labels}
        return selector.items() <= labels.items() and scaling_rules.is_tolerated(pod, booted.node_taints)
