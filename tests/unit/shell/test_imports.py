"""A DAG file's import of our names costs next to nothing and drags no heavy library in."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import raytpu_ops

HEAVY = {"ray", "jax", "jaxlib", "flax", "kubernetes", "kubernetes_asyncio", "google", "aiohttp"}

PROBE = """
import json, sys
from airflow.sdk import DAG
before = set(sys.modules)
exec(sys.argv[1])
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def modules_added_by(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", PROBE, code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def heavy_among(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] in HEAVY}


def test_public_names_add_no_heavy_module() -> None:
    added = modules_added_by(f"from raytpu_ops import {', '.join(raytpu_ops.__all__)}")

    assert heavy_among(added) == set()
    assert "raytpu_ops.operators.ray_jobs" in added


@pytest.mark.parametrize("name", raytpu_ops.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(raytpu_ops, name).__name__ == name


def test_an_unknown_name_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'RayTpuOperatorr'"):
        _ = raytpu_ops.RayTpuOperatorr


def test_the_package_itself_loads_nothing_of_airflow() -> None:
    code = "import sys, raytpu_ops; print('airflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
