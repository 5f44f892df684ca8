"""What the testbed decides before anything runs: what is built, which pools a word means, what is swept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.cluster import needs
from tests.testbed import layout as runs
from tests.testbed import nodes, parts
from tests.testbed.__main__ import main
from tests.testbed.images import ImageFault, Registry
from tests.testbed.layout import Options


@pytest.mark.parametrize(
    ("spec", "pools"),
    [
        ("cpu", {"cpu-0": 1}),
        ("cpu*3", {"cpu-0": 3}),
        ("v4-2x2x2*2", {"v4-2x2x2-0": 2, "v4-2x2x2-1": 2}),
        ("v6e-2x4@ct6e-standard-8t", {"v6e-2x4-0": 1}),
        ("v6e-2x4@ct6e-standard-4t", {"v6e-2x4-0": 2}),
    ],
)
def test_a_word_means_pools_one_for_each_slice(spec: str, pools: dict[str, int]) -> None:
    assert {pool.name: pool.hosts for pool in nodes.parse(spec)} == pools


def test_names_that_are_taken_are_not_given_again() -> None:
    assert [pool.name for pool in nodes.parse("v4-2x2x1*2", frozenset({"v4-2x2x1-0"}))] == ["v4-2x2x1-1", "v4-2x2x1-2"]


@pytest.mark.parametrize("spec", ["", "cpu*", "v4 2x2x2", "v4-2x2x2*two", "v9-2x2", "v6e-2x4"])
def test_a_word_that_is_no_pool_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        nodes.parse(spec)


def test_every_module_says_its_version_and_its_key_follows_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {one.name: one.version for one in parts.MODULES.values()}["kubernetes"].startswith("v1.")
    folder = tmp_path / "etcd"
    folder.mkdir()
    for path in parts.MODULES["etcd"].folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    before = parts.MODULES["etcd"].key()
    monkeypatch.setattr(parts, "GO", tmp_path)
    assert parts.MODULES["etcd"].key() == before
    (folder / "go.sum").write_text("another")
    assert parts.MODULES["etcd"].key() != before


def test_the_key_follows_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: one.key() for name, one in parts.MODULES.items()}
    monkeypatch.setattr(parts, "FLAGS", (*parts.FLAGS, "-race"))
    assert not [name for name, one in parts.MODULES.items() if one.key() == before[name]]


def test_no_go_and_nothing_built_is_a_reason_that_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYTPU_TESTBED_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert "needs Go to build etcd, kubernetes, kuberay" in str(parts.missing(nodes=False, kueue=False))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "needs root" in str(parts.missing(nodes=False, kueue=False))


@pytest.mark.parametrize("can", [True, False])
def test_a_build_that_cannot_be_is_an_error_unless_it_is_asked_for_only_where_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], can: bool
) -> None:
    monkeypatch.setattr(parts, "missing", lambda **_: None if can else "the testbed needs Go to build etcd")
    monkeypatch.setattr(parts, "_absent_packages", list)
    monkeypatch.setattr(parts, "build", lambda one, **_: print(f"built {one.name}"))
    monkeypatch.setenv("RAYTPU_TESTBED_CACHE", str(tmp_path))

    def build(*more: str) -> str:
        monkeypatch.setattr("sys.argv", ["testbed", "build", "--kueue", *more])
        main()
        return capsys.readouterr().out

    if can:
        assert build() == build("--if-possible")
        *_, kueue, all_of_it = build().splitlines()
        assert kueue == "built kueue"
        assert all_of_it.startswith("Every part of the testbed is built, after ")
        return
    assert build("--if-possible") == "Not built: the testbed needs Go to build etcd\n"
    with pytest.raises(SystemExit, match="testbed: the testbed needs Go to build etcd"):
        build()


def test_sweeping_clears_runs_whose_lock_is_free_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTPU_TESTBED_RUNS", str(tmp_path))
    live, lock = runs.new_run()
    dead, other = runs.new_run()
    other.close()
    with lock:
        assert runs.sweep() == [dead.id]
        assert [one.id for one in runs.all_runs()] == [live.id]
    assert runs.sweep() == [live.id]


def test_what_sweeping_cannot_remove_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTPU_TESTBED_RUNS", str(tmp_path))
    monkeypatch.setattr("tests.testbed.cgroups.remove", lambda path: [f"/sys/fs/cgroup/{path}"])
    dead, lock = runs.new_run()
    lock.close()
    said: list[str] = []
    assert runs.sweep(said.append) == [dead.id]
    assert said == [f"cleared what was left of run {dead.id}, but not of /sys/fs/cgroup/{dead.cgroup}"]


def test_options_survive_their_file() -> None:
    options = Options(("cpu", "v4-2x2x2*2"), kueue=True, venv="/some/where")
    assert Options.from_json(options.to_json()) == options


async def test_the_registry_serves_ray_by_any_name_and_nothing_else() -> None:
    registry = Registry("/venv")
    async with TestClient(TestServer(registry.app)) as client:
        answer = await client.get("/v2/rayproject/ray/manifests/2.60.0?ns=docker.io")
        manifest = json.loads(await answer.text())
        blob = await client.get(f"/v2/rayproject/ray/blobs/{manifest['config']['digest']}")
        assert "PATH=/venv/bin:" in str((await blob.json(content_type=None))["config"]["Env"])
        assert (await client.get("/v2/library/nginx/manifests/1")).status == 404
        registry.faults = [ImageFault("docker.io/rayproject/ray:bad", missing=True)]
        assert (await client.get("/v2/rayproject/ray/manifests/bad?ns=docker.io")).status == 404
        assert (await client.get("/v2/rayproject/ray/manifests/good?ns=docker.io")).status == 200


def test_a_named_cluster_is_taken_and_a_wrong_name_is_no_reason_to_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(needs.VARIABLE, raising=False)
    assert needs.given_kubeconfig() is None
    monkeypatch.setenv(needs.VARIABLE, str(tmp_path / "config"))
    with pytest.raises(pytest.fail.Exception, match="is no file"):
        needs.given_kubeconfig()
    (tmp_path / "config").touch()
    assert needs.given_kubeconfig() == tmp_path / "config"
