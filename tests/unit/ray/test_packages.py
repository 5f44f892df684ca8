"""Claims of packages.py: the same content has the same name, and nothing goes along that should stay."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from raytpu_ops.ray import packages
from raytpu_ops.ray.packages import write_zip
from raytpu_ops.tpu.errors import InvalidSpec
from tests.unit.ray.fake_ray import RESET, status


def make(root: Path, *names: str, text: str = "x = 1\n") -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def names_in(root: Path, excludes: tuple[str, ...] = ()) -> list[str]:
    file = io.BytesIO()
    write_zip(root, file, excludes=excludes)
    return zipfile.ZipFile(file).namelist()


async def test_a_folder_arrives_as_a_zip_that_ray_unpacks(ray, client, tmp_path):
    make(tmp_path, "train.py", "digits/data.py")
    uri = await client.upload_package(tmp_path)
    name = uri.removeprefix("gcs://")
    assert name.startswith("_ray_pkg_")
    assert name.endswith(".zip")
    archive = zipfile.ZipFile(io.BytesIO(ray.packages[name]))
    assert archive.namelist() == ["digits/data.py", "train.py"]
    assert archive.read("train.py") == b"x = 1\n"


async def test_the_same_content_is_uploaded_once_wherever_and_whenever_it_was_written(ray, client, tmp_path):
    one, two = make(tmp_path / "one", "b.py", "a.py"), make(tmp_path / "two", "a.py", "b.py")
    os.utime(one / "a.py", (1, 1))
    assert await client.upload_package(one) == await client.upload_package(str(two))
    assert ray.count("PUT /api/packages") == 1


@pytest.mark.parametrize("change", ["content", "name", "mode", "more"])
def test_other_content_has_another_name(tmp_path, change):
    one, two = make(tmp_path / "one", "a.py"), make(tmp_path / "two", "a.py")
    before = packages._packed(one, ())
    assert packages._packed(two, ()) == before
    if change == "content":
        (two / "a.py").write_text("x = 2\n")
    elif change == "name":
        (two / "a.py").rename(two / "b.py")
    elif change == "mode":
        (two / "a.py").chmod(0o755)
    else:
        make(two, "b.py")
    assert packages._packed(two, ()) != before


def test_what_no_cluster_needs_stays_here(tmp_path):
    make(
        tmp_path, "a.py", ".git/config", "p/__pycache__/a.pyc", "p/b.pyc", ".venv/lib/x.py", "p/.mypy_cache/x", "p/c.py"
    )
    assert names_in(tmp_path) == ["a.py", "p/c.py"]


def test_ignore_files_hold_below_their_folder_and_the_nearest_has_the_last_word(tmp_path):
    make(
        tmp_path,
        "a.csv",
        "keep.csv",
        "p/b.csv",
        "p/c.log",
        "q/c.log",
        "q/build/x.py",
        "build/y.py",
        "p/q/d.csv",
        "z.py",
    )
    (tmp_path / ".gitignore").write_text("*.csv\n!keep.csv\n/build/\n# comment\n")
    (tmp_path / "p" / ".rayignore").write_text("*.log\n!d.csv\n")
    assert names_in(tmp_path) == [
        ".gitignore", "keep.csv", "p/.rayignore", "p/q/d.csv", "q/build/x.py", "q/c.log", "z.py",
    ]  # fmt: skip


def test_further_patterns_may_be_given(tmp_path):
    make(tmp_path, "a.py", "data/big.bin", "tests/test_a.py")
    assert names_in(tmp_path, ("data/", "test_*.py")) == ["a.py"]


def test_links_are_followed_and_a_circle_ends(tmp_path):
    make(tmp_path / "shared", "util.py")
    root = make(tmp_path / "code", "a.py")
    (root / "shared").symlink_to(tmp_path / "shared")
    (root / "again").symlink_to(root)
    (root / "broken").symlink_to(tmp_path / "nowhere")
    assert names_in(root) == ["a.py", "shared/util.py"]
    linked = tmp_path / "current"
    linked.symlink_to(root)
    assert names_in(linked) == names_in(root)


def test_executables_stay_executable(tmp_path):
    make(tmp_path, "run.sh", "a.py")
    (tmp_path / "run.sh").chmod(0o750)
    file = io.BytesIO()
    write_zip(tmp_path, file)
    modes = {entry.filename: (entry.external_attr >> 16) & 0o777 for entry in zipfile.ZipFile(file).infolist()}
    assert modes == {"run.sh": 0o755, "a.py": 0o644}


async def test_a_zip_is_sent_as_it_is(ray, client, tmp_path):
    path = tmp_path / "code.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.py", "x")
    uri = await client.upload_package(path)
    assert ray.packages[uri.removeprefix("gcs://")] == path.read_bytes()


@pytest.mark.parametrize("name", ["nothing", "file.py", "fake.zip"])
async def test_what_is_no_folder_and_no_zip_is_refused(client, tmp_path, name):
    make(tmp_path, "file.py", "fake.zip")
    with pytest.raises(InvalidSpec, match=r"package .*: it is no folder and no \.zip on this machine"):
        await client.upload_package(tmp_path / name)


async def test_a_folder_with_nothing_to_send_is_refused(client, tmp_path):
    make(tmp_path, ".git/config")
    with pytest.raises(InvalidSpec, match="no file that is not excluded"):
        await client.upload_package(tmp_path)


async def test_too_much_is_refused_before_it_is_sent_and_names_the_largest(ray, client, tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "MAX_PACKAGE_BYTES", 100_000)
    make(tmp_path, "a.py")
    (tmp_path / "model.bin").write_bytes(os.urandom(150_000))
    with pytest.raises(
        InvalidSpec, match=r"more than the 0\.1 MiB .*\.rayignore.* Largest so far: model\.bin \(0\."
    ) as caught:
        await client.upload_package(tmp_path)
    assert "\n" not in str(caught.value)
    assert ray.requests == []


async def test_a_file_that_may_not_be_read_is_named(client, tmp_path, monkeypatch):
    make(tmp_path, "a.py")

    def refuse(*_):
        raise PermissionError(13, "Permission denied", "a.py")

    monkeypatch.setattr(packages, "_entry", refuse)
    with pytest.raises(InvalidSpec, match="cannot be read: .*'a.py'"):
        await client.upload_package(tmp_path)


async def test_an_upload_survives_errors(ray, client, tmp_path):
    make(tmp_path, "a.py")
    ray.fails("GET /api/packages", status(500))
    ray.fails("PUT /api/packages", RESET, status(503))
    uri = await client.upload_package(tmp_path)
    assert uri.removeprefix("gcs://") in ray.packages
