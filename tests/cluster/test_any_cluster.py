"""What any cluster with KubeRay has to show; `RAYTPU_TEST_KUBECONFIG` names another one than the testbed.

Nothing here looks at nodes or bends the cluster, so it is safe where others work too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("kubernetes", reason="tests on a cluster need the extra `dev`")

from kubernetes import client

from tests.cluster.manifests import ray_cluster
from tests.testbed.faults import KubernetesFaults, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(600)]

_READ_CLUSTERS = {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": ["get", "list"]}


@pytest.fixture(scope="module")
def place(any_cluster: KubernetesFaults) -> Iterator[str]:
    """A namespace of this module's own."""
    with any_cluster.namespace("any-cluster") as name:
        yield name


def refusal(call: Any, *args: object) -> str:
    """Why the API server refuses, or nothing."""
    try:
        call(*args)
    except client.ApiException as error:
        return f"{error.status} {error.body}"
    return ""


def test_a_raycluster_is_taken_and_nonsense_is_not(any_cluster: KubernetesFaults, place: str) -> None:
    resource = any_cluster.dynamic.resources.get(api_version="ray.io/v1", kind="RayCluster")
    manifest = ray_cluster("dry")
    manifest["metadata"]["namespace"] = place
    dry = {"namespace": place, "field_manager": "test", "query_params": [("dryRun", "All")]}
    made = resource.server_side_apply(body=manifest, name="dry", **dry)
    assert made.spec.workerGroupSpecs[0].numOfHosts == 2
    manifest["spec"]["workerGroupSpecs"][0]["numOfHost"] = 2
    with pytest.raises(client.ApiException, match="numOfHost"):
        resource.server_side_apply(body=manifest, name="dry", **dry)
    assert resource.get(namespace=place).items == []


def test_an_account_may_do_what_its_rules_say_and_nothing_else(any_cluster: KubernetesFaults, place: str) -> None:
    path = any_cluster.kubeconfig_for([_READ_CLUSTERS], place)
    assert path.stat().st_mode & 0o077 == 0
    few = KubernetesFaults(path)
    try:
        listing = few.custom.list_namespaced_custom_object
        assert refusal(listing, "ray.io", "v1", place, "rayclusters") == ""
        assert refusal(listing, "ray.io", "v1", "default", "rayclusters").startswith("403")
        assert refusal(few.core.list_namespaced_pod, place).startswith("403")
        assert 'cannot list resource \\"pods\\"' in refusal(few.core.list_namespaced_pod, place)
    finally:
        few.close()


def test_a_manifest_is_granted_as_it_stands_in_another_namespace(
    any_cluster: KubernetesFaults, place: str, tmp_path: Path
) -> None:
    """As `deploy/gke/rbac.yaml` is: two accounts, one of them bound."""
    where, name = {"namespace": "written-for-another"}, {"name": "bound"}
    rbac = "rbac.authorization.k8s.io"
    manifests = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "unbound", **where}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**name, **where}},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": {**name, **where}, "rules": [_READ_CLUSTERS]},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": {**name, **where},
            "roleRef": {"apiGroup": rbac, "kind": "Role", **name},
            "subjects": [{"kind": "ServiceAccount", **name, **where}],
        },
    ]
    path = tmp_path / "rights.yaml"
    path.write_text(yaml.safe_dump_all(manifests))
    bound = KubernetesFaults(any_cluster.kubeconfig_for(path, place))
    unbound = KubernetesFaults(any_cluster.kubeconfig_for(path, place, "unbound"))
    try:
        for account, expected in ((bound, ""), (unbound, "403")):
            listing = account.custom.list_namespaced_custom_object
            assert refusal(listing, "ray.io", "v1", place, "rayclusters")[:3] == expected
    finally:
        bound.close()
        unbound.close()


def test_rights_on_the_whole_cluster_go_with_the_namespace(any_cluster: KubernetesFaults, tmp_path: Path) -> None:
    rbac, name = "rbac.authorization.k8s.io", {"name": "raytpu-test-reads-nodes"}
    rule = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}
    manifests = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": name, "rules": [rule]},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": name,
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", **name},
            "subjects": [{"kind": "ServiceAccount", **name, "namespace": "written-for-another"}],
        },
    ]
    path = tmp_path / "rights.yaml"
    path.write_text(yaml.safe_dump_all(manifests))
    roles = client.RbacAuthorizationV1Api(any_cluster.api)

    def left() -> list[str]:
        found = [*roles.list_cluster_role().items, *roles.list_cluster_role_binding().items]
        return [one.metadata.name for one in found if one.metadata.name.startswith(name["name"])]

    with any_cluster.namespace("wide") as where:
        account = KubernetesFaults(any_cluster.kubeconfig_for(path, where))
        assert refusal(account.core.list_node) == ""
        account.close()
        assert len(left()) == 2
    wait_until(lambda: not left(), 120, lambda: f"left: {left()}")


def test_a_namespace_is_gone_with_what_is_in_it(any_cluster: KubernetesFaults) -> None:
    with any_cluster.namespace("short") as name:
        any_cluster.core.create_namespaced_config_map(name, {"metadata": {"name": "held"}})
        # No pod could be made without it.
        assert any_cluster.core.read_namespaced_service_account("default", name)
    assert refusal(any_cluster.core.read_namespace, name).startswith("404")
