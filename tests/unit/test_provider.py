"""Airflow finds the package, takes its metadata, and builds the connection form from it."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path

import jsonschema
import pytest

from raytpu_ops.backends.base import backend_names
from raytpu_ops.backends.gke.settings import Settings as Gke
from raytpu_ops.backends.tpu_vm.settings import Settings as TpuVm
from raytpu_ops.hooks.google_cloud import CLOUD_KEYS
from raytpu_ops.hooks.kubernetes import ACCESS_KEYS
from raytpu_ops.provider import get_provider_info


@pytest.fixture(scope="module")
def manager():
    """Airflow's own manager, with every provider of this environment."""
    from airflow.providers_manager import ProvidersManager

    return ProvidersManager()


def test_metadata_satisfies_airflows_own_schema():
    import airflow

    schema = json.loads((Path(airflow.__file__).parent / "provider_info.schema.json").read_text())
    jsonschema.validate(get_provider_info(), schema)


def test_airflow_finds_the_package_by_its_entry_point():
    [entry] = [e for e in entry_points(group="apache_airflow_provider") if e.value.startswith("raytpu_ops.")]
    assert entry.load()() == get_provider_info()


def test_connection_type_leads_to_the_hook():
    from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

    info = ProvidersManagerTaskRuntime().hooks["ray_tpu"]
    assert info is not None
    assert info.hook_class_name == "raytpu_ops.hooks.ray_tpu.RayTpuHook"
    assert info.hook_name == "Ray on TPU"
    assert info.connection_id_attribute_name == "ray_tpu_conn_id"


def test_connection_form_offers_every_backend_and_no_field_that_means_nothing(manager):
    widgets = manager.connection_form_widgets
    assert widgets["extra__ray_tpu__backend"].field["schema"]["enum"] == backend_names()
    assert "extra__ray_tpu__root" in widgets
    known = ACCESS_KEYS | CLOUD_KEYS | Gke.model_fields.keys() | TpuVm.model_fields.keys() | {"backend", "root"}
    fields = {key.removeprefix("extra__ray_tpu__") for key in widgets if key.startswith("extra__ray_tpu__")}
    assert ACCESS_KEYS <= fields <= known
    assert {"zones", "node_pools"} <= fields
    assert manager.field_behaviours["ray_tpu"]["hidden_fields"] == ["host", "port", "login", "password", "schema"]


def test_dashboard_link_is_registered(manager):
    assert "raytpu_ops.links.ray_dashboard.RayDashboardLink" in manager.extra_links_class_names
