"""The startup script in a plain bash: what it asks, what it starts Ray with, and what it says where it can not.

The metadata server and Python are played by two small programs; `tests/cluster/test_tpu_vm_hosts.py` runs it whole.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raytpu_ops.backends.tpu_vm.settings import Settings
from raytpu_ops.backends.tpu_vm.startup import script
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake.fake import ZONE
from tests.unit.tpu_vm.conftest import SPEC
from tests.waiting import eventually

if sys.platform != "linux":
    pytest.skip("the script is for TPU VMs, which run Linux", allow_module_level=True)

ONE = SliceSpec.of("v4", "2x2x2")
TOKEN = "a-token-that-nobody-may-see"
#: The metadata server: files below a folder; what is PUT is appended to a file.
CURL = """#!/bin/bash
url=${!#}
while (($#)); do
    [[ $1 == --data-binary ]] && echo "$2" >> "$PLAYED/said" && exit
    [[ $1 == "Metadata-Flavor: Google" ]] && asked=rightly
    shift
done
[[ $asked == rightly ]] || exit 22
exec cat "$PLAYED/metadata/${url#*/instance/}"
"""
#: Python: has the version of Ray that a file says, and keeps what it is told to start, and with what. This Ray ends at
#: once, so the script starts it again and again, and what a test reads is replaced meanwhile, never half written.
PYTHON = """#!/bin/bash
case "$*" in
    "- "*) cat > /dev/null; [[ $2 == "$(cat "$PLAYED/ray")" ]] || { echo "Ray $2 is wanted" >&2; exit 1; } ;;
    *"pip install"*) echo "$*" >> "$PLAYED/installed"
        [[ -e $PLAYED/broken ]] && { echo "no such package" >&2; exit 1; }
        echo 2.60.0 > "$PLAYED/ray" ;;
    *) env > "$PLAYED/new"; mv "$PLAYED/new" "$PLAYED/env"
        stat --format %a "$RAY_AUTH_TOKEN_PATH" > "$PLAYED/new"; mv "$PLAYED/new" "$PLAYED/mode"
        cat "$RAY_AUTH_TOKEN_PATH" > "$PLAYED/new"; mv "$PLAYED/new" "$PLAYED/token"
        echo "$*" >> "$PLAYED/started" ;;
esac
"""


class Vm:
    """A VM that is a folder.

    :param folder: empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin, self.played = folder / "bin", folder / "played"
        self.bin.mkdir()
        for path in ("run", "opt", "var/log"):
            (folder / path).mkdir(parents=True)
        (self.played / "metadata" / "attributes").mkdir(parents=True)
        (self.played / "metadata" / "network-interfaces" / "0").mkdir(parents=True)
        for name, text in (("curl", CURL), ("python", PYTHON), ("sleep", "#!/bin/bash\nexec /bin/sleep 0.05\n")):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        (self.played / "ray").write_text("2.60.0\n")
        self.is_worker(0)
        self.attribute("raytpu-token", TOKEN)
        self.process: subprocess.Popen[bytes] | None = None

    def attribute(self, name: str, text: str) -> None:
        """The metadata server says so."""
        (self.played / "metadata" / "attributes" / name).write_text(text)

    def is_worker(self, worker: int, slice_id: int | None = None) -> None:
        """It is this worker, of this slice among several."""
        own = f"127.99.{slice_id or 0}.{worker + 2}"
        (self.played / "metadata" / "network-interfaces" / "0" / "ip").write_text(own)
        self.attribute("agent-worker-number", str(worker))
        self.attribute("worker-network-endpoints", "unknown:unknown:127.99.0.2,unknown:unknown:127.99.0.3")
        env = "ACCELERATOR_TYPE: 'v4-16'\nTOPOLOGY: '2x2x2'\n"
        if slice_id is not None:
            env += f"MEGASCALE_COORDINATOR_ADDRESS: '127.99.0.2:8080'\nMEGASCALE_SLICE_ID: '{slice_id}'\n"
        self.attribute("tpu-env", env)

    def boot(self, spec: SliceSpec, **options: Any) -> None:
        """Run the script, in folders of its own."""
        text = script(spec, Settings.of({"zones": ZONE, "python": str(self.bin / "python"), **options}))
        for path in ("/run/raytpu", "/opt/raytpu", "/var/log/raytpu.log"):
            assert path in text
            text = text.replace(path, f"{self.folder}{path}")
        file = self.folder / "startup-script"
        file.write_text(text)
        environment = {"PATH": f"{self.bin}:{os.defpath}", "PLAYED": str(self.played)}
        log = (self.folder / "serial.log").open("wb")
        argv = [shutil.which("bash") or "bash", str(file)]
        self.process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)
        log.close()

    def read(self, name: str) -> str:
        path = self.played / name
        return path.read_text() if path.exists() else ""

    def log(self) -> str:
        return (self.folder / "serial.log").read_text()

    def until(self, there: Callable[[], object], what: str) -> None:
        try:
            eventually(there, what, limit_s=60)
        except AssertionError:
            print(self.log()[-3000:])
            raise

    def end(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def vm(tmp_path: Path) -> Iterator[Vm]:
    found = Vm(tmp_path)
    yield found
    found.end()


def test_worker_0_of_the_first_slice_is_the_head(vm: Vm):
    vm.is_worker(0, slice_id=0)
    vm.boot(SPEC, ray_start_params={"num-cpus": "4"}, env={"JAX_PLATFORMS": "tpu,cpu", "MINE": "two words"})
    vm.until(lambda: vm.read("started"), "Ray is started")
    line = vm.read("started").splitlines()[0]
    assert line == (
        "-m ray.scripts.scripts start --head --port=6379 --dashboard-host=127.99.0.2 --dashboard-port=8265 "
        "--node-ip-address=127.99.0.2 --num-cpus=4 --block --log-color=false"
    )
    env = dict(line.split("=", 1) for line in vm.read("env").splitlines() if "=" in line)
    assert env["RAY_AUTH_MODE"] == "token"
    assert vm.read("token") == TOKEN
    assert vm.read("mode") == "600\n"
    assert (env["JAX_PLATFORMS"], env["MINE"]) == ("tpu,cpu", "two words")
    assert env["PATH"].startswith(str(vm.bin))
    assert vm.read("installed") == ""


def test_the_users_variables_are_rays_and_not_the_scripts(vm: Vm):
    """Whatever the script itself calls something: both have what they need."""
    mine = {"SLICES": "1", "STATE": "x", "RAY_VERSION": "1.0", "LOG": "debug", "PYTHON": "/none", "UID": "7"}
    mine |= {"GCS_PORT": "1", "address": "nowhere", "role": "x", "PATH": f"/mine:{os.defpath}", "ENVIRONMENT": "test"}
    vm.is_worker(0, slice_id=0)
    vm.boot(SPEC, env=mine)
    vm.until(lambda: vm.read("started"), "Ray is started")
    assert "--head --port=6379 --dashboard-host=127.99.0.2" in vm.read("started")
    assert "slice 0 worker 0 at 127.99.0.2 starts Ray 2.60.0" in vm.read("said")
    env = dict(line.split("=", 1) for line in vm.read("env").splitlines() if "=" in line)
    assert {name: env[name] for name in mine} == mine | {"PATH": f"{vm.bin}:/mine:{os.defpath}"}


def test_what_installs_has_the_users_variables_too(vm: Vm):
    (vm.played / "ray").write_text("2.55.0\n")
    pip = vm.bin / "pip-python"
    pip.write_text(PYTHON.replace('echo "$*" >> "$PLAYED/installed"', 'echo "$PIP_INDEX_URL" >> "$PLAYED/installed"'))
    pip.chmod(0o755)
    vm.boot(ONE, python=str(pip), pip=["ray"], env={"PIP_INDEX_URL": "https://packages.example.net"})
    vm.until(lambda: vm.read("started"), "Ray is started")
    assert vm.read("installed") == "https://packages.example.net\n"


def test_a_lone_slice_finds_its_head_among_its_own_workers(vm: Vm):
    vm.boot(ONE)
    vm.until(lambda: vm.read("started"), "Ray is started")
    assert "--head" in vm.read("started")


@pytest.mark.parametrize(
    "endpoints", ["unknown:unknown:127.99.0.2,unknown:unknown:127.99.0.3", "127.99.0.2,127.99.0.3"]
)
def test_both_ways_in_which_workers_are_listed(vm: Vm, endpoints: str):
    vm.is_worker(1)
    vm.attribute("worker-network-endpoints", endpoints)
    vm.boot(ONE)
    vm.until(lambda: "waits for Ray's head at 127.99.0.2:6379" in vm.read("said"), "it waits for the head")


@pytest.mark.parametrize(("worker", "slice_id"), [(1, 0), (0, 1), (1, 1)])
def test_all_others_wait_for_the_head(vm: Vm, worker: int, slice_id: int):
    vm.is_worker(worker, slice_id)
    vm.boot(SPEC)
    vm.until(lambda: "waits for Ray's head at 127.99.0.2:6379" in vm.read("said"), "it waits for the head")
    assert f"slice {slice_id} worker {worker}" in vm.read("said")
    assert vm.read("started") == ""


def test_a_head_of_ones_own_is_joined_by_all(vm: Vm, tmp_path: Path):
    import socket

    vm.is_worker(0, slice_id=0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        vm.boot(SPEC, ray_head=address, dashboard_url="http://127.0.0.1:8265")
        vm.until(lambda: vm.read("started"), "Ray is started")
    assert f"start --address={address} --node-ip-address=127.99.0.2" in vm.read("started")


def test_ray_that_ends_is_started_again_and_said(vm: Vm):
    vm.boot(ONE)
    vm.until(lambda: vm.read("started").count("\n") >= 2, "Ray is started again")
    assert "ended with 0 and is tried again" in vm.read("said")


def test_what_is_missing_is_installed_once(vm: Vm):
    (vm.played / "ray").write_text("2.55.0\n")
    vm.boot(ONE, pip=["ray[default]=={ray_version}", "jax[tpu]"])
    vm.until(lambda: vm.read("started").count("\n") >= 2, "Ray is started twice")
    assert vm.read("installed") == "-m pip install --quiet ray[default]==2.60.0 jax[tpu]\n"
    assert "installs ray[default]==2.60.0 jax[tpu]" in vm.read("said")


def test_python_is_fetched_where_none_is_named(vm: Vm):
    """uv brings a Python of its own: that of the TPU software is older than this package."""
    own = vm.folder / "opt" / "raytpu"
    uv = vm.bin / "fetched-uv"
    uv.write_text(
        f'#!/bin/bash\necho "uv $*" >> "$PLAYED/installed"\n[[ $1 == venv ]] && mkdir -p {own}/venv/bin && '
        f'cp {vm.bin}/python {own}/venv/bin/python\n[[ $1 == pip ]] && echo 2.60.0 > "$PLAYED/ray"\nexit 0\n'
    )
    python3 = vm.bin / "python3"
    python3.write_text(
        f'#!/bin/bash\necho "python3 $*" >> "$PLAYED/installed"; mkdir -p {own}/uv/bin; cp {uv} {own}/uv/bin/uv\n'
    )
    for program in (uv, python3):
        program.chmod(0o755)
    (vm.played / "ray").write_text("none\n")
    vm.boot(ONE, python=None, pip=["ray"])
    vm.until(lambda: vm.read("started"), "Ray is started")
    assert vm.read("installed").splitlines() == [
        f"python3 -m pip install --quiet --target {own}/uv uv",
        f"uv venv --quiet --python 3.11 {own}/venv",
        f"uv pip install --quiet --python {own}/venv/bin/python ray",
    ]


def test_an_installation_that_fails_is_said_and_tried_again(vm: Vm):
    (vm.played / "ray").write_text("2.55.0\n")
    (vm.played / "broken").touch()
    vm.boot(ONE, pip=["ray"])
    vm.until(lambda: vm.read("said").count("no such package") >= 3, "it says why, again and again")
    assert vm.read("started") == ""
    # Not its own words once more in each of them.
    assert all(line.count("ended with") <= 1 for line in vm.read("said").splitlines())
    (vm.played / "broken").unlink()
    vm.until(lambda: vm.read("started"), "Ray is started")


def test_nothing_is_installed_where_pip_is_empty(vm: Vm):
    (vm.played / "ray").write_text("2.55.0\n")
    vm.boot(ONE, pip=[])
    vm.until(lambda: "the option pip is empty" in vm.read("said"), "it says why")
    assert vm.read("installed") == ""


def test_slices_that_are_not_told_of_each_other_say_so(vm: Vm):
    vm.is_worker(0)
    vm.boot(SPEC)
    vm.until(lambda: "does not say where worker 0 of the first slice is" in vm.read("said"), "it says why")
    assert vm.read("started") == ""


def test_the_token_is_in_no_output(vm: Vm):
    vm.boot(ONE)
    vm.until(lambda: vm.read("started").count("\n") >= 2, "Ray is started twice")
    assert TOKEN not in vm.log() + vm.read("said") + vm.read("started") + vm.read("env")
    assert TOKEN not in script(ONE, Settings.of({"zones": ZONE}))


def test_options_are_no_commands():
    odd = "'; rm -rf / #"
    text = script(ONE, Settings.of({"zones": ZONE, "env": {"A": odd}, "pip": [odd], "ray_start_params": {"b": odd}}))
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    for line in text.splitlines():
        if "rm -rf" in line:
            assert "'\"'\"'" in line
