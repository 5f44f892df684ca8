"""What is read off Google's queued resources and nodes: plain records, with the secret kept out of their words.

Not here: how they are fetched (``api.py``) and what they mean (``states.py``, ``health.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from raytpu_ops.backends.google.enums import word_of
from raytpu_ops.backends.tpu_vm import states
from raytpu_ops.backends.tpu_vm.record import OWNER, RECORD, TOKEN, Record, read_record
from raytpu_ops.backends.tpu_vm.states import Meaning


@dataclass(frozen=True)
class QueuedView:
    """A queued resource.

    :param zone: where it is.
    :param id: its name there.
    :param state: the state's name, as Google writes it.
    :param failure: the ``google.rpc.Status`` that it ended with, None where it did not fail.
    :param node_ids: of its nodes, whether they exist yet or not.
    :param owner: the owner's digest on its label, None where there is none.
    :param record: what we wrote on it.
    :param token: Ray's.
    """

    zone: str
    id: str
    state: str
    failure: Any
    node_ids: tuple[str, ...]
    owner: str | None
    record: Record | None
    token: str | None = field(repr=False)

    @classmethod
    def of(cls, resource: Any) -> QueuedView:
        """Read a ``tpu_v2.QueuedResource``."""
        _, _, _, zone, _, name = resource.name.split("/")
        spec = resource.tpu.node_spec[0] if resource.tpu.node_spec else None
        labels, metadata = (dict(spec.node.labels), dict(spec.node.metadata)) if spec is not None else ({}, {})
        failed = resource.state.failed_data if "failed_data" in resource.state else None
        return cls(
            zone=zone,
            id=name,
            state=word_of(resource.state.state),
            failure=failed.error if failed is not None else None,
            node_ids=_node_ids(spec, name),
            owner=labels.get(OWNER),
            record=read_record(labels, metadata),
            token=metadata.get(TOKEN),
        )

    @property
    def meaning(self) -> Meaning:
        """What its state means."""
        return states.queued_resource(self.state)

    @property
    def delete_by(self) -> str:
        """The command with which a person deletes it, and its nodes."""
        return f"gcloud compute tpus queued-resources delete {self.id} --zone {self.zone} --force"

    def __str__(self) -> str:
        return f"queued resource {self.id} in {self.zone}"


@dataclass(frozen=True)
class NodeView:
    """A node: one slice, with a VM for each of its hosts.

    :param zone: where it is.
    :param id: its name there, which is the slice's name in Ray.
    :param state: the state's name, as Google writes it.
    :param health: how it is, as Google writes it, with its reason.
    :param owner: the owner's digest on its label, None where there is none.
    :param record: what we wrote on it.
    :param queued: name of its queued resource.
    :param address: internal address of its worker 0, None while there is none.
    :param external: public address of its worker 0, None where it has none.
    :param created: when it was made, which is when it was granted.
    """

    zone: str
    id: str
    state: str
    health: str
    owner: str | None
    record: Record | None
    queued: str
    address: str | None
    external: str | None
    created: datetime | None

    @classmethod
    def of(cls, node: Any) -> NodeView:
        """Read a ``tpu_v2.Node``."""
        _, _, _, zone, _, name = node.name.split("/")
        labels = dict(node.labels)
        first = node.network_endpoints[0] if node.network_endpoints else None
        health = word_of(node.health).removeprefix("HEALTH_")
        return cls(
            zone=zone,
            id=name,
            state=word_of(node.state),
            health=f"{health} ({node.health_description})" if node.health_description else health,
            owner=labels.get(OWNER),
            record=read_record(labels, dict(node.metadata)),
            queued=node.queued_resource.rpartition("/")[2],
            address=(first.ip_address or None) if first is not None else None,
            external=(first.access_config.external_ip or None) if first is not None else None,
            created=node.create_time if "create_time" in node else None,
        )

    @property
    def meaning(self) -> Meaning:
        """What its state means."""
        return states.node(self.state)

    @property
    def delete_by(self) -> str:
        """The command with which a person deletes it."""
        return f"gcloud compute tpus tpu-vm delete {self.id} --zone {self.zone}"

    def words(self) -> str:
        """Its state for a message."""
        unwell = "" if self.health.startswith(("HEALTHY", "UNSPECIFIED")) else f", health {self.health}"
        return f"{self.state}{unwell}"

    def __str__(self) -> str:
        return f"node {self.id} in {self.zone}"


def unread(found: QueuedView | NodeView) -> str:
    """What a person is told of something of ours whose record can't be read."""
    return (
        f"{found} has our label {OWNER}, and its metadata entry {RECORD!r} can't be read: somebody wrote over it, or a "
        f"newer raytpu-ops wrote it, which this one does not understand. It bills until somebody deletes it, by "
        f"`{found.delete_by}`"
    )


def _node_ids(spec: Any, name: str) -> tuple[str, ...]:
    if spec is None:
        return ()
    if "multislice_params" not in spec:
        return (spec.node_id,)
    prefix = spec.multislice_params.node_id_prefix or name
    return tuple(f"{prefix}-{number}" for number in range(spec.multislice_params.node_count))
