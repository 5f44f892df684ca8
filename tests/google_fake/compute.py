"""Compute Engine, as far as slices need it: machine types, reservations, quotas, workload policies, operations.

Not here: instances. Nodes of pools count against reservations that the pool names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.google_fake import refusals
from tests.google_fake.clock import Clock
from tests.google_fake.gate import Ask
from tests.google_fake.refusals import Code, Refusal

Json = dict[str, Any]
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?\Z")
_TOPOLOGY = re.compile(r"[0-9]+x[0-9]+x[0-9]+\Z")
#: CPUs and GiB of machine types: "Plan TPUs in GKE" and "Machine families" in Google Cloud's documentation.
_MACHINES = {
    "ct4p-hightpu-4t": (240, 407),
    "ct5lp-hightpu-1t": (24, 48),
    "ct5lp-hightpu-4t": (112, 192),
    "ct5lp-hightpu-8t": (224, 384),
    "ct5p-hightpu-4t": (208, 448),
    "ct6e-standard-1t": (44, 176),
    "ct6e-standard-4t": (180, 720),
    "ct6e-standard-8t": (180, 1440),
    "tpu7x-standard-4t": (224, 960),
    "e2-medium": (2, 4),
    "e2-standard-4": (4, 16),
    "e2-standard-8": (8, 32),
}


@dataclass(frozen=True)
class Route:
    """One method over HTTP.

    :param verb: `GET`.
    :param path: with names in braces.
    :param method: as the API's reference calls it: `reservations.get`.
    :param ask: the resource and the permissions of a request, from the names in its path and its body.
    :param do: acts, and answers.
    """

    verb: str
    path: str
    method: str
    ask: Callable[[Mapping[str, str], Json], Ask]
    do: Callable[[Mapping[str, str], Json], Json]


@dataclass
class Reservation:
    """Machines that were bought ahead.

    :param machine_type: of all of them.
    :param count: how many there are.
    :param in_use: by others than this fake's node pools.
    :param status: `READY`, `CREATING`, `DELETING`.
    """

    machine_type: str
    count: int
    in_use: int = 0
    status: str = "READY"


class Compute:
    """The service and its state.

    :param clock: of the fake.
    :param uses: name of a reservation (`projects/P/reservations/N`) -> machines of node pools in it.
    :param policies_used: workload policies that node pools name, short names.
    """

    def __init__(self, clock: Clock, uses: Callable[[str], int], policies_used: Callable[[], Iterable[str]]) -> None:
        self.clock = clock
        self._uses = uses
        self._policies_used = policies_used
        #: How long making and removing a policy takes, seconds.
        self.delay = 5.0
        #: `projects/P/zones/Z/reservations/N`.
        self.reservations: dict[str, Reservation] = {}
        #: Machine types that a zone lacks, as `ZONE/TYPE`.
        self.lacks: set[str] = set()
        #: Region -> metric -> limit and usage.
        self.quotas: dict[str, dict[str, tuple[float, float]]] = {}
        #: `projects/P/regions/R/resourcePolicies/N` -> as it is shown.
        self.policies: dict[str, Json] = {}
        #: Policies that were ever made, full names, in order.
        self.made: list[str] = []
        self._operations: dict[str, Json] = {}
        self._numbers = itertools.count(1)

    @property
    def routes(self) -> list[Route]:
        """The methods."""
        zone, region = "/compute/v1/projects/{project}/zones/{zone}", "/compute/v1/projects/{project}/regions/{region}"
        policies = f"{region}/resourcePolicies"

        def get(path: str, method: str, permission: str, do: Callable[[Mapping[str, str], Json], Json]) -> Route:
            return Route("GET", path, method, _asks(path, permission), do)

        reservations = "compute.reservations"
        return [
            get(f"{zone}/reservations", "reservations.list", f"{reservations}.list", self._list_reservations),
            get(f"{zone}/reservations/{{name}}", "reservations.get", f"{reservations}.get", self._get_reservation),
            get(
                f"{zone}/machineTypes/{{name}}", "machineTypes.get", "compute.machineTypes.get", self._get_machine_type
            ),
            get(region, "regions.get", "compute.regions.get", self._get_region),
            get(f"{policies}/{{name}}", "resourcePolicies.get", "compute.resourcePolicies.get", self._get_policy),
            get(policies, "resourcePolicies.list", "compute.resourcePolicies.list", self._list_policies),
            Route(
                "POST",
                policies,
                "resourcePolicies.insert",
                lambda names, body: Ask(
                    f"projects/{names['project']}/regions/{names['region']}/resourcePolicies/{body.get('name', '')}",
                    ("compute.resourcePolicies.create",),
                ),
                self._insert_policy,
            ),
            Route(
                "DELETE",
                f"{policies}/{{name}}",
                "resourcePolicies.delete",
                _asks(f"{policies}/{{name}}", "compute.resourcePolicies.delete"),
                self._delete_policy,
            ),
            get(
                f"{region}/operations/{{name}}", "regionOperations.get", "compute.regionOperations.get", self._operation
            ),
            get(f"{zone}/operations/{{name}}", "zoneOperations.get", "compute.zoneOperations.get", self._operation),
        ]

    def add_reservation(
        self, name: str, machine_type: str, count: int, *, zone: str, project: str, in_use: int = 0
    ) -> Reservation:
        """Machines are bought ahead."""
        found = Reservation(machine_type, count, in_use)
        self.reservations[f"projects/{project}/zones/{zone}/reservations/{name}"] = found
        return found

    def put_policy(self, name: str, topology: str, *, region: str, project: str) -> None:
        """A workload policy that somebody else made."""
        path = f"projects/{project}/regions/{region}/resourcePolicies/{name}"
        policy = {"type": "HIGH_THROUGHPUT", "acceleratorTopology": topology}
        self.policies[path] = self._shown(path, {"name": name, "workloadPolicy": policy})

    def free_in(self, project: str, zone: str, value: str) -> tuple[Reservation | None, int]:
        """A reservation as a node pool names it, and how many of its machines are free.

        :param value: its name, or `projects/P/reservations/N`.
        """
        owner, name = (value.split("/")[1], value.rpartition("/")[2]) if "/" in value else (project, value)
        found = self.reservations.get(f"projects/{owner}/zones/{zone}/reservations/{name}")
        if found is None:
            return None, 0
        return found, found.count - found.in_use - self._uses(f"projects/{owner}/reservations/{name}")

    def policy_names(self) -> list[str]:
        """All workload policies that are ready."""
        return [name for name, policy in self.policies.items() if policy["status"] == "READY"]

    # Methods

    def _get_reservation(self, names: Mapping[str, str], body: Json) -> Json:
        path = _path(names, "zones", "reservations")
        if path not in self.reservations:
            raise _missing(path)
        found = self.reservations[path]
        used = found.in_use + self._uses(f"projects/{names['project']}/reservations/{names['name']}")
        zone = f"https://www.googleapis.com/compute/v1/projects/{names['project']}/zones/{names['zone']}"
        return {
            "kind": "compute#reservation",
            "name": names["name"],
            "zone": zone,
            "status": found.status,
            "specificReservationRequired": True,
            "specificReservation": {
                # 64-bit numbers are text in Google's JSON.
                "count": str(found.count),
                "inUseCount": str(used),
                "assuredCount": str(found.count),
                "instanceProperties": {"machineType": found.machine_type},
            },
        }

    def _list_reservations(self, names: Mapping[str, str], body: Json) -> Json:
        parent = f"projects/{names['project']}/zones/{names['zone']}/reservations/"
        found = [path.removeprefix(parent) for path in self.reservations if path.startswith(parent)]
        items = [self._get_reservation({**names, "name": name}, {}) for name in found]
        return {"kind": "compute#reservationList", **({"items": items} if items else {})}

    def _get_machine_type(self, names: Mapping[str, str], body: Json) -> Json:
        if f"{names['zone']}/{names['name']}" in self.lacks:
            raise _missing(_path(names, "zones", "machineTypes"))
        cpus, memory = _MACHINES.get(names["name"], (0, 0))
        size = {"guestCpus": cpus, "memoryMb": memory * 1024} if cpus else {}
        return {"kind": "compute#machineType", "name": names["name"], "zone": names["zone"], **size}

    def _get_region(self, names: Mapping[str, str], body: Json) -> Json:
        quotas = self.quotas.get(names["region"], {})
        return {
            "kind": "compute#region",
            "name": names["region"],
            "status": "UP",
            "quotas": [{"metric": one, "limit": most, "usage": used} for one, (most, used) in quotas.items()],
        }

    def _get_policy(self, names: Mapping[str, str], body: Json) -> Json:
        path = _path(names, "regions", "resourcePolicies")
        if path not in self.policies:
            raise _missing(path)
        return self.policies[path]

    def _list_policies(self, names: Mapping[str, str], body: Json) -> Json:
        parent = f"projects/{names['project']}/regions/{names['region']}/resourcePolicies/"
        items = [policy for path, policy in self.policies.items() if path.startswith(parent)]
        return {"kind": "compute#resourcePolicyList", **({"items": items} if items else {})}

    def _insert_policy(self, names: Mapping[str, str], body: Json) -> Json:
        name = str(body.get("name", ""))
        path = _path({**names, "name": name}, "regions", "resourcePolicies")
        if not _NAME.match(name):
            raise refusals.invalid(f"Invalid value for field 'resource.name': '{name}'. Must be a match of regex ...")
        if path in self.policies:
            raise Refusal(Code.ALREADY_EXISTS, f"The resource '{path}' already exists", reason="alreadyExists")
        policy = body.get("workloadPolicy") or {}
        if policy.get("type") != "HIGH_THROUGHPUT" or not _TOPOLOGY.match(str(policy.get("acceleratorTopology", ""))):
            raise refusals.invalid("Invalid value for field 'resource.workloadPolicy': '...'. Bad topology or type.")
        self.policies[path] = self._shown(path, body) | {"status": "CREATING"}
        self.made.append(path)

        def ready() -> None:
            if path in self.policies:
                self.policies[path]["status"] = "READY"

        return self._begin(names, path, "insert", ready)

    def _delete_policy(self, names: Mapping[str, str], body: Json) -> Json:
        path = _path(names, "regions", "resourcePolicies")
        if path not in self.policies:
            raise _missing(path)
        if names["name"] in self._policies_used():
            raise Refusal(
                Code.INVALID_ARGUMENT,
                f"The resource_policy resource '{path}' is already being used by a node pool's instance group",
                reason="resourceInUseByAnotherResource",
            )
        self.policies[path]["status"] = "DELETING"
        return self._begin(names, path, "delete", lambda: self.policies.pop(path, None))

    def _operation(self, names: Mapping[str, str], body: Json) -> Json:
        if names["name"] not in self._operations:
            raise _missing(_path(names, "zones" if "zone" in names else "regions", "operations"))
        return self._operations[names["name"]]

    def _begin(self, names: Mapping[str, str], target: str, verb: str, done: Callable[[], object]) -> Json:
        number = next(self._numbers)
        name = f"operation-{int(self.clock.now().timestamp() * 1000)}-{number:013x}-{number:08x}-{number:08x}"
        region = f"https://www.googleapis.com/compute/v1/projects/{names['project']}/regions/{names['region']}"
        operation = {
            "kind": "compute#operation",
            "id": str(10**18 + number),
            "name": name,
            "operationType": verb,
            "status": "RUNNING",
            "progress": 0,
            "targetLink": f"https://www.googleapis.com/compute/v1/{target}",
            "region": region,
            "selfLink": f"{region}/operations/{name}",
        }
        self._operations[name] = operation

        def end() -> None:
            done()
            operation.update(status="DONE", progress=100)

        self.clock.after(self.delay, end)
        return operation

    def _shown(self, path: str, body: Json) -> Json:
        link = f"https://www.googleapis.com/compute/v1/{path}"
        region = link.partition("/resourcePolicies/")[0]
        return {"kind": "compute#resourcePolicy", **body, "region": region, "selfLink": link, "status": "READY"}


def _path(names: Mapping[str, str], scope: str, kind: str) -> str:
    return f"projects/{names['project']}/{scope}/{names[scope[:-1]]}/{kind}/{names['name']}"


def _asks(path: str, permission: str) -> Callable[[Mapping[str, str], Json], Ask]:
    resource = path.removeprefix("/compute/v1/")
    return lambda names, body: Ask(resource.format_map(names), (permission,))


def _missing(path: str) -> Refusal:
    return Refusal(Code.NOT_FOUND, f"The resource '{path}' was not found", reason="notFound")
