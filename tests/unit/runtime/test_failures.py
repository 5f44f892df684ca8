"""One judgement for everything that goes wrong on hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytpu_ops.runtime import failures
from raytpu_ops.runtime.cluster import Host
from raytpu_ops.runtime.failures import GRACE_S, Died, Raised, judge
from raytpu_ops.tpu.errors import DeadlineExceeded, Preempted, RayTpuError, UserCodeFailed

HOSTS = [
    Host(f"node-{number}", f"127.0.0.{number + 2}", 1, "s0", number, "v4-16", 4, alive=True) for number in range(2)
]
BUG = Raised(host="s0 worker 0", at=10.0, error="ValueError: a bug", kind="builtins.ValueError")
GLOO = Raised(
    host="s0 worker 1",
    at=5.0,
    error="ValueError: UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer",
    kind="builtins.ValueError",
)
JAX = replace(GLOO, error="JaxRuntimeError: UNAVAILABLE: Socket closed", kind="jax.errors.JaxRuntimeError")
MEMORY = replace(JAX, error="JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory")
DIED = Died("s0 worker 1", "Worker exit detail: connection error code 2")


class Looks:
    """Stands in for the look at the hosts; remembers how long it would have waited."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost: list[Host] = []
        self.graces: list[float] = []
        monkeypatch.setattr(failures, "lost_hosts", self)

    def __call__(self, hosts: list[Host], grace_s: float) -> list[Host]:
        assert hosts == HOSTS
        self.graces.append(grace_s)
        return self.lost


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


@pytest.mark.parametrize("raised", [[], [BUG], [GLOO], [JAX, BUG]])
@pytest.mark.parametrize("died", [[], [DIED]])
def test_a_lost_host_is_the_reason_whatever_else_happened(looks: Looks, raised: list[Raised], died: list[Died]) -> None:
    looks.lost = [HOSTS[1]]
    error = judge("train:loop", HOSTS, raised, died)
    assert isinstance(error, Preempted)
    assert "s0 worker 1 (127.0.0.3) died while it ran" in str(error)


@pytest.mark.parametrize(
    ("raised", "died", "words"),
    [
        ([BUG], [], "train:loop raised on s0 worker 0: ValueError: a bug"),
        ([GLOO, BUG], [], "raised on s0 worker 0: ValueError: a bug"),  # what peers saw came first, and does not count
        ([BUG], [DIED], "raised on s0 worker 0: ValueError: a bug"),
        ([MEMORY], [], "RESOURCE_EXHAUSTED"),
        ([GLOO], [], "Gloo AllGather failed"),
        ([GLOO], [DIED], "its process died on s0 worker 1"),
        ([], [DIED], "its process died on s0 worker 1, while every host lives on"),
        ([], [], "no host says why"),
    ],
)
def test_with_every_host_alive_it_is_the_users_code(
    looks: Looks, raised: list[Raised], died: list[Died], words: str
) -> None:
    error = judge("train:loop", HOSTS, raised, died)
    assert isinstance(error, UserCodeFailed)
    assert words in str(error)


def test_an_error_of_ours_keeps_its_class(looks: Looks) -> None:
    late = Raised("s0 worker 0", 1.0, "DeadlineExceeded: no answer", "raytpu_ops.tpu.errors.X", "DeadlineExceeded")
    error: RayTpuError = judge("train:loop", HOSTS, [late], [])
    assert isinstance(error, DeadlineExceeded)
    assert str(error) == "no answer (s0 worker 0)"


@pytest.mark.parametrize(
    ("raised", "died", "grace"),
    [([BUG], [], 0.0), ([MEMORY], [], 0.0), ([GLOO], [], GRACE_S), ([JAX], [], GRACE_S), ([], [DIED], GRACE_S)],
)
def test_only_what_a_dead_peer_may_have_caused_waits_for_its_death(
    looks: Looks, raised: list[Raised], died: list[Died], grace: float
) -> None:
    judge("train:loop", HOSTS, raised, died)
    assert looks.graces == [grace]
