"""A Ray head of one's own: its token and addresses, and a connection and a task that each say some of the options."""

from __future__ import annotations

from datetime import timedelta

import pytest

from raytpu_ops.backends.tpu_vm.record import TOKEN
from raytpu_ops.flows.serving import http_options
from raytpu_ops.tpu.capacity import Spot, ladder
from raytpu_ops.tpu.errors import InvalidSpec
from tests.google_fake import GoogleFake
from tests.google_fake.fake import PROJECT, ZONE
from tests.unit.tpu_vm.conftest import ME, SPEC, Make, full, nothing_left, planned

PARENT = f"projects/{PROJECT}/locations/{ZONE}"
HEAD = {"ray_head": "10.9.9.9:6379", "dashboard_url": "http://10.9.9.9:8265"}
#: Options that do not suffice to ask for slices, as a connection alone may have them, and what is said of them.
TOO_FEW = {
    "no token": (HEAD, "ray_token: is missing"),
    "no dashboard": ({"ray_head": "10.9.9.9:6379", "ray_token": "the-users-own"}, "dashboard_url: is missing"),
    "no address": ({"reach": "external"}, "'external' needs external_ip=True"),
    "a list without Ray": (
        {"pip": ["pandas", "raytpu-ops"]},
        r"pip: has no Ray: the list .*'ray\[default,train,serve\]",
    ),
    "another Ray": ({"pip": "ray[default]==2.58.0"}, r"pip: has ray\[default\]==2.58.0, and ray_version is 2.60.0"),
    "no zones": ({"zones": []}, "zones: is missing: backend 'tpu_vm' needs the zones"),
}


async def test_a_head_of_ones_own_brings_its_token_and_its_addresses(google: GoogleFake, make: Make):
    backend = make(ray_head="10.9.9.9:6379", dashboard_url="http://10.9.9.9:8265", ray_token="the-users-own")
    lease = await backend.acquire(planned(), ME)
    metadata = google.queued_resources()[full()].tpu.node_spec[0].node.metadata
    assert metadata[TOKEN] == "the-users-own"
    assert "the-users-own" not in metadata["startup-script"]
    assert "RAY_HEAD=10.9.9.9:6379" in metadata["startup-script"]
    assert (lease.ray.address, lease.ray.serve_address) == ("http://10.9.9.9:8265", "http://10.9.9.9:8000")
    # Its machine may have other addresses than the one by which it is reached.
    assert lease.ray.serve_listens == "0.0.0.0:8000"
    assert "the-users-own" not in repr(backend)


@pytest.mark.parametrize("url", ["https://ray.example.net", "http://10.7.7.7:9000"])
async def test_serve_listens_on_worker_0_wherever_the_dashboard_is_reached(google: GoogleFake, make: Make, url: str):
    """A proxy's address is none of the head's: nobody can listen there."""
    lease = await make(dashboard_url=url).acquire(planned(), ME)
    first = google.nodes()[f"{PARENT}/nodes/{lease.created['slice'][0]}"].network_endpoints[0].ip_address
    assert lease.ray.address == url
    assert lease.ray.serve_listens == f"{first}:8000"
    assert http_options(lease) == {"host": first, "port": 8000}


@pytest.mark.parametrize(("options", "told"), TOO_FEW.values(), ids=TOO_FEW)
async def test_what_is_missing_is_said_where_slices_are_asked_for(
    google: GoogleFake, make: Make, options: dict[str, str], told: str
):
    with pytest.raises(InvalidSpec, match=told):
        await make(**options).plan(SPEC, ladder(), lease_for=timedelta(hours=2))
    with pytest.raises(InvalidSpec, match=told):
        await make(**options).acquire(planned(), ME)
    assert google.tpu.made == []


@pytest.mark.parametrize(
    "options",
    [*(options for options, _ in TOO_FEW.values()), {"ray_token": "the-users-own"}],
    ids=[*TOO_FEW, "a token"],
)
async def test_a_lease_is_looked_after_with_what_the_connection_alone_says(
    google: GoogleFake, make: Make, options: dict[str, str]
):
    """F43: the provisioning task has more options than those that come after it, and the reaper."""
    lease = await make(**HEAD, ray_token="the-users-own").acquire(planned(), ME)
    assert await make(**options).find(ME) == lease
    assert await make(**options).list_leases() == [lease]
    assert (await make(**options).observe(lease)).fatal is None
    assert await make(**options).repair(lease) == lease
    await make(**options).release(lease)
    google.advance(300)
    assert nothing_left(google)


@pytest.mark.parametrize("options", [{}, {"ray_token": "a-newer-one"}], ids=["without it", "with a newer one"])
async def test_a_repair_hands_the_token_of_a_head_of_ones_own_on(
    google: GoogleFake, make: Make, options: dict[str, str]
):
    lease = await make(**HEAD, ray_token="the-users-own").acquire(planned(Spot()), ME)
    google.tpu.preempt(f"{PARENT}/nodes/{lease.created['slice'][0]}")
    google.advance(60)

    anew = await make(**options).repair(lease)

    assert anew.created["slice"] != lease.created["slice"]
    (resource,) = google.queued_resources().values()
    assert resource.tpu.node_spec[0].node.metadata[TOKEN] == options.get("ray_token", "the-users-own")


async def test_a_token_without_a_head_is_no_head_of_ones_own(google: GoogleFake, make: Make):
    """One connection may serve DAGs with a head of their own, and others."""
    await make(ray_token="the-users-own").acquire(planned(), ME)
    assert google.queued_resources()[full()].tpu.node_spec[0].node.metadata[TOKEN] != "the-users-own"
