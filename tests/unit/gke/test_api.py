"""What the API server answers, or fails to, and which error that becomes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.tpu.errors import CapacityUnavailable, Misconfigured, RayTpuError, RemoteUnavailable
from tests.unit.gke.calls import CALLS, MANIFEST, every_call
from tests.unit.gke.fake_kube import (
    CUT,
    FORBIDDEN,
    HANG,
    NAMESPACE,
    NO_SUCH_PATH,
    NO_WEBHOOK,
    PODS,
    QUOTA,
    RAY_CLUSTERS,
    RESET,
    WORKLOADS,
    FakeKube,
    Fault,
    answer,
    kubeconfig,
    refusal,
)


def one_line(error: pytest.ExceptionInfo[RayTpuError]) -> str:
    said = str(error.value)
    assert "\n" not in said
    return said


# What the server says


@pytest.mark.parametrize(
    ("fault", "kind", "words", "next_step"),
    [
        (FORBIDDEN, Misconfigured, 'cannot patch resource "rayclusters"', "deploy/gke/rbac.yaml"),
        (QUOTA, CapacityUnavailable, "exceeded quota: chips", "ResourceQuota is used up: release leases"),
        (
            refusal(403, 'admission webhook "tpu.gke.io" denied the request: number of workers is wrong', "Forbidden"),
            Misconfigured,
            'admission webhook "tpu.gke.io" denied',
            "change the option that it speaks of",
        ),
        (
            refusal(422, "ValidatingAdmissionPolicy 'images' with binding 'all' denied request: no", "Invalid"),
            Misconfigured,
            "ValidatingAdmissionPolicy 'images'",
            "ask who made the rule",
        ),
        (
            refusal(403, "unable to create new content in namespace ml because it is being terminated", "Forbidden"),
            Misconfigured,
            "namespace ml",
            "name another one in the option namespace",
        ),
        (
            refusal(403, 'User "system:anonymous" cannot patch resource "rayclusters"', "Forbidden"),
            Misconfigured,
            "system:anonymous",
            "check the kubeconfig or the connection",
        ),
        (
            refusal(422, 'RayCluster.ray.io "one" is invalid: spec.headGroupSpec: Required value', "Invalid"),
            Misconfigured,
            "spec.headGroupSpec: Required value",
            "change the option or the template",
        ),
        (refusal(400, "the body cannot be read", "BadRequest"), Misconfigured, "cannot be read", "change the option"),
        (
            refusal(
                500, "failed to create typed patch object (ml/one): .spec.authOptions: field not declared in schema"
            ),
            Misconfigured,
            ".spec.authOptions",
            "KubeRay is older than 1.5",
        ),
        (
            refusal(500, "failed to create typed patch object (ml/one): .spec.headGroupSpec: expected map, got &{[]}"),
            Misconfigured,
            "expected map",
            "misspelt in a template",
        ),
        (NO_SUCH_PATH, Misconfigured, "404 page not found", "KubeRay is not installed"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_what_asking_again_cannot_change_names_object_verb_and_next_step(
    kube: FakeKube, api: KubeApi, fault: Fault, kind: type[RayTpuError], words: str, next_step: str
):
    kube.fails("patch rayclusters", fault)

    with pytest.raises(RayTpuError) as refused:
        await api.apply_ray_cluster(MANIFEST)

    assert type(refused.value) is kind
    said = one_line(refused)
    assert said.startswith(f"Kubernetes refused to apply RayCluster {NAMESPACE}/one ({fault.status}): ")
    assert words in said
    assert next_step in said.partition(words)[2]
    assert kube.calls == ["patch rayclusters"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (refusal(409, "Operation cannot be fulfilled: the object has been modified", "Conflict"), "has been modified"),
        (refusal(429, "too many requests", "TooManyRequests"), "too many requests"),
        (NO_WEBHOOK, 'failed calling webhook "mraycluster.kb.io"'),
        (refusal(500, "etcdserver: leader changed", "InternalError"), "leader changed"),
        (refusal(503, "apiserver is shutting down", "ServiceUnavailable"), "shutting down"),
        (refusal(504, "request did not complete within requested timeout", "Timeout"), "did not complete"),
        (answer(502, "<html>Bad Gateway</html>"), "<html>Bad Gateway</html>"),
        (answer(500, b"\xff\xfe"), "(500)"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_what_goes_away_by_itself_is_told_in_the_servers_words(
    kube: FakeKube, api: KubeApi, fault: Fault, words: str
):
    """F16, F28: a webhook that is down is named."""
    kube.fails("patch rayclusters", fault)

    with pytest.raises(RemoteUnavailable) as refused:
        await api.apply_ray_cluster(MANIFEST)

    said = one_line(refused)
    assert said.startswith(f"Kubernetes is not able to apply RayCluster {NAMESPACE}/one now ({fault.status}): ")
    assert words in said


async def test_a_namespace_that_does_not_exist_is_named_with_the_command_for_it(kube: FakeKube, api: KubeApi):
    kube.namespaces.clear()

    with pytest.raises(Misconfigured, match=r'namespaces "ml" not found; create it with `kubectl create namespace`'):
        await api.apply_ray_cluster(MANIFEST)


@pytest.mark.parametrize("call", ["get rayclusters", "list rayclusters", "delete rayclusters"])
async def test_without_kuberay_nothing_counts_as_absent(kube: FakeKube, api: KubeApi, call: str):
    """F07: a 404 of the path, such as at a wrong address, says nothing about the object."""
    kube.kinds.remove(RAY_CLUSTERS)

    with pytest.raises(Misconfigured, match="KubeRay is not installed there"):
        await CALLS[call](api)


@pytest.mark.parametrize("call", ["get rayclusters", "get secrets", "delete rayclusters", "delete pods"])
@pytest.mark.parametrize(
    "fault",
    [
        answer(404, "<html>nginx: not found</html>"),
        answer(404, b'{"message": "not found"}'),
        refusal(404, 'namespaces "ml" not found', "NotFound", name="ml", kind="namespaces"),
        FORBIDDEN,
        NO_WEBHOOK,
    ],
)
async def test_only_the_servers_word_that_this_object_does_not_exist_is_absence(
    kube: FakeKube, api: KubeApi, call: str, fault: Fault
):
    """F07: anything else would skip a deletion and leave chips behind."""
    kube.fails(call, fault)

    with pytest.raises(RayTpuError):
        await CALLS[call](api)


async def test_what_does_not_exist_is_none_and_deleting_it_is_nothing(api: KubeApi):
    assert await api.ray_cluster("one") is None
    assert await api.token("one") is None
    assert await api.ray_clusters("raytpu-owner") == []
    await api.delete_ray_cluster("one", "u")
    await api.delete_pod("one", "u")


@pytest.mark.parametrize("from_storage", [False, True])
async def test_another_object_of_the_same_name_is_not_deleted(kube: FakeKube, api: KubeApi, from_storage: bool):
    """The server has two texts for a precondition that does not hold."""
    kube.store(RAY_CLUSTERS, {"metadata": {"name": "one", "uid": "new"}, "spec": {}})
    kube.store(PODS, {"metadata": {"name": "one", "uid": "new"}})
    if from_storage:
        text = "StorageError: invalid object, Precondition failed: UID in precondition: old, UID in object meta: new"
        kube.fails("delete", refusal(409, text, "Conflict"), always=True)

    await api.delete_ray_cluster("one", "old")
    await api.delete_pod("one", "old")

    assert kube.count("delete") == 2
    for kind in (RAY_CLUSTERS, PODS):
        assert "deletionTimestamp" not in kube.all(kind)["one"]["metadata"]


async def test_a_dry_run_stores_nothing(kube: FakeKube, api: KubeApi):
    assert (await api.apply_ray_cluster(MANIFEST, dry_run=True))["metadata"]["name"] == "one"
    assert kube.all(RAY_CLUSTERS) == {}


# The connection


@every_call
@pytest.mark.parametrize("fault", [RESET, CUT], ids=["reset", "cut"])
async def test_a_connection_that_breaks_is_the_far_side_being_away(
    kube: FakeKube, api: KubeApi, call: str, fault: Fault
):
    kube.kinds |= set(WORKLOADS.values())
    kube.fails(call, fault, always=True)

    with pytest.raises(RemoteUnavailable) as broken:
        await CALLS[call](api)

    assert one_line(broken).startswith(f"Kubernetes at {kube.address}, ")
    assert NAMESPACE in str(broken.value)


@every_call
async def test_a_server_that_hangs_counts_as_silent_in_time(kube: FakeKube, access: KubeconfigAccess, call: str):
    kube.fails(call, HANG)

    async with KubeApi(access, NAMESPACE, timeout_s=0.2) as api:
        with pytest.raises(RemoteUnavailable, match="TimeoutError|timeout"):
            await CALLS[call](api)


@pytest.mark.parametrize("call", sorted(CALLS.keys() - {"get pods/log"}))
@pytest.mark.parametrize(
    "body",
    [b"<html>log in</html>", b"", b"\xff\xfe\x00", b"[]", b"null", b'{"error": "log in"}', b'{"metadata": 1}'],
    ids=["page", "nothing", "bytes", "list", "null", "other-json", "odd-metadata"],
)
async def test_an_answer_that_is_not_kubernetes_is_the_far_side_being_away(
    kube: FakeKube, api: KubeApi, call: str, body: bytes
):
    kube.kinds |= set(WORKLOADS.values())
    kube.fails(call, answer(200, body))

    with pytest.raises(RemoteUnavailable, match="no Kubernetes") as broken:
        await CALLS[call](api)

    assert "log in" not in one_line(broken)  # nothing of a body that may be a Secret


@pytest.mark.parametrize("call", sorted(call for call in CALLS if call.startswith("list")))
async def test_a_list_without_items_is_no_empty_list(kube: FakeKube, api: KubeApi, call: str):
    kube.kinds |= set(WORKLOADS.values())
    kube.fails(call, answer(200, '{"metadata": {}, "items": null}'))

    with pytest.raises(RemoteUnavailable, match="no list"):
        await CALLS[call](api)


async def test_nobody_at_the_address(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        async with KubeApi(KubeconfigAccess(str(kubeconfig(tmp_path / "k", url))), NAMESPACE) as api:
            with pytest.raises(RemoteUnavailable, match=f"Kubernetes at {url}, get RayCluster ml/one"):
                await api.ray_cluster("one")


@pytest.mark.parametrize("url", ["127.0.0.1:6443", "http://", "https://host:port"])
async def test_an_address_that_is_none_is_not_asked_again_and_again(tmp_path: Path, url: str):
    async with KubeApi(KubeconfigAccess(str(kubeconfig(tmp_path / "k", url))), NAMESPACE) as api:
        with pytest.raises(Misconfigured, match="check the kubeconfig or the connection"):
            await api.ray_cluster("one")


# Logs and Kueue


async def test_the_last_lines_of_a_container(kube: FakeKube, api: KubeApi):
    kube.store(PODS, {"metadata": {"name": "head"}})
    assert await api.last_lines("head", "ray-head") == []  # it has not run before
    assert await api.last_lines("gone", "ray-head") == []

    kube.logs["head"] = "one\n\ntwo \xe4\nthree\n"
    assert await api.last_lines("head", "ray-head", lines=3) == ["two \xe4", "three"]

    kube.fails("get pods/log", answer(200, b"\xff\xfe broken"))
    assert await api.last_lines("head", "ray-head") == ["\ufffd\ufffd broken"]

    kube.fails("get pods/log", refusal(500, "Get https://10.0.0.9:10250/containerLogs: no route to host"))
    with pytest.raises(RemoteUnavailable, match=r"read the log of pod ml/head now \(500\)"):
        await api.last_lines("head", "ray-head")


@pytest.mark.parametrize("versions", [["v1beta2", "v1beta1"], ["v1beta1"]], ids=lambda versions: versions[0])
async def test_kueue_is_asked_in_the_newest_version_that_it_has(kube: FakeKube, api: KubeApi, versions: list[str]):
    kinds = [WORKLOADS[version] for version in versions]
    kube.kinds |= set(kinds)
    kube.store(kinds[0], {"metadata": {"name": "w", "labels": {"kueue.x-k8s.io/job-uid": "u-7"}}})

    found = await api.workload("u-7")

    assert found is not None
    assert found["metadata"]["name"] == "w"
    assert await api.workload("u-8") is None


async def test_without_kueue_there_is_no_workload(kube: FakeKube, api: KubeApi):
    assert await api.workload("u-7") is None
    assert kube.calls == ["list workloads"] * 2
