"""Node pools of the testbed: what GKE would make of them, and the files that each node runs with.

A TPU slice is one pool, each host of it one node, with GKE's labels and taint. Not here: how a node
is started and killed (`inside.py`), what process 1 of a node does (`node_init.py`).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from raytpu_ops.tpu.shapes import SliceShape, catalogue, resolve
from tests.testbed.controlplane import INNER
from tests.testbed.images import PAUSE
from tests.testbed.layout import NODE_NET, POD_CIDR, REGISTRY_PORT, SERVICE_DNS, Layout
from tests.testbed.node_init import CONTAINERD_SOCKET
from tests.testbed.parts import program
from tests.testbed.pki import Authority

#: GKE's taint of every node with TPUs.
TPU_TAINT = {"key": "google.com/tpu", "value": "present", "effect": "NoSchedule"}
_SPEC = re.compile(
    r"(?P<kind>cpu|[a-z0-9]+)(?:-(?P<topology>[0-9x]+))?(?:@(?P<machine>[a-z0-9-]+))?(?:\*(?P<times>\d+))?\Z"
)


@dataclass(frozen=True)
class Pool:
    """A node pool.

    :param name: the value of `cloud.google.com/gke-nodepool`, and the prefix of its nodes' names.
    :param hosts: how many nodes it has.
    :param shape: of the slice that it is; None for a pool without TPUs.
    :param labels: more labels for its nodes.
    :param taints: of its nodes; None for those that follow from the shape.
    """

    name: str
    hosts: int
    shape: SliceShape | None = None
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[dict[str, str], ...] | None = None

    @classmethod
    def named(
        cls,
        name: str,
        hosts: int,
        machine_type: str,
        topology: str,
        labels: dict[str, str],
        taints: list[dict[str, str]],
    ) -> Pool:
        """What the GKE API is told; see `Levers.add_pool`.

        :raises ValueError: for a machine type that has no such topology.
        """
        shape = None
        if topology:
            fits = [one for one in catalogue() if (one.machine_type, one.topology) == (machine_type, topology)]
            if not fits:
                raise ValueError(f"node pool {name}: {machine_type} has no topology {topology}")
            shape = fits[0]
        return cls(name, hosts, shape, labels, tuple(taints))

    @property
    def node_names(self) -> list[str]:
        return [f"{self.name}-{index}" for index in range(self.hosts)]

    @property
    def node_labels(self) -> dict[str, str]:
        labels = {
            "cloud.google.com/gke-nodepool": self.name,
            "topology.kubernetes.io/region": "test-region1",
            "topology.kubernetes.io/zone": "test-region1-a",
            "node.kubernetes.io/instance-type": "test-standard",
        }
        if self.shape is not None:
            labels |= {**self.shape.node_selector, "node.kubernetes.io/instance-type": self.shape.machine_type}
        return labels | self.labels

    @property
    def node_taints(self) -> list[dict[str, str]]:
        if self.taints is not None:
            return list(self.taints)
        return [TPU_TAINT] if self.shape is not None else []


def parse(spec: str, taken: frozenset[str] = frozenset()) -> list[Pool]:
    """`cpu`, `cpu*2`, `v4-2x2x2*2`, `v6e-2x4@ct6e-standard-4t`: pools, one for each slice.

    :param spec: kind, topology, machine type where the topology leaves a choice, and how many.
    :param taken: names of pools that are there already.
    :raises ValueError: for a word that is none of these.
    """
    found = _SPEC.match(spec.strip())
    if found is None:
        raise ValueError(f"node pool {spec!r}: write cpu, cpu*2, v4-2x2x2*2 or v6e-2x4@ct6e-standard-4t")
    times = int(found["times"] or 1)
    if found["kind"] == "cpu":
        return [Pool(_free("cpu", taken), times)]
    shape = resolve(found["kind"], found["topology"], found["machine"])
    pools: list[Pool] = []
    for _ in range(times):
        name = _free(f"{shape.generation.name}-{shape.topology}", taken | {pool.name for pool in pools})
        pools.append(Pool(name, shape.hosts, shape))
    return pools


def _free(prefix: str, taken: frozenset[str] | set[str]) -> str:
    return next(name for name in (f"{prefix}-{number}" for number in range(len(taken) + 1)) if name not in taken)


def base_spec(venv: str) -> dict[str, object]:
    """The OCI spec that every container starts from: containerd's own, and what the Ray image lacks.

    :param venv: the virtual environment with Ray.
    """
    made = subprocess.run([program("ctr"), "oci", "spec"], check=True, capture_output=True, text=True)
    spec: dict[str, object] = json.loads(made.stdout)
    process = spec["process"]
    assert isinstance(process, dict)
    # The limit in there is lower than the host's; raising it again takes a right that not every machine gives.
    process.pop("rlimits", None)
    mounts = spec["mounts"]
    assert isinstance(mounts, list)
    for path in host_paths(venv):
        mounts.append({"destination": path, "source": path, "type": "bind", "options": ["rbind", "ro", "nosuid"]})
    return spec


def host_paths(venv: str) -> list[str]:
    """What pods see of the host, read-only, at the same paths.

    :param venv: the virtual environment with Ray.
    """
    paths = ["/usr", "/etc/ssl", sys.base_prefix, venv]
    inside = [path for path in paths if Path(path).exists()]
    return [one for one in inside if not any(one != other and Path(one).is_relative_to(other) for other in inside)]


def shared_files(layout: Layout, venv: str) -> None:
    """Files that all nodes read.

    :param layout: the run.
    :param venv: the virtual environment with Ray.
    """
    work = layout.work
    (work / "base-spec.json").write_text(json.dumps(base_spec(venv)))
    (work / "resolv.conf").write_text("options ndots:1\n")
    hosts = work / "registry.d" / "_default"
    hosts.mkdir(parents=True)
    registry = f"http://127.0.0.1:{REGISTRY_PORT}"
    hosts.joinpath("hosts.toml").write_text(
        f'server = "{registry}"\n[host."{registry}"]\ncapabilities = ["pull", "resolve"]\n'
    )
    plugin = {
        "type": "bridge",
        "bridge": "pods",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": POD_CIDR}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(layout.ipam),  # one for all nodes: they share the bridge
        },
    }
    network = {"cniVersion": "1.0.0", "name": "pods", "plugins": [plugin]}
    (work / "cni").mkdir()
    (work / "cni" / "10-pods.conflist").write_text(json.dumps(network))


def node_files(layout: Layout, authority: Authority, name: str, pool: Pool, number: int) -> tuple[Path, str]:
    """Everything that one node starts with.

    :param layout: the run.
    :param authority: its certificate authority.
    :param name: of the node.
    :param pool: that it belongs to.
    :param number: of the node in the run, from 1; makes its address.
    :return: the file for `node_init.py`, and the node's address.
    """
    folder = layout.nodes / name
    address = f"{NODE_NET}.{10 + number}"
    shutil.rmtree(folder, ignore_errors=True)  # of a pool that had this name and is gone
    (folder / "kubelet").mkdir(parents=True)
    authority.issue(f"node-{name}", f"system:node:{name}", groups=("system:nodes",), hosts=(name, address))
    authority.kubeconfig(folder / "kubeconfig", INNER, name=f"node-{name}")
    (folder / "containerd.toml").write_text(_containerd_config(layout, folder))
    (folder / "kubelet.json").write_text(json.dumps(_kubelet_config(layout, folder, name, pool, address)))
    labels = ",".join(f"{key}={value}" for key, value in pool.node_labels.items())
    spec = {
        "folder": str(folder),
        "containerd": [program("containerd"), "--config", str(folder / "containerd.toml"), "--log-level", "warn"],
        "kubelet": [
            program("kubelet"),
            f"--config={folder / 'kubelet.json'}",
            f"--kubeconfig={folder / 'kubeconfig'}",
            f"--hostname-override={name}",
            f"--node-ip={address}",
            f"--node-labels={labels}",
            f"--cert-dir={folder / 'pki'}",
            f"--root-dir={'/var/lib/kubelet'}",
        ],
    }
    path = folder / "node.json"
    path.write_text(json.dumps(spec))
    return path, address


def _containerd_config(layout: Layout, folder: Path) -> str:
    unused = ("nri.v1.nri", "snapshotter.v1.btrfs", "snapshotter.v1.zfs", "snapshotter.v1.devmapper",
              "snapshotter.v1.blockfile", "snapshotter.v1.erofs", "internal.v1.tracing", "internal.v1.opt")  # fmt: skip
    return f"""version = 3
root = "{folder}/containerd"
state = "/run/containerd-state"
disabled_plugins = {json.dumps([f"io.containerd.{name}" for name in unused])}
[grpc]
address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"
[plugins."io.containerd.cri.v1.images".registry]
config_path = "{layout.work}/registry.d"
[plugins."io.containerd.cri.v1.runtime"]
# Lowering the score takes CAP_SYS_RESOURCE, which a container or a small machine may lack.
restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/usr/lib/cni"]
conf_dir = "{layout.work}/cni"
[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
runtime_path = "{program("containerd-shim-runc-v2")}"
base_runtime_spec = "{layout.work}/base-spec.json"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = false
"""


def _kubelet_config(layout: Layout, folder: Path, name: str, pool: Pool, address: str) -> dict[str, object]:
    never = dict.fromkeys(("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available"), "0%")
    return {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "address": address,
        "healthzBindAddress": address,
        "readOnlyPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
        },
        "tlsCertFile": str(layout.pki / f"node-{name}.crt"),
        "tlsPrivateKeyFile": str(layout.pki / f"node-{name}.key"),
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "cgroupRoot": f"/{layout.cgroup}/{name}",
        "enforceNodeAllocatable": [],
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "clusterDNS": [SERVICE_DNS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(layout.work / "resolv.conf"),
        "podLogsDir": str(folder / "pod-logs"),
        "volumePluginDir": str(folder / "plugins"),
        "registerWithTaints": pool.node_taints,
        "failSwapOn": False,
        "serializeImagePulls": False,
        # A full disk of the host is not what is tested.
        "evictionHard": never,
        "imageGCHighThresholdPercent": 100,
        "maxPods": 40,
        # A node that comes and goes within a test has to be seen quickly.
        "nodeStatusUpdateFrequency": "5s",
        "nodeLeaseDurationSeconds": 20,
    }
