"""``raytpu doctor --backend tpu_vm``: whether Google lets this account have TPU VMs in the zones that were named.

Asked as the one who will run the backend; nothing is made. What a particular spec needs is ``raytpu plan``'s business.
Not here: who that is (``cli/backends.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from raytpu_ops.backends.google import roles
from raytpu_ops.backends.google.access import CloudAccess
from raytpu_ops.backends.google.clients import GoogleApis
from raytpu_ops.backends.google.refusals import is_denied, is_nowhere
from raytpu_ops.backends.tpu_vm.request import RUNTIME_VERSIONS, TYPES
from raytpu_ops.cli.doctor import Check, package, unseen
from raytpu_ops.tpu.errors import Misconfigured, RayTpuError, RemoteUnavailable
from raytpu_ops.tpu.shapes import catalogue

_GET = "pip install 'raytpu-ops[google]'"
_WHO = (
    "gcloud auth application-default login, GOOGLE_APPLICATION_CREDENTIALS, or an Airflow connection with --conn-id; "
    "and --project"
)


async def checks(cloud: CloudAccess, zones: Sequence[str]) -> list[Check]:
    """Look at everything.

    :param cloud: who asks.
    :param zones: where slices may be.
    """
    found = [package("google-cloud-tpu", (1, 23), _GET)]
    if found[0].missing:
        return found
    try:
        async with GoogleApis(cloud) as apis:
            await cloud.credentials()
            found.append(Check("credentials", True, f"there are some, for project {apis.project}"))
            looks = [_permissions(apis), *(_zone(apis, zone) for zone in zones)]
            for rows in await asyncio.gather(*looks):
                found += rows
    except RemoteUnavailable as error:
        found.append(unseen("credentials", str(error), "try again"))
    except Misconfigured as error:
        found.append(Check("credentials", False, str(error), _WHO))
    return found


async def _permissions(apis: GoogleApis) -> list[Check]:
    role = roles.TPU_VM
    how = role.how_to_grant(apis.project)
    try:
        granted = await apis.permissions([*role.needed, *role.looks])
    except RayTpuError as error:
        return [unseen("permissions", str(error), "enable cloudresourcemanager.googleapis.com")]
    rows = []
    for name, wanted, needed in (("permissions", role.needed, True), ("permissions of plans", role.looks, False)):
        missing = [one for one in wanted if one not in granted]
        if missing:
            rows.append(Check(name, False, f"without {', '.join(missing)}", how, needed=needed))
        else:
            rows.append(Check(name, True, f"all {len(wanted)}"))
    return rows


async def _zone(apis: GoogleApis, zone: str) -> list[Check]:
    """Which generations the zone has, each told by its smallest slice, and whether the API answers there at all."""
    parent = f"projects/{apis.project}/locations/{zone}"
    had, without = [], []
    try:
        for name in TYPES:
            word, version = catalogue(name)[0].pod_type, RUNTIME_VERSIONS[name]
            kind = await apis.ask_or_none(
                f"get accelerator type {word} in {zone}",
                apis.tpu.get_accelerator_type,
                name=f"{parent}/acceleratorTypes/{word}",
            )
            if kind is None:
                continue
            had.append(name)
            software = await apis.ask_or_none(
                f"get runtime version {version} in {zone}",
                apis.tpu.get_runtime_version,
                name=f"{parent}/runtimeVersions/{version}",
            )
            without += [] if software is not None else [f"{version} for {name}"]
    except RayTpuError as error:
        return [_unlisted(zone, error, apis.project)]
    if not had:
        return [Check(zone, False, "it has no TPUs that this backend knows", "name another zone")]
    rows = [Check(zone, True, ", ".join(had))]
    if without:
        rows.append(Check(f"{zone}, software", False, f"no {', '.join(without)}", "set runtime_version", needed=False))
    return rows


def _unlisted(zone: str, error: RayTpuError, project: str) -> Check:
    if isinstance(error, RemoteUnavailable):
        return unseen(zone, str(error), "try again")
    if is_nowhere(error):
        return Check(zone, False, str(error), "name a zone that Cloud TPU has: gcloud compute tpus locations list")
    if is_denied(error):
        return unseen(zone, str(error), roles.TPU_VM.how_to_grant(project))
    how = "see what Google says; gcloud services enable tpu.googleapis.com enables the API"
    return Check(zone, False, str(error), how)
