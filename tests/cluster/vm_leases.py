"""The `tpu_vm` backend on VMs that this machine plays: options for two cores."""

from __future__ import annotations

import sys
from typing import Any

from raytpu_ops.backends.tpu_vm import TpuVmBackend
from tests.google_fake import GoogleFake
from tests.google_fake.access import FakeAccess
from tests.google_fake.fake import ZONE
from tests.google_fake.tpu_queue import Delays

#: A zone of which most tests want nothing.
OTHER = "europe-west4-b"
ZONES = [ZONE, OTHER]


def small(**more: Any) -> dict[str, Any]:
    """Options for VMs with this machine's Python: nothing is installed, and JAX runs on CPUs.

    :param more: further options, over these.
    """
    return {
        "zones": ZONES,
        "python": sys.executable,
        "pip": [],
        "ray_start_params": {"num-cpus": "4", "object-store-memory": str(160 * 2**20)},
        "env": {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
        **more,
    }


def quick(google: GoogleFake) -> None:
    """Google takes some seconds of its own clock for each step."""
    google.tpu.delays = Delays(accept=5, wait=5, queue=20, provision=40, delete=20, suspend=20)


def backend(google: GoogleFake, **options: Any) -> TpuVmBackend:
    """The backend as its users have it."""
    return TpuVmBackend(FakeAccess(google), **small(**options))
