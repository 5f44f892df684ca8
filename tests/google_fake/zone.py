"""A zone of TPU VMs on this machine: a network of namespaces, which ends with the process that made it.

The machine itself reaches the VMs by their addresses; nobody beyond it does, and they reach nothing else.
Not here: which VMs there are and what they are told (`vms.py`).
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from tests.testbed import layout as runs
from tests.testbed.client import TestbedFailed, end_kept, start_kept
from tests.testbed.layout import Layout

#: The first two parts of the addresses; the third is the zone's.
_NET = "10.164"


def missing() -> str:
    """Why this machine can't play TPU VMs; empty when it can."""
    if platform.system() != "Linux" or os.geteuid() != 0:
        return "TPU VMs are namespaces of Linux, which take root"
    absent = [program for program in ("ip", "unshare", "setpriv", "mount", "curl") if not shutil.which(program)]
    return f"TPU VMs need {', '.join(absent)}" if absent else ""


class Zone:
    """A zone that is up.

    :param layout: the folder of its run.
    :param keeper: who ends it.
    """

    def __init__(self, layout: Layout, keeper: subprocess.Popen[bytes]) -> None:
        self._layout, self._keeper = layout, keeper
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(layout.control)), base_url="http://zone", timeout=120
        )
        self._number = 0

    @classmethod
    def up(cls) -> Self:
        """Start one.

        :raises TestbedFailed: when it does not come up.
        """
        runs.sweep()
        layout, lock = runs.new_run()
        zone = cls(layout, start_kept(layout, lock, owner=os.getpid(), within=60, program=f"{__package__}.zone_inside"))
        try:
            zone._plug_in()
            zone.order("open", gateway=zone.gateway)
        except BaseException:
            zone.down()
            raise
        return zone

    def down(self) -> None:
        """End it, and all VMs with it.

        :raises TestbedFailed: when something is left.
        """
        self._http.close()
        end_kept(self._layout, self._keeper, 60)

    def order(self, order: str, /, **arguments: object) -> Any:
        """Give an order; see `zone_inside.Zone`.

        :raises TestbedFailed: when it fails.
        """
        answer = self._http.post(f"/{order}", json=arguments).json()
        if "error" in answer:
            raise TestbedFailed(f"{order}: {answer['error']}")
        return answer["result"]

    def run(self, vm: str, *argv: str) -> str:
        """Run a short command in a VM, as root.

        :param vm: its name.
        :return: what it said.
        :raises subprocess.CalledProcessError: when it ends with an error.
        """
        folder = self.folder(vm)
        # Process 1 of the VM is the last of those whose command line says so: before it come those that made it.
        around = psutil.Process(self._keeper.pid).children(recursive=True)
        first = [one for one in around if one.cmdline()[-1:] == [str(folder)]][-1]
        spaces = ("--net", "--mount", "--pid", "--uts", "--ipc")
        enter = ["nsenter", "--target", str(first.pid), *spaces, "chroot", str(folder / "root")]
        return subprocess.run([*enter, *argv], check=True, capture_output=True, text=True, timeout=60).stdout

    def folder(self, vm: str) -> Path:
        """Where a VM's files are."""
        return self._layout.nodes / vm

    def address(self, number: int) -> str:
        """The address of a VM.

        :param number: of the VM in the zone, from 0.
        """
        return f"{_NET}.{self._number}.{number + 10}"

    @property
    def machine(self) -> str:
        """The address by which VMs reach this machine."""
        return f"{_NET}.{self._number}.1"

    @property
    def gateway(self) -> str:
        """The zone's own address, which forwards nothing."""
        return f"{_NET}.{self._number}.254"

    @property
    def seen(self) -> list[str]:
        """What VMs need of this machine that may be on a file system of its own: Python and the packages."""
        return sorted({path for path in (sys.prefix, sys.base_prefix) if _device(path) != _device("/")})

    def _plug_in(self) -> None:
        """A cable from the machine into the zone; it goes when the zone's namespace goes."""
        first = psutil.Process(self._keeper.pid).children(recursive=True)
        inside = next(one for one in first if "tests.google_fake.zone_inside" in one.cmdline() and _own_net(one.pid))
        for self._number in random.sample(range(1, 255), 254):
            name = f"tpuzone{self._number}"
            cable = ["ip", "link", "add", name, "type", "veth", "peer", "name", "uplink", "netns", str(inside.pid)]
            if subprocess.run(cable, check=False, capture_output=True).returncode == 0:
                break
        else:
            raise TestbedFailed("no address is free for a zone")
        for command in (f"addr add {self.machine}/24 dev {name}", f"link set {name} up"):
            subprocess.run(["ip", *command.split()], check=True)


def _device(path: str) -> int:
    return Path(path).stat().st_dev


def _own_net(pid: int) -> bool:
    return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
