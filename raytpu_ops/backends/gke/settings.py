"""What a DAG author or a connection may say about RayClusters on Kubernetes.

Everything has a default that works on GKE with KubeRay installed. Not here: which cluster that is
(``access.py``) and how a setting becomes a manifest (``manifest.py``).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from raytpu_ops.backends.gke.pool_settings import NodePools
from raytpu_ops.backends.ray_options import RayVersion, start_parameters
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.fields import Line, PlainDict, Word, matching
from raytpu_ops.tpu.naming import LABEL_PREFIX
from raytpu_ops.tpu.problems import Checked, read
from raytpu_ops.tpu.words import shown

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
#: ``HOST:PORT/PATH:TAG@DIGEST``; a registry says the rest.
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*\Z")
_CPUS = re.compile(r"[0-9]+(\.[0-9]+)?m?\Z")
#: Kubernetes takes a bare number for bytes, which nobody means.
_MEMORY = re.compile(r"[0-9]+(\.[0-9]+)?([kMGTP]|[KMGTP]i)\Z")
#: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z")
#: What KubeRay, or this backend, says to ``ray start``: services and addresses go by it.
_OURS = frozenset({"head", "address", "port", "node-ip-address", "dashboard-host", "dashboard-port"})


def _labels(value: dict[str, str]) -> dict[str, str]:
    for key, text in value.items():
        if not _LABEL_KEY.match(key) or not _LABEL_VALUE.match(text):
            raise ValueError(
                "must be labels of Kubernetes: letters, digits, dashes, dots and underscores, at most 63; "
                f"{shown(key)} is none"
            )
        if key.startswith(LABEL_PREFIX):
            raise ValueError(f"must not begin with {LABEL_PREFIX!r}, by which leases are found")
    return value


Flags = Annotated[dict[Word, Word], AfterValidator(start_parameters(_OURS))]
DnsLabel = Annotated[
    Word,
    matching(_DNS_LABEL, "must be a Kubernetes name: lower-case letters, digits and dashes, at most 63 characters"),
]
Image = Annotated[Line, matching(_IMAGE, "must be the name of an image, such as 'rayproject/ray:2.60.0-py311'")]
Cpus = Annotated[Word, matching(_CPUS, "must be CPUs as Kubernetes writes them, such as '4' or '500m'")]
Memory = Annotated[Word, matching(_MEMORY, "must be memory as Kubernetes writes it, with a unit, such as '16Gi'")]


class Resources(Checked):
    """What a pod asks for, beside its chips.

    :param cpu: CPUs that are requested; no limit is set.
    :param memory: memory that is requested, and for the head its limit too.
    """

    cpu: Cpus
    memory: Memory


class Settings(Checked):
    """The options of the ``gke`` backend.

    :param namespace: where RayClusters are made.
    :param image: image of head and hosts; it needs Ray, and for training JAX.
    :param ray_version: Ray's version in that image; KubeRay judges features by it.
    :param runtime: ``upload`` sends this package's own code to the cluster, once for each content; ``image``
        says that the image has it.
    :param service_account: of the pods; for ``gs://`` by Workload Identity.
    :param head: what the head asks for.
    :param host: what each TPU host asks for, beside its chips.
    :param head_start_params: further ``rayStartParams`` of the head.
    :param host_start_params: further ``rayStartParams`` of the hosts.
    :param head_template: pod template that is merged over the head's, as ``kubectl patch`` does it.
    :param host_template: pod template that is merged over the hosts'.
    :param labels: further labels of the RayCluster and its pods.
    :param queue: a Kueue LocalQueue; the RayCluster waits there for quota.
    :param queue_priority: a Kueue WorkloadPriorityClass.
    :param compute_class: a GKE ComputeClass whose nodes are wanted.
    :param node_pools: make a node pool of GKE's for each slice and delete it on release, see
        :class:`~raytpu_ops.backends.gke.pool_settings.NodePools`; ``True`` for all its defaults. Default: nodes
        exist, or the cluster's autoscaler brings them.
    :param reach: how Ray is reached: ``proxy`` through the API server, ``service`` from inside the cluster.
    :param dashboard_url: where Ray's dashboard is reached instead; ``{name}`` and ``{namespace}`` are filled in.
    :param serve_url: the same for Serve.
    :raises InvalidSpec: one line: where, what is wrong, what would be right.
    """

    namespace: DnsLabel = "default"
    image: Image = "rayproject/ray:2.60.0-py311"
    ray_version: RayVersion = "2.60.0"
    runtime: Literal["upload", "image"] = "upload"
    service_account: DnsLabel | None = None
    head: Resources = Field(default_factory=lambda: Resources(cpu="2", memory="8Gi"))
    host: Resources = Field(default_factory=lambda: Resources(cpu="8", memory="32Gi"))
    head_start_params: Flags = Field(default_factory=dict)
    host_start_params: Flags = Field(default_factory=dict)
    head_template: PlainDict = Field(default_factory=dict)
    host_template: PlainDict = Field(default_factory=dict)
    labels: Annotated[dict[Word, Word], AfterValidator(_labels)] = Field(default_factory=dict)
    queue: DnsLabel | None = None
    queue_priority: DnsLabel | None = None
    compute_class: DnsLabel | None = None
    node_pools: NodePools | None = None
    reach: Literal["proxy", "service"] = "proxy"
    dashboard_url: Line | None = None
    serve_url: Line | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.queue_priority and not self.queue:
            raise InvalidSpec("queue_priority: is Kueue's and needs queue='…', the LocalQueue's name")
        for option in ("queue", "compute_class"):
            if self.node_pools is not None and getattr(self, option):
                raise InvalidSpec(
                    f"node_pools and {option} don't go together: nodes come either with the lease's own pools or "
                    f"by {'what Kueue admits' if option == 'queue' else 'the ComputeClass'}; keep one of them"
                )
        return self

    @property
    def proxied(self) -> bool:
        """Whether Ray is reached through the API server, be it only its dashboard or only Serve."""
        return self.reach == "proxy" and not (self.dashboard_url and self.serve_url)

    @classmethod
    def of(cls, options: object) -> Self:
        """Read what a person wrote.

        :raises InvalidSpec: one line: where, what is wrong, what would be right.
        """
        return read(cls, options, "backend 'gke'")
