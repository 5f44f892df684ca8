"""deploy/kind/up.sh, with Docker, kind, kubectl and git played: what it leaves is what Airflow needs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from raytpu_ops.hooks.kubernetes import access_from

ROOT = Path(__file__).parents[2]
#: As `kind get kubeconfig` prints it.
KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "kind-raytpu", "cluster": {"server": "http://127.0.0.1:41234"}}],
    "users": [{"name": "kind-raytpu", "user": {"token": "of-a-test"}}],
    "contexts": [{"name": "kind-raytpu", "context": {"cluster": "kind-raytpu", "user": "kind-raytpu"}}],
    "current-context": "kind-raytpu",
}


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Where it was brought up, in a shell that has a `$KUBECONFIG`; relative, as a person may say it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "printed").write_text(yaml.safe_dump(KUBECONFIG))
    for name in ("docker", "git", "kind", "kubectl"):
        says = f'case "$1 $2" in "get kubeconfig") cat {tools}/printed ;; esac' if name == "kind" else ":"
        (tools / name).write_text(f"#!/bin/sh\n{says}\n")
        (tools / name).chmod(0o755)
    relative = os.path.relpath(tmp_path / "here" / "storage", ROOT)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "STORAGE": relative, "KUBECONFIG": "mine.yaml"}
    subprocess.run(["/bin/sh", "deploy/kind/up.sh"], cwd=ROOT, env=env, check=True, capture_output=True)
    return tmp_path / "here" / "storage"


async def test_an_airflow_of_another_shell_finds_the_cluster(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    options = json.loads((storage.parent / "kind-connection.json").read_text())
    access, rest = access_from({key: value for key, value in options.items() if key != "backend"})

    assert (await access.configuration()).host == "http://127.0.0.1:41234"
    assert Path(access.selectors["kubeconfig"]).is_absolute()
    assert rest["head_template"]["spec"]["volumes"][0]["hostPath"]["path"] == str(storage)


def test_nobody_else_may_read_its_credentials(storage: Path):
    assert stat.S_IMODE((storage.parent / "kind-kubeconfig").stat().st_mode) == 0o600
