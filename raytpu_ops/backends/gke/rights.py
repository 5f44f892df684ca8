"""What the ``gke`` backend may do on a Kubernetes cluster: one table, and what of it is needed when.

``deploy/gke/rbac.yaml`` grants exactly this, a test compares the two; ``raytpu doctor`` asks the API
server for each row. Rights on nothing but one namespace: who has them can neither read another
namespace nor change nodes. Not here: Google's own IAM; ``docs/gke.md`` says what that needs.

Requests that pass the API server's service proxy are authorized by their HTTP method: POST asks for
``create``, PUT for ``update``, GET for ``get``, and so does a websocket, which begins as a GET. Nothing
here sends a DELETE.
"""

from __future__ import annotations

from typing import NamedTuple


class Right(NamedTuple):
    """One verb on one resource, in the backend's namespace unless the table says otherwise.

    :param group: the API group; empty for Kubernetes' core.
    :param resource: in the plural, as in URLs.
    :param subresource: empty for the resource itself.
    :param verb: as RBAC spells it.
    :param why: the call that needs it.
    :param only_for: the feature without which it is not needed; empty for a right that is always needed.
    """

    group: str
    resource: str
    subresource: str
    verb: str
    why: str
    only_for: str = ""

    @property
    def path(self) -> str:
        """Resource and subresource as a Role spells them: ``pods/log``."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource

    @property
    def full_name(self) -> str:
        """The path with its group, as people and ``kubectl`` write it: ``rayclusters.ray.io``."""
        if not self.group:
            return self.path
        return f"{self.resource}.{self.group}" + (f"/{self.subresource}" if self.subresource else "")


_RAY, _KUEUE, _SCALING = "ray.io", "kueue.x-k8s.io", "autoscaling.x-k8s.io"
_QUEUED = "queued provisioning"
#: What :attr:`~raytpu_ops.backends.gke.settings.Settings.proxied` tells.
PROXY = "Ray through the API server"

#: In the namespace where the RayClusters live.
RIGHTS: tuple[Right, ...] = (
    Right(_RAY, "rayclusters", "", "get", "readiness, and looking before creating or deleting"),
    Right(_RAY, "rayclusters", "", "list", "leases are found by the labels of their RayClusters"),
    Right(_RAY, "rayclusters", "", "create", "server-side apply of one that is not there yet"),
    Right(_RAY, "rayclusters", "", "patch", "server-side apply, and how far node pools for it have come"),
    Right(_RAY, "rayclusters", "", "delete", "release"),
    Right("", "pods", "", "list", "which hosts are there, what each waits for, and on which nodes"),
    Right("", "pods", "", "delete", "repair, where KubeRay makes the slice anew, and release"),
    Right("", "pods", "log", "get", "last lines of a head that crash-loops"),
    Right("", "secrets", "", "get", "the token that KubeRay makes for each RayCluster; it has the RayCluster's name"),
    Right("", "services", "proxy", "get", "states, logs, the log tail's websocket", PROXY),
    Right("", "services", "proxy", "create", "POST submits and stops jobs, asks models", PROXY),
    Right("", "services", "proxy", "update", "PUT uploads code and deploys applications", PROXY),
    Right(_KUEUE, "workloads", "", "list", "why Kueue holds a RayCluster back, in its Workload's words", "Kueue"),
    Right(_SCALING, "provisioningrequests", "", "list", "how far the queue for a slice's nodes is", _QUEUED),
    Right(_SCALING, "provisioningrequests", "", "create", "server-side apply of one for each slice", _QUEUED),
    Right(_SCALING, "provisioningrequests", "", "patch", "server-side apply", _QUEUED),
    Right(_SCALING, "provisioningrequests", "", "delete", "another kind of capacity is next, repair, release", _QUEUED),
    Right("", "podtemplates", "", "create", "server-side apply of what a ProvisioningRequest names", _QUEUED),
    Right("", "podtemplates", "", "patch", "server-side apply", _QUEUED),
)


def needed(*features: str) -> list[Right]:
    """What no lease can do without, and what some features need.

    :param features: as ``only_for`` of the table names them.
    """
    return [right for right in RIGHTS if right.only_for in ("", *features)]


#: Read by ``raytpu doctor`` alone, on the whole cluster; ``deploy/gke/doctor.yaml`` grants it. Without
#: one of them that check is left out, by name.
DOCTOR_RIGHTS: tuple[Right, ...] = (
    Right("", "namespaces", "", "get", "whether the namespace exists"),
    Right("", "nodes", "", "list", "nodes with TPUs and one for the head: what they offer, labels, taints"),
    Right("apps", "deployments", "", "list", "version, flags and health of the KubeRay operator"),
    Right(
        "admissionregistration.k8s.io", "mutatingwebhookconfigurations", "", "list", "whether the TPU webhook is there"
    ),
)
