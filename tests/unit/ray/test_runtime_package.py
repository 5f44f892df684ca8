"""Claims of the package that brings our own code to a cluster: whole, no more than that, and always the same."""

from __future__ import annotations

import ast
import io
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from raytpu_ops.ray import packages
from raytpu_ops.tpu.errors import Misconfigured

#: What is on a cluster where Ray is, with Serve; and what user code there brings for JAX and its checkpoints.
ON_THE_CLUSTER = {"pydantic", "pydantic_core", "ray", "starlette", "jax", "numpy", "orbax", "etils"}
#: All of them come with pydantic.
PYDANTIC = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection")


@pytest.fixture
def package() -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(packages._packed_runtime()))


def imports(source: bytes) -> Iterator[str]:
    """Modules that the source imports, anywhere in it but for type checkers."""
    tree = ast.parse(source)
    hints = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in hints:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


def test_it_holds_what_runs_on_the_cluster_below_its_own_name_and_nothing_else(package):
    names = package.namelist()
    parts = {name.split("/")[1] for name in names}
    assert {name.split("/")[0] for name in names} == {"raytpu_ops"}
    assert parts == {"__init__.py", "py.typed", "runtime", "tpu"}
    here = {path.relative_to(packages.RUNTIME_FOLDER).as_posix() for path in packages.RUNTIME_FOLDER.rglob("*.py")}
    wanted = {name for name in here if name.startswith(("runtime/", "tpu/")) or name == "__init__.py"}
    assert {name.removeprefix("raytpu_ops/") for name in names if name.endswith(".py")} == wanted
    assert sum(entry.compress_size for entry in package.infolist()) < 300_000


def test_what_it_imports_is_in_it_or_on_every_cluster(package):
    names = set(package.namelist())
    found = {(name, module) for name in names if name.endswith(".py") for module in imports(package.read(name))}
    foreign = {
        (name, module)
        for name, module in found
        if (top := module.partition(".")[0]) not in ON_THE_CLUSTER | sys.stdlib_module_names | {"raytpu_ops"}
        or (
            top == "raytpu_ops"
            and not {f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"} & names
        )
    }
    assert len(found) > 100
    assert not foreign


def test_it_is_imported_with_nothing_but_pydantic(package, tmp_path: Path):
    """An interpreter of its own, without site-packages: the way into the driver, and every module of facts."""
    package.extractall(tmp_path / "sent")
    (tmp_path / "libraries").mkdir()
    for name in PYDANTIC:
        source = Path(str(import_module(name).__file__))
        target = source.parent if source.name == "__init__.py" else source
        (tmp_path / "libraries" / target.name).symlink_to(target)
    modules = [name.removesuffix(".py").replace("/", ".") for name in package.namelist() if "/tpu/" in name]
    modules = [name.removesuffix(".__init__") for name in modules] + ["raytpu_ops.runtime.__main__"]
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path / 'sent')!r}, {str(tmp_path / 'libraries')!r}]\n"
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
        "import raytpu_ops; print(raytpu_ops.__file__)"
    )
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(tmp_path / "sent" / "raytpu_ops" / "__init__.py")


def test_it_is_the_same_wherever_and_whenever_it_was_installed(tmp_path, monkeypatch):
    here = packages._packed_runtime()
    copy = tmp_path / "site-packages" / "raytpu_ops"
    shutil.copytree(packages.RUNTIME_FOLDER, copy, copy_function=shutil.copy)  # other times than here
    (copy / "example_dags").mkdir(exist_ok=True)
    (copy / "example_dags" / "more.py").write_text("")
    monkeypatch.setattr(packages, "RUNTIME_FOLDER", copy)
    assert packages._packed_runtime() == here
    with (copy / "tpu" / "shapes.py").open("a") as file:
        file.write("\n")
    assert packages._packed_runtime() != here


async def test_it_is_uploaded_once(ray, client):
    uri = await client.upload_runtime()
    assert await client.upload_runtime() == uri
    assert ray.count("PUT /api/packages") == 1
    sent = zipfile.ZipFile(io.BytesIO(ray.packages[uri.removeprefix("gcs://")]))
    assert "raytpu_ops/runtime/__main__.py" in sent.namelist()


async def test_an_installation_without_files_says_what_to_do(client, monkeypatch):
    monkeypatch.setattr(packages, "RUNTIME_FOLDER", Path("/opt/app.pyz/raytpu_ops"))
    with pytest.raises(Misconfigured, match=r"not installed as files .*pip.*runtime='image'"):
        await client.upload_runtime()
