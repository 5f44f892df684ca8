"""What a training loop has at hand, with real orbax on one host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raytpu_ops.runtime import place, run
from raytpu_ops.runtime.checkpoints import load_checkpoint
from raytpu_ops.runtime.place import CurrentHost
from raytpu_ops.runtime.run import CurrentRun
from raytpu_ops.tpu.errors import Misconfigured, UserCodeFailed


class Told:
    """Stands in for the ledger."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def put(self, kind: str, who: str, record: dict[str, Any]) -> None:
        assert (kind, who) == ("progress", "0")
        self.records.append(record)


def host(rank: int = 0, num_hosts: int = 1) -> CurrentHost:
    return CurrentHost(rank, num_hosts, "s0", 0, 1, rank, "127.0.0.2")


def a_run(folder: Path, *, resume: bool = True, keep: int = 2, at: CurrentHost | None = None) -> CurrentRun:
    return CurrentRun(at or host(), str(folder / "checkpoints"), keep, resume, Told())  # type: ignore[arg-type]


def state(value: float) -> dict[str, Any]:
    return {"weights": jnp.full((4, 2), value), "count": jnp.asarray(int(value))}


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def trained(folder: Path, steps: int) -> CurrentRun:
    this = a_run(folder)
    for step in range(1, steps + 1):
        this.report({"loss": 1 / step}, step=step, state=state(step))
    this.finish()
    return this


def test_the_summary_says_how_far_it_is(tmp_path: Path) -> None:
    this = trained(tmp_path, 3)
    summary = this._ledger.records[-1]  # type: ignore[attr-defined]
    assert summary == this.summary()
    assert summary == {
        "metrics": {"loss": 1 / 3},
        "step": 3,
        "history": [{"step": step, "loss": 1 / step} for step in (1, 2, 3)],
        "checkpoint": f"{tmp_path}/checkpoints/3",
        "resumed_from_step": None,
    }
    assert saved(tmp_path) == ["2", "3"]


def test_a_later_try_goes_on_where_the_last_one_saved(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    this = a_run(tmp_path)
    found = this.restore(state(0))
    assert found is not None
    step, values = found
    assert step == 3
    np.testing.assert_array_equal(values["weights"], np.full((4, 2), 3.0))
    assert this.summary()["resumed_from_step"] == 3
    assert this.summary()["checkpoint"] == f"{tmp_path}/checkpoints/3"


def test_a_save_that_was_cut_off_is_no_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    torn = tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp" / "default.orbax-checkpoint-tmp"
    torn.mkdir(parents=True)
    (torn / "_METADATA").write_text("half")
    this = a_run(tmp_path)
    found = this.restore(state(0))
    assert found is not None
    assert found[0] == 2
    this.report({}, step=3, state=state(3))
    this.finish()
    assert saved(tmp_path) == ["2", "3"]


def test_the_first_try_finds_nothing(tmp_path: Path) -> None:
    assert a_run(tmp_path).restore(state(0)) is None


def test_a_run_that_must_not_resume_removes_what_is_there(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    this = a_run(tmp_path, resume=False)
    assert this.restore(state(0)) is None
    this.report({}, step=1, state=state(1))
    this.finish()
    assert saved(tmp_path) == ["1"]


def test_steps_must_grow(tmp_path: Path) -> None:
    this = trained(tmp_path, 2)
    again = a_run(tmp_path)
    with pytest.raises(Misconfigured, match="step 1 was not saved: step 2 is, and steps must grow"):
        again.report({}, step=1, state=state(1))
    assert this.summary()["step"] == 2


def test_a_report_without_state_saves_nothing(tmp_path: Path) -> None:
    this = a_run(tmp_path)
    this.report({"loss": jnp.asarray(2.0)}, step=1)
    assert this.summary()["metrics"] == {"loss": 2.0}
    assert this.summary()["checkpoint"] is None
    assert not (tmp_path / "checkpoints").exists()


def test_metrics_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserCodeFailed, match="metrics holds a"):
        a_run(tmp_path).report({"loss": jnp.zeros(3)}, step=1)


def test_the_history_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_HISTORY", 3)
    this = a_run(tmp_path)
    for step in range(10):
        this.report({"x": step}, step=step)
    assert [entry["step"] for entry in this.summary()["history"]] == [7, 8, 9]


def test_a_checkpoint_is_read_into_another_sharding(tmp_path: Path) -> None:
    this = trained(tmp_path, 1)

    def elsewhere(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=this.sharded if leaf.ndim else this.replicated)

    like = jax.tree.map(elsewhere, state(0))
    values = load_checkpoint(this.summary()["checkpoint"], like)
    np.testing.assert_array_equal(values["weights"], np.full((4, 2), 1.0))
    assert values["weights"].sharding == this.sharded


def test_every_host_works_on_rows_of_its_own() -> None:
    parts = [a_run(Path("/x"), at=host(rank, 4)).rows(1003) for rank in range(4)]
    assert [(part.start, part.stop) for part in parts] == [(0, 250), (250, 500), (500, 750), (750, 1000)]


def test_a_batch_is_spread_over_all_chips() -> None:
    this = a_run(Path("/x"))
    images, digits = this.shard((np.ones((8, 3), np.float32), np.arange(8)))
    assert images.shape == (8, 3)
    assert digits.sharding == this.sharded


def test_outside_of_a_run_there_is_no_run() -> None:
    with pytest.raises(Misconfigured, match="only in a training loop"):
        run.current_run()
    with pytest.raises(Misconfigured, match="only in code that runs on a host"):
        place.current_host()
