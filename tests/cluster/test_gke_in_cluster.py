"""An Airflow in the same cluster: its pod's service account, Ray by the name of its service, no kubeconfig at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")

from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.backends.gke.rights import RIGHTS
from tests.cluster import in_pod
from tests.cluster.leases import LIMIT_S, RBAC, small_with
from tests.cluster.manifests import plain_pod
from tests.testbed.client import Testbed
from tests.testbed.faults import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).parents[2]
#: Where the image of `runtime: image` has the package, which is no place of this machine.
BAKED = "/opt/baked"


def mounted(*folders: str, below: str) -> tuple[list[Any], list[Any]]:
    """Volumes that are folders of the repository, and where a container has them."""
    names = {folder: folder.replace("_", "-") for folder in folders}
    volumes = [
        {"name": name, "hostPath": {"path": str(REPOSITORY / folder), "type": "Directory"}}
        for folder, name in names.items()
    ]
    mounts = [{"name": name, "mountPath": f"{below}/{folder}", "readOnly": True} for folder, name in names.items()]
    return volumes, mounts


def baked(container: str) -> dict[str, Any]:
    """A pod whose image has the package."""
    volumes, mounts = mounted("raytpu_ops", below=BAKED)
    variable = {"name": "PYTHONPATH", "value": BAKED}
    return {"volumes": volumes, "containers": [{"name": container, "env": [variable], "volumeMounts": mounts}]}


def airflow_pod(options: dict[str, Any]) -> dict[str, Any]:
    """A pod as one of Airflow's workers is: this repository beside what it needs, and an account with rights."""
    pod = plain_pod("airflow", "python", "-m", in_pod.__name__)
    volumes, mounts = mounted("raytpu_ops", "tests", below=str(REPOSITORY))
    pod["spec"] |= {"serviceAccountName": "raytpu-airflow", "volumes": volumes}
    pod["spec"]["containers"][0] |= {
        "workingDir": str(REPOSITORY),
        "volumeMounts": mounts,
        "env": [{"name": in_pod.OPTIONS, "value": json.dumps(options)}],
    }
    return pod


@pytest.mark.parametrize("runtime", ["upload", pytest.param("image", marks=pytest.mark.core)])
def test_a_lease_lives_and_ends_from_within_the_cluster(slices: Testbed, runtime: str) -> None:
    templates = {"head_template": baked("ray-head"), "host_template": baked("ray-worker")}
    options = small_with(**(templates if runtime == "image" else {}))
    with slices.namespace(f"in-cluster-{runtime}") as namespace:
        slices.kubeconfig_for(RBAC, namespace)  # for the account and its rights
        pod = airflow_pod({**options, "namespace": namespace, "reach": "service", "runtime": runtime})
        pod["metadata"]["namespace"] = namespace
        slices.core.create_namespaced_pod(namespace, pod)

        def ended() -> str | None:
            phase = slices.core.read_namespaced_pod("airflow", namespace).status.phase
            return phase if phase in ("Succeeded", "Failed") else None

        phase = wait_until(ended, LIMIT_S, lambda: f"it still runs: {slices.logs('airflow', namespace)}")
        said = slices.logs("airflow", namespace)
        print(said)
        assert phase == "Succeeded"
        found = json.loads(said.splitlines()[-1])

        assert found["dashboard"] == f"http://{found['lease']}-head-svc.{namespace}.svc:8265"
        assert not {"kubeconfig", "context"} & found["place"].keys()
        assert found["hosts"] == 2
        where = [line.rpartition(" ")[2] for line in found["lines"] if "our code is" in line]
        assert len(where) == 2
        if runtime == "image":
            assert set(where) == {f"{BAKED}/raytpu_ops/runtime/__init__.py"}
            assert found["runtime_env"] == {}  # nothing was uploaded
        else:
            assert all("/runtime_resources/py_modules_files/" in path for path in where)
        assert slices.count("ray.io/v1", "RayCluster", OWNER, namespace) == 0
        assert slices.count("v1", "Pod", "ray.io/cluster", namespace) == 0
        # By the API server's own record: what deploy/gke/rbac.yaml says may go with `reach: service` was not asked for.
        asked, granted = slices.asked(namespace), {(right.group, right.path, right.verb) for right in RIGHTS}
        assert ("ray.io", "rayclusters", "patch") in asked
        assert asked <= {right for right in granted if right[1] != "services/proxy"}
