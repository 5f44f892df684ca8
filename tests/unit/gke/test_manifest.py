"""What is sent to KubeRay, and what is refused before anything is sent."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.manifest import digest, ray_cluster
from raytpu_ops.backends.gke.record import OWNER, Record, read_record, written
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.tpu.capacity import FlexStart, OnDemand, Queued, Reservation, Spot
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.naming import lease_id
from raytpu_ops.tpu.shapes import catalogue
from raytpu_ops.tpu.spec import SliceSpec

SPEC = SliceSpec.of("v4", "2x2x2", num_slices=2)
ME = Owner(dag_id="d", run_id="r", task_id="provision")


def made(spec: SliceSpec = SPEC, rung: Any = None, **options: Any) -> dict[str, Any]:
    return ray_cluster("d-provision-1", spec, rung or OnDemand(), Settings.of(options))


def of_pod(**fields: Any) -> dict[str, Any]:
    return {"host_template": {"spec": fields}}


def ray_container(**fields: Any) -> dict[str, Any]:
    return of_pod(containers=[{"name": "ray-worker", **fields}])


def variable(container: str, name: str) -> dict[str, Any]:
    """A template that gives the container the variable."""
    return {"spec": {"containers": [{"name": container, "env": [{"name": name, "value": "1"}]}]}}


def group(manifest: dict[str, Any]) -> dict[str, Any]:
    (only,) = manifest["spec"]["workerGroupSpecs"]
    found: dict[str, Any] = only
    return found


def host(manifest: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = group(manifest)["template"]["spec"]
    return pod


@pytest.mark.parametrize("shape", catalogue(), ids=str)
def test_every_shape_becomes_one_group_of_whole_slices(shape):
    spec = SliceSpec.of(shape.generation.name, shape.topology, machine_type=shape.machine_type, num_slices=3)
    found = made(spec)

    assert (group(found)["replicas"], group(found)["numOfHosts"]) == (3, shape.hosts)
    assert group(found)["minReplicas"] == group(found)["maxReplicas"] == 3
    assert host(found)["nodeSelector"] == shape.node_selector
    chips = host(found)["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert int(chips) * shape.hosts == shape.chips


def test_the_webhooks_label_is_on_the_raycluster_and_on_every_pod():
    """F17."""
    found = made()
    metadata = [found["metadata"], found["spec"]["headGroupSpec"]["template"]["metadata"]]

    for one in (*metadata, group(found)["template"]["metadata"]):
        assert one["labels"]["app.kubernetes.io/name"] == "kuberay"


def test_token_auth_is_on_and_pods_hold_no_kubernetes_token():
    found = made()

    assert found["spec"]["authOptions"] == {"mode": "token"}
    for pod in (host(found), found["spec"]["headGroupSpec"]["template"]["spec"]):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False
        assert pod["containers"][0]["resources"]["requests"].keys() >= {"cpu", "memory"}


@pytest.mark.parametrize(
    ("rung", "selector"),
    [
        (OnDemand(), {}),
        (Spot(), {"cloud.google.com/gke-spot": "true"}),
        (FlexStart(3600), {"cloud.google.com/gke-flex-start": "true"}),
        (
            Reservation("team-a"),
            {"cloud.google.com/reservation-name": "team-a", "cloud.google.com/reservation-affinity": "specific"},
        ),
        (
            Reservation("projects/other-project/reservations/team-a"),
            {
                "cloud.google.com/reservation-name": "team-a",
                "cloud.google.com/reservation-affinity": "specific",
                "cloud.google.com/reservation-project": "other-project",
            },
        ),
    ],
    ids=str,
)
def test_the_kind_of_capacity_is_chosen_by_the_nodes_labels(rung, selector):
    assert host(made(rung=rung))["nodeSelector"] == {**SPEC.shape.node_selector, **selector}


def test_a_compute_class_joins_the_selector():
    assert host(made(compute_class="tpus"))["nodeSelector"]["cloud.google.com/compute-class"] == "tpus"


def test_a_queue_gets_the_raycluster_suspended_so_that_nothing_jumps_it():
    found = made(queue="team", queue_priority="high")

    assert found["spec"]["suspend"] is True
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert found["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert "suspend" not in made()["spec"]


def test_a_template_is_merged_over_ours():
    template = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "containers": [
                {"name": "ray-worker", "env": [{"name": "X", "value": "1"}], "resources": {"requests": {"cpu": "90"}}},
                {"name": "sidecar", "image": "s:1"},
            ],
            "tolerations": [{"key": "team", "operator": "Exists"}],
            "nodeSelector": {"zone": "a"},
            "securityContext": {"fsGroup": None},
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    }
    pod = host(made(host_template=template))

    assert [one["name"] for one in pod["containers"]] == ["ray-worker", "sidecar"]
    main = pod["containers"][0]
    assert main["image"]
    assert main["env"] == [{"name": "X", "value": "1"}]
    assert main["resources"]["requests"] == {"cpu": "90", "memory": "32Gi", "google.com/tpu": "4"}
    assert pod["tolerations"] == [*SPEC.shape.tolerations, {"key": "team", "operator": "Exists"}]
    assert pod["nodeSelector"] == {**SPEC.shape.node_selector, "zone": "a"}
    assert "fsGroup" not in pod["securityContext"]
    assert host(made())["tolerations"] == SPEC.shape.tolerations  # and ours is as it was


def test_a_template_may_say_what_kubernetes_takes():
    """Amounts as numbers, ports by name or number, and fields that are newer than the client library."""
    chips = {"google.com/tpu": SPEC.shape.chips_per_host}
    probe = {"httpGet": {"port": "http"}, "periodSeconds": 5}
    main = {"resources": {"requests": {**chips, "cpu": 1.5}, "limits": chips}, "readinessProbe": probe, "newer": ["x"]}
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": 2**30}}
    projected = {"name": "id", "projected": {"sources": [{"serviceAccountToken": {"path": "t", "audience": "a"}}]}}
    found = host(made(**ray_container(**main)))["containers"][0]

    assert found["resources"]["requests"]["cpu"] == 1.5
    assert found["readinessProbe"] == probe
    assert found["newer"] == ["x"]
    assert host(made(**of_pod(volumes=[volume, projected], hostNewer=1)))["volumes"] == [volume, projected]


def test_a_sidecar_may_have_the_token_and_played_hosts_say_what_they_are():
    sidecar = {"name": "sidecar", "image": "s:1", "env": [{"name": "RAY_AUTH_TOKEN_PATH", "value": "/token"}]}
    assert made(host_template={"spec": {"containers": [sidecar]}})
    assert made(host_template=variable("ray-worker", "TPU_TOPOLOGY"))
    assert made(labels={"example.net/team": "Vision_1"}, head_start_params={"num-cpus": "4"})


def test_the_digest_follows_the_spec_and_nothing_else():
    assert digest(made()) == digest(made())
    assert digest(made()) != digest(made(image="other:1"))


def test_a_record_is_read_back_from_the_raycluster_alone():
    now = datetime.now(UTC)
    record = Record(
        owner=ME,
        spec=SPEC,
        capacity={"kind": "spot"},
        digest="d",
        granted_at=now,
        expires_at=now + timedelta(hours=1),
        dashboard="https://h/d",
        serve="https://h/s",
    )
    found = written(made(), record)

    assert read_record(found) == record
    assert found["metadata"]["labels"][OWNER] == ME.digest
    assert read_record(made()) is None
    found["metadata"]["labels"][OWNER] = "somebody-else"
    assert read_record(found) is None


def test_the_name_fits_whatever_the_owner_is_called():
    """F18: longer names are cut in pod and service names, and hosts no longer match."""
    long = Owner(dag_id="d" * 250, run_id="r" * 250, task_id="t" * 250, map_index=1023)

    assert len(lease_id(long)) <= 40


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"namespace": "No Such"}, "namespace: must be a Kubernetes name"),
        ({"namespace": "x" * 64}, "namespace: must be a Kubernetes name"),
        ({"namespce": "x"}, "namespce"),
        ({"image": ""}, "image"),
        ({"image": "a\nb"}, "image"),
        ({"image": "ray 2.60"}, "image: must be the name of an image"),
        ({"ray_version": "2.54.0"}, "must be 2.55 or newer"),
        ({"ray_version": "latest"}, "must be a version such as '2.60.0'"),
        ({"runtime": "magic"}, "runtime"),
        ({"reach": "telepathy"}, "reach"),
        ({"head": {"cpu": "lots", "memory": "8Gi"}}, "head.cpu: must be CPUs as Kubernetes writes them"),
        ({"head": {"cpu": "1"}}, "memory: is missing"),
        ({"host": {"cpu": "-1", "memory": "8Gi"}}, "host.cpu: must be CPUs as Kubernetes writes them"),
        ({"host": {"cpu": "8Gi", "memory": "8Gi"}}, "host.cpu: must be CPUs as Kubernetes writes them"),
        ({"host": {"cpu": "8", "memory": "8"}}, "host.memory: must be memory as Kubernetes writes it, with a unit"),
        ({"host": {"cpu": "8", "memory": "800m"}}, "host.memory: must be memory as Kubernetes writes it, with a unit"),
        ({"queue_priority": "high"}, "needs queue="),
        ({"queue": "team; rm -rf /"}, "queue: must be a Kubernetes name"),
        ({"labels": {"a": 1}}, "labels"),
        ({"host_template": []}, "host_template"),
        ({"host_template": {"spec": {"containers": [{"image": "x"}]}}}, "containers[0]: must be an object with 'name'"),
        ({"host_template": {"metadata": {"labels": {"app.kubernetes.io/name": "mine"}}}}, "what GKE's TPU webhook"),
        ({"head_template": {"metadata": {"labels": {"app.kubernetes.io/name": None}}}}, "what GKE's TPU webhook"),
        ({"host_template": {"spec": {"nodeSelector": {"cloud.google.com/gke-tpu-topology": "4x4"}}}}, "node selector"),
        ({"host_template": {"spec": {"nodeSelector": None}}}, "node selector"),
        (
            {
                "host_template": {
                    "spec": {"containers": [{"name": "ray-worker", "resources": {"limits": {"google.com/tpu": 8}}}]}
                }
            },
            "hosts of v4 2x2x2 (ct4p-hightpu-4t) have 4 chips",
        ),
        ({"host_template": {"spec": {"containers": None}}}, "first container must be 'ray-worker'"),
        ({"service_account": "Robot"}, "service_account"),
        (
            {"host_template": {"sepc": {}}},
            "host_template: a pod template has no 'sepc'; did you mean 'spec'?",
        ),
        (
            {"head_template": {"replicas": 3}},
            "head_template: a pod template has no 'replicas'; there are metadata, spec",
        ),
        ({"head_template": {"spec": "x"}}, "head_template.spec: must be an object, got str"),
        (
            ray_container(env={"HF_HOME": "/x"}),
            "host_template.spec.containers[0].env: must be a list of objects with 'name', got dict",
        ),
        (
            ray_container(env=[{"name": "A", "value": 1}]),
            "host_template.spec.containers[0].env[0].value: must be text, got int",
        ),
        (ray_container(resources="x"), "host_template.spec.containers[0].resources: must be an object, got str"),
        (ray_container(resources={"limits": 4}), "containers[0].resources.limits: must be an object, got int"),
        (ray_container(tty="yes"), "containers[0].tty: must be true or false, got str"),
        (ray_container(image=None), "container 'ray-worker' has no image; leave the field out"),
        (of_pod(containers="x"), "host_template.spec.containers: must be a list of objects with 'name', got str"),
        (of_pod(containers=["x"]), "host_template.spec.containers[0]: must be an object, got str"),
        (of_pod(containers=[None]), "host_template.spec.containers[0]: must be an object, got NoneType"),
        (of_pod(nodeSelector="x"), "host_template.spec.nodeSelector: must be an object, got str"),
        (of_pod(nodeSelector={"a": 1}), "host_template.spec.nodeSelector.a: must be text, got int"),
        (
            of_pod(tolerations=[{"$patch": "replace"}]),
            "host_template.spec.tolerations[0]: '$patch' is not known here: null removes a field, "
            "an item is merged by its key",
        ),
        (of_pod(tolerations="x"), "host_template.spec.tolerations: must be a list, got str"),
        (of_pod(tolerations={"key": "x"}), "host_template.spec.tolerations: must be a list, got dict"),
        (of_pod(terminationGracePeriodSeconds="5"), "GracePeriodSeconds: must be a whole number, got str"),
        (of_pod(terminationGracePeriodSeconds=True), "GracePeriodSeconds: must be a whole number, got bool"),
        ({"head_template": {"metadata": {"labels": "x"}}}, "head_template.metadata.labels: must be an object, got str"),
        ({"head_template": {"metadata": {"labels": {"a": 1}}}}, "head_template.metadata.labels.a: must be text"),
        (
            {"host_template": {"spec": {"containers": [{"name": "ray-workr", "env": []}]}}},
            "container 'ray-workr' has no image; did you mean 'ray-worker'",
        ),
        ({"head_template": {"spec": {"initContainers": [{"name": "init"}]}}}, "container 'init' has no image"),
        ({"host_template": variable("ray-worker", "RAY_AUTH_TOKEN")}, "RAY_AUTH_TOKEN is set for each pod"),
        ({"head_template": variable("ray-head", "RAY_AUTH_MODE")}, "RAY_AUTH_MODE is set for each pod"),
        ({"host_template": variable("ray-worker", "TPU_WORKER_ID")}, "TPU_WORKER_ID is set for each pod"),
        ({"labels": {"a b": "c"}}, "labels: must be labels of Kubernetes"),
        ({"labels": {"a": "b c"}}, "labels: must be labels of Kubernetes"),
        ({"labels": {"raytpu-owner": "c"}}, "labels: must not begin with 'raytpu-'"),
        (
            {"head_start_params": {"dashboard-host": "127.0.0.1"}},
            "head_start_params: dashboard-host is what the backend",
        ),
        ({"host_start_params": {"address": "x"}}, "host_start_params: address is what the backend"),
        ({"host_start_params": {"--num-cpus": "1"}}, "host_start_params: must be options of `ray start` without"),
        ({"compute_class": ""}, "compute_class"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, said):
    with pytest.raises(InvalidSpec) as refused:
        made(**options)

    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("rungs", "said"),
    [([Spot(), OnDemand()], "takes one kind, 2 were given"), ([Queued(60)], "name a Kueue LocalQueue")],
)
async def test_kinds_of_capacity_that_it_does_not_have_are_refused(rungs, said):
    with pytest.raises(InvalidSpec, match=said):
        await GkeBackend().plan(SPEC, rungs, lease_for=timedelta(hours=1))
