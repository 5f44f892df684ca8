"""The permissions that the backends need at Google; ``deploy/google/`` has the same as custom roles.

Names are those of the API references: "GKE API permissions" for node pools, and "Cloud TPU roles and
permissions", where IAM has none for queued resources: those for nodes count.
Not here: Kubernetes' own rights (``gke/rights.py``), and ``iam.serviceAccounts.actAs``, which is granted on
the account that nodes run as and which a project's policy need not show.
"""

from __future__ import annotations

from typing import NamedTuple

from raytpu_ops.backends.deployed import deployed


class Role(NamedTuple):
    """What an account has to have.

    :param id: of the custom role that has it all, as ``docs/google.md`` calls it.
    :param file: the custom role, below ``deploy``.
    :param needed: without these a lease can't be granted, watched and given back.
    :param looks: without these the checks before creation tell less.
    """

    id: str
    file: str
    needed: tuple[str, ...]
    looks: tuple[str, ...]

    def how_to_grant(self, project: str) -> str:
        """What somebody who may types, in one line.

        :param project: its id.
        """
        return (
            f"gcloud iam roles create {self.id} --project {project} --file {deployed(self.file)} (update in the place "
            f"of create where it is there), then gcloud projects add-iam-policy-binding {project} --role "
            f"projects/{project}/roles/{self.id} --member serviceAccount:ACCOUNT"
        )


GKE = Role(
    "raytpu_gke",
    "google/role-gke.yaml",
    (
        "container.clusters.get",
        "container.clusters.update",
        "container.operations.list",
    ),
    ("compute.machineTypes.get", "compute.regions.get", "compute.reservations.get"),
)
#: Needed on top where TPU7x slices of several hosts get a workload policy of their own.
WORKLOAD_POLICY = (
    "compute.resourcePolicies.create",
    "compute.resourcePolicies.delete",
    "compute.resourcePolicies.get",
)
TPU_VM = Role(
    "raytpu_tpu_vm",
    "google/role-tpu-vm.yaml",
    (
        "tpu.nodes.create",
        "tpu.nodes.delete",
        "tpu.nodes.get",
        "tpu.nodes.list",
        "tpu.operations.get",
    ),
    ("compute.reservations.get", "tpu.acceleratortypes.get", "tpu.runtimeversions.get"),
)
