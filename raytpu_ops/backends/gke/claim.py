"""What an owner's RayCluster is to be, and whether one that is there is it.

Pure. Not here: how it is asked for (``backend.py``, ``granting.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raytpu_ops.backends.gke.objects import ClusterView, lease_record
from raytpu_ops.backends.gke.record import HOLD, OWNER, RECORD, Record, owned_by, written
from raytpu_ops.tpu import naming
from raytpu_ops.tpu.errors import Misconfigured
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.waits import Done, Pending

Json = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """An owner's claim on a RayCluster.

    :param owner: whose it is.
    :param namespace: where it is.
    :param manifest: what is to be there, without record and labels of the owner.
    :param digest: changes with everything that was asked for.
    """

    owner: Owner
    namespace: str
    manifest: Json
    digest: str

    @property
    def name(self) -> str:
        """Of the RayCluster: the lease's id."""
        return naming.lease_id(self.owner)

    @property
    def what(self) -> str:
        """The RayCluster, as messages name it."""
        return f"RayCluster {self.namespace}/{self.name}"

    def adopt(self, there: Mapping[str, Any]) -> Pending | Done[Record]:
        """What one that is there means.

        :return: its record where it is the one; that it has to go first where it is being deleted.
        :raises Misconfigured: it is somebody else's, or the owner's with another spec (F03).
        """
        view, record = ClusterView.of(there), lease_record(there)
        if not owned_by(there, self.owner):
            whose = f"belongs to {record.owner.key}" if record else "was not made by raytpu-ops"
            raise Misconfigured(f"{self.what} exists and {whose}: delete or rename it")
        if view.deleting:
            return Pending(f"the one before is still being deleted; it is held by {held_by(view)}")
        if record is None:
            raise Misconfigured(unread(there))
        if record.digest != self.digest:
            raise Misconfigured(
                f"{self.what} exists for {self.owner.key} with another spec or other options ({record.spec}): release "
                f"it first, by the run's release task or `raytpu release {self.name}`, with --conn-id as the task has "
                "it"
            )
        return Done(record)

    def written(self, record: Record) -> Json:
        """The manifest with the record on it; one whose nodes are yet to be made begins without pods, and is held."""
        found = written(self.manifest, record)
        if record.pools is not None:
            found["spec"]["suspend"] = True
            found["metadata"]["finalizers"] = [HOLD]
        return found


def unread(there: Mapping[str, Any]) -> str:
    """What a person is told of a RayCluster of ours whose record can't be read."""
    name, namespace = there["metadata"]["name"], there["metadata"]["namespace"]
    return (
        f"RayCluster {namespace}/{name} has our label {OWNER}, and its annotation {RECORD!r} can't be read: somebody "
        "wrote over it, or a newer raytpu-ops wrote it, which this one does not understand. It bills until somebody "
        f"deletes it, by `kubectl delete raycluster {name} --namespace {namespace}`"
    )


def held_by(view: ClusterView) -> str:
    """What keeps a RayCluster that is being deleted."""
    return f"finalizers {', '.join(view.finalizers)}" if view.finalizers else "nothing but its pods"
