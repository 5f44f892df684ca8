"""What every request passes before anything is done for it: who asks, may he, and does it go wrong.

The record of calls is kept here, with the permissions that each of them needs at Google.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.google_fake import refusals
from tests.google_fake.clock import Clock
from tests.google_fake.faults import Faults
from tests.google_fake.refusals import CutOff, Refusal
from tests.google_fake.tokens import Tokens


@dataclass
class Call:
    """One request.

    :param api: `container`, `tpu`, `compute`, `cloudresourcemanager`.
    :param method: the RPC's name, `CreateNodePool`; of REST too: `reservations.get`.
    :param resource: full name of what is asked for.
    :param permissions: that it needs.
    :param request: the message or the JSON.
    :param at: the instant.
    :param principal: whose word it was; empty before that is known.
    :param status: `OK`, or the code of the error that was answered.
    """

    api: str
    method: str
    resource: str
    permissions: tuple[str, ...]
    request: Any
    at: datetime
    principal: str = ""
    status: str = ""


@dataclass(frozen=True)
class Ask:
    """What a service says about a request before it acts."""

    resource: str
    permissions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rpc:
    """One method of a service.

    :param request: the message class.
    :param answer: the message class.
    :param ask: the resource and the permissions of a request.
    :param do: acts, and answers.
    """

    request: Any
    answer: Any
    ask: Callable[[Any], Ask]
    do: Callable[[Any], Any]


@dataclass
class Gate:
    """The one way in.

    :param clock: of the fake.
    :param tokens: whose word a request is.
    """

    clock: Clock
    tokens: Tokens
    faults: Faults = field(default_factory=Faults)
    calls: list[Call] = field(default_factory=list)
    #: Permissions that nobody has.
    denied: set[str] = field(default_factory=set)
    #: All permissions that there are, if not simply all; by principal.
    granted: dict[str, frozenset[str]] = field(default_factory=dict)
    #: APIs that nobody has enabled.
    off: set[str] = field(default_factory=set)

    def may(self, principal: str, permission: str) -> bool:
        """Whether somebody has a permission."""
        granted = self.granted.get(principal, self.granted.get("*"))
        return permission not in self.denied and (granted is None or permission in granted)

    def enter(
        self, api: str, method: str, ask: Ask, request: Any, headers: Mapping[str, str], do: Callable[[], Any]
    ) -> Any:
        """Let a request in, and act for it.

        :raises Refusal: the answer is an error.
        :raises CutOff: there is none.
        """
        with self.clock.lock:
            self.clock.advance(self.clock.per_call)
            call = Call(api, method, ask.resource, ask.permissions, request, self.clock.now())
            self.calls.append(call)
            try:
                answer = self._act(call, headers, do)
            except Refusal as error:
                call.status = error.code.name
                raise
            except CutOff:
                call.status = "CUT_OFF"
                raise
            call.status = "OK"
            return answer

    def _act(self, call: Call, headers: Mapping[str, str], do: Callable[[], Any]) -> Any:
        call.principal = self.tokens.principal(headers.get("authorization", ""))
        if call.api in self.off:
            raise refusals.api_off(call.api, _project(call.resource))
        fault = self.faults.take(call)
        if fault is not None and not fault.after:
            raise fault.error
        for permission in call.permissions:
            if not self.may(call.principal, permission):
                raise refusals.denied(call.api, permission, call.resource)
        answer = do()
        if fault is not None:
            raise fault.error
        return answer


def _project(resource: str) -> str:
    parts = resource.split("/")
    return parts[1] if parts[0] == "projects" and len(parts) > 1 else "tpu-project"
