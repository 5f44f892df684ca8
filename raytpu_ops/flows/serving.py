"""An application on a lease: deployed beside what is there, then waited for until it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from raytpu_ops.backends.base import Backend, Say
from raytpu_ops.flows.leases import reach, stands, wait_whole
from raytpu_ops.ray.client import RayClient
from raytpu_ops.ray.follow import follow_serve
from raytpu_ops.ray.states import ServeApplication, ServeStatus
from raytpu_ops.tpu.deadlines import Phase, Schedule
from raytpu_ops.tpu.errors import Misconfigured
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.work import ServeApp

#: Builds the user's application with the slice that it is to own (``runtime/serve.py``).
BUILDER = "raytpu_ops.runtime.serve:build"


class ServeRequest(ServeApp):
    """Everything about an application that travels from the task to the trigger, as plain JSON.

    :param runtime_env: Ray's runtime environment.
    :param schedule: how long it may take until the slices are whole, and then until it answers.
    :param poll_s: seconds between two looks.
    :param owner: whose it is, the same over retries and runs; no other task deploys over it.
    """

    runtime_env: dict[str, Any] = Field(default_factory=dict)
    schedule: Schedule
    poll_s: float = Field(default=1.0, gt=0)
    owner: str = ""

    def config(self, lease: SliceLease) -> dict[str, Any]:
        """The application as Serve's REST API takes it."""
        spec = lease.spec.model_dump(mode="json")
        return {
            "name": self.name,
            "import_path": BUILDER,
            "route_prefix": self.route_prefix,
            "args": {"app": self.app, "args": self.args, "slice": spec, "owner": self.owner},
            "runtime_env": self.runtime_env,
        }


async def run_serve(backend: Backend, lease: SliceLease, request: ServeRequest, *, say: Say) -> dict[str, Any]:
    """Deploy the application and wait until it runs; one that runs with the same config stays as it is.

    :return: ``application``, ``url``, ``route_prefix``, ``deployments`` and ``lease_id``, as plain JSON.
    :raises Misconfigured: the name is taken by another task's application.
    :raises UserCodeFailed: the application could not be built or its replicas do not come up.
    :raises DeadlineExceeded: it did not run in time.
    """
    lease, _ = await wait_whole(backend, lease, schedule=request.schedule, say=say)
    async with backend.ray(lease) as client:
        starts = Schedule.start(request.schedule.deadlines)
        await reach(
            backend,
            lease,
            lambda: _deploy(client, lease, request, say),
            schedule=starts,
            phase=Phase.STARTING,
            say=say,
        )
        application = await follow_serve(
            client,
            request.name,
            until=starts.until(Phase.STARTING),
            on_progress=say,
            slices_whole=lambda: stands(backend, lease),
            poll_s=request.poll_s,
        )
        # Of two tasks that deploy at the same moment each has seen nothing of the other; the later one has it.
        _refuse_anothers(application, request.owner, lease)
    base = lease.ray.serve_address or ""
    return {
        "application": request.name,
        "url": f"{base}{request.route_prefix}",
        "route_prefix": request.route_prefix,
        "deployments": {d.name: dict(d.replicas) for d in application.deployments},
        "lease_id": lease.id,
    }


async def _deploy(client: RayClient, lease: SliceLease, request: ServeRequest, say: Say) -> None:
    there = (await client.serve_applications()).get(request.name)
    _refuse_anothers(there, request.owner, lease)
    if there is not None and there.status in (ServeStatus.DEPLOY_FAILED, ServeStatus.UNHEALTHY):
        # Serve keeps the failed one when the same config comes again; a retry means a new start.
        say(f"Application {request.name} is {there.status_word}: removed, to start afresh")
        await client.delete_application(request.name)
    options = http_options(lease)
    await client.deploy(request.config(lease), http_options=options, proxy_location="HeadOnly")
    say(f"Deployed application {request.name} ({request.app}) on lease {lease.id}")


def http_options(lease: SliceLease) -> dict[str, Any]:
    """Where Serve's proxy listens, as the lease says."""
    from urllib.parse import urlsplit

    if lease.ray.serve_address is None:
        raise Misconfigured(f"lease {lease.id} has no address for Serve: its backend {lease.backend!r} cannot serve")
    listens = lease.ray.serve_listens
    address = urlsplit(f"//{listens}" if listens else lease.ray.serve_address)
    return {"host": address.hostname, "port": address.port or (443 if address.scheme == "https" else 80)}


def owner_in(application: ServeApplication) -> str:
    """Whose application it is; empty for one that no task of ours deployed."""
    args = (application.config or {}).get("args")
    return str(args.get("owner") or "") if isinstance(args, Mapping) else ""


def _refuse_anothers(there: ServeApplication | None, owner: str, lease: SliceLease) -> None:
    if there is None or not owner or owner_in(there) in ("", owner):
        return
    raise Misconfigured(
        f"application {there.name} on lease {lease.id} is {owner_in(there)}'s, and {owner} would replace it: "
        "give each task a name of its own"
    )


async def remove_application(backend: Backend, lease: SliceLease, name: str, owner: str = "") -> str:
    """Take an application away; what came of it, in words.

    :param owner: whose it must be; another's stays.
    """
    async with backend.ray(lease) as client:
        there = (await client.serve_applications()).get(name)
        if there is not None and owner and owner_in(there) not in ("", owner):
            return f"application {name}: is {owner_in(there)}'s, left as it is"
        removed = await client.delete_application(name)
    return f"application {name}: {'removed' if removed else 'was not there'}"
