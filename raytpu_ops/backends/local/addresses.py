"""Loopback addresses and ports, chosen before anything starts so that they can be written down first.

Every host has an address of its own out of a block 127.A.B.*: all of 127/8 is this machine on Linux,
and nothing outside can reach it. Elsewhere (macOS) only 127.0.0.1 is there; hosts then share it and
start one after another, and Ray takes the machine's own address in its place
(``resolve_ip_for_localhost`` in ray/_private/services.py, 2.60).

Not here: Ray's own choice of further ports.
"""

from __future__ import annotations

import errno
import hashlib
import socket
from collections.abc import Collection, Iterator

from raytpu_ops.tpu.errors import RemoteUnavailable

#: Where a system has no loopback address but this one.
ONLY_ADDRESS = "127.0.0.1"
#: Addresses for hosts in a block: .1 is the head, .0 and .255 stay unused.
HOSTS = 253
#: Below the ports that Linux hands out to clients (32768 on), above Ray's worker ports (10002-19999).
_FIRST_PORT, _PORTS = 20_000, 12_000


def has_blocks() -> bool:
    """Whether the system has loopback addresses beyond 127.0.0.1."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.77.77.77", 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return False
            raise
    return True


def choose_block(seed: str, taken: Collection[str]) -> str:
    """A block ``127.A.B`` that no other lease has; the same seed gets the same one while it is free.

    :param seed: what sets the lease apart from all others on this machine.
    :param taken: blocks of the leases that there are.
    :raises RemoteUnavailable: when none of those that were tried is free.
    """
    for attempt in range(64):
        digest = hashlib.sha256(f"{seed}/{attempt}".encode()).digest()
        # 127.0 is where systems keep their own (127.0.0.53 of systemd, 127.0.1.1 of Debian).
        block = f"127.{1 + digest[0] % 254}.{digest[1]}"
        if block not in taken:
            return block
    raise RemoteUnavailable("no loopback block is free; release leases that nobody needs")


def of_head(block: str) -> str:
    """The head's address in a block."""
    return ONLY_ADDRESS if block == ONLY_ADDRESS else f"{block}.1"


def of_host(block: str, number: int) -> str:
    """The address of the lease's n-th host, counted from 1; those of hosts long gone are used again."""
    return ONLY_ADDRESS if block == ONLY_ADDRESS else f"{block}.{2 + (number - 1) % HOSTS}"


def is_free(port: int) -> bool:
    """Whether nobody listens on a port, at any address: Ray's own servers take all of them."""
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - closed at once, and never listens
        except OSError:
            return False
    return True


def free_ports(seed: str, taken: Collection[int]) -> Iterator[int]:
    """Ports that nobody uses, beginning at a place of the seed's own so that two leases rarely meet.

    :param seed: what sets the lease apart from all others on this machine.
    :param taken: ports that other leases wrote down but may not have opened yet.
    :raises RemoteUnavailable: when all are in use.
    """
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[2:6], "big")
    for step in range(_PORTS):
        port = _FIRST_PORT + (start + step) % _PORTS
        if port not in taken and is_free(port):
            yield port
    raise RemoteUnavailable("no port between 20000 and 32000 is free")
