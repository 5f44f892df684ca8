"""What a DAG author or a connection may say about node pools that the ``gke`` backend makes, or is to use.

Not here: how a setting becomes a request (``node_pools.py``).
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from raytpu_ops.backends.google.fields import Account, Labels, Tags, Words, Zones
from raytpu_ops.backends.google.price import PricePerChipHour
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.fields import Count, Flag, Line, Word, matching
from raytpu_ops.tpu.naming import Kind, check_name
from raytpu_ops.tpu.problems import Checked

_CLUSTER = re.compile(r"projects/(?P<project>[^/]+)/locations/(?P<location>[a-z0-9-]+)/clusters/(?P<name>[a-z0-9-]+)\Z")
#: What Google calls machines' parts, versions and ranges.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def _pools(value: list[str]) -> list[str]:
    return [check_name(name, Kind.NODE_POOL, "node_pools.reuse") for name in value]


ClusterPath = Annotated[Line, matching(_CLUSTER, "must be 'projects/PROJECT/locations/LOCATION/clusters/NAME'")]
Name = Annotated[Word, matching(_NAME, "must be a name: letters, digits, dots, dashes and underscores")]
PoolNames = Annotated[Words, AfterValidator(_pools)]


class NodePools(Checked):
    """Node pools for a lease: one for each slice, made when it is acquired and deleted when it is released.

    :param zones: where they may be; each kind of capacity is tried in each of them, in this order. Default: the
        cluster's own zone, where it is a zonal one.
    :param cluster: ``projects/…/locations/…/clusters/…``, where the way to the API server does not say it.
    :param reuse: names of pools that somebody else made, one for each slice. They are checked, used and never
        deleted; nothing is made then.
    :param workload_policy: TPU7x of several hosts: the name of a workload policy in the zone's region. Default: one
        is made with the pools and deleted with them.
    :param service_account: e-mail address of the nodes' service account; default that of Compute Engine.
    :param disk_size_gb: of the nodes' boot disks.
    :param disk_type: of the nodes' boot disks, such as ``hyperdisk-balanced``.
    :param image_type: of the nodes, such as ``COS_CONTAINERD``.
    :param version: of Kubernetes on the nodes; default the control plane's.
    :param tags: network tags of the nodes.
    :param labels: further labels of nodes and of what Google bills.
    :param pod_range: name of the secondary range of the nodes' pods.
    :param private_nodes: nodes without addresses of their own on the internet; default as the cluster has it.
    :param image_streaming: containers start before their image is there as a whole.
    :param secure_boot: of the nodes.
    :param price_per_chip_hour: of a chip, a number or numbers by generation; then a plan says what it may cost.
    :raises InvalidSpec: one line: where, what is wrong, what would be right.
    """

    zones: Zones = Field(default_factory=list)
    cluster: ClusterPath | None = None
    reuse: PoolNames = Field(default_factory=list)
    workload_policy: Name | None = None
    service_account: Account | None = None
    disk_size_gb: Annotated[Count, Field(ge=10, le=65536)] | None = None
    disk_type: Name | None = None
    image_type: Name | None = None
    version: Name | None = None
    tags: Tags = Field(default_factory=list)
    labels: Labels = Field(default_factory=dict)
    pod_range: Name | None = None
    private_nodes: Flag | None = None
    image_streaming: Flag = False
    secure_boot: Flag = False
    price_per_chip_hour: PricePerChipHour | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, data: Any) -> Any:
        """The JSON that a form, or a lease's ``place``, holds; ``True`` for all defaults."""
        if data is True:
            return {}
        if not isinstance(data, str):
            return data
        try:
            found = json.loads(data)
        except ValueError:
            raise ValueError('must be JSON such as \'{"zones": ["us-east5-b"]}\'') from None
        return {} if found is True else found

    @model_validator(mode="after")
    def _once(self) -> Self:
        for field in ("zones", "reuse"):
            names: list[str] = getattr(self, field)
            if len(set(names)) != len(names):
                raise InvalidSpec(f"node_pools.{field}: each name stands there once")
        return self

    def asked(self) -> str:
        """All that changes what is made, as JSON."""
        return self.model_copy(update={"cluster": None, "price_per_chip_hour": None}).to_text()

    def to_text(self) -> str:
        """As JSON, without what is at its default."""
        return self.model_dump_json(exclude_defaults=True)


def cluster_parts(path: str) -> tuple[str, str, str]:
    """Project, location and name of a cluster's path."""
    match = _CLUSTER.match(path)
    if match is None:
        raise InvalidSpec(f"node_pools.cluster: {path!r} is no path of a GKE cluster")
    return match["project"], match["location"], match["name"]
