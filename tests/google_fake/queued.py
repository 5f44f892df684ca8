"""GKE's queued provisioning, played: a ProvisioningRequest brings the nodes of a pool that no pod brings.

Objects of Kubernetes go in and conditions come out; who has a Kubernetes hands them over (`boots.py`, and the unit
tests' world). Sources: `provisioningrequest` in Kubernetes' cluster autoscaler, GKE's page on flex-start with queued
provisioning, and reports of what it says: nodes are booked for ten minutes, then those that nobody uses go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from google.cloud import container_v1 as gke

from raytpu_ops.backends.gke.manifest import POOL_LABEL, TPU
from tests.google_fake.pool_life import Cluster, Pools, Status

Object = dict[str, Any]

API, KIND, PLURAL = "autoscaling.x-k8s.io/v1", "ProvisioningRequest", "provisioningrequests"
_GROUP, _VERSION = API.split("/")
_CLASS = "queued-provisioning.gke.io"
_TAINT = {"key": "cloud.google.com/gke-queued", "value": "true", "effect": "NoSchedule"}


class Queue:
    """The queue of one cluster.

    :param pools: of the fake.
    :param cluster: whose requests these are.
    :ivar refusal: words with which every request that is not granted yet fails; empty: none does.
    :ivar booked: how long nodes are kept for pods that are to use them.
    """

    def __init__(self, pools: Pools, cluster: Cluster) -> None:
        self._pools, self._cluster = pools, cluster
        self.refusal, self.booked = "", timedelta(minutes=10)
        #: When nodes come, by the request's uid.
        self._due: dict[str, datetime] = {}
        self._revoked: set[str] = set()

    def revoke(self, pool: str) -> None:
        """The nodes of a pool are taken back."""
        self._revoked.add(pool)
        self._pools.preempt(self._path(pool))

    def look(
        self, requests: Iterable[Object], templates: Mapping[str, Object], is_used: Callable[[str], bool]
    ) -> dict[str, list[Object]]:
        """Go on with all of them.

        :param templates: the namespace's PodTemplates, by name.
        :param is_used: whether pods run on a pool's nodes.
        :return: all conditions of those of which one has changed, by the request's name.
        """
        with self._pools.clock.lock:
            changed = {}
            for one in requests:
                there = {row["type"]: row for row in (one.get("status") or {}).get("conditions") or []}
                if one["metadata"].get("deletionTimestamp") or one["spec"]["provisioningClassName"] != _CLASS:
                    continue
                new = self._next(one, there, templates, is_used)
                if new is not None:
                    kind, message = new
                    row = {"type": kind, "status": "True", "reason": kind, "message": message}
                    there[kind] = {**row, "lastTransitionTime": f"{self._pools.clock.now():%Y-%m-%dT%H:%M:%SZ}"}
                    changed[one["metadata"]["name"]] = list(there.values())
            return changed

    def _next(
        self, one: Object, there: dict[str, Object], templates: Mapping[str, Object], is_used: Callable[[str], bool]
    ) -> tuple[str, str] | None:
        """The condition that a request gets now, if any, and its message."""
        if "Failed" in there or "CapacityRevoked" in there:
            return None
        name, uid, [pods] = one["metadata"]["name"], one["metadata"]["uid"], one["spec"]["podSets"]
        template = templates.get(pods["podTemplateRef"]["name"])
        if "Provisioned" not in there and (wrong := self.refusal or self._wrong(template, int(pods["count"]))):
            return "Failed", wrong
        assert template is not None
        pool, now = template["template"]["spec"]["nodeSelector"][POOL_LABEL], self._pools.clock.now()
        if "Accepted" not in there:
            self._due[uid] = now + timedelta(seconds=self._pools.delays.scale_up)
            return "Accepted", "Provisioning Request was successfully queued."
        if "Provisioned" not in there:
            return self._grant(one, pool)
        if pool in self._revoked:
            return "CapacityRevoked", f"Nodes of Provisioning Request {name} were taken back."
        booked = datetime.fromisoformat(there["Provisioned"]["lastTransitionTime"])
        if "BookingExpired" in there or now < booked + self.booked:
            return None
        if pool in self._cluster.pools and not is_used(pool):
            self._pools.preempt(self._path(pool))
        return (
            "BookingExpired",
            f"Capacity booking for the Provisioning Request {name} has expired and the nodes are now candidates for "
            "scale down when underutilized.",
        )

    def _grant(self, one: Object, pool: str) -> tuple[str, str] | None:
        if self._pools.clock.now() < self._due[one["metadata"]["uid"]]:
            return None
        if not self._cluster.sizes[pool]:
            runs = float(one["spec"]["parameters"]["maxRunDurationSeconds"])
            self._pools.fill(self._path(pool), int(one["spec"]["podSets"][0]["count"]), runs)
        found = self._cluster.pools[pool]
        if any(watcher.busy(self._cluster, found) for watcher in self._pools.watchers):
            return None
        return "Provisioned", "Provisioning Request was successfully provisioned."

    def _wrong(self, template: Object | None, count: int) -> str:
        """What GKE says of a request that it can never grant."""
        if template is None:
            return "Pod template does not exist."
        spec = template["template"]["spec"]
        pool = self._cluster.pools.get(spec.get("nodeSelector", {}).get(POOL_LABEL, ""))
        if pool is None or pool.status != Status.RUNNING or not pool.queued_provisioning.enabled:
            return "There is no node pool with queued provisioning that its pods select."
        if any(pool.config.labels.get(key) != value for key, value in spec["nodeSelector"].items() if "/" not in key):
            return "Its pods select other nodes than those of the node pool."
        if not all(any(self._tolerates(one, taint) for one in spec.get("tolerations", [])) for taint in _taints(pool)):
            return "Its pods do not tolerate the taints of the node pool."
        if TPU not in spec["containers"][0]["resources"]["requests"]:
            return "Its pods ask for no TPU."
        most = pool.autoscaling.total_max_node_count
        return "" if count == most else f"A slice has {most} nodes, {count} were asked for."

    @staticmethod
    def _tolerates(toleration: Mapping[str, str], taint: Mapping[str, str]) -> bool:
        same = toleration["key"] == taint["key"]
        return same and (toleration.get("operator") == "Exists" or toleration.get("value") == taint["value"])

    def _path(self, pool: str) -> str:
        return f"{self._cluster.name}/nodePools/{pool}"


def _taints(pool: gke.NodePool) -> list[dict[str, str]]:
    return [{"key": one.key, "value": one.value} for one in pool.config.taints] + [_TAINT]


def definition() -> Object:
    """The kind, as far as it is used here; GKE brings it."""
    text, frozen = {"type": "string"}, [{"rule": "self == oldSelf", "message": "Value is immutable"}]
    named = {"type": "object", "properties": {"name": text}, "required": ["name"]}
    pods = {
        "type": "object",
        "properties": {"podTemplateRef": named, "count": {"type": "integer", "minimum": 1}},
        "required": ["podTemplateRef", "count"],
    }
    spec = {
        "type": "object",
        "properties": {
            "podSets": {
                "type": "array",
                "minItems": 1,
                "maxItems": 32,
                "items": pods,
                "x-kubernetes-validations": frozen,
            },
            "provisioningClassName": {**text, "x-kubernetes-validations": frozen},
            "parameters": {"type": "object", "additionalProperties": text, "x-kubernetes-validations": frozen},
        },
        "required": ["podSets", "provisioningClassName"],
    }
    row = {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {"type": text}}
    row |= {"required": ["type"]}
    rows = {"type": "array", "items": row, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    status = {"type": "object", "properties": {"conditions": rows}}
    schema = {"type": "object", "required": ["spec"], "properties": {"spec": spec, "status": status}}
    version = {"name": _VERSION, "served": True, "storage": True, "subresources": {"status": {}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{_GROUP}", "annotations": {"api-approved.kubernetes.io": "unapproved, played"}},
        "spec": {
            "group": _GROUP,
            "scope": "Namespaced",
            "names": {"kind": KIND, "listKind": f"{KIND}List", "plural": PLURAL, "singular": KIND.lower()},
            "versions": [{**version, "schema": {"openAPIV3Schema": schema}}],
        },
    }
