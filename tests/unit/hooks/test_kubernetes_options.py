"""Options name one way to an API server; what is left over, missing or contradicts is refused by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.settings import Settings
from raytpu_ops.hooks.kubernetes import ACCESS_KEYS, ConnectionAccess, access_from, found_again, overlaid
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured

CLUSTER = {"cluster_name": "tpus", "location": "us-central2-b"}


def test_options_of_the_backend_are_given_back() -> None:
    access, rest = access_from({"kubeconfig": "/k", "context": "c", "namespace": "ml", "head": {"cpu": "4"}})

    assert isinstance(access, KubeconfigAccess)
    assert access.selectors == {"kubeconfig": "/k", "context": "c"}
    assert rest == {"namespace": "ml", "head": {"cpu": "4"}}


def test_no_option_has_two_meanings() -> None:
    assert ACCESS_KEYS.isdisjoint(Settings.model_fields)


@pytest.mark.parametrize("silent", [None, "", False])
def test_what_a_form_leaves_empty_says_nothing(silent: object) -> None:
    access, rest = access_from({"use_internal_ip": silent, "cluster_name": silent, "kubernetes_conn_id": "k8s"})

    assert isinstance(access, ConnectionAccess)
    assert rest == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kubernetes_conn_id": "k", "kubeconfig": "/k"}, "kubernetes_conn_id and kubeconfig are two ways"),
        ({**CLUSTER, "kubeconfig": "/k"}, "cluster_name and kubeconfig are two ways"),
        ({**CLUSTER, "context": "c"}, "cluster_name and context are two ways"),
        ({"gcp_conn_id": "g", "kubernetes_conn_id": "k"}, "kubernetes_conn_id and gcp_conn_id are two ways"),
        ({"gcp_conn_id": "g"}, "cluster_name and location are missing beside gcp_conn_id"),
        ({"cluster_name": "tpus"}, "location is missing beside cluster_name"),
        ({"location": "us-central2-b", "project_id": "p"}, "cluster_name is missing beside location"),
        ({**CLUSTER, "use_internal_ip": True, "use_dns_endpoint": True}, "use_internal_ip and use_dns_endpoint"),
        ({**CLUSTER, "use_internal_ip": "yes"}, "use_internal_ip: .*'yes'"),
        ({**CLUSTER, "impersonation_chain": {"a": 1}}, "impersonation_chain: "),
        ({"kubernetes_conn_id": 3}, "kubernetes_conn_id: .*got 3"),
        ({"kubeconfig": ["/k"]}, "kubeconfig: "),
        ({"in_cluster": True}, "'in_cluster': leave it out inside a pod"),
        ({"config_file": "/k"}, "'config_file': write kubeconfig"),
        ({"region": "us-central2"}, "'region': write location"),
        ({"clustername": "tpus"}, "'clustername'; did you mean 'cluster_name'"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec, match=f"^backend 'gke': .*{message}"):
        access_from(options)


def test_other_unknown_options_are_the_backends_to_refuse() -> None:
    assert access_from({"namespce": "ml"})[1] == {"namespce": "ml"}


@pytest.mark.parametrize(
    ("options", "module", "extra"),
    [
        ({}, "kubernetes_asyncio.client", "gke"),
        ({"kubernetes_conn_id": "k8s"}, "airflow.providers.cncf.kubernetes.hooks.kubernetes", "gke"),
        (CLUSTER, "airflow.providers.google.common.hooks.base_google", "google"),
    ],
)
def test_an_extra_that_is_not_installed_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(Misconfigured, match=rf"pip install 'raytpu-ops\[{extra}\]'"):
        access_from(options)


@pytest.mark.parametrize(
    ("connection", "task", "together"),
    [
        ({"kubeconfig": "/k", "namespace": "a"}, {"namespace": "b"}, {"kubeconfig": "/k", "namespace": "b"}),
        ({"kubeconfig": "/k"}, {"context": "c"}, {"kubeconfig": "/k", "context": "c"}),
        ({"kubernetes_conn_id": "k"}, {"context": "c"}, {"kubernetes_conn_id": "k", "context": "c"}),
        ({"context": "c"}, {"kubeconfig": "/k"}, {"context": "c", "kubeconfig": "/k"}),
        ({"context": "c"}, {"kubernetes_conn_id": "k"}, {"kubernetes_conn_id": "k"}),
        ({"kubeconfig": "/k", "context": "c", "queue": "q"}, CLUSTER, {**CLUSTER, "queue": "q"}),
        ({"kubernetes_conn_id": "k", "use_internal_ip": False}, CLUSTER, CLUSTER),
        ({"location": "l"}, {"cluster_name": "c"}, {"location": "l", "cluster_name": "c"}),
        ({**CLUSTER, "use_internal_ip": True}, {"use_internal_ip": False}, {**CLUSTER, "use_internal_ip": False}),
    ],
)  # fmt: skip
def test_a_tasks_options_go_over_the_connections_and_another_way_replaces_it(
    connection: dict[str, Any], task: dict[str, Any], together: dict[str, Any]
) -> None:
    assert overlaid(connection, task) == together


def test_a_lease_is_found_where_it_was_granted_and_not_where_the_connection_leads_now() -> None:
    now = {"kubernetes_conn_id": "other", "namespace": "b", "queue": "q"}
    place = {"kubeconfig": "/k", "namespace": "a", "runtime": "upload", "something": "else"}

    assert found_again(now, place) == {"kubeconfig": "/k", "namespace": "a", "runtime": "upload", "queue": "q"}
    assert found_again(now, {"namespace": "a"}) == {**now, "namespace": "a"}


def test_the_ways_selectors_are_options_again() -> None:
    for options in ({"kubernetes_conn_id": "k8s", "context": "c"}, {"kubeconfig": "/k"}, {}):
        access, _ = access_from(options)
        again, _ = access_from(access.selectors)
        assert (type(again), again.selectors) == (type(access), options)
