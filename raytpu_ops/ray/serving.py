"""Serve's applications over Ray's dashboard: look, deploy one beside the others, take one away.

Serve's REST API knows only "these are all applications": a ``PUT`` ends every declared one that is
not in it. So what is deployed already is read first and sent along, and read again before it is sent again.

Not here: waiting until an application runs (``follow.py``) and what its state means (``verdicts.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raytpu_ops.ray.cluster import state_of
from raytpu_ops.ray.states import DeploymentStatus, ServeApplication, ServeDeployment, ServeStatus
from raytpu_ops.ray.transport import Transport, decoded
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, RemoteUnavailable

_PATH = "/api/serve/applications/"
#: The actor that is Serve (ray.serve._private.constants, 2.60).
_CONTROLLER = "SERVE_CONTROLLER_ACTOR"
#: Where Serve's proxy listens unless the caller says otherwise: nobody but this machine. Ray's REST
#: API would say 0.0.0.0.
_LOOPBACK = {"host": "127.0.0.1", "port": 8000}
#: Seconds for the answer to a deployment: the first one starts Serve's controller and proxy.
_DEPLOY_S = 180.0
#: How often a deployment is sent again where somebody else's, at the same moment, took it away.
_DEPLOY_ATTEMPTS = 3


async def applications(transport: Transport) -> dict[str, ServeApplication]:
    """Every application by its name; nothing where Serve does not run."""
    details = await transport.again(lambda: _details(transport))
    return {name: _application(name, row) for name, row in _rows(details).items()}


async def deploy(
    transport: Transport,
    application: Mapping[str, Any],
    *,
    http_options: Mapping[str, Any] | None = None,
    proxy_location: str | None = None,
) -> None:
    """Deploy the application beside those that are deployed already.

    :param application: as Serve's REST API takes it: ``name``, ``import_path``, ``route_prefix``,
        ``args``, ``runtime_env``, ``deployments``.
    :param http_options: where the proxy listens, ``host`` and ``port``. It counts only for the
        deployment that starts Serve; a running Serve keeps what it has.
    :param proxy_location: ``HeadOnly``, ``EveryNode`` or ``Disabled``; ``HeadOnly`` if left out.
        It, too, counts only for the deployment that starts Serve.
    :raises InvalidSpec: it has no name or no import path.
    :raises Misconfigured: Serve refuses it, in Serve's words; or Serve is not installed over there.
    """
    name = application.get("name")
    if not isinstance(name, str) or not name or not application.get("import_path"):
        raise InvalidSpec("a Serve application needs a name and an import_path, such as 'package.module:app'")

    async def once() -> None:
        details = await _details(transport)
        others = _declared(details, without=name)
        await _put(transport, details, [*others, dict(application)], http_options, proxy_location)

    for _ in range(_DEPLOY_ATTEMPTS):
        await transport.again(once)
        # Two deployments at the same moment each send what they read, and the later one wins.
        found = _rows(await transport.again(lambda: _details(transport))).get(name)
        if found is not None and not _goes(found):
            return
    raise RemoteUnavailable(
        f"application {name}: Serve took it {_DEPLOY_ATTEMPTS} times and does not list it; does somebody else deploy "
        "to the same cluster?"
    )


async def delete(transport: Transport, name: str) -> bool:
    """Take the application away; the others stay.

    :return: False where there was none.
    :raises Misconfigured: Python code deployed it, and only Python code can take it away.
    """
    there = False

    async def once() -> None:
        nonlocal there
        details = await _details(transport)
        row = _rows(details).get(name)
        if row is None:
            return
        if not row.get("deployed_app_config"):
            raise Misconfigured(
                f"application {name} was deployed by Python code; take it away with serve.delete({name!r})"
            )
        there = True
        await _put(transport, details, _declared(details, without=name), None, None)

    await transport.again(once)
    return there


async def _details(transport: Transport) -> Mapping[str, Any]:
    details = decoded(await transport.once("GET", _PATH))
    if not isinstance(details, Mapping) or not isinstance(details.get("applications"), Mapping):
        raise RemoteUnavailable(f"GET {_PATH}: no applications in the answer: {str(details)[:200]}")
    return details


def _rows(details: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: row for name, row in details["applications"].items() if isinstance(row, Mapping)}


def _declared(details: Mapping[str, Any], *, without: str) -> list[Mapping[str, Any]]:
    """Configs of the other applications that a ``PUT`` would end if it left them out.

    One that is being deleted would be raised from the dead; one that Python code deployed has no
    config and is not touched by a ``PUT``.
    """
    return [
        {**row["deployed_app_config"], "name": name}
        for name, row in _rows(details).items()
        if name != without and isinstance(row.get("deployed_app_config"), Mapping) and not _goes(row)
    ]


def _goes(row: Mapping[str, Any]) -> bool:
    return ServeStatus.of(row.get("status")) is ServeStatus.DELETING


async def _refuse_unseen(transport: Transport) -> None:
    """Ray's dashboard says "no Serve" also where it could not ask for it: a ``PUT`` would end whatever runs there.

    :raises RemoteUnavailable: Serve's controller is there all the same.
    """
    states = {str(row.get("state")) for row in await state_of(transport, "actors", name=_CONTROLLER)} - {"DEAD"}
    if states:
        raise RemoteUnavailable(
            f"Serve's controller is {', '.join(sorted(states))}, but Ray's dashboard at {transport.address} shows no "
            "Serve: nothing is deployed before it does"
        )


async def _put(
    transport: Transport,
    details: Mapping[str, Any],
    wanted: Sequence[Mapping[str, Any]],
    http_options: Mapping[str, Any] | None,
    proxy_location: str | None,
) -> None:
    config: dict[str, Any] = {"applications": list(wanted)}
    if details.get("http_options"):
        config["http_options"] = details["http_options"]
        config["proxy_location"] = details.get("proxy_location") or proxy_location or "HeadOnly"
    else:
        await _refuse_unseen(transport)
        config["http_options"] = dict(http_options or _LOOPBACK)
        config["proxy_location"] = proxy_location or "HeadOnly"
    if details.get("target_capacity") is not None:
        config["target_capacity"] = details["target_capacity"]
    await transport.once("PUT", _PATH, json=config, timeout=_DEPLOY_S)


def _application(name: str, row: Mapping[str, Any]) -> ServeApplication:
    word = str(row.get("status") or "")
    deployments = row.get("deployments")
    return ServeApplication(
        name=name,
        status=ServeStatus.of(word),
        status_word=word,
        message=str(row.get("message") or ""),
        route_prefix=row.get("route_prefix"),
        deployments=tuple(
            _deployment(key, value)
            for key, value in (deployments.items() if isinstance(deployments, Mapping) else ())
            if isinstance(value, Mapping)
        ),
        config=row.get("deployed_app_config"),
    )


def _deployment(name: str, row: Mapping[str, Any]) -> ServeDeployment:
    replicas = row.get("replicas") or ()
    return ServeDeployment(
        name=name,
        status=DeploymentStatus.of(row.get("status")),
        message=str(row.get("message") or ""),
        replicas=dict(Counter(str(replica.get("state")) for replica in replicas if isinstance(replica, Mapping))),
    )
