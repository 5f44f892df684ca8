"""The first tier of the testbed: a real API server with KubeRay and the TPU webhook, up in seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from kubernetes.client import ApiException
from kubernetes.dynamic.exceptions import DynamicApiError
from urllib3.exceptions import MaxRetryError, ProtocolError

from tests.cluster.manifests import host_pod, ray_cluster
from tests.cluster.traces import Traces, alive, assert_gone, owned_by_another, processes_of
from tests.testbed import layout as runs
from tests.testbed.client import Testbed, TestbedFailed
from tests.testbed.faults import KubernetesFaults, wait_until
from tests.testbed.layout import Layout

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]


def apply(testbed: KubernetesFaults, manifest: dict[str, Any], *, dry_run: bool = True) -> str:
    """Server-side apply; what the API server says against it, or nothing."""
    resource = testbed.dynamic.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
    metadata = manifest["metadata"]
    try:
        resource.server_side_apply(
            body=manifest,
            name=metadata["name"],
            namespace=metadata["namespace"],
            field_manager="test",
            query_params=[("dryRun", "All")] if dry_run else [],
        )
    except DynamicApiError as error:
        return f"{error.status} {json.loads(error.body)['message']}"
    return ""


def test_kuberays_definitions_take_a_cluster_and_refuse_nonsense(control_plane: Testbed) -> None:
    assert apply(control_plane, ray_cluster("right")) == ""
    wrong = ray_cluster("wrong")
    wrong["spec"]["workerGroupSpecs"][0]["numOfHost"] = 2
    assert ".numOfHost: field not declared in schema" in apply(control_plane, wrong)


@pytest.mark.parametrize(
    ("accelerator", "topology", "chips", "hosts"),
    [
        ("tpu-v4-podslice", "2x2x1", 4, 1),
        ("tpu-v5-lite-podslice", "2x4", 4, 2),
        ("tpu-v6e-slice", "2x4", 8, 1),
        ("tpu7x", "4x4x4", 4, 16),
    ],
)
def test_the_tpu_webhook_takes_the_right_number_of_hosts_and_no_other(
    control_plane: Testbed, accelerator: str, topology: str, chips: int, hosts: int
) -> None:
    shape = {"accelerator": accelerator, "topology": topology, "chips": chips}
    assert apply(control_plane, ray_cluster("shape", hosts=hosts, **shape)) == ""  # type: ignore[arg-type]
    refused = apply(control_plane, ray_cluster("shape", hosts=hosts + 1, **shape))  # type: ignore[arg-type]
    assert "Number of workers in worker group not equal to specified topology" in refused


def test_a_cluster_without_the_webhooks_label_passes_it_by(control_plane: Testbed) -> None:
    unlabelled = ray_cluster("unlabelled", hosts=5)
    del unlabelled["metadata"]["labels"]
    assert apply(control_plane, unlabelled) == ""


@pytest.mark.parametrize("labelled", [True, False])
def test_a_pod_is_numbered_if_it_has_the_webhooks_label(control_plane: Testbed, labelled: bool) -> None:
    """F17: KubeRay puts the label on, and a pod template can take it away."""
    manifest = host_pod("numbered", host=1)
    if not labelled:
        del manifest["metadata"]["labels"]["app.kubernetes.io/name"]
    made = control_plane.core.create_namespaced_pod("default", manifest, dry_run="All")
    numbers = [one.value for one in made.spec.containers[0].env or [] if one.name == "TPU_WORKER_ID"]
    assert numbers == (["1"] if labelled else [])


def test_a_webhook_that_is_down_fails_the_create_by_name(control_plane: Testbed) -> None:
    with control_plane.webhook_down():
        assert "failed calling webhook" in apply(control_plane, ray_cluster("right"))
    assert apply(control_plane, ray_cluster("right")) == ""


def test_answers_429_500_and_410_come_from_the_proxy_and_are_counted(control_plane: Testbed) -> None:
    for status in (429, 500):
        with control_plane.api_fault("status", method="GET", path="/namespaces$", status=status, times=1) as counts:
            with pytest.raises(ApiException) as caught:
                control_plane.core.list_namespace()
            assert caught.value.status == status
            control_plane.core.list_namespace()
            assert counts() == {"matched": 2, "hits": 1}
    with control_plane.api_fault("gone", path="/namespaces"), pytest.raises(ApiException) as caught:
        control_plane.core.list_namespace()
    assert caught.value.status == 410


def test_an_answer_can_be_lost_after_the_object_was_made(control_plane: Testbed) -> None:
    with control_plane.api_fault("lost", method="POST", path="/namespaces", times=1), pytest.raises(ProtocolError):
        control_plane.core.create_namespace({"metadata": {"name": "lost"}})
    assert control_plane.core.read_namespace("lost").metadata.name == "lost"


def test_watches_break_when_they_are_cut(control_plane: Testbed) -> None:
    watch = control_plane.core.list_namespace(watch=True, _preload_content=False)
    lines = watch.stream()
    assert json.loads(next(lines).split(b"\n")[0])["type"] == "ADDED"
    assert control_plane.cut_watches() >= 1
    with pytest.raises(ProtocolError):
        for _ in lines:
            pass


def test_the_api_server_goes_and_comes_back_with_all_it_knew(control_plane: Testbed) -> None:
    control_plane.core.create_namespace({"metadata": {"name": "kept"}})
    with control_plane.api_down(), pytest.raises(MaxRetryError, match="refused"):
        control_plane.core.list_namespace()
    assert "kept" in {one.metadata.name for one in control_plane.core.list_namespace().items}


def test_a_finalizer_holds_an_object_until_it_is_let_go(control_plane: Testbed) -> None:
    assert apply(control_plane, ray_cluster("held"), dry_run=False) == ""
    resource = control_plane.dynamic.resources.get(api_version="ray.io/v1", kind="RayCluster")
    with control_plane.held("ray.io/v1", "RayCluster", "held", "default"):
        resource.delete(name="held", namespace="default")
        assert resource.get(name="held", namespace="default").metadata.deletionTimestamp
    wait_until(lambda: control_plane.count("ray.io/v1", "RayCluster") == 0, 60, "the RayCluster is still there")


def test_nodes_are_left_as_they_were_found(control_plane: Testbed) -> None:
    mine, mark = "raytpu.test/mine", "raytpu.test/mark"
    names = [f"node-{number}" for number in range(3)]
    for name in names:
        control_plane.core.create_node({"metadata": {"name": name, "labels": {mine: ""}}})

    def cordoned() -> list[str]:
        found = control_plane.core.list_node(label_selector=mine).items
        return [one.metadata.name for one in found if one.spec.unschedulable]

    try:
        control_plane.cordon(names[2])  # by somebody else
        with control_plane.no_node_fits(mine, but=names[:1]):
            assert cordoned() == names[1:]
        assert cordoned() == names[2:]
        with control_plane.labelled(mine, mark):
            assert control_plane.nodes(f"{mark}=true") == names
        assert control_plane.nodes(mark) == []
    finally:
        for name in names:
            control_plane.core.delete_node(name)


def test_requests_are_recorded(control_plane: Testbed) -> None:
    control_plane.requests(forget=True)
    control_plane.core.list_node()
    assert [(one["method"], one["target"], one["status"]) for one in control_plane.requests()] == [
        ("GET", "/api/v1/nodes", 200)
    ]


def test_what_accounts_ask_is_on_the_api_servers_own_record(control_plane: Testbed) -> None:
    with control_plane.namespace("asked", wait=False) as name:
        rules = [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]
        account = KubernetesFaults(control_plane.kubeconfig_for(rules, name))
        for ask in (account.core.read_namespaced_secret, account.core.read_namespaced_pod_log):
            with pytest.raises(ApiException):
                ask("none", name)
        account.close()
        assert control_plane.asked(name) == {("", "secrets", "get"), ("", "pods/log", "get")}


def test_a_control_plane_alone_says_that_it_has_no_nodes(control_plane: Testbed) -> None:
    with pytest.raises(TestbedFailed, match="control plane alone"):
        control_plane.add_pools("cpu")


def test_two_runs_never_meet(control_plane: Testbed) -> None:
    with Testbed.up(control_plane=True) as other:
        other.core.create_namespace({"metadata": {"name": "only-here"}})
        assert other.server != control_plane.server
        assert "only-here" not in {one.metadata.name for one in control_plane.core.list_namespace().items}
    assert control_plane.core.list_namespace().items


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_ends_with_its_owner_however_that_ends(control_plane: Testbed, how: signal.Signals) -> None:
    before = Traces.now()
    with owned_by_another() as (owner, testbed):
        processes = processes_of(testbed)
        assert len(processes) > 5
        owner.send_signal(how)
        assert_gone(testbed, processes)
    assert Traces.now() == before


def test_a_killed_keeper_takes_all_processes_along_and_the_next_up_clears_the_rest(control_plane: Testbed) -> None:
    with owned_by_another() as (_, testbed):
        processes = processes_of(testbed)
        os.kill(testbed.layout.state()["keeper"], signal.SIGKILL)
        wait_until(lambda: not alive(processes), 60, lambda: f"left: {alive(processes)}")
        assert testbed.layout.id in runs.sweep()
        assert not testbed.layout.root.exists()
        assert control_plane.layout.root.exists()  # a live one is left alone


@pytest.mark.usefixtures("control_plane")
def test_the_command_line_starts_shows_and_ends_a_run(short_dir: Path) -> None:
    environment = {**os.environ, "RAYTPU_TESTBED_RUNS": str(short_dir)}

    def said(*command: str) -> str:
        argv = [sys.executable, "-m", "tests.testbed", *command]
        return subprocess.run(
            argv, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True, timeout=300
        ).stdout

    up = said("up", "--control-plane")
    try:
        (folder,) = short_dir.iterdir()
        testbed = Testbed(Layout(folder))
        processes = processes_of(testbed)
        assert up.startswith(f"run {folder.name} is up after ")
        assert f"export KUBECONFIG={testbed.kubeconfig}" in up.splitlines()
        assert json.loads(said("status"))["run"] == folder.name
        assert said("kubeconfig", folder.name) == f"{testbed.kubeconfig}\n"
        assert [one.metadata.name for one in testbed.core.list_namespace().items if one.metadata.name == "default"]
        testbed.close()
    finally:
        down = said("down")
    assert down == f"run {folder.name} is down\n"
    assert_gone(testbed, processes)


@pytest.mark.usefixtures("built")
def test_down_is_quick() -> None:
    testbed = Testbed.up(control_plane=True)
    processes = processes_of(testbed)
    began = time.monotonic()
    testbed.down()
    assert time.monotonic() - began < 30
    assert_gone(testbed, processes)
