"""The `gke` backend makes its nodes: from none to a served model and back; Google's side of the wire is played."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the testbed needs the extra `dev`")
pytest.importorskip("google.cloud.container_v1", reason="Google's clients are part of the extra `dev`")

from raytpu_ops.backends.gke import GkeBackend
from raytpu_ops.backends.gke.access import KubeconfigAccess
from raytpu_ops.backends.gke.record import OWNER
from raytpu_ops.backends.google.roles import GKE
from raytpu_ops.demo.airflow import AirflowInstance
from raytpu_ops.flows.leases import give_back, wait_whole
from raytpu_ops.tpu.capacity import FlexStart, OnDemand, Queued, Spot, ladder
from raytpu_ops.tpu.deadlines import Schedule
from raytpu_ops.tpu.errors import CapacityUnavailable
from raytpu_ops.tpu.spec import SliceSpec
from tests.cluster.leases import V4, owner, small
from tests.google_fake import Clock, GoogleFake, queued
from tests.google_fake.access import FakeAccess
from tests.google_fake.boots import BootsNodes
from tests.google_fake.fake import CLUSTER
from tests.google_fake.pool_life import Delays
from tests.google_fake.roles import Watch
from tests.leaks import Argv, leaks, marks
from tests.session import SESSION_DIR
from tests.testbed.client import Testbed
from tests.waiting import eventually, eventually_async

pytestmark = [pytest.mark.cluster, pytest.mark.airflow, pytest.mark.timeout(2400)]

REPOSITORY = Path(__file__).parents[2]
RBAC = REPOSITORY / "deploy" / "gke" / "rbac.yaml"
DAG = "tpu_train_and_serve"
#: What only a hang takes.
LIMIT_S = 1500.0
KINDS = [("ray.io/v1", "RayCluster"), ("v1", "Pod"), ("v1", "Secret"), ("v1", "Service")]
#: Seconds of Google's in one of ours.
SPEED = 20.0


@pytest.fixture(scope="module")
def google(slices: Testbed) -> Iterator[GoogleFake]:
    """Everybody has the rights of our role and no others."""
    with GoogleFake(clock=Clock(speed=SPEED)) as fake:
        watch = Watch(fake, GKE)
        fake.container.delays = Delays(create=90, delete=60)  # real nodes take their time beside
        fake.boots_nodes(slices)
        yield fake
        assert fake.node_pools() == {}
        assert watch.missing == set()


def there(testbed: Testbed, namespace: str) -> list[dict[str, Any]]:
    """Objects of a lease and others of their kinds, as the API server has them."""
    resources = [testbed.dynamic.resources.get(api_version=version, kind=kind) for version, kind in KINDS]
    return [one for resource in resources for one in resource.get(namespace=namespace).to_dict()["items"]]


def left(testbed: Testbed, google: GoogleFake, namespace: str) -> list[str]:
    """All that is there of leases, in words."""
    kinds = [*KINDS, ("v1", "PodTemplate"), (queued.API, queued.KIND)]
    ours = [kind for version, kind in kinds if testbed.count(version, kind, OWNER, namespace)]
    pools = [name.rpartition("/")[2] for name in google.container.made]
    nodes = [name for name in testbed.nodes() if name.startswith(tuple(pools))]
    return [*ours, *google.node_pools(), *nodes]


def test_the_pipeline_runs_from_no_node_to_a_served_model_and_back(slices: Testbed, google: GoogleFake) -> None:
    storage = slices.shared
    with slices.namespace("gke-node-pools") as namespace:
        extra = {
            **small(str(storage)),
            "namespace": namespace,
            "kubeconfig": str(slices.kubeconfig_for(RBAC, namespace)),
            "node_pools": {"cluster": CLUSTER},
            "google_endpoints": google.endpoints,
        }
        environment = {
            "AIRFLOW_CONN_RAY_TPU_DEFAULT": json.dumps({"conn_type": "ray_tpu", "extra": extra}),
            "RAYTPU_DEMO_STORAGE": f"{storage}/pools",
            "GOOGLE_APPLICATION_CREDENTIALS": str(google.key_file(SESSION_DIR)),
            **google.environment,
        }
        home = SESSION_DIR / "pools-home"
        airflow = AirflowInstance(home, [REPOSITORY / "dags"], env=environment, temporary=[SESSION_DIR])
        airflow.start()
        try:
            airflow.api.wait_for_dag(DAG)
            airflow.api.unpause(DAG)
            with Argv() as argv:
                run = airflow.api.trigger(DAG, {"backend": "gke", "epochs": 6})
                airflow.api.wait_task(DAG, run, "labelled", deadline_s=LIMIT_S)
                objects = there(slices, namespace)
                airflow.api.wait_run(DAG, run, deadline_s=LIMIT_S)
            state = airflow.api.wait_run(DAG, run, deadline_s=LIMIT_S)["state"]
            if state != "success":
                for task in airflow.api.tasks(DAG, run):
                    print(task["task_id"], task["state"], *airflow.api.last_log(DAG, run, task["task_id"]), sep="\n  ")
            assert state == "success"
            lease = airflow.api.xcom(DAG, run, "provision")
            workers = airflow.api.xcom(DAG, run, "train")["workers"]
            released = airflow.api.xcom(DAG, run, "release")
            log = str(airflow.api.log_events(DAG, run, "provision", 1))
            assert airflow.api.xcom(DAG, run, "evaluate")["accuracy"] >= 0.95
            secrets = {base64.b64decode(word).decode() for one in objects for word in (one.get("data") or {}).values()}
            pools = [call.request.node_pool.config for call in google.asked("CreateNodePool")]
            labels = [[dict(one.labels), dict(one.resource_labels), dict(one.metadata)] for one in pools]
            told = {"argv": argv.lines, "objects": marks(objects), "pools": labels}
            assert secrets
            assert leaks(google.secrets | secrets, home, **told) == []
        finally:
            assert airflow.stop() == []
        made = [name.rpartition("/")[2] for name in google.container.made]
        assert lease["created"]["node pool"] == made
        assert sorted(one["slice"] for one in workers) == ["slice-0", "slice-0", "slice-1", "slice-1"]
        assert released["left"] == []
        assert {f"node pool {name}" for name in made} <= set(released["removed"])
        assert "2 GKE node pools, each of 2 ct4p-hightpu-4t nodes" in log
        assert "1 of 2 node pools run" in log
        assert left(slices, google, namespace) == []


@pytest.mark.parametrize(
    "granted", [OnDemand(), FlexStart(timedelta(hours=2)), Queued(timedelta(hours=2))], ids=lambda rung: str(rung.kind)
)
async def test_a_rung_without_chips_gives_way_to_the_next_and_leaves_nothing(
    slices: Testbed, google: GoogleFake, granted: OnDemand | FlexStart | Queued
) -> None:
    """F01, and then real hosts that Ray labels."""
    spec = SliceSpec.of("v4", "2x2x2")
    google.faults.stockout()
    told: list[str] = []
    with slices.namespace("gke-ladder") as namespace:
        gke = GkeBackend(
            KubeconfigAccess(str(slices.kubeconfig_for(RBAC, namespace))),
            cloud=FakeAccess(google),
            **small(namespace=namespace, node_pools={"cluster": CLUSTER}),
        )
        plan = await gke.plan(spec, ladder([Spot(), granted]), lease_for=timedelta(hours=12))
        lease = await gke.acquire(plan, owner("provision"), say=told.append)
        assert "does not have enough resources" in lease.attempts[0]
        assert lease.capacity["kind"] == granted.kind

        schedule = Schedule.start({"provisioning": 600, "labelled": 600})
        lease, report = await wait_whole(gke, lease, schedule=schedule, say=told.append)
        assert [len(one.hosts) for one in report.slices] == [2]
        assert len(google.node_pools()) == 1

        await give_back(gke, lease, by=datetime.now(UTC) + timedelta(minutes=5), say=told.append, poll_s=1)
        eventually(lambda: left(slices, google, namespace) == [], f"nothing is left: {told}")


async def test_two_slices_are_queued_for_by_requests_of_their_own(slices: Testbed, google: GoogleFake) -> None:
    """A real API server takes requests, templates and hosts as they are made here; one that fails leaves nothing."""
    told: list[str] = []
    with slices.namespace("gke-queued") as namespace:
        gke = GkeBackend(
            KubeconfigAccess(str(slices.kubeconfig_for(RBAC, namespace))),
            cloud=FakeAccess(google),
            **small(namespace=namespace, node_pools={"cluster": CLUSTER}),
        )
        plan = await gke.plan(V4, ladder(Queued(timedelta(hours=2))), lease_for=timedelta(hours=12))
        [bridge] = google.container.watchers
        assert isinstance(bridge, BootsNodes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bridge.queue, "refusal", "there are none")
            with pytest.raises(CapacityUnavailable, match="is Failed: there are none"):
                await gke.acquire(plan, owner("provision"), say=told.append)
        eventually(lambda: left(slices, google, namespace) == [], f"nothing is left: {told}")

        lease = await gke.acquire(plan, owner("provision"), say=told.append)
        try:
            schedule = Schedule.start({"provisioning": 600, "labelled": 600})
            lease, report = await wait_whole(gke, lease, schedule=schedule, say=told.append)
            assert report.ready
            requests = slices.dynamic.resources.get(api_version=queued.API, kind=queued.KIND)
            made = requests.get(namespace=namespace).to_dict()["items"]
            assert sorted(one["metadata"]["name"] for one in made) == lease.created["node pool"]
            said = [{row["type"] for row in one["status"]["conditions"]} for one in made]
            assert all({"Accepted", "Provisioned"} <= one for one in said)
        finally:
            await give_back(gke, lease, by=datetime.now(UTC) + timedelta(minutes=5), say=told.append, poll_s=1)
        eventually(lambda: left(slices, google, namespace) == [], f"nothing is left: {told}")


async def test_a_pool_that_is_lost_is_made_anew_and_its_slice_becomes_whole(
    slices: Testbed, google: GoogleFake
) -> None:
    """F12: somebody deletes the pool under a slice."""
    told: list[str] = []
    with slices.namespace("gke-mend") as namespace:
        gke = GkeBackend(
            KubeconfigAccess(str(slices.kubeconfig_for(RBAC, namespace))),
            cloud=FakeAccess(google),
            **small(namespace=namespace, node_pools={"cluster": CLUSTER}),
        )
        plan = await gke.plan(V4, ladder(None), lease_for=timedelta(hours=1))
        lease = await gke.acquire(plan, owner("provision"), say=told.append)
        try:
            schedule = Schedule.start({"provisioning": 600, "labelled": 600})
            lease, _ = await wait_whole(gke, lease, schedule=schedule, say=told.append)
            lost = lease.created["node pool"][1]
            google.container.vanish(f"{CLUSTER}/nodePools/{lost}")

            async def seen() -> bool:
                """Ray and Kubernetes take their time to notice that hosts are gone."""
                return not (await gke.observe(lease)).ready

            await eventually_async(seen, "somebody notices", limit_s=300, every_s=1)
            mended, report = await wait_whole(gke, lease, schedule=schedule, say=told.append)

            assert report.ready, told
            assert lost not in mended.created["node pool"], told
            assert len(google.node_pools()) == 2
        finally:
            await give_back(gke, lease, by=datetime.now(UTC) + timedelta(minutes=5), say=told.append, poll_s=1)
        eventually(lambda: left(slices, google, namespace) == [], f"nothing is left: {told}")
