"""What is asked for: every shape and rung as Cloud TPU takes it, and what it does not have refused before that."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.cloud import tpu_v2

from raytpu_ops.backends import ladder as climbing
from raytpu_ops.backends.ladder import Climb
from raytpu_ops.backends.tpu_vm import TpuVmBackend, request
from raytpu_ops.backends.tpu_vm.record import RECORD, Record, asked_with, digest
from raytpu_ops.backends.tpu_vm.settings import Settings
from raytpu_ops.tpu.capacity import FlexStart, OnDemand, Queued, Reservation, Spot, ladder
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.shapes import SliceShape, catalogue
from raytpu_ops.tpu.spec import SliceSpec
from tests.google_fake import tpu_rules
from tests.google_fake.fake import PROJECT, ZONE
from tests.unit.tpu_vm.conftest import ME, SPEC, planned

NOW = datetime(2026, 11, 30, 8, tzinfo=UTC)
RUNGS = [OnDemand(), Spot(), Reservation("team-a"), Queued(timedelta(hours=6))]


def spec_of(shape: SliceShape, slices: int = 1) -> SliceSpec:
    return SliceSpec.of(shape.generation.name, shape.topology, machine_type=shape.machine_type, num_slices=slices)


def had(shape: SliceShape) -> bool:
    """Whether Cloud TPU has it, Ray can use it, and the fake knows it: large cubes are many."""
    return (
        shape.ray_reserves
        and shape.generation.name in request.TYPES
        and not (shape.chips == 8 and shape.hosts == 2 and shape.generation.dimensions == 2)
        and any(shape.pod_type == one.accelerator_type for one in tpu_rules.catalogue())
        and shape.topology in tpu_rules.FAMILIES[2].topologies + tpu_rules.FAMILIES[3].topologies
    )


def asked(spec: SliceSpec, rung: Any, **options: Any) -> tpu_v2.QueuedResource:
    settings = Settings.of({"zones": [ZONE], **options})
    plan = planned(rung, spec)
    (step,) = climbing.steps(plan, settings.zones)
    climb = Climb.start(NOW)
    record = Record(
        owner=ME,
        spec=spec,
        capacity=rung.model_dump(mode="json"),
        climb=climb,
        ladder=plan.ladder,
        settings=asked_with(settings),
        digest=digest(plan, settings),
        lease_for=plan.lease_for,
        until=climbing.deadline(step, climb, plan),
    )
    found = request.queued_resource(PROJECT, step, record, settings, "secret-token", NOW)
    return tpu_v2.QueuedResource(found)


@pytest.mark.parametrize("shape", [shape for shape in catalogue() if had(shape)], ids=str)
def test_every_shape_is_asked_for_as_google_takes_it(shape: SliceShape):
    parent = f"projects/{PROJECT}/locations/{ZONE}"
    for slices in (1, 2):
        for rung in RUNGS:
            spec = spec_of(shape, slices)
            request.check(spec)
            found = asked(spec, rung)
            tpu_rules.check_queued(found, parent)
            played = tpu_rules.shape_of(found.tpu.node_spec[0].node)
            assert (played.accelerator_type, played.hosts) == (shape.pod_type, shape.hosts)
            for name in tpu_rules.node_ids(found, "qr"):
                tpu_rules.check_id(name, "node_id")


def test_the_shapes_are_many():
    assert len([shape for shape in catalogue() if had(shape)]) > 30


@pytest.mark.parametrize("shape", catalogue("7x")[:3], ids=str)
def test_7x_is_to_be_had_on_gke_alone(shape: SliceShape):
    with pytest.raises(InvalidSpec, match="end at v6e, there is no 7x: use backend 'gke'"):
        request.check(spec_of(shape))


@pytest.mark.parametrize("generation", ["v5e", "v6e"])
def test_eight_chips_are_one_host(generation: str):
    of_four = next(shape for shape in catalogue(generation) if shape.topology == "2x4" and shape.hosts == 2)
    with pytest.raises(InvalidSpec, match="one host of 8 chips: say machine_type='ct.*-8t'"):
        request.check(spec_of(of_four))


def test_flex_start_is_refused():
    with pytest.raises(InvalidSpec, match=r"capacity\[1\]: the Cloud TPU API v2 has no flex-start"):
        request.check_rung(FlexStart(timedelta(hours=2)), "capacity[1]")


def test_the_tier_follows_the_rung():
    spot, reserved, plain = (asked(SPEC, rung) for rung in (Spot(), Reservation("team-a"), OnDemand()))
    assert "spot" in spot
    assert spot.tpu.node_spec[0].node.scheduling_config.spot
    assert "guaranteed" in reserved
    assert reserved.reservation_name == f"projects/{PROJECT}/locations/{ZONE}/reservations/team-a"
    assert reserved.tpu.node_spec[0].node.scheduling_config.reserved
    assert "spot" not in plain
    assert "guaranteed" not in plain


def test_another_projects_reservation_is_named_with_its_project():
    found = asked(SPEC, Reservation("projects/other-project/reservations/team-a"))
    assert found.reservation_name == f"projects/other-project/locations/{ZONE}/reservations/team-a"


@pytest.mark.parametrize(
    ("valid_for", "within", "valid"),
    [
        (timedelta(hours=3), None, timedelta(hours=3)),
        (timedelta(hours=6), None, timedelta(hours=4)),
        (timedelta(hours=6), timedelta(hours=5), timedelta(hours=5)),
    ],
    ids=["as it says", "deadline", "within"],
)
def test_a_queued_request_is_valid_for_as_long_as_somebody_waits_for_it(
    valid_for: timedelta, within: timedelta | None, valid: timedelta
):
    """F09."""
    found = asked(SPEC, Queued(valid_for, within=within))
    assert found.queueing_policy.valid_until_duration == valid


@pytest.mark.parametrize("rung", [OnDemand(), Spot(), Reservation("team-a")])
def test_others_are_valid_until_their_time_on_the_ladder_is_over(rung: Any):
    assert asked(SPEC, rung).queueing_policy.valid_until_duration == timedelta(minutes=30)


def test_options_reach_the_nodes():
    node = (
        asked(
            SPEC,
            Spot(),
            network="projects/host/global/networks/shared",
            subnetwork="projects/host/regions/us-central2/subnetworks/tpus",
            external_ip=True,
            service_account="ml@tpu-project.iam.gserviceaccount.com",
            tags="tpu,ray",
            labels={"team": "vision"},
            runtime_version="tpu-vm-v4-base",
        )
        .tpu.node_spec[0]
        .node
    )
    assert node.network_config.network == "projects/host/global/networks/shared"
    assert node.network_config.subnetwork == "projects/host/regions/us-central2/subnetworks/tpus"
    assert node.network_config.enable_external_ips
    assert node.service_account.email == "ml@tpu-project.iam.gserviceaccount.com"
    assert list(node.tags) == ["tpu", "ray"]
    assert node.labels["team"] == "vision"
    assert node.runtime_version == "tpu-vm-v4-base"


def test_vms_have_no_public_address_unless_somebody_says_so():
    assert not asked(SPEC, Spot()).tpu.node_spec[0].node.network_config.enable_external_ips


def test_a_request_that_comes_after_another_has_other_nodes():
    first = request.node_prefix("lease", NOW)
    assert first != request.node_prefix("lease", NOW + timedelta(microseconds=1))
    assert first == request.node_prefix("lease", NOW)


def test_the_record_and_the_labels_hold_no_secret():
    node = asked(SPEC, Spot()).tpu.node_spec[0].node
    told = {key: value for key, value in node.metadata.items() if key != "raytpu-token"}
    assert "secret-token" not in str(told)
    assert "secret-token" not in str(node.labels)
    assert Record.model_validate_json(node.metadata[RECORD]).owner == ME


# Options


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"zones": "us-central2"}, "must be a zone of Google Cloud such as 'us-east5-b', got 'us-central2'"),
        ({"zones": f"{ZONE},{ZONE}"}, "names a zone twice"),
        ({"zones": ZONE, "labels": {"team": "x_"}}, "no dash or underscore at the end"),
        ({"zones": ZONE, "zone": ZONE}, "there is no such field; did you mean 'zones'"),
        ({"zones": ZONE, "reach": "proxy"}, "reach: "),
        ({"zones": ZONE, "ray_version": "2.40.0"}, "must be 2.55 or newer"),
        ({"zones": ZONE, "python": "python3"}, "must be an absolute path on the VMs"),
        ({"zones": ZONE, "python": "/opt/x y"}, "must be an absolute path on the VMs, without spaces"),
        ({"zones": ZONE, "python": "/opt/a:b/python"}, "must be an absolute path on the VMs, without spaces"),
        ({"zones": ZONE, "network": "a b"}, "network: must be a name such as"),
        ({"zones": ZONE, "subnetwork": "a b"}, "subnetwork: must be a name such as"),
        ({"zones": ZONE, "tags": ["A B"]}, "must be a network tag"),
        ({"zones": ZONE, "service_account": "x"}, "service_account: must be the e-mail address"),
        ({"zones": ZONE, "labels": {"Team": "a"}}, "must be labels as Google and Kubernetes"),
        ({"zones": ZONE, "labels": {"raytpu-owner": "a"}}, "must not begin with 'raytpu-'"),
        ({"zones": ZONE, "ray_start_params": {"head": ""}}, "ray_start_params"),
        ({"zones": ZONE, "ray_start_params": {"--num-cpus": "4"}}, "without the dashes"),
        ({"zones": ZONE, "ray_start_params": {"address": "10.0.0.1:1"}}, "is what the backend itself says"),
        ({"zones": ZONE, "price_per_chip_hour": [1]}, "price_per_chip_hour: must be a number above zero, or such"),
        ({"zones": ZONE, "price_per_chip_hour": 0}, "by generation, got 0"),
        ({"zones": ZONE, "price_per_chip_hour": True}, "by generation, got True"),
        ({"zones": ZONE, "price_per_chip_hour": "inf"}, "by generation, got 'inf'"),
        ({"zones": ZONE, "price_per_chip_hour": {"v4": "x"}}, "by generation, got 'x'"),
        ({"zones": ZONE, "ray_head": "10.0.0.1"}, "must be the address of a Ray head's GCS"),
        ({"zones": ZONE, "ray_head": "10.0.0.1:99999"}, "must be the address of a Ray head's GCS"),
        ({"zones": ZONE, "ray_head": "10.0.0.1:0"}, "must be the address of a Ray head's GCS"),
        ({"zones": ZONE, "env": {"a b": "c"}}, "env"),
        ({"zones": ZONE, "env": {"RAY_AUTH_TOKEN": "hunter2"}}, "env: RAY_AUTH_TOKEN is set for each VM"),
        ({"zones": ZONE, "env": {"RAY_AUTH_MODE": "disabled"}}, "env: RAY_AUTH_MODE is set for each VM"),
        ({"zones": ZONE, "env": {"TPU_WORKER_ID": "0"}}, "env: TPU_WORKER_ID is set for each VM"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_option_is_refused_in_one_line(options: dict[str, Any], told: str):
    with pytest.raises(InvalidSpec) as caught:
        Settings.of(options)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["dashboard_url", "serve_url"])
def test_a_url_with_a_password_is_refused_without_it(option: str):
    with pytest.raises(InvalidSpec, match="without a user name or password") as caught:
        Settings.of({"zones": ZONE, option: "http://user:SEKRET@head.example.net:8265"})
    assert "SEKRET" not in str(caught.value)


@pytest.mark.parametrize("token", [["SEKRET"], 7, "SEK RET"])
def test_a_token_that_is_none_is_refused_in_one_line(token: Any):
    with pytest.raises(InvalidSpec, match="^Ray's token") as caught:
        TpuVmBackend(zones=ZONE, ray_head="10.0.0.1:6379", dashboard_url="http://10.0.0.1:8265", ray_token=token)
    assert "SEK" not in str(caught.value)


def test_names_and_paths_of_google_are_taken_as_they_are():
    options = {
        "network": "projects/example.com:shared/global/networks/ml",
        "subnetwork": "ml",
        "tags": "ray,tpu-hosts",
        "service_account": "123-compute@developer.gserviceaccount.com",
        "python": "/opt/venv-3.11/bin/python3",
    }
    found = Settings.of({"zones": ZONE, **options}).model_dump()
    assert {name: found[name] for name in options} == {**options, "tags": ["ray", "tpu-hosts"]}


def test_packages_with_extras_are_told_apart_in_text():
    found = Settings.of({"zones": ZONE, "pip": "ray[default,serve]=={ray_version}, jax[tpu] ,flax"})
    assert found.packages == [f"ray[default,serve]=={found.ray_version}", "jax[tpu]", "flax"]


@pytest.mark.parametrize(
    "pip",
    [
        [],
        ["ray"],
        ["Ray[default]=={ray_version}", "pandas"],
        ["ray==2.60.*"],
        ["ray==2.60"],
        ["ray>=2.58"],
        ["ray >= 2.58"],
        ["ray[default] == 2.60.0"],
        ["ray==2.60.0 ; python_version > '3'"],
        ["ray==2.60.0+local"],
        ["ray @ https://files.example.net/ray.whl"],
        ["-r /opt/requirements.txt"],
        ["https://files.example.net/ray-2.60.0-cp311-cp311-manylinux2014_x86_64.whl"],
        ["ray@https://files.example.net/ray.whl"],
        ["-r/opt/requirements.txt"],
    ],
    ids=str,
)
def test_packages_that_may_bring_the_right_ray_are_taken(pip: list[str]):
    Settings.of({"zones": ZONE, "pip": pip}).check_enough()


@pytest.mark.parametrize(
    "pip", [["pandas"], ["ray-lightning", "xray"], ["https://files.example.net/rayon-1.0-py3-none-any.whl"]], ids=str
)
def test_packages_without_ray_are_refused(pip: list[str]):
    with pytest.raises(InvalidSpec, match="pip: has no Ray"):
        Settings.of({"zones": ZONE, "pip": pip}).check_enough()


@pytest.mark.parametrize(
    "pip", ["ray==2.58.0", "ray == 2.58.0+local", "ray[default]===2.58.0", "ray==2.6", "ray==2.59.*"]
)
def test_packages_with_another_ray_are_refused(pip: str):
    """VMs that look for one version and install another go on installing until the deadline."""
    with pytest.raises(InvalidSpec, match=r"pip: has .*, and ray_version is 2.60.0, which the VMs look for"):
        Settings.of({"zones": ZONE, "pip": pip}).check_enough()


def test_a_place_in_the_queue_is_not_waited_for_when_it_is_gone():
    request.check_rung(Queued(60, within=60), "capacity[0]")
    with pytest.raises(InvalidSpec, match=r"capacity\[0\]: within \(10 days, 0:00:00\) is longer than valid_for"):
        request.check_rung(Queued(60, within=timedelta(days=10)), "capacity[0]")


def test_zones_are_text_or_a_list():
    assert Settings.of({"zones": "us-central2-b, europe-west4-b"}) == Settings.of(
        {"zones": ["us-central2-b", "europe-west4-b"]}
    )


def test_a_ladder_stays_a_ladder():
    assert [rung.kind for rung in ladder(RUNGS)] == [rung.kind for rung in RUNGS]
