"""The protocol's side of the local backend: what is refused before anything starts, and how leases are found."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import httpx
import psutil
import pytest

from raytpu_ops.backends.base import Backend, Plan, make_backend
from raytpu_ops.backends.local import LocalBackend, processes
from raytpu_ops.backends.local.layout import HEAD
from raytpu_ops.backends.local.record import read_token
from raytpu_ops.ray.client import RayClient
from raytpu_ops.tpu import capacity
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.spec import SliceSpec

HOUR = timedelta(hours=1)
SPEC = SliceSpec.of("v4", "2x2x2", num_slices=2)


def names_in(folder: Path) -> list[str] | None:
    """What is in a folder; None where there is no folder."""
    return [path.name for path in folder.iterdir()] if folder.exists() else None


def test_it_speaks_the_protocol(root: Path) -> None:
    backend = make_backend("local", root=str(root))
    assert isinstance(backend, Backend)
    assert (backend.name, backend.acquires_in_task) == ("local", True)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"colour": "red"}, "there is no option 'colour'; there are root, head_cpus, host_cpus"),
        ({"host_cpu": 1}, "there is no option 'host_cpu'; did you mean 'host_cpus'"),
        ({"head_cpus": 0}, "head_cpus must be a whole number from 1, got 0"),
        ({"pass_env": "HOME"}, r"pass_env must be a list of names of variables, such as \['MY_VARIABLE'\], got str"),
        ({"pass_env": {"TOKEN": "x"}}, "pass_env must be a list of names .* got dict"),
        ({"host_cpus": True}, "host_cpus"),
        ({"max_hosts": "4"}, "max_hosts"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidSpec, match=f"backend 'local'.*{word}"):
        make_backend("local", **options)


async def test_a_plan_says_what_would_be_made_and_makes_nothing(backend: LocalBackend, root: Path) -> None:
    plan = await backend.plan(SPEC, capacity.ladder(["spot"]), lease_for=HOUR)
    assert any("2 slices of v4 2x2x2" in line and "4 Ray nodes" in line for line in plan.creates)
    assert any("granted at once" in note for note in plan.notes)
    assert names_in(root) == []
    assert Plan.model_validate(plan.model_dump(mode="json")) == plan


async def test_a_plan_warns_of_short_memory(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    class Little:
        available = 10**9

    monkeypatch.setattr(psutil, "virtual_memory", Little)
    plan = await backend.plan(SPEC, capacity.ladder(), lease_for=HOUR)
    assert any("memory is short" in note for note in plan.notes)


async def test_more_hosts_than_the_machine_plays_are_refused(root: Path) -> None:
    with pytest.raises(InvalidSpec, match="4 hosts, this machine plays at most 3; take a smaller topology"):
        await LocalBackend(root, max_hosts=3, ray_start=("true",)).plan(SPEC, capacity.ladder(), lease_for=HOUR)


async def test_a_missing_ray_is_named_with_the_command_that_installs_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(Misconfigured, match=r"Ray is not installed; .*pip install 'raytpu-ops\[local\]'"):
        await LocalBackend(root).plan(SPEC, capacity.ladder(), lease_for=HOUR)


async def test_a_ray_that_is_too_old_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "2.51.1")
    with pytest.raises(Misconfigured, match=r"needs Ray 2\.55 or newer, Ray 2\.51\.1 is installed"):
        await LocalBackend(root).plan(SPEC, capacity.ladder(), lease_for=HOUR)


async def test_a_python_that_ray_cannot_start_is_refused_before_anything_starts(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/opt/my env/bin/python")
    with pytest.raises(Misconfigured, match="this Python '/opt/my env/bin/python'"):
        await LocalBackend(root).plan(SliceSpec.of("v4", "2x2x1"), capacity.ladder(), lease_for=timedelta(hours=1))


async def test_leases_are_found_by_owner_and_labels(backend: LocalBackend, plan: Plan, owner: Owner) -> None:
    other = owner.model_copy(update={"dag_id": "other"})
    lease, second = await backend.acquire(plan, owner), await backend.acquire(plan, other)
    assert await backend.find(owner) == lease
    assert await backend.find(owner.model_copy(update={"map_index": 3})) is None
    assert {found.id for found in await backend.list_leases()} == {lease.id, second.id}
    assert await backend.list_leases(dag_id="other", run_id=owner.run_id) == [second]
    assert await backend.list_leases(task_id="nobody") == []
    with pytest.raises(InvalidSpec, match="can't be narrowed by colour: use dag_id, run_id, task_id"):
        await backend.list_leases(colour="red")


async def test_there_are_no_leases_where_there_is_no_root(root: Path) -> None:
    gone = LocalBackend(f"{root}z")
    assert await gone.list_leases() == []
    assert names_in(gone.root.path) is None


async def test_a_lease_is_released_by_a_backend_with_another_root(
    backend: LocalBackend, root: Path, plan: Plan, owner: Owner
) -> None:
    lease = await backend.acquire(plan, owner)
    elsewhere = LocalBackend(f"{root}y")
    assert (await elsewhere.release(lease)).left == []
    assert processes.marked(root) == []
    assert names_in(Path(f"{root}y")) is None


async def test_a_lease_that_names_a_folder_of_others_touches_nothing(
    backend: LocalBackend, root: Path, plan: Plan, owner: Owner, tmp_path: Path
) -> None:
    lease = await backend.acquire(plan, owner)
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    (victim / "data").touch()
    forged = lease.model_copy(update={"place": {"root": str(victim), "folder": str(victim)}})
    with pytest.raises((Misconfigured, InvalidSpec)):
        await backend.release(forged)
    assert (victim / "data").exists()


async def test_while_the_head_starts_the_report_says_so(backend: LocalBackend, plan: Plan, owner: Owner) -> None:
    lease = await backend.acquire(plan, owner)
    report = await backend.observe(lease)
    assert not report.ready
    assert not report.head_alive
    assert report.fatal is None
    assert [item.name for item in report.slices] == lease.created["slice"]
    assert "is starting since" in report.describe()


async def test_a_dead_head_is_repaired_with_every_slice_and_found_where_it_was(
    backend: LocalBackend, plan: Plan, owner: Owner
) -> None:
    lease = await backend.acquire(plan, owner)
    record = backend._cluster.read(lease.id)
    assert record is not None
    backend._cluster.kill(record, [HEAD])
    report = await backend.observe(lease)
    assert report.fatal is None
    assert report.broken == lease.created["slice"]
    repaired = await backend.repair(lease)
    assert repaired.ray == lease.ray
    assert not set(repaired.created["slice"]) & set(lease.created["slice"])
    report = await backend.observe(lease)
    assert not report.broken
    assert "head" in report.describe()
    assert "is starting since" in report.describe()


async def test_a_released_lease_is_fatal_and_has_no_client(backend: LocalBackend, plan: Plan, owner: Owner) -> None:
    lease = await backend.acquire(plan, owner)
    assert (await backend.release(lease)).left == []
    report = await backend.observe(lease)
    assert report.fatal is not None
    assert "provision again" in report.fatal
    with pytest.raises(Misconfigured, match=f"lease {lease.id} is not under .* any more"):
        backend.ray(lease)


async def test_a_repaired_slice_is_observed_under_its_new_name_with_the_old_lease_too(
    backend: LocalBackend, plan: Plan, owner: Owner
) -> None:
    lease = await backend.acquire(plan, owner)
    record = backend._cluster.read(lease.id)
    assert record is not None
    backend._cluster.kill(record, [record.slices[0].hosts[0].part])
    assert (await backend.observe(lease)).broken == [lease.created["slice"][0]]
    repaired = await backend.repair(lease)
    assert repaired.created["slice"] == [f"{lease.created['slice'][0]}-r1", lease.created["slice"][1]]
    assert [item.name for item in (await backend.observe(lease)).slices] == repaired.created["slice"]
    assert await backend.find(owner) == repaired


async def test_a_whole_lease_comes_back_from_repair_as_it_is(backend: LocalBackend, plan: Plan, owner: Owner) -> None:
    lease = await backend.acquire(plan, owner)
    assert await backend.repair(lease) == lease


async def test_the_client_carries_the_leases_token(
    backend: LocalBackend, plan: Plan, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await backend.acquire(plan, owner)
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"ray_version": "2.60.0", "session_name": "s"})

    real = RayClient.__init__

    def with_transport(self: RayClient, address: str, **options: object) -> None:
        real(self, address, **options, transport=httpx.MockTransport(answer))  # type: ignore[arg-type]

    monkeypatch.setattr(RayClient, "__init__", with_transport)
    async with backend.ray(lease) as ray:
        await ray.version()
    assert seen[0].headers["authorization"] == f"Bearer {read_token(Path(lease.place['folder']))}"
    assert str(seen[0].url).startswith(lease.ray.address)


def test_the_package_is_light_to_import() -> None:
    heavy = "psutil", "httpx", "ray", "pydantic"
    code = f"import sys, raytpu_ops.backends.local; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
