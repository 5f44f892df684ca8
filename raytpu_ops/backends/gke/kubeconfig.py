"""Loading a kubeconfig: nothing blocks the caller's event loop, and no error repeats what stands in it.

A kubeconfig may name a program that hands out credentials. One that hangs is ended here: the client
library forgets it, and it would run on in a triggerer that lives for weeks.
Not here: where a kubeconfig comes from (``access.py``, ``hooks/kubernetes.py``).
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from raytpu_ops.tpu.errors import Misconfigured, RayTpuError, RemoteUnavailable

if TYPE_CHECKING:
    from kubernetes_asyncio.client import Configuration

#: Seconds until that program counts as one that does not answer.
PLUGIN_S = 60.0


async def load(fill: Callable[[], Awaitable[Any]], what: str, hint: str = "") -> None:
    """Let a library load a kubeconfig, in a thread with a loop of its own.

    :param fill: loads it.
    :param what: whose kubeconfig it is; begins the error message.
    :param hint: ends it.
    :raises Misconfigured: it cannot work as it stands.
    :raises RemoteUnavailable: the program that hands out credentials fails or hangs.
    """

    def run() -> None:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(_within(fill))

    try:
        await asyncio.to_thread(run)
    # A kubeconfig of the wrong shape ends in errors of any kind, and its text may stand in one or in its
    # cause: hence no cause.
    except Exception as error:
        known = _in_words(error, what, hint)
        if known is None:
            raise
        raise known from None


def current_context(kubeconfig: str | Mapping[str, Any] | None) -> str | None:
    """The context that a kubeconfig names as its current one; None where that is no name.

    Blocks, and raises what :func:`load` has words for: call it there.

    :param kubeconfig: a path, several with the system's separator between them, or the content; None for
        the library's default path.
    """
    from kubernetes_asyncio.config import list_kube_config_contexts

    if isinstance(kubeconfig, Mapping):
        name = kubeconfig.get("current-context")
    else:
        _, current = list_kube_config_contexts(kubeconfig)
        name = current["name"] if current else None
    return name if isinstance(name, str) and name else None


def check_server(configuration: Configuration, what: str) -> None:
    """Refuse a server's URL that carries credentials: it is logged, and the client can't use them beside a token.

    :param what: whose kubeconfig it is; begins the error message, which has no part of the URL but its host.
    :raises Misconfigured: it carries some.
    """
    parts = urlsplit(configuration.host or "")
    if parts.username is not None or parts.password is not None:
        raise Misconfigured(
            f"{what}: the server's URL at {parts.hostname} has a user name or a password in it: take them out, and say "
            "under `users` who asks"
        )


def _in_words(error: Exception, what: str, hint: str) -> RayTpuError | None:
    """The error as ours, without the text that it was made from; None for one that is a bug."""
    import yaml
    from kubernetes_asyncio.config import ConfigException

    if isinstance(error, RayTpuError):
        return error
    if isinstance(error, TimeoutError):
        return RemoteUnavailable(f"{what}: the program that gives out credentials took over {PLUGIN_S:g} s")
    # The library puts whole entries, tokens too, into what it says about them: as a dict, at the end.
    text = " ".join(str(error).partition("{")[0].split())[:400]
    if isinstance(error, ConfigException) and text.startswith("exec: process returned"):
        return RemoteUnavailable(f"{what}: the program that gives out credentials failed: {text}")
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        return Misconfigured(f"{what}: the kubeconfig is no YAML or JSON{at}{hint}")
    if isinstance(error, ConfigException | OSError):
        return Misconfigured(f"{what}: {text}{hint}")
    if isinstance(error, ValueError | TypeError | LookupError | AttributeError | AssertionError):
        return Misconfigured(f"{what}: the kubeconfig has not the shape of one ({type(error).__name__}){hint}")
    return None


class _Loop(asyncio.SelectorEventLoop):
    """Remembers the programs that it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: list[tuple[asyncio.SubprocessTransport, Process]] = []

    async def subprocess_exec(self, protocol_factory: Any, *args: Any, **kwargs: Any) -> Any:
        """As the base class does it."""
        transport, protocol = await super().subprocess_exec(protocol_factory, *args, **kwargs)
        self.programs.append((transport, Process(transport, protocol, self)))
        return transport, protocol


async def _within(fill: Callable[[], Awaitable[Any]]) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    try:
        async with asyncio.timeout(PLUGIN_S):
            await fill()
    finally:
        for transport, program in loop.programs:
            if program.returncode is None:
                program.kill()
                await program.wait()
            transport.close()
