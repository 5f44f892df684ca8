"""Names fit their limits, are readable, and belong to one owner each."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytpu_ops.tpu import naming
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.lease import Owner
from raytpu_ops.tpu.naming import Kind, check_name

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?\Z")
KUBERNETES_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?\Z")
GOOGLE_LABEL = re.compile(r"[a-z0-9_-]{0,63}\Z")

#: All that `str.isprintable` lets through: no controls, surrogates, private or unassigned ones, no space but one.
printable = st.characters(exclude_categories=["C", "Z"]) | st.just(" ")
an_id = st.text(printable, min_size=1, max_size=250) | st.text(
    string.ascii_letters + string.digits + "_.-+:", min_size=1, max_size=250
)
an_owner = st.builds(
    Owner,
    dag_id=an_id,
    run_id=an_id,
    task_id=an_id,
    map_index=st.integers(-1, 5000),
    deployment=st.none() | an_id,
)
a_number = st.integers(0, naming.MAX_NUMBER)

OWNER = Owner(dag_id="team.Train_Digits", run_id="scheduled__2026-01-01T00:00:00+00:00", task_id="slices.provision")


@given(owner=an_owner, number=a_number, other=a_number)
def test_every_name_fits_its_limit_and_is_a_dns_label(owner, number, other):
    lease = naming.lease_id(owner)
    for name, limit in [
        (lease, 40),
        (naming.ray_cluster_name(owner), 53),
        (naming.ray_job_name(owner), 47),
        (naming.submission_id(owner, number, other), 47),
        (naming.node_pool_name(owner, number, other), 40),
        (naming.slice_name(lease, number, other), 63),
    ]:
        assert len(name) <= limit, name
        assert DNS_LABEL.match(name), name
        assert "--" not in name


@given(owner=an_owner)
def test_names_are_made_of_the_owner_alone(owner):
    again = Owner(**owner.model_dump())
    assert naming.lease_id(owner) == naming.lease_id(again)
    assert naming.owner_labels(owner) == naming.owner_labels(again)


@given(owner=an_owner, other=an_owner)
def test_different_owners_get_different_names(owner, other):
    assert (owner == other) == (naming.lease_id(owner) == naming.lease_id(other))
    assert (owner == other) == (naming.submission_id(owner, 0, 0) == naming.submission_id(other, 0, 0))


@pytest.mark.parametrize(
    "change",
    [
        {"dag_id": "team.train.digits"},
        {"run_id": "manual__1"},
        {"task_id": "slices_provision"},
        {"map_index": 0},
        {"deployment": "staging"},
    ],
)
def test_each_part_of_the_owner_counts_even_where_the_readable_part_is_the_same(change):
    other = OWNER.model_copy(update=change)
    assert naming.lease_id(other) != naming.lease_id(OWNER)
    assert naming.owner_labels(other)["raytpu-owner"] != naming.owner_labels(OWNER)["raytpu-owner"]


def test_a_name_is_readable():
    assert naming.lease_id(OWNER).startswith("team-train-di-slices-provis-")
    assert naming.submission_id(OWNER, 2, 1).endswith("-e2-a1")


@pytest.mark.parametrize(
    ("dag_id", "task_id", "begins"),
    [
        ("Données", "entraîner", "donnees-entrainer-"),
        ("データ", "訓練", "dag-task-"),
        ("2024_report", "train", "d2024-report-train-"),
        ("___", "...", "dag-task-"),
        ("d" * 250, "t" * 250, "ddddddddddddd-ttttttttttttt-"),
        ("d" * 250, "go", "d" * 24 + "-go-"),
        ("go", "t" * 250, "go-" + "t" * 24 + "-"),
    ],
)
def test_awkward_ids_still_make_readable_names(dag_id, task_id, begins):
    name = naming.lease_id(Owner(dag_id=dag_id, run_id="r", task_id=task_id))
    assert name.startswith(begins)
    assert len(name) <= 40


class TestSubmissions:
    @given(owner=an_owner, epoch=a_number, attempt=a_number)
    def test_an_id_says_epoch_and_attempt(self, owner, epoch, attempt):
        parsed = naming.parse_submission_id(naming.submission_id(owner, epoch, attempt))
        assert parsed is not None
        assert (parsed.epoch, parsed.attempt) == (epoch, attempt)
        assert naming.submission_prefix(owner).startswith(f"{parsed.owner}-")

    @given(owner=an_owner, epoch=a_number, other=a_number, attempt=a_number)
    def test_a_prefix_finds_its_epoch_and_no_other(self, owner, epoch, other, attempt):
        found = naming.submission_id(owner, other, attempt).startswith(naming.submission_prefix(owner, epoch))
        assert found == (epoch == other)
        assert naming.submission_id(owner, other, attempt).startswith(naming.submission_prefix(owner))

    @given(owner=an_owner, other=an_owner)
    def test_a_prefix_never_finds_another_owners(self, owner, other):
        found = naming.submission_id(other, 0, 0).startswith(naming.submission_prefix(owner))
        assert found == (owner == other)

    @pytest.mark.parametrize("text", ["raysubmit_abc", "", "x-e1", "x-e1-a", "x-e1-a1\n", "x-e12345-a1", "X-e1-a1"])
    def test_other_ids_are_not_ours(self, text):
        assert naming.parse_submission_id(text) is None


def test_a_replacement_never_has_the_name_of_what_it_replaces():
    lease = naming.lease_id(OWNER)
    names = [naming.slice_name(lease, index, again) for index in range(3) for again in range(3)]
    pools = [naming.node_pool_name(OWNER, index, again) for index in range(3) for again in range(3)]
    assert len(set(names)) == len(set(pools)) == 9


class TestLabels:
    @given(text=st.text(max_size=400))
    def test_any_text_becomes_a_label_for_kubernetes_and_google(self, text):
        value = naming.label_value(text)
        assert KUBERNETES_LABEL.match(value), value
        assert GOOGLE_LABEL.match(value), value

    @given(text=st.text(max_size=400), other=st.text(max_size=400))
    def test_different_texts_stay_different(self, text, other):
        assert (text == other) == (naming.label_value(text) == naming.label_value(other))

    def test_a_label_stays_as_it_is(self):
        assert naming.label_value("train_digits-2") == "train_digits-2"

    def test_colons_and_plus_of_a_run_id_are_replaced_readably(self):
        value = naming.label_value(OWNER.run_id)
        assert value.startswith("scheduled__2026-01-01t00-00-00-00-00-")

    @given(owner=an_owner)
    def test_keys_claim_no_domain_and_fit_google(self, owner):
        for key in naming.owner_labels(owner):
            assert re.match(r"[a-z][a-z0-9_-]{0,62}\Z", key)

    def test_the_map_index_is_there_only_for_mapped_tasks(self):
        assert "raytpu-map-index" not in naming.owner_labels(OWNER)
        assert naming.owner_labels(OWNER.model_copy(update={"map_index": 3}))["raytpu-map-index"] == "3"

    def test_the_deployment_is_there_only_where_this_airflow_has_a_name(self):
        assert "raytpu-deployment" not in naming.owner_labels(OWNER)
        assert naming.owner_labels(OWNER.model_copy(update={"deployment": "staging"}))["raytpu-deployment"] == "staging"


class TestChosenNames:
    @pytest.mark.parametrize("kind", Kind)
    def test_a_name_at_the_limit_passes_and_one_beyond_is_refused_with_both_numbers(self, kind):
        assert check_name("a" * kind.limit, kind) == "a" * kind.limit
        with pytest.raises(InvalidSpec) as refused:
            check_name("a" * (kind.limit + 1), kind)
        assert f"has {kind.limit + 1} characters" in str(refused.value)
        assert f"at most {kind.limit}" in str(refused.value)

    def test_the_limits_are_those_of_kuberay_and_gke(self):
        kinds = (Kind.RAY_CLUSTER, Kind.RAY_JOB, Kind.RAY_SERVICE, Kind.NODE_POOL)
        assert [kind.limit for kind in kinds] == [53, 47, 47, 40]

    def test_a_name_that_could_be_cleaned_is_refused_with_the_clean_one(self):
        with pytest.raises(InvalidSpec, match=r"cluster_name: .*such as 'my-cluster'"):
            check_name("My Cluster", Kind.RAY_CLUSTER, "cluster_name")

    @given(owner=an_owner)
    def test_what_we_build_passes_our_own_check(self, owner):
        lease = naming.lease_id(owner)
        assert check_name(lease, Kind.LEASE) == lease
        assert check_name(naming.slice_name(lease, 0, 1), Kind.SLICE)
        assert check_name(naming.node_pool_name(owner, 0), Kind.NODE_POOL)
