"""The programs of the testbed: which versions, how they are built, where they are kept.

Each folder below `go/` is a small Go module that names its programs in `tool` lines; versions and
checksums are in its go.mod and go.sum. They are built once into a cache outside the tree, keyed by
all that the result depends on, so a new version of one part rebuilds that part alone.
Not here: how the programs are started (`controlplane.py`, `nodes.py`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

GO = Path(__file__).parent / "go"
#: One set of flags for all, or nothing is shared between the builds.
FLAGS = ("-trimpath", "-mod=readonly", "-buildvcs=false")
LDFLAGS = "-s -w"
#: Of the machine, for two slices of two hosts with Ray and JAX on them beside an Airflow.
MEMORY_GIB = 12
#: Debian's packages, with a program or folder that shows that each is there.
DEBIAN = {
    "runc": "/usr/sbin/runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iptables": "/usr/sbin/iptables",
    "iproute2": "/usr/sbin/ip",
    "busybox-static": "/bin/busybox",
    "util-linux": "/usr/bin/unshare",
    # Pods see the machine's /usr, and KubeRay's probes of older Ray call it.
    "wget": "/usr/bin/wget",
}


class TestbedUnavailable(RuntimeError):
    """This machine cannot run the testbed; the message says what is missing."""

    __test__ = False


@dataclass(frozen=True)
class Module:
    """A folder below `go/`.

    :param name: the folder.
    :param programs: name of the built file -> Go package.
    :param module: the Go module that it is about; its version is read from go.mod.
    :param files: name in the cache -> path within that module: manifests that are applied as they are.
    :param nodes_only: the control plane alone does without it.
    :param optional: built only when it is asked for by name.
    """

    name: str
    programs: dict[str, str]
    module: str
    files: dict[str, str] = field(default_factory=dict)
    nodes_only: bool = False
    optional: bool = False

    @property
    def folder(self) -> Path:
        return GO / self.name

    @property
    def version(self) -> str:
        """The version that go.mod asks for, `v1.37.2`."""
        found = re.search(rf"{re.escape(self.module)} (v\S+)", (self.folder / "go.mod").read_text())
        if found is None:
            raise ValueError(f"{self.folder}/go.mod: no version of {self.module}")
        return found.group(1)

    @property
    def ldflags(self) -> str:
        if self.name != "kubernetes":
            return LDFLAGS
        # Without a version clients that parse the server's (Kueue, kubectl) fail.
        major, minor, _ = self.version.lstrip("v").split(".")
        prefix = "-X k8s.io/component-base/version."
        return f"{LDFLAGS} {prefix}gitVersion={self.version} {prefix}gitMajor={major} {prefix}gitMinor={minor}"

    def key(self) -> str:
        """Changes with everything that the result depends on but the tool chain on this machine."""
        digest = hashlib.sha256(json.dumps([FLAGS, self.ldflags, self.programs, self.files]).encode())
        for path in sorted(self.folder.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:12]

    def home(self) -> Path:
        """Where it is kept when it is built."""
        return cache() / f"{self.name}-{self.version}-{self.key()}"

    def built(self) -> bool:
        return all((self.home() / name).exists() for name in [*self.programs, *self.files])


MODULES = {
    one.name: one
    for one in (
        Module("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}, "go.etcd.io/etcd/server/v3"),
        Module(
            "kubernetes",
            {
                name: f"k8s.io/kubernetes/cmd/{name}"
                for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
            },
            "k8s.io/kubernetes",
        ),
        Module(
            "kuberay",
            {"ray-operator": "github.com/ray-project/kuberay/ray-operator"},
            "github.com/ray-project/kuberay/ray-operator",
            files={"crds": "config/crd/bases"},
        ),
        Module(
            "containerd",
            {
                name: f"github.com/containerd/containerd/v2/cmd/{name}"
                for name in ("containerd", "containerd-shim-runc-v2", "ctr")
            },
            "github.com/containerd/containerd/v2",
            nodes_only=True,
        ),
        Module("coredns", {"coredns": "."}, "github.com/coredns/coredns", nodes_only=True),
        Module(
            "kueue",
            {"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
            "sigs.k8s.io/kueue",
            files={"config": "config/components"},
            optional=True,
        ),
    )
}


def cache() -> Path:
    """The folder that outlives the runs; `RAYTPU_TESTBED_CACHE` moves it."""
    return Path(os.environ.get("RAYTPU_TESTBED_CACHE") or Path.home() / ".cache" / "raytpu-testbed")


def program(name: str) -> str:
    """The path of a built program.

    :param name: the file's name, `kubelet`.
    """
    return next(str(one.home() / name) for one in MODULES.values() if name in one.programs)


def wanted(*, nodes: bool, kueue: bool) -> list[Module]:
    """The modules that a run needs.

    :param nodes: with kubelets.
    :param kueue: with Kueue.
    """
    return [one for one in MODULES.values() if (nodes or not one.nodes_only) and (one.name != "kueue" or kueue)]


def missing(*, nodes: bool, kueue: bool) -> str | None:
    """Why the testbed cannot run here, in words that fit a skipped test; None if it can.

    Nothing is built or installed to find out.

    :param nodes: with kubelets.
    :param kueue: with Kueue.
    """
    if os.geteuid() != 0:
        return "the testbed needs root: namespaces, mounts, cgroups"
    if reason := _too_small(nodes):
        return reason
    unbuilt = [one.name for one in wanted(nodes=nodes, kueue=kueue) if not one.built()]
    if unbuilt and shutil.which("go") is None:
        return f"the testbed needs Go to build {', '.join(unbuilt)}"
    absent = _absent_packages()
    if absent and shutil.which("apt-get") is None:
        return f"the testbed needs {', '.join(absent)}"
    return None


def _too_small(nodes: bool) -> str | None:
    """What this machine lacks, so that tests are skipped and do not fail; None where it lacks nothing."""
    if unshare := shutil.which("unshare"):
        command = [unshare, "--mount", "--net", "--pid", "--fork", "true"]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        if tried.returncode != 0:
            return f"the testbed needs namespaces, which root can't make here: {tried.stderr.strip()}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
    if nodes and memory < MEMORY_GIB:
        return f"the testbed's nodes need {MEMORY_GIB} GiB of memory, this machine has {memory}"
    return None


def unready(*, nodes: bool, kueue: bool) -> str | None:
    """Why the testbed cannot start here at once; None if it can.

    :param nodes: with kubelets.
    :param kueue: with Kueue.
    """
    unbuilt = [one.name for one in wanted(nodes=nodes, kueue=kueue) if not one.built()]
    reason = missing(nodes=nodes, kueue=kueue)
    if reason is None and unbuilt:
        return f"not built yet: {', '.join(unbuilt)}; run `python -m tests.testbed build --kueue`"
    return reason


def ensure(*, nodes: bool, kueue: bool, say: Callable[[str], None] = print, nice: int = 0) -> None:
    """Build and install what is absent.

    :param nodes: with kubelets.
    :param kueue: with Kueue.
    :param say: told what is done and how long it took.
    :param nice: niceness of the builds; they take both cores for minutes.
    :raises TestbedUnavailable: when something cannot be had here.
    """
    reason = missing(nodes=nodes, kueue=kueue)
    if reason:
        raise TestbedUnavailable(reason)
    absent = _absent_packages()
    if absent:
        _install(absent, say)
    for one in wanted(nodes=nodes, kueue=kueue):
        if not one.built():
            build(one, say=say, nice=nice)


def build(one: Module, *, say: Callable[[str], None] = print, nice: int = 0) -> None:
    """Build one module into the cache; whoever comes second waits for the first.

    :param one: what to build.
    :param say: told what is done and how long it took.
    :param nice: niceness of the build.
    :raises TestbedUnavailable: when the build fails; the message carries the tail of its output.
    """
    home = one.home()
    home.mkdir(parents=True, exist_ok=True)
    with _lock(home.with_suffix(".lock")):
        for name, package in one.programs.items():
            if (home / name).exists():
                continue
            began = time.monotonic()
            say(f"building {name} ({one.version})")
            unfinished = home / f".{name}.part"
            _go(one, nice, "build", *FLAGS, "-ldflags", one.ldflags, "-o", str(unfinished), package)
            unfinished.rename(home / name)
            say(f"built {name} in {time.monotonic() - began:.0f} s")
        for name, path in one.files.items():
            if (home / name).exists():
                continue
            source = Path(_go(one, nice, "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", one.module).strip()) / path
            unfinished = home / f".{name}.part"
            shutil.rmtree(unfinished, ignore_errors=True)
            # The module cache is read-only, copies of it must not be: they are removed some day.
            shutil.copytree(source, unfinished, copy_function=shutil.copyfile)
            unfinished.chmod(0o755)
            unfinished.rename(home / name)


def _go(one: Module, nice: int, *args: str) -> str:
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
    command = ["nice", "-n", str(nice), "go", *args] if nice else ["go", *args]
    done = subprocess.run(command, cwd=one.folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-15:])
        raise TestbedUnavailable(f"go {args[0]} of {one.name} {one.version} failed:\n{tail}")
    return done.stdout


def _absent_packages() -> list[str]:
    return [package for package, path in DEBIAN.items() if not Path(path).exists()]


def _install(packages: list[str], say: Callable[[str], None]) -> None:
    say(f"installing {' '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", "-qq", "-o", "Acquire::Retries=3", *command],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise TestbedUnavailable(f"apt-get {command[0]} failed: {done.stderr.strip()[-500:]}")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
