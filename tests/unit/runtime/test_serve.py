"""Building an application for the slices of a lease."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from raytpu_ops.runtime.replicas import HostReplica, SliceReplica
from raytpu_ops.runtime.serve import build, slice_app
from raytpu_ops.tpu.errors import InvalidSpec, UserCodeFailed
from raytpu_ops.tpu.spec import SliceSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ray 2.60 declares fields in a way that pydantic warns of, once, at import
    from ray.serve import Application

TWO = SliceSpec.of("v4", "2x2x2", num_slices=2)
SINGLE = SliceSpec.of("v6e", "2x2")


class Model:
    """Never made here."""


def app(args: dict[str, Any]) -> Any:
    return slice_app(Model, args["checkpoint"], num_replicas=args.get("replicas", 1))


def nothing(_args: dict[str, Any]) -> None:
    return None


def built(spec: SliceSpec, app: str = f"{__name__}:app", **args: Any) -> Application:
    config = {"app": app, "args": {"checkpoint": "c", **args}, "slice": spec.model_dump(mode="json")}
    application: Application = build(config)
    return application


def deployment(application: Application) -> Any:
    return application._bound_deployment


def test_the_app_is_built_for_the_slices_of_its_lease() -> None:
    made = deployment(built(TWO, replicas=2))
    assert made.name == "Model"
    assert made.func_or_class is SliceReplica
    assert made._deployment_config.num_replicas == 2
    (settings,) = made.init_args
    assert (settings.model, settings.init_args) == (f"{__name__}:Model", ["c"])
    assert settings.spec == TWO.model_copy(update={"num_slices": 1})
    assert made.ray_actor_options["num_cpus"] == 0
    assert made.ray_actor_options["resources"] == {"node:__internal_head__": 0.001}


def test_a_single_host_slice_takes_a_replica_on_the_host() -> None:
    made = deployment(built(SINGLE))
    assert made.func_or_class is HostReplica
    config = made._replica_config
    assert config.placement_group_bundles == [{"TPU": 4}]
    assert config.placement_group_bundle_label_selector == [SINGLE.shape.ray_labels]


def test_more_replicas_than_slices_are_refused() -> None:
    with pytest.raises(InvalidSpec, match="num_replicas: each replica takes a slice, and there are 2; got 3"):
        built(TWO, replicas=3)


def test_an_app_that_is_none_is_refused() -> None:
    with pytest.raises(UserCodeFailed, match="returned a NoneType: return slice_app"):
        built(TWO, app=f"{__name__}:nothing")


def test_an_app_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserCodeFailed, match="there is no module 'nowhere'"):
        built(TWO, app="nowhere:app")


def test_outside_of_a_lease_the_slices_must_be_given() -> None:
    with pytest.raises(InvalidSpec, match="spec: is missing"):
        slice_app(Model, "c")
    assert deployment(slice_app(Model, "c", spec=TWO)).name == "Model"


def test_a_class_that_hosts_cannot_import_is_refused() -> None:
    class Local:
        """Only here."""

    with pytest.raises(InvalidSpec, match="put the class at the top of a module"):
        slice_app(Local, spec=TWO)
    with pytest.raises(InvalidSpec, match=r"model must be 'package.module:function'"):
        slice_app("no target", spec=TWO)
