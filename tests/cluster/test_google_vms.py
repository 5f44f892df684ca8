"""TPU VMs of the fake Google: namespaces that run the node's startup script and ask their own metadata server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="Google's clients are part of the extra `dev`")

import httpx
from google.cloud import tpu_v2

from tests.google_fake import Clock, GoogleFake, zone
from tests.google_fake.access import FakeAccess
from tests.google_fake.vms import BootsVms
from tests.testbed.faults import wait_until
from tests.unit.google.requests_to_google import PARENT, QUEUED, queued

if why := zone.missing():
    pytest.skip(why, allow_module_level=True)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

FIRST, SECOND = f"{PARENT}/nodes/qr-0", f"{PARENT}/nodes/qr-1"
#: Serves a file that it makes in /srv, which only its own layer has, and tells how far it is.
SCRIPT = f"""#!/bin/bash
ask() {{ curl -sS --retry 5 --retry-connrefused -H 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/$1"; }}
mkdir -p /srv/www && cd /srv/www || exit 1
echo "start" >> /srv/starts
for one in accelerator-type agent-worker-number instance-id tpu-env worker-network-endpoints own; do
    ask "instance/attributes/$one" > "$one"
done
ask project/project-id > project; ask instance/network-interfaces/0/ip > ip; hostname > hostname
ls /dev/accel* > chips
echo "HOME is ${{HOME-not set}}"
curl -sS -X PUT -H 'Metadata-Flavor: Google' --data-binary 'serves' \
    http://metadata.google.internal/computeMetadata/v1/instance/guest-attributes/raytpu/state
exec {sys.executable} -m http.server 8265
"""


@pytest.fixture
def google() -> Iterator[GoogleFake]:
    with GoogleFake(clock=Clock(speed=60)) as fake:
        yield fake


@pytest.fixture
async def tpu(google: GoogleFake) -> tpu_v2.TpuClient:
    credentials = await FakeAccess(google).credentials()
    return tpu_v2.TpuClient(credentials=credentials, client_options={"api_endpoint": google.endpoints["tpu"]})


@pytest.fixture
def vms(google: GoogleFake, tpu: tpu_v2.TpuClient) -> BootsVms:
    """Two slices of two VMs, active."""
    vms = google.boots_vms()
    metadata = {"startup-script": SCRIPT, "own": "1", "enable-guest-attributes": "TRUE"}
    resource = queued({"metadata": metadata}, slices=2)
    tpu.create_queued_resource(parent=PARENT, queued_resource_id="qr", queued_resource=resource)
    wait_until(lambda: state(tpu) == "ACTIVE", 60, lambda: f"not active: {state(tpu)} {vms.errors}")
    return vms


def state(tpu: tpu_v2.TpuClient) -> str:
    return str(tpu.get_queued_resource(name=QUEUED).state.state.name)


def told(tpu: tpu_v2.TpuClient, node: str) -> list[str]:
    """What the workers of a node told."""
    answer = tpu.get_guest_attributes(request={"name": node, "query_path": "raytpu/state"})
    return [one.value for worker in answer.guest_attributes for one in worker.query_value.items]


def addresses(tpu: tpu_v2.TpuClient, node: str) -> list[str]:
    return [one.ip_address for one in tpu.get_node(name=node).network_endpoints]


def read(address: str, path: str) -> str:
    return httpx.get(f"http://{address}:8265/{path}", timeout=2).text.strip()


def answers(address: str) -> bool:
    try:
        read(address, "ip")
    except httpx.TransportError:
        return False
    return True


def test_each_worker_is_a_machine_of_its_own_that_knows_who_it_is(tpu: tpu_v2.TpuClient, vms: BootsVms) -> None:
    for number, node in enumerate((FIRST, SECOND)):
        wait_until(
            lambda node=node: told(tpu, node) == ["serves"] * 2, 60, lambda node=node: f"{node}: {vms.log(node)}"
        )
        assert "HOME is not set" in vms.log(node)
        for worker, address in enumerate(addresses(tpu, node)):
            wait_until(lambda address=address: answers(address), 30, f"{address} does not serve")
            said = {name: read(address, name) for name in ("accelerator-type", "instance-id", "own", "ip", "project")}
            assert said == {
                "accelerator-type": "v4-16",
                "instance-id": f"qr-{number}",
                "own": "1",
                "ip": address,
                "project": "tpu-project",
            }
            assert read(address, "agent-worker-number") == str(worker)
            assert read(address, "chips").split() == [f"/dev/accel{chip}" for chip in range(4)]
            env = read(address, "tpu-env")
            assert "TOPOLOGY: '2x2x2'" in env
            assert f"MEGASCALE_SLICE_ID: '{number}'" in env
            assert f"MEGASCALE_COORDINATOR_ADDRESS: '{addresses(tpu, FIRST)[0]}:8080'" in env
            hosts = [one.rpartition(":")[2] for one in read(address, "worker-network-endpoints").split(",")]
            assert hosts == addresses(tpu, node)
    assert not Path("/srv/www").exists()


def test_a_request_without_the_flavour_is_refused_and_metadata_may_change(tpu: tpu_v2.TpuClient, vms: BootsVms) -> None:
    url = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/own"

    def ask(*more: str) -> str:
        return vms.run(FIRST, 0, "curl", "-sS", *more, url)

    assert "Metadata-Flavor" in ask()
    assert ask("-H", "Metadata-Flavor: Google") == "1"
    node = tpu.get_node(name=FIRST)
    node.metadata["own"] = "2"
    tpu.update_node(node=node, update_mask={"paths": ["metadata"]})
    wait_until(lambda: ask("-H", "Metadata-Flavor: Google") == "2", 10, "the new metadata does not arrive")


def test_a_machine_that_restarts_runs_its_script_again_on_the_same_disk(tpu: tpu_v2.TpuClient, vms: BootsVms) -> None:
    address = addresses(tpu, FIRST)[1]
    wait_until(lambda: answers(address), 60, "it does not serve")
    vms.kill(FIRST, 1)
    assert not answers(address)
    assert answers(addresses(tpu, FIRST)[0])
    vms.restart(FIRST, 1)
    wait_until(lambda: answers(address), 60, "it does not serve again")
    assert (vms.folder(FIRST, 1) / "upper" / "srv" / "starts").read_text() == "start\nstart\n"


def test_preemption_and_deletion_end_everything_on_the_machines(
    google: GoogleFake, tpu: tpu_v2.TpuClient, vms: BootsVms
) -> None:
    first, second = addresses(tpu, FIRST)[0], addresses(tpu, SECOND)[0]
    for address in (first, second):
        wait_until(lambda address=address: answers(address), 60, f"{address} does not serve")
    google.tpu.delays.suspend = 24 * 3600  # until then the other slice goes on
    google.tpu.preempt(FIRST)
    wait_until(lambda: not answers(first), 30, "a machine outlives its preemption")
    assert answers(second)
    tpu.delete_queued_resource(request={"name": QUEUED, "force": True})
    wait_until(lambda: not google.queued_resources(), 60, "the queued resource is left")
    assert not answers(second)
    assert set(vms.status().values()) == {False}


def test_nothing_outlives_the_process_that_wanted_it(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import time
        from tests.google_fake import Clock, GoogleFake
        from tests.unit.google.requests_to_google import QUEUED, queued
        with GoogleFake(clock=Clock(speed=60)) as google:
            vms = google.boots_vms()
            google.tpu.put(QUEUED, queued({"metadata": {"startup-script": "#!/bin/bash\\nexec sleep 1000"}}))
            while not all(vms.status().values()) or not vms.status():
                time.sleep(0.1)
            print(vms._zone._layout.root, vms._zone.address(0), flush=True)
            time.sleep(1000)
        """
    )
    path = tmp_path / "owner.py"
    path.write_text(program)
    repository = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(repository), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(path)], cwd=repository, env=environment, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folder, address = owner.stdout.readline().split()
        net = address.rpartition(".")[0] + "."
        assert net in _addresses_of_this_machine()
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not Path(folder).exists(), 60, f"{folder} is left")
    wait_until(lambda: net not in _addresses_of_this_machine(), 30, f"an interface with {net} is left")


def _addresses_of_this_machine() -> str:
    return subprocess.run(["ip", "-4", "-o", "addr"], check=True, capture_output=True, text=True).stdout
