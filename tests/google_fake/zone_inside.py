"""Process 1 of a zone: the network that TPU VMs are in, and their start and end.

Run by `tests/testbed/keeper.py` in network, mount and process namespaces of its own, so that nothing of it can
outlive this process. Orders come in over a socket in the run's folder. Not here: what a VM does (`vm_init.py`).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.testbed.control import serve
from tests.testbed.layout import Layout
from tests.testbed.processes import Child, Children, CommandFailed

#: What of this machine a VM sees beside its root file system is bound there, as on the machine itself.
_HIDDEN = ("/run",)


class Zone:
    """The VMs; every public method is an order.

    :param layout: the run's folder.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._children = Children(layout.logs)
        self._numbers: dict[str, int] = {}

    async def open(self, gateway: str) -> None:
        """Connect the network to the machine, whose end of the cable is plugged in already.

        :param gateway: the network's own address; what is sent there goes nowhere.
        """
        for command in (
            "link set lo up",
            "link add vms type bridge",
            f"addr add {gateway}/24 dev vms",
            "link set vms up",
            "link set uplink master vms",
            "link set uplink up",
        ):
            await self._children.run("ip", *command.split())

    async def boot(self, name: str, spec: dict[str, Any], metadata: dict[str, Any]) -> None:
        """A VM starts, for the first time or again; it is up when its startup script runs.

        :param name: of the VM.
        :param spec: `vm.json`.
        :param metadata: `metadata.json`.
        """
        folder = self._layout.nodes / name
        folder.mkdir(exist_ok=True, mode=0o755)
        (folder / "up").unlink(missing_ok=True)
        (folder / "vm.json").write_text(json.dumps(spec))
        await self.describe(name, metadata)
        number = self._numbers.setdefault(name, len(self._numbers))
        net, link = f"vm{number}", f"link{number}"
        await self._children.run("ip", "netns", "add", net)
        # Always the same, else the machine asks a VM that restarted by the address that it had before.
        address = f"02:00:0a:a4:{number >> 8:02x}:{number & 255:02x}"
        cable = f"link add {link} type veth peer name eth0 address {address} netns {net}"
        await self._children.run("ip", *cable.split())
        await self._children.run("ip", "link", "set", link, "master", "vms", "up")
        spaces = ("--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child=KILL")
        init = [sys.executable, "-I", str(Path(__file__).with_name("vm_init.py")), str(folder)]
        argv = ["ip", "netns", "exec", net, "unshare", *spaces, *init]
        child = Child(name, argv, restart=False)
        self._children.start(child)
        while not (folder / "up").exists():
            if child.pid == 0:
                log = (self._layout.logs / f"{name}.log").read_text(errors="replace")
                raise RuntimeError(f"VM {name} ended while it booted: {log[-1000:]}")
            await asyncio.sleep(0.02)

    async def describe(self, name: str, metadata: dict[str, Any]) -> None:
        """What a VM's metadata server says from now on."""
        folder = self._layout.nodes / name
        unfinished = folder / ".metadata"
        unfinished.write_text(json.dumps(metadata))
        unfinished.rename(folder / "metadata.json")

    async def kill(self, name: str, forget: bool) -> None:
        """A VM vanishes, with all that runs in it.

        :param forget: its disk too.
        """
        if name in self._children.by_name:
            await self._children.stop(name, signal.SIGKILL)
        with suppress(CommandFailed):  # it is not there
            await self._children.run("ip", "netns", "del", f"vm{self._numbers.get(name, -1)}")
        if forget:
            await asyncio.to_thread(shutil.rmtree, self._layout.nodes / name, ignore_errors=True)

    async def status(self) -> dict[str, Any]:
        """The VMs, and whether each of them runs."""
        return {name: bool(child["pid"]) for name, child in self._children.status().items()}


async def _main(layout: Layout) -> None:
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    runner = await serve(Zone(layout), layout.control)
    layout.write_state(ready=True)
    await ending.wait()
    await runner.cleanup()


def main() -> None:
    layout = Layout(Path(sys.argv[1]))
    try:
        for hidden in _HIDDEN:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "zone", hidden], check=True)
        asyncio.run(_main(layout))
    except Exception as error:  # noqa: BLE001 - whoever waits for the run is told why there is none
        traceback.print_exc()
        layout.failure.write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
