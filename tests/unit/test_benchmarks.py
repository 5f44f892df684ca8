"""The benchmark of `acquire` measures the same for both sides, and says when it takes too long."""

from __future__ import annotations

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from tests.benchmarks import testbed as benchmark
from tests.testbed import parts


def test_what_is_paid_once_counts_for_nobody_and_each_is_first_in_its_turn():
    order: list[str] = []

    def bare() -> float:
        order.append("bare")
        return 40.0 if len(order) > 1 else 900.0

    def ours() -> float:
        order.append("ours")
        return 44.0

    assert benchmark.compare(bare, ours, 3) == pytest.approx(1.1)
    assert order == ["bare", "bare", "ours", "ours", "bare", "bare", "ours"]


class _Testbed:
    @classmethod
    def up(cls, *nodes: str, control_plane: bool = False) -> _Testbed:
        return cls()

    def down(self) -> None: ...


@pytest.mark.parametrize(("ratio", "code"), [(1.25, 0), (1.26, 1)])
def test_more_than_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch, ratio: float, code: int):
    monkeypatch.setattr("sys.argv", ["testbed"])
    monkeypatch.setattr(benchmark, "Testbed", _Testbed)
    monkeypatch.setattr(benchmark, "measured", lambda testbed, rounds: ratio)
    assert benchmark.main() == code


def test_where_nothing_is_built_it_says_so_if_it_may(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["testbed", "--if-built"])
    monkeypatch.setattr(parts, "unready", lambda **_: "not built yet: etcd")
    assert benchmark.main() == 0
    assert capsys.readouterr().out == "Not measured: not built yet: etcd\n"


def test_two_rounds_have_no_median(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["testbed", "--rounds", "2"])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
