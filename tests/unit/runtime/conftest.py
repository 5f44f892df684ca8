"""JAX runs on this machine's CPU, whatever else it has."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
