"""The table of rights, the manifests that grant it and the calls that need it are one and the same."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import kmock
import pytest
import yaml
from kubernetes_asyncio.client import Configuration

from raytpu_ops.backends.gke.api import KubeApi
from raytpu_ops.backends.gke.rights import DOCTOR_RIGHTS, RIGHTS, Right
from tests.unit.gke.calls import MANIFEST as RAY_CLUSTER
from tests.unit.gke.calls import REQUEST, TEMPLATE

DEPLOY = Path(__file__).parents[3] / "deploy" / "gke"

#: Group, resource with its subresource, verb.
Key = tuple[str, str, str]


def keys(rights: tuple[Right, ...]) -> list[Key]:
    return [(right.group, right.path, right.verb) for right in rights]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def granted(name: str, kind: str) -> list[Key]:
    [role] = [one for one in documents(name) if one["kind"] == kind]
    return [
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


def test_the_role_grants_the_table_and_nothing_else():
    assert sorted(granted("rbac.yaml", "Role")) == sorted(keys(RIGHTS))


def test_the_doctors_role_grants_its_table_and_nothing_else():
    assert sorted(granted("doctor.yaml", "ClusterRole")) == sorted(keys(DOCTOR_RIGHTS))


def test_no_right_is_wild_or_reaches_beyond_a_namespace():
    assert not [key for key in keys(RIGHTS) if "*" in "".join(key)]
    assert {one["kind"] for one in documents("rbac.yaml")} == {"ServiceAccount", "Role", "RoleBinding"}


def test_rays_pods_have_an_account_without_rights_and_without_a_token():
    [pods] = [one for one in documents("rbac.yaml") if one["metadata"]["name"] == "raytpu-pods"]
    assert pods["automountServiceAccountToken"] is False
    bound = [
        subject["name"]
        for name in ("rbac.yaml", "doctor.yaml")
        for one in documents(name)
        for subject in one.get("subjects", [])
    ]
    assert set(bound) == {"raytpu-airflow"}


def test_another_namespace_is_one_word_in_its_place():
    """As the manifest's comment says: a `sed` that meets nothing but the namespaces."""
    moved = re.sub("namespace: raytpu$", "namespace: team-a", (DEPLOY / "rbac.yaml").read_text(), flags=re.MULTILINE)
    for one in yaml.safe_load_all(moved):
        assert one["metadata"]["namespace"] == "team-a"
        assert all(subject["namespace"] == "team-a" for subject in one.get("subjects", []))
        assert one["metadata"]["name"].startswith("raytpu")


def test_rights_are_written_as_kubectl_writes_them():
    names = {right.full_name for right in RIGHTS}
    assert {"rayclusters.ray.io", "pods/log", "services/proxy", "workloads.kueue.x-k8s.io", "podtemplates"} <= names
    assert all(right.why for right in (*RIGHTS, *DOCTOR_RIGHTS))


class _Access:
    """The API server that a test plays."""

    def __init__(self, url: str) -> None:
        self.selectors: dict[str, str] = {}
        self._configuration = Configuration(host=url)

    async def configuration(self, *, renew: bool = False) -> Configuration:
        return self._configuration


#: Each call of the backend's client, with arguments that reach the server.
CALLS: dict[str, tuple[Any, ...]] = {
    "ray_cluster": ("one",),
    "ray_clusters": ("a=b",),
    "apply_ray_cluster": (RAY_CLUSTER,),
    "change_ray_cluster": ({"metadata": {"name": "one", "uid": "uid", "resourceVersion": "1"}}, {"a": "b"}),
    "let_go": ({"metadata": {"name": "one", "resourceVersion": "1", "finalizers": ["a"]}}, "a"),
    "delete_ray_cluster": ("one", "uid"),
    "pods": ("one",),
    "delete_pod": ("pod", "uid"),
    "last_lines": ("pod", "ray-head"),
    "token": ("one",),
    "workload": ("uid",),
    "provisioning_requests": ("a=b",),
    "apply_provisioning_request": (REQUEST,),
    "delete_provisioning_request": (REQUEST,),
    "apply_pod_template": (TEMPLATE,),
}
_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)/namespaces/ns/(?P<resource>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>.+))?)?\Z"
)


def asked_for(request: kmock.Request) -> set[Key]:
    """What the API server asks RBAC about a request."""
    match = _PATH.match(request.url.path)
    assert match, f"{request.url.path} is not in the namespace"
    resource = match["resource"] + (f"/{match['sub']}" if match["sub"] else "")
    collection = "watch" if request.params.get("watch") else "list"
    verbs = {
        "GET": {"get" if match["name"] else collection},
        "POST": {"create"},
        "PUT": {"update"},
        # Server-side apply: also for an object that is not there yet.
        "PATCH": {"patch", "create"},
        "DELETE": {"delete" if match["name"] else "deletecollection"},
    }[request.method.value]
    return {(match["group"] or "", resource, verb) for verb in verbs}


async def test_the_backends_calls_need_the_table_and_nothing_less():
    public = {name for name, _ in inspect.getmembers(KubeApi, inspect.iscoroutinefunction) if not name.startswith("_")}
    assert set(CALLS) == public, "a call was added or taken away: so is its right"
    needed: set[Key] = set()
    async with kmock.RawHandler() as handler, kmock.Server(handler):
        handler.fallback << {"items": [], "data": {}, "metadata": {}}
        async with KubeApi(_Access(str(handler.url)), "ns") as api:
            for name, arguments in CALLS.items():
                more = {"suspend": True} if name == "change_ray_cluster" else {}
                await getattr(api, name)(*arguments, **more)
        for request in handler:
            needed |= asked_for(request)
    # Of these there is the API server's own record, of a whole pipeline: tests/cluster/test_gke_pipeline.py.
    through_ray = {key for key in keys(RIGHTS) if key[1] == "services/proxy"}
    assert needed == set(keys(RIGHTS)) - through_ray


@pytest.mark.parametrize("right", RIGHTS, ids=lambda right: f"{right.verb}-{right.path}")
def test_each_right_is_in_the_table_once(right: Right):
    assert keys(RIGHTS).count((right.group, right.path, right.verb)) == 1
