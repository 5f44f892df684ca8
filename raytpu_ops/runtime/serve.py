"""Serving a model from a whole slice: one replica owns it, with one worker on each of its hosts.

The user writes a class and an app:

    class Digits:
        def __init__(self, checkpoint): ...      once on each host, JAX is connected over all of them
        def __call__(self, request): ...         on each host with the same request; JSON in, JSON out

    def app(args):
        return slice_app(Digits, args["checkpoint"])

and ``RayServeOperator(app="digits.serve:app", ...)`` deploys :func:`build` with it. Over HTTP, POST
a JSON body to the application's route; GET says which hosts answer. A single-host slice takes a
replica that lives on the host itself.
Not here: what replicas do (``replicas.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from raytpu_ops.runtime.replicas import HostReplica, ReplicaSettings, SliceReplica
from raytpu_ops.runtime.targets import import_target
from raytpu_ops.tpu.errors import InvalidSpec, UserCodeFailed
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.tpu.work import check_target

#: The slices of the lease, while an application is built for them.
_slices: ContextVar[SliceSpec] = ContextVar("slices")
#: How often a replica is asked for its health, and how long it may take to answer.
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2.0, 15.0
#: A replica that cannot come up is tried this often before the deployment fails.
_CONSTRUCTOR_TRIES = 2


def build(args: dict[str, Any]) -> Any:
    """What Serve imports: the user's application, built for the slices of a lease.

    :param args: ``app``, the user's ``module:builder``; ``args``, plain JSON that it is called with;
        ``slice``, a :class:`SliceSpec` as JSON. What else is there, such as ``owner``, is for those who
        look at the application's config.
    :raises UserCodeFailed: when the builder is not there or returns something else.
    """
    from ray.serve import Application

    spec = SliceSpec.model_validate(args["slice"])
    builder = import_target(check_target(args["app"], "app"), "app")
    with _building_for(spec):
        application = builder(dict(args.get("args") or {}))
    if not isinstance(application, Application):
        raise UserCodeFailed(
            f"app {args['app']!r} returned a {type(application).__name__}: return slice_app(...) or a bound deployment"
        )
    return application


@contextmanager
def _building_for(spec: SliceSpec) -> Iterator[None]:
    token = _slices.set(spec)
    try:
        yield
    finally:
        _slices.reset(token)


def slice_app(
    model: type | str,
    *init_args: Any,
    init_kwargs: dict[str, Any] | None = None,
    name: str | None = None,
    num_replicas: int = 1,
    spec: SliceSpec | None = None,
    start_timeout_s: float = 600.0,
    request_timeout_s: float = 60.0,
    max_ongoing_requests: int = 64,
) -> Any:
    """A Serve application that answers from a model spread over the hosts of a slice.

    :param model: the class, or its ``module:Class``; it must be importable on the hosts.
    :param init_args: what it is constructed with on each host, plain values.
    :param init_kwargs: keyword arguments for the same.
    :param name: name of the deployment, the class's where not given.
    :param num_replicas: replicas, each with a slice of its own.
    :param spec: the slices; those of the lease where not given.
    :param start_timeout_s: seconds until the model must be up on every host of its slice.
    :param request_timeout_s: seconds without an answer, while requests wait, that mean that hosts hang.
    :param max_ongoing_requests: how many requests a replica takes on at a time; hosts answer one by one.
    :return: a bound Serve deployment.
    :raises InvalidSpec: for more replicas than slices, and for a class that cannot be imported.
    """
    from ray import serve

    slices = spec or _slices.get(None)
    if slices is None:
        raise InvalidSpec("spec: is missing; only an app that RayServeOperator builds knows the slices of its lease")
    if not 1 <= num_replicas <= slices.num_slices:
        raise InvalidSpec(
            f"num_replicas: each replica takes a slice, and there are {slices.num_slices}; got {num_replicas}"
        )
    settings = ReplicaSettings(
        model=_target(model),
        init_args=list(init_args),
        init_kwargs=dict(init_kwargs or {}),
        spec=slices.model_copy(update={"num_slices": 1}),
        start_timeout_s=start_timeout_s,
        request_timeout_s=request_timeout_s,
    )
    replica = HostReplica if slices.shape.single_host else SliceReplica
    deployment = serve.deployment(replica).options(
        name=name or settings.model.rpartition(":")[2],
        num_replicas=num_replicas,
        max_ongoing_requests=max_ongoing_requests,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=10.0,
        max_constructor_retry_count=_CONSTRUCTOR_TRIES,
        **replica.placement(settings.spec.shape),
    )
    return deployment.bind(settings)


def _target(model: type | str) -> str:
    if isinstance(model, str):
        try:
            return check_target(model, "model")
        except ValueError as error:
            raise InvalidSpec(str(error)) from error
    target = f"{model.__module__}:{model.__qualname__}"
    if model.__module__ == "__main__" or "<locals>" in target:
        raise InvalidSpec(f"model: {target} cannot be imported on the hosts; put the class at the top of a module")
    return target
