"""Versions in the Dockerfiles, and options in the documentation, are those of the code."""

from __future__ import annotations

import json
import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytpu_ops.backends.gke.manifest import ray_cluster
from raytpu_ops.backends.gke.pool_settings import NodePools
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.backends.local import LocalBackend
from raytpu_ops.backends.tpu_vm.settings import Settings as TpuVm
from raytpu_ops.cli.doctor import Check, _sign
from raytpu_ops.hooks.google_cloud import CLOUD_KEYS
from raytpu_ops.hooks.kubernetes import ACCESS_KEYS, access_from
from raytpu_ops.operators.retries import OTHER, tpu_retry_policy
from raytpu_ops.tpu.capacity import FlexStart, OnDemand, Queued, Reservation, Spot
from raytpu_ops.tpu.deadlines import Deadlines, Phase
from raytpu_ops.tpu.spec import SliceSpec

ROOT = Path(__file__).parents[2]
IMAGES = ["ray-tpu", "airflow"]


def dockerfile(image: str) -> str:
    return (ROOT / "docker" / image / "Dockerfile").read_text()


def pinned(package: str) -> str:
    [version] = re.findall(rf"^{re.escape(package)}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return version


@pytest.mark.parametrize(
    ("image", "argument", "package"),
    [("ray-tpu", "RAY_VERSION", "ray"), ("airflow", "AIRFLOW_VERSION", "apache-airflow")],
)
def test_an_image_is_built_with_the_version_that_is_tested(image: str, argument: str, package: str):
    assert f"\nARG {argument}={pinned(package)}\n" in dockerfile(image)


def test_the_backends_own_image_has_the_version_that_is_tested():
    assert Settings().ray_version == pinned("ray")
    assert Settings().image == f"rayproject/ray:{pinned('ray')}-py311"


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_ends_as_a_user_without_privileges(image: str):
    users = re.findall(r"^USER (\S+)$", dockerfile(image), re.MULTILINE)
    assert users
    assert users[-1].split(":")[0] not in ("root", "0")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_made_from_what_its_context_holds(image: str):
    ignored = (ROOT / "docker" / image / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        word
        for line in re.findall(r"^COPY (.+)$", dockerfile(image), re.MULTILINE)
        for word in line.split()[:-1]
        if not word.startswith("--")
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("option", sorted(Settings.model_fields))
def test_each_option_of_the_gke_backend_is_documented_with_its_default(option: str):
    rows = [line for line in (ROOT / "docs" / "gke.md").read_text().splitlines() if line.startswith(f"| `{option}` |")]
    assert len(rows) == 1
    default = Settings.model_fields[option].get_default(call_default_factory=True)
    if isinstance(default, str):
        assert f"`{default}`" in rows[0].split(" | ")[1]


@pytest.mark.parametrize("option", sorted(ACCESS_KEYS))
def test_each_way_to_a_cluster_is_documented(option: str):
    assert f"`{option}`" in (ROOT / "docs" / "gke.md").read_text()


#: Options of docs/google.md, by the heading that they stand below.
GOOGLE = {"Who acts": CLOUD_KEYS, "Node pools": NodePools.model_fields, "TPU VMs": TpuVm.model_fields}


@pytest.mark.parametrize("heading", GOOGLE)
def test_options_of_google_are_documented_each_once_and_nothing_else(heading: str):
    section = (ROOT / "docs" / "google.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)) == sorted(GOOGLE[heading])


def test_options_of_the_local_backend_are_documented_with_their_defaults():
    options = {name: one.default for name, one in signature(LocalBackend).parameters.items() if name != "ray_start"}
    rows = re.findall(r"^\| `([a-z_]+)` \| (\S+)", (ROOT / "docs" / "local.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(options)
    for name, default in rows:
        assert default == str(options[name]) or not isinstance(options[name], int)


def test_each_rung_and_each_class_of_failure_of_google_is_documented():
    text = (ROOT / "docs" / "google.md").read_text()
    for rung in (OnDemand, Spot, Reservation, FlexStart, Queued):
        assert re.search(rf"^\| `{rung.__name__}\(", text, re.MULTILINE), rung
    for kind, budget in tpu_retry_policy().budgets.items():
        of = "all other errors" if kind == OTHER else f"`{kind}`"
        [row] = re.findall(rf"^\| {of} \| (\w+)", text, re.MULTILINE)[-1:]
        assert row == (str(budget.retries) if budget.retries else "none")


def test_nothing_is_documented_that_is_no_option():
    rows = re.findall(r"^\| `([a-z_]+)` \|", (ROOT / "docs" / "gke.md").read_text(), re.MULTILINE)
    assert set(rows) <= set(Settings.model_fields) | set(Phase)


@pytest.mark.parametrize("phase", Phase)
def test_each_phase_is_documented_with_its_default(phase: Phase):
    [row] = [line for line in (ROOT / "docs" / "gke.md").read_text().splitlines() if line.startswith(f"| `{phase}` |")]
    default = getattr(Deadlines(), phase)
    hours, minutes = divmod(int(default.total_seconds()) // 60, 60)
    assert row.endswith(f"| {f'{hours} h' if hours else f'{minutes} min'} |")


def test_what_kind_plays_is_a_lease_that_the_backend_takes():
    options = json.loads((ROOT / "deploy" / "kind" / "connection.json").read_text().replace("STORAGE", "/storage"))
    assert options.pop("backend") == "gke"
    access, rest = access_from(options)
    assert dict(access.selectors) == {"kubeconfig": "KUBECONFIG", "context": "kind-raytpu"}, "up.sh says which file"
    settings, spec = Settings.of(rest), SliceSpec.of("v4", "2x2x2")
    host = ray_cluster("kind", spec, OnDemand(), settings)["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    env = {row["name"]: row["value"] for row in host["containers"][0]["env"]}
    assert (env["TPU_ACCELERATOR_TYPE"], env["TPU_TOPOLOGY"]) == (spec.shape.pod_type, spec.topology)
    nodes = yaml.safe_load((ROOT / "deploy" / "kind" / "cluster.yaml").read_text())["nodes"]
    slices = [node for node in nodes if node.get("labels", {}).items() >= host["nodeSelector"].items()]
    assert len(slices) == spec.hosts
    assert {node["labels"]["cloud.google.com/gke-nodepool"] for node in slices} == {"slice-0"}
    assert host["containers"][0]["resources"]["limits"]["google.com/tpu"] == "4", "as up.sh says it"


def test_the_first_run_on_gke_has_room_for_the_head_and_pays_for_chips_while_it_runs():
    [block] = re.findall(r"## On GKE in ten lines\n\n```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = block.splitlines()
    assert len(lines) <= 10

    [cluster] = [line for line in lines if " clusters create " in line]
    cpus = int(re.findall(r"--machine-type n2-standard-(\d+) ", cluster)[0])
    [extra] = re.findall(r"--conn-extra '(.*)'", block)
    options = {key: value for key, value in json.loads(extra).items() if key not in {*ACCESS_KEYS, "backend"}}
    head = Settings.of(options).head
    # A part is the system's; it has 4 GB for each CPU.
    assert cpus >= int(head.cpu) + 1
    assert 4 * cpus * 0.75 >= int(head.memory.removesuffix("Gi"))

    [pool] = [line for line in lines if " node-pools create " in line]
    assert "--num-nodes 0 --enable-autoscaling --min-nodes 0 " in pool


def test_the_secret_of_the_documentation_reaches_the_hosts_by_name():
    [section] = re.findall(r"## Secrets for your code\n(.*?)\n## ", (ROOT / "docs" / "gke.md").read_text(), re.DOTALL)
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    written: dict[str, Any] = {}
    exec(code, written)
    settings = Settings(**written["backend_options"])

    cluster = ray_cluster("kind", SliceSpec.of("v4", "2x2x2"), OnDemand(), settings)
    [host] = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]

    assert written["token"] in host["env"]


def test_the_doctor_has_one_word_for_what_it_may_not_read():
    word = _sign(Check("name", False, "found", seen=False))[0]
    assert f"`{word}`" in (ROOT / "docs" / "gke.md").read_text()
    assert f'say "{word}"' in (ROOT / "deploy" / "gke" / "doctor.yaml").read_text()


def test_links_between_documents_lead_somewhere():
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
