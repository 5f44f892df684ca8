"""Ray on the TPU VMs of the fake Google: it finds its chips, and labels itself, as it does on real ones."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="Google's clients are part of the extra `dev`")

from tests.google_fake import Clock, GoogleFake, zone
from tests.testbed.faults import wait_until
from tests.unit.google.requests_to_google import PARENT, QUEUED, queued

if why := zone.missing():
    pytest.skip(why, allow_module_level=True)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

HEAD = f"{PARENT}/nodes/qr-0"
TOKEN = "a-token-of-this-test-alone-0123456789"
#: Joins whatever Google says that the first worker of the first slice is; what comes before Ray's head is up fails
#: and is tried again.
SCRIPT = f"""#!/bin/bash
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN={TOKEN}
ask() {{ curl -sS --fail -H 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/$1"; }}
ip=$(ask network-interfaces/0/ip)
head=$(ask attributes/tpu-env | sed -n "s/^MEGASCALE_COORDINATOR_ADDRESS: '\\(.*\\):8080'/\\1/p")
small="--num-cpus=1 --object-store-memory=100000000 --disable-usage-stats --block"
role="--address=$head:6379"
[[ $ip == "$head" ]] && role="--head --port=6379 --include-dashboard=false"
until (exec 3<> "/dev/tcp/$head/6379") 2> /dev/null || [[ $ip == "$head" ]]; do sleep 1; done
until {sys.executable} -m ray.scripts.scripts start --node-ip-address="$ip" $small $role; do sleep 1; done
"""
AUTH = ("RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={TOKEN}")
LOOK = """
import json, ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
print(json.dumps([[n["NodeManagerAddress"], n["Labels"], n["Resources"]] for n in ray.nodes() if n["Alive"]]))
"""


def test_ray_labels_itself_from_the_metadata_server() -> None:
    with GoogleFake(clock=Clock(speed=60)) as google:
        vms = google.boots_vms()
        google.tpu.put(QUEUED, queued({"metadata": {"startup-script": SCRIPT}}, slices=2))
        addresses = {one.ip_address for node in google.nodes().values() for one in node.network_endpoints}

        def nodes() -> dict[str, Any] | None:
            if not vms.log(HEAD) or "Ray runtime started" not in vms.log(HEAD):
                return None
            said = vms.run(HEAD, 0, "env", "HOME=/root", *AUTH, sys.executable, "-c", LOOK)
            found = {address: (labels, resources) for address, labels, resources in json.loads(said.splitlines()[-1])}
            return found if found.keys() == addresses else None

        found = wait_until(
            nodes, 300, lambda: "\n".join(vms.log(node, n) for node in google.nodes() for n in (0, 1)), 2
        )
        for number in (0, 1):
            node = google.nodes()[f"{PARENT}/nodes/qr-{number}"]
            for worker, endpoint in enumerate(node.network_endpoints):
                labels, resources = found[endpoint.ip_address]
                assert labels["ray.io/tpu-slice-name"] == f"qr-{number}"
                assert labels["ray.io/tpu-worker-id"] == str(worker)
                assert labels["ray.io/tpu-topology"] == "2x2x2"
                assert labels["ray.io/tpu-pod-type"] == "v4-16"
                assert resources["TPU"] == 4
