"""GKE's TPU webhook as the testbed plays it: one test for each rule that is known of the real one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.testbed import tpu_webhook as webhook

Pod = dict[str, Any]
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def pod(
    *,
    labels: dict[str, str] | None = None,
    indexed: tuple[int, int] | None = (0, 0),
    topology: str | None = "2x2x2",
    chips: tuple[int, ...] = (4,),
    env: list[dict[str, Any]] | None = None,
    accelerator: str = "tpu-v4-podslice",
) -> Pod:
    """A pod as KubeRay makes it."""
    marks = {"ray.io/cluster": "demo", "ray.io/group": "slices"} if labels is None else labels
    if indexed is not None:
        replica, host = indexed
        marks = {
            **marks,
            "ray.io/worker-group-replica-name": f"slices-x{replica}",
            "ray.io/worker-group-replica-index": str(replica),
            "ray.io/replica-host-index": str(host),
        }
    selector = {webhook.ACCELERATOR: accelerator, **({webhook.TOPOLOGY: topology} if topology else {})}
    containers = [
        {"name": f"c{number}", "resources": {"limits": {webhook.TPU: str(count)}} if count else {}, "env": env or []}
        for number, count in enumerate(chips)
    ]
    return {"metadata": {"labels": marks}, "spec": {"nodeSelector": selector, "containers": containers}}


def mutated(one: Pod, known: list[Pod] | None = None, **how: bool) -> Pod:
    """The pod after the patch, as the API server applies it."""
    import copy

    result: Pod = copy.deepcopy(one)
    for change in webhook.mutate(one, known or [], **how):
        assert change["op"] == "add"
        *parents, last = change["path"].strip("/").split("/")
        target: Any = result
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
        if isinstance(target, list):
            target.append(change["value"])
        else:
            target[last] = change["value"]
    return result


def environment(one: Pod, container: int = 0) -> dict[str, Any]:
    """Variables of a container; the last of a name counts, as in Kubernetes."""
    return {
        entry["name"]: entry.get("value", entry.get("valueFrom"))
        for entry in one["spec"]["containers"][container]["env"]
    }


def cluster(hosts: int | None, topology: str | None = "2x2x2", chips: int = 4) -> dict[str, Any]:
    """A RayCluster with one worker group."""
    group = {"groupName": "slices", "template": {"spec": pod(topology=topology, chips=(chips,))["spec"]}}
    return {"spec": {"workerGroupSpecs": [{**group, **({"numOfHosts": hosts} if hosts is not None else {})}]}}


def test_a_pod_without_chips_is_left_alone() -> None:
    assert webhook.mutate(pod(chips=(0,), topology=None, labels={}, indexed=None)) == []


@pytest.mark.parametrize(
    ("one", "lacking"),
    [
        (pod(labels={"ray.io/group": "slices"}), "ray.io/cluster"),
        (pod(labels={"ray.io/cluster": "demo"}), "ray.io/group"),
        (pod(topology=None), "cloud.google.com/gke-tpu-topology"),
        (pod(topology="2xtwo"), "2xtwo"),
    ],
)
def test_a_pod_that_lacks_what_the_webhook_needs_is_refused(one: Pod, lacking: str) -> None:
    with pytest.raises(webhook.Refused, match=lacking):
        webhook.mutate(one)


@pytest.mark.parametrize(
    ("topology", "chips", "hosts"), [("2x2x2", 4, 2), ("2x4", 4, 2), ("2x4", 8, 1), ("1x1", 4, 1), ("4x4x4", 4, 16)]
)
def test_hosts_follow_from_the_topology_and_the_chips_of_one_pod(topology: str, chips: int, hosts: int) -> None:
    assert webhook.hosts_of(topology, chips) == hosts


def test_requests_count_before_limits_and_all_containers_together() -> None:
    assert webhook.chips_of({"resources": {"requests": {webhook.TPU: "2"}, "limits": {webhook.TPU: "4"}}}) == 2
    assert webhook.mutate(pod(chips=(2, 2), topology="2x2x1"))[0]["path"] != "/spec/hostname"  # one host of four


def test_indexing_labels_make_worker_id_and_name() -> None:
    found = environment(mutated(pod(indexed=(1, 1))))
    assert (found["TPU_WORKER_ID"], found["TPU_NAME"]) == ("1", "slices-1")


def test_a_host_of_several_gets_name_subdomain_and_the_names_of_all() -> None:
    spec = mutated(pod(indexed=(1, 0)))
    assert spec["spec"]["hostname"] == "slices-1-0"
    assert spec["spec"]["subdomain"] == "demo-headless"
    assert environment(spec)["TPU_WORKER_HOSTNAMES"] == "slices-1-0.demo-headless,slices-1-1.demo-headless"


def test_a_single_host_gets_neither_names_nor_affinity() -> None:
    one = mutated(pod(topology="2x2x1"))
    assert not {"hostname", "subdomain", "affinity"} & set(one["spec"])
    assert "TPU_WORKER_HOSTNAMES" not in environment(one)
    assert environment(one)["TPU_WORKER_ID"] == "0"


def test_one_slice_stays_in_one_pool_and_away_from_all_others() -> None:
    before = pod(indexed=(1, 0))
    before["spec"]["affinity"] = {"nodeAffinity": {"what": "the template had"}}
    affinity = mutated(before)["spec"]["affinity"]
    assert set(affinity) == {"podAffinity", "podAntiAffinity"}  # it replaces
    [drawn] = affinity["podAffinity"][_REQUIRED]
    assert drawn["topologyKey"] == "cloud.google.com/gke-nodepool"
    assert {"key": "ray.io/worker-group-replica-name", "operator": "In", "values": ["slices-x1"]} in (
        drawn["labelSelector"]["matchExpressions"]
    )
    others, strangers = affinity["podAntiAffinity"][_REQUIRED]
    assert {rule["operator"] for rule in others["labelSelector"]["matchExpressions"]} == {"In", "NotIn"}
    assert {"key": "ray.io/cluster", "operator": "NotIn", "values": ["demo"]} in (
        strangers["labelSelector"]["matchExpressions"]
    )
    assert strangers["namespaceSelector"]["matchExpressions"][0]["values"] == ["kube-system"]


def test_the_device_plugin_is_told_by_the_hosts_address() -> None:
    found = environment(mutated(pod()))
    assert found["TPU_DEVICE_PLUGIN_HOST_IP"] == {"fieldRef": {"fieldPath": "status.hostIP"}}
    assert found["TPU_DEVICE_PLUGIN_ADDR"] == "$(TPU_DEVICE_PLUGIN_HOST_IP):2112"


def test_the_device_plugins_own_variables_are_not_injected() -> None:
    assert not {"TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY"} & set(environment(mutated(pod())))


def test_megascale_variables_come_only_where_the_number_of_slices_is_set() -> None:
    assert not [name for name in environment(mutated(pod())) if name.startswith("MEGASCALE")]
    found = environment(mutated(pod(indexed=(1, 0), env=[{"name": "MEGASCALE_NUM_SLICES", "value": "2"}])))
    assert found["MEGASCALE_SLICE_ID"] == "1"
    assert found["MEGASCALE_COORDINATOR_ADDRESS"] == "slices-0-0.demo-headless"
    assert found["MEGASCALE_PORT"] == "8081"


def test_what_the_author_set_stays_but_wrong_defaults_do_not() -> None:
    set_by_hand = [
        {"name": "TPU_NAME", "value": "mine"},
        {"name": "TPU_WORKER_ID", "value": "0"},
        {"name": "TPU_WORKER_HOSTNAMES", "value": "localhost"},
    ]
    found = environment(mutated(pod(indexed=(0, 1), env=set_by_hand)))
    assert found["TPU_NAME"] == "mine"
    assert found["TPU_WORKER_ID"] == "1"
    assert found["TPU_WORKER_HOSTNAMES"].startswith("slices-0-0.")


def test_ironwood_counts_containers_and_gives_each_a_port() -> None:
    one = mutated(pod(indexed=(0, 1), chips=(2, 2), accelerator="tpu7x"))
    first, second = environment(one, 0), environment(one, 1)
    assert (first["TPU_WORKER_ID"], second["TPU_WORKER_ID"]) == ("2", "3")
    assert (first["TPU_PROCESS_PORT"], second["TPU_PROCESS_PORT"]) == ("8471", "8472")
    assert first["TPU_PROCESS_ADDRESSES"] == ",".join(
        f"slices-0-{host}.demo-headless:{port}" for host in (0, 1) for port in (8471, 8472)
    )


def test_without_indexing_labels_it_counts_the_pods_it_knows() -> None:
    known: list[Pod] = []
    places = []
    for _ in range(4):
        one = mutated(pod(indexed=None), known)
        places.append((one["metadata"]["labels"]["replicaIndex"], environment(one)["TPU_WORKER_ID"]))
        known.append(one)
    assert places == [("slices-0", "0"), ("slices-0", "1"), ("slices-1", "0"), ("slices-1", "1")]
    [drawn] = known[2]["spec"]["affinity"]["podAffinity"][_REQUIRED]
    assert {"key": "replicaIndex", "operator": "In", "values": ["slices-1"]} in drawn["labelSelector"][
        "matchExpressions"
    ]


def test_the_legacy_path_fills_the_gap_that_a_deleted_pod_leaves() -> None:
    known: list[Pod] = []
    for _ in range(4):
        known.append(mutated(pod(indexed=None), known))
    known[1]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert environment(mutated(pod(indexed=None), known))["TPU_WORKER_ID"] == "1"


def test_the_legacy_path_hands_out_duplicates_from_a_stale_cache() -> None:
    first, second = mutated(pod(indexed=None), []), mutated(pod(indexed=None), [])
    assert environment(first)["TPU_WORKER_ID"] == environment(second)["TPU_WORKER_ID"] == "0"


def test_the_fault_gives_every_host_the_same_id() -> None:
    assert environment(mutated(pod(indexed=(1, 1)), duplicates=True))["TPU_WORKER_ID"] == "0"


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (cluster(2), None),
        (cluster(1, topology="2x4", chips=8), None),
        (cluster(1), "Number of workers"),
        (cluster(4), "Number of workers"),
        (cluster(1, topology=None, chips=0), None),
    ],
)
def test_a_cluster_is_refused_when_its_hosts_differ_from_the_topology(one: dict[str, Any], message: str | None) -> None:
    found = webhook.validate(one)
    assert found == message if message is None else message in str(found)


@pytest.mark.parametrize("one", [cluster(None), cluster(0), cluster(2, topology=None)])
def test_a_cluster_without_hosts_or_topology_is_refused_outright(one: dict[str, Any]) -> None:
    with pytest.raises(webhook.Refused, match="slices"):
        webhook.validate(one)


def test_long_names_are_cut_as_kuberay_cuts_them() -> None:
    assert webhook.headless_service("x" * 60) == "x" * 41 + "-headless"
    assert webhook.headless_service("1demo") == "rdemo-headless"
