"""Facts and plain values cost little to import: every DAG file parse pays for them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PURE = ["errors", "words", "naming", "generations", "shapes"]
ALL = [*PURE, "fields", "problems", "spec", "capacity", "deadlines", "lease", "readiness", "work"]
HEAVY = {"ray", "jax", "kubernetes", "google", "aiohttp", "httpx", "airflow", "asyncio"}


def modules_after_importing(*names: str) -> set[str]:
    code = f"import json, sys; {'; '.join(f'import raytpu_ops.tpu.{name}' for name in names)}; "
    done = subprocess.run(
        [sys.executable, "-c", code + "print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    return set(json.loads(done.stdout))


def test_nothing_here_imports_a_heavy_library():
    assert HEAVY & modules_after_importing(*ALL) == set()


def test_shapes_and_names_need_the_standard_library_alone():
    ours = modules_after_importing(*PURE)
    assert {module for module in ours if module.partition(".")[0] in {"pydantic", "pydantic_core", *HEAVY}} == set()


@pytest.mark.parametrize("name", ALL)
def test_each_module_can_be_imported_first(name):
    """A cycle shows only from one end."""
    assert f"raytpu_ops.tpu.{name}" in modules_after_importing(name)
