"""What a user of the ``tpu_vm`` backend may set, checked in one place.

Not here: who asks Google (``google/access.py``) and how the options become a request (``request.py``).
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from raytpu_ops.backends.google.fields import Account, Labels, Resource, Tags, Words, Zones
from raytpu_ops.backends.google.price import PricePerChipHour
from raytpu_ops.backends.ray_options import RayVersion, start_parameters
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.fields import Flag, Line, Url, Word, matching
from raytpu_ops.tpu.problems import Checked, read
from raytpu_ops.tpu.work import is_reserved

#: What a host needs beside Ray's own requirements: the same as docker/ray-tpu has. ``jax[tpu]`` brings libtpu.
PACKAGES = (
    "ray[default,train,serve]=={ray_version}",
    "jax[tpu]",
    "flax",
    "optax",
    "orbax-checkpoint",
    "etils[epath-gcs]",
    "scikit-learn",
)
_HOST_PORT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?:([0-9]{1,5})\Z")
#: Ray among packages without their spaces, with the version that it is pinned to, if any; also as a file, or in a list
#: of requirements.
_RAY = re.compile(
    r"ray(?:\[[^\]]*\])?(?:===?([0-9][^,;+]*))?(?:[=<>~!;@,+].*)?\Z|.*/ray-[0-9][^/]*\Z|(?:-r|--requirement).*",
    re.IGNORECASE,
)
#: The script puts its folder into PATH, which is split at colons.
_PATH = re.compile(r"/[^\s:]*[^\s:/]\Z")
#: What the startup script itself says to ``ray start``.
_OURS = frozenset({"head", "address", "port", "node-ip-address", "dashboard-host", "dashboard-port", "block"})


def _host_port(value: str) -> str:
    match = _HOST_PORT.match(value)
    if not match or not 0 < int(match[1]) < 65536:
        raise ValueError("must be the address of a Ray head's GCS, 'host:port'")
    return value


def _environment(value: dict[str, str]) -> dict[str, str]:
    for key in value:
        if is_reserved(key):
            raise ValueError(f"{key} is set for each VM and must not be given")
    return value


Variable = Annotated[Word, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
HostPort = Annotated[Word, AfterValidator(_host_port)]
AbsolutePath = Annotated[
    Line,
    matching(_PATH, "must be an absolute path on the VMs, without spaces and colons, such as '/opt/venv/bin/python'"),
]


class Settings(Checked):
    """The options of the ``tpu_vm`` backend.

    A connection may say some and a task others, so here each is checked by itself, and what belongs together where
    slices are asked for, by :meth:`check_enough`.

    :param zones: where slices may be, in the order in which each rung is tried there; a list, or text with commas.
    :param runtime_version: the TPU software version of the VMs; default the one for the generation.
    :param network: the VPC network; default the project's ``default``.
    :param subnetwork: of the network, in each zone's region.
    :param external_ip: give every VM a public address too. Without one they need Cloud NAT to install anything.
    :param reach: which address of the head is used: ``internal``, or ``external`` (needs ``external_ip``).
    :param service_account: the account that the VMs act as; default Compute Engine's. They need no right for what
        this backend does, only for what the jobs do (buckets).
    :param tags: network tags, for firewall rules.
    :param labels: further labels of the VMs.
    :param ray_version: Ray's version on the VMs.
    :param python: absolute path of a Python 3.11 or newer on the VMs, as an image of one's own has it; default one
        that is fetched when a VM first starts.
    :param pip: packages, Ray among them, in the place of :data:`PACKAGES`. They are installed where Python lacks Ray,
        or has another version of it; ``{ray_version}`` is filled in. Empty: nothing is ever installed, and a VM
        without Ray is an error.
    :param ray_start_params: further options of ``ray start`` on every VM.
    :param env: further environment variables of Ray on every VM, and of what installs it there (``PIP_INDEX_URL``).
        They are readable like the VM's metadata: no secrets. Python's own folder goes before a ``PATH``.
    :param ray_head: ``host:port`` of a Ray head of one's own which all slices join; default worker 0 of the first slice
        is the head. Its token comes with the option ``ray_token``, its dashboard's address with ``dashboard_url``.
    :param dashboard_url: where Ray's dashboard is reached; default port 8265 of the head's address.
    :param serve_url: where Serve is reached; default port 8000 of the head's address.
    :param price_per_chip_hour: what a chip costs for an hour, or a dict of that by generation: a plan then says what
        the lease may cost.
    :raises InvalidSpec: one line: where, what is wrong, what would be right.
    """

    zones: Zones = Field(default_factory=list)
    runtime_version: Word | None = None
    network: Resource | None = None
    subnetwork: Resource | None = None
    external_ip: Flag = False
    reach: Annotated[Word, Field(pattern="^(internal|external)$")] = "internal"
    service_account: Account | None = None
    tags: Tags = Field(default_factory=list)
    labels: Labels = Field(default_factory=dict)
    ray_version: RayVersion = "2.60.0"
    python: AbsolutePath | None = None
    pip: Words = Field(default_factory=lambda: list(PACKAGES))
    ray_start_params: Annotated[dict[Word, Line], AfterValidator(start_parameters(_OURS))] = Field(default_factory=dict)
    env: Annotated[dict[Variable, Line], AfterValidator(_environment)] = Field(default_factory=dict)
    ray_head: HostPort | None = None
    dashboard_url: Url | None = None
    serve_url: Url | None = None
    price_per_chip_hour: PricePerChipHour | None = None

    @model_validator(mode="after")
    def _zones_once(self) -> Self:
        if len(set(self.zones)) < len(self.zones):
            raise InvalidSpec(f"zones: {', '.join(self.zones)} names a zone twice; each rung is tried once in each")
        return self

    def check_enough(self) -> None:
        """Refuse options that do not suffice to ask for slices.

        :raises InvalidSpec: one line: what is missing.
        """
        if not self.zones:
            raise InvalidSpec(
                "zones: is missing: backend 'tpu_vm' needs the zones in which slices may be, such as "
                "zones=['us-central2-b'], in its options or in the connection's extra"
            )
        if self.ray_head and not self.dashboard_url:
            raise InvalidSpec("dashboard_url: is missing: with ray_head nothing else says where that Ray is reached")
        if self.reach == "external" and not self.external_ip:
            raise InvalidSpec("reach: 'external' needs external_ip=True, which gives the VMs such an address")
        self._check_packages()

    def _check_packages(self) -> None:
        """VMs that look for a Ray which never comes would bill until the deadline of the phase ``labelled``."""
        rays = {package: match for package in self.packages if (match := _RAY.match("".join(package.split())))}
        if self.pip and not rays:
            raise InvalidSpec(
                f"pip: has no Ray: the list is in the place of the default one, so put {PACKAGES[0]!r} into it, or "
                "leave it empty where the VMs have Ray"
            )
        for package, match in rays.items():
            pin = match[1]
            if pin and not any(fnmatchcase(self.ray_version, one) for one in (pin, f"{pin}.0")):
                raise InvalidSpec(
                    f"pip: has {package}, and ray_version is {self.ray_version}, which the VMs look for: say "
                    "'=={ray_version}' in pip, and set ray_version"
                )

    @property
    def packages(self) -> list[str]:
        """The packages to install, with Ray's version filled in."""
        return [package.replace("{ray_version}", self.ray_version) for package in self.pip]

    @classmethod
    def of(cls, options: object) -> Self:
        """Read what a person wrote.

        :raises InvalidSpec: one line: where, what is wrong, what would be right.
        """
        return read(cls, options, "backend 'tpu_vm'")
