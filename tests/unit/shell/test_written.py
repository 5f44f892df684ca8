"""What is wrong as written is an import error of the DAG, before any chip is held; templates wait."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task

from raytpu_ops import (
    ProvisionTpuSlicesOperator,
    RayServeOperator,
    RayTpuJobOperator,
    RayTrainOperator,
    ReapTpuSlicesOperator,
    ReleaseTpuSlicesOperator,
    TpuSlicesReadySensor,
    tpu_slices,
)
from raytpu_ops.tpu.deadlines import Deadlines
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.spec import SliceSpec

TEMPLATE = "{{ params.x }}"
Make = Callable[..., Any]
LEASE = SliceLease(
    id="d-provision-1",
    owner=Owner(dag_id="d", run_id="r", task_id="provision"),
    backend="local",
    spec=SliceSpec.of("v4", "2x2x1"),
    ray=RayEndpoint(address="http://127.0.0.1:8265"),
    granted_at=datetime.now(UTC),
    expires_at=datetime.now(UTC),
)


def train(**changes: Any) -> Any:
    return RayTrainOperator(**{"task_id": "t", "lease": TEMPLATE, "train_loop": "m:f", "storage": "/s", **changes})


def job(**changes: Any) -> Any:
    return RayTpuJobOperator(**{"task_id": "t", "lease": TEMPLATE, "function": "m:f", **changes})


def serve(**changes: Any) -> Any:
    return RayServeOperator(**{"task_id": "t", "lease": TEMPLATE, "app": "m:f", **changes})


def reap(**changes: Any) -> Any:
    return ReapTpuSlicesOperator(task_id="t", **changes)


def release(**changes: Any) -> Any:
    return ReleaseTpuSlicesOperator(**{"task_id": "t", "lease": TEMPLATE, **changes})


def provision(**changes: Any) -> Any:
    return ProvisionTpuSlicesOperator(**{"task_id": "t", "generation": "v4", "topology": "2x2x1", **changes})


def ready(**changes: Any) -> Any:
    return TpuSlicesReadySensor(**{"task_id": "t", "lease": TEMPLATE, **changes})


def block(**changes: Any) -> None:
    with tpu_slices("v4", **{"topology": "2x2x1", "backend": "local", **changes}):
        pass


def line_of(make: Make, **changes: Any) -> str:
    with DAG("d", schedule=None), pytest.raises(InvalidSpec) as refused:
        make(**changes)
    line = str(refused.value)
    assert line.isprintable()
    assert "pydantic" not in line
    return line


#: What is called, one mistake, and what the line says.
MISTAKES: list[tuple[Make, dict[str, Any], str]] = [
    (provision, {"topology": "4x4x20"}, "Ray 2.60 has no v4 4x4x20.* the nearest that it has is '4x4x16'"),
    (train, {"deadlines": {"runing": 4}}, "runing"),
    (train, {"train_loop": "mf"}, "RayTrainOperator: train_loop: it must be 'package.module:function'"),
    (train, {"train_loop": lambda config: None}, "train_loop: .* cannot be imported on the hosts"),
    (train, {"storage": "runs"}, "storage: must be an absolute folder"),
    (train, {"keep_checkpoints": 0}, "keep_checkpoints: should be greater than or equal to 1"),
    (train, {"run_name": "Bad Name"}, "run_name: must be lower-case letters"),
    (train, {"resume": "yes"}, "resume: "),
    (train, {"config": [1]}, "config: should be a valid dictionary"),
    (train, {"config": {"x": object()}}, "config: at x: must be plain JSON"),
    (train, {"poll_interval": float("nan")}, "poll_interval: must be a finite number"),
    (job, {"command": ["echo"]}, "give function='module:function' or command="),
    (job, {"function": None}, "give function='module:function' or command="),
    (job, {"function": "mf"}, "RayTpuJobOperator: function: it must be 'package.module:function'"),
    (job, {"function": lambda: None}, "function: .* cannot be imported on the hosts"),
    (job, {"function": None, "command": "echo hi"}, r"RayTpuJobOperator: command: must be a list .*\['echo', 'hi'\]"),
    (job, {"function": None, "command": []}, "command: "),
    (job, {"op_args": "ab"}, "op_args: should be a valid list"),
    (job, {"op_args": [object()]}, "op_args.0: must be plain JSON"),
    (job, {"op_kwargs": [1]}, "op_kwargs: should be a valid dictionary"),
    (job, {"num_slices": -1}, "num_slices: must be a whole number, 1 or more, got -1"),
    (job, {"num_slices": "two"}, "num_slices: must be a whole number, 1 or more, got 'two'"),
    (job, {"poll_interval": 0}, "poll_interval: must be longer than zero"),
    (job, {"env": ["A"]}, "RayTpuJobOperator: env: should be a valid dictionary, got list"),
    (job, {"env": {"A-B": "x"}}, "env: names of variables"),
    (job, {"runtime_env": ["pip"]}, "runtime_env: should be a valid dictionary"),
    (job, {"runtime_env": {"pip": object()}}, "runtime_env: at pip: must be plain JSON"),
    (job, {"runtime_env": {"env_vars": ["A"]}}, "runtime_env: env_vars must be an object of texts"),
    (job, {"runtime_env": {"env_vars": {"A": 1}}}, "runtime_env: env_vars must be an object of texts"),
    (job, {"runtime_env": {"env_vars": {"B": "", "TPU_NAME": "x"}}}, "env_vars: TPU_NAME: set for each host"),
    (job, {"runtime_env": {"py_modules": "m"}}, "runtime_env: py_modules must be a list"),
    (job, {"runtime_env": {"working_dir": "gs://b/c.zip"}, "working_dir": "/code"}, "working_dir is set twice"),
    (serve, {"app": "mf"}, "RayServeOperator: app: app must be 'package.module:function'"),
    (serve, {"args": [1]}, "RayServeOperator: args: should be a valid dictionary, got list"),
    (serve, {"args": {"x": object()}}, "args: at x: must be plain JSON"),
    (serve, {"name": "a b"}, "name: must be letters, digits, dashes and underscores"),
    (serve, {"route_prefix": "digits/"}, "route_prefix: must be a path of .* such as '/digits'"),
    (serve, {"poll_interval": -1}, "poll_interval: must be longer than zero"),
    (serve, {"deadlines": {"starting": 0}}, "starting: must be longer than zero"),
    (reap, {"dry_run": "maybe"}, "dry_run: must be true or false, got 'maybe'"),
    (reap, {"unknown_runs": 3}, "unknown_runs: must be true or false, got 3"),
    (reap, {"deadlines": {"x": 2}}, "there is no such field"),
    (reap, {"deadlines": {"running": 2}}, "t: deadlines: running would have no effect here, .* phases are releasing"),
    (release, {"deadlines": {"queued": 2, "starting": 2}}, "queued, starting would have no effect"),
    (ready, {"deadlines": {"releasing": 2}}, "releasing would .* the phases are queued, provisioning, labelled;"),
    (provision, {"deadlines": {"labelled": 2}}, "labelled would .* the phases are queued, provisioning, releasing;"),
    (train, {"deadlines": Deadlines(releasing=2)}, "releasing would have no effect"),
    (serve, {"deadlines": {"running": 2}}, "running would have no effect here, .* labelled, starting; give it to"),
    (block, {"deadlines": {"running": 2}}, "running would .* queued, provisioning, labelled, releasing;"),
    (release, {"deadlines": {"x": 2}}, "there is no such field"),
    (release, {"lease": None}, "t: has neither lease nor provision_task_id, .* pass lease=provision.output"),
    (release, {"lease": None, "provision_task_id": ""}, "t: has neither lease nor provision_task_id"),
    (ready, {"deadlines": {"x": 2}}, "there is no such field"),
    (ready, {"poke_interval": 0}, "poke_interval: must be longer than zero"),
    (ready, {"poke_interval": 601}, "poke_interval: must be at most 600 seconds: what ended meanwhile is paid for"),
    (train, {"poll_interval": timedelta(days=1)}, "poll_interval: must be at most 600 seconds"),
    (serve, {"poll_interval": 3e7}, "poll_interval: must be at most 600 seconds"),
    (train, {"deferrable": "no"}, "t: deferrable must be True or False, got 'no'"),
    (block, {"deferrable": None}, "plan: deferrable must be True or False, got None"),
    (block, {"prefix": None}, "tpu_slices: prefix must be text, such as 'second_', got None"),
]


@pytest.mark.parametrize(("make", "mistake", "words"), MISTAKES)
def test_a_mistake_is_refused_when_the_file_is_parsed(make: Make, mistake: dict[str, Any], words: str) -> None:
    with DAG("d", schedule=None), pytest.raises(InvalidSpec, match=words):
        make(**mistake)
    assert "\n" not in line_of(make, **mistake)


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        (train, {"storage": TEMPLATE, "train_loop": "mf"}, "train_loop"),
        (train, {"train_loop": TEMPLATE, "config": {"a": TEMPLATE}, "run_name": "Bad Name"}, "run_name"),
        (train, {"config": {"a": TEMPLATE, "b": object()}}, "config: at b"),
        (job, {"env": {"A": TEMPLATE}, "working_dir": TEMPLATE, "num_slices": 0}, "num_slices"),
        (job, {"env": {"A": TEMPLATE, "B": 1}}, "env.B"),
        (job, {"function": TEMPLATE, "command": ["x"]}, "give function="),
        (serve, {"app": TEMPLATE, "name": "a b"}, "name"),
        (reap, {"dry_run": TEMPLATE, "unknown_runs": "maybe"}, "maybe"),
        (provision, {"ray_tpu_conn_id": TEMPLATE, "topology": "4x4"}, "topology"),
        (provision, {"generation": "v99", "topology": TEMPLATE}, "v99"),
        (provision, {"topology": TEMPLATE, "num_slices": 0}, "num_slices"),
        (provision, {"num_slices": TEMPLATE, "topology": "4x4"}, "topology"),
        (provision, {"generation": TEMPLATE, "capacity": "cheap"}, "capacity"),
        (provision, {"generation": TEMPLATE, "lease_for": -1}, "lease_for"),
    ],
)
def test_a_template_in_one_field_does_not_hide_another(make: Make, changes: dict[str, Any], words: str) -> None:
    assert words in line_of(make, **changes)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (train, {"train_loop": TEMPLATE, "storage": TEMPLATE, "run_name": TEMPLATE, "config": TEMPLATE}),
        (train, {"config": {"epochs": TEMPLATE}, "num_slices": TEMPLATE, "working_dir": TEMPLATE, "env": TEMPLATE}),
        (train, {"storage": "gs://{{ var.value.bucket }}/Runs", "working_dir": Path("/not/on/this/machine")}),
        (job, {"op_args": TEMPLATE, "op_kwargs": {"a": [TEMPLATE]}, "runtime_env": {"pip": [TEMPLATE]}}),
        (job, {"function": None, "command": ["echo", TEMPLATE], "num_slices": "2"}),
        (job, {"function": None, "command": TEMPLATE}),
        (serve, {"app": TEMPLATE, "args": TEMPLATE, "name": TEMPLATE}),
        (serve, {"route_prefix": TEMPLATE, "args": {"checkpoint": TEMPLATE}}),
        (reap, {"dry_run": TEMPLATE, "unknown_runs": TEMPLATE}),
    ],
)
def test_templates_wait_until_they_are_rendered(make: Make, changes: dict[str, Any]) -> None:
    with DAG("d", schedule=None):
        made = make(**changes)

    assert made.task_id == "t"


#: What people pass in the place of a lease, made inside a DAG.
NO_LEASES: dict[str, Callable[[], object]] = {
    "the operator": lambda: provision(task_id="provision"),
    "a block that is not entered": lambda: tpu_slices("v4", topology="2x2x1"),
    "a list": lambda: [provision(task_id="provision").output],
    "a task's id": lambda: "provision",
    "a number": lambda: 3,
}


@pytest.mark.parametrize("what", NO_LEASES)
@pytest.mark.parametrize("make", [ready, train, job, serve, release])
def test_what_can_be_no_lease_is_refused_when_the_file_is_parsed(make: Make, what: str) -> None:
    """A release of it would fail in every run, and the slices would bill until the reaper takes them."""
    with (
        DAG("d", schedule=None),
        pytest.raises(InvalidSpec, match="^t: lease: must be .* lease=provision.output") as no,
    ):
        make(lease=NO_LEASES[what]())
    assert str(no.value).isprintable()


@pytest.mark.parametrize("make", [ready, train, job, serve])
def test_no_lease_at_all_is_refused_where_the_task_needs_one(make: Make) -> None:
    with DAG("d", schedule=None), pytest.raises(InvalidSpec, match="^t: lease: must be .* got None"):
        make(lease=None)


@pytest.mark.parametrize("make", [ready, train, job, serve, release])
def test_a_lease_comes_in_many_ways(make: Make) -> None:
    with DAG("d", schedule=None) as dag:
        granted = provision(task_id="provision").output
        ways = [granted, granted.map(lambda lease: lease), granted.zip(granted), dag.param("lease", {}), TEMPLATE]
        given = [*ways, LEASE, LEASE.to_xcom()]
        for number, lease in enumerate(given):
            assert make(task_id=f"t{number}", lease=lease).lease == lease
        assert release(task_id="by_task", lease=None, provision_task_id="provision").lease is None


@pytest.mark.parametrize("make", [provision, ready, train, job, serve, block])
def test_a_result_that_is_needed_is_not_switched_off(make: Make) -> None:
    off = {"do_xcom_push": False}
    with (
        DAG("d", schedule=None, default_args=off),
        pytest.raises(InvalidSpec, match="do_xcom_push is off, .* leave it"),
    ):
        make(**off)


@pytest.mark.parametrize("make", [release, reap])
def test_a_result_that_nobody_needs_may_be_switched_off(make: Make) -> None:
    with DAG("d", schedule=None, default_args={"do_xcom_push": False}):
        assert not make().do_xcom_push


def test_each_task_of_a_lease_has_the_deadlines_of_its_own_phases() -> None:
    said = {"queued": 1, "provisioning": 2, "labelled": 3, "releasing": 4}
    with DAG("d", schedule=None) as dag:
        block(deadlines=said)

    made: dict[str, Any] = dag.task_dict
    given = {name: Deadlines.of(made[name].deadlines).model_fields_set for name in made if name != "released"}
    assert given == {
        "plan": {"queued", "provisioning", "releasing"},
        "provision": {"queued", "provisioning", "releasing"},
        "labelled": {"queued", "provisioning", "labelled"},
        "release": {"releasing"},
    }
    assert made["release"].deadlines.releasing.total_seconds() == said["releasing"]


def test_what_other_tasks_return_waits_too() -> None:
    @task(multiple_outputs=True)
    def before() -> dict[str, Any]:
        return {}

    with DAG("d", schedule=None) as dag, tpu_slices("v4", topology="2x2x1") as lease:
        out = before()
        train(task_id="train", lease=lease, train_loop=out["loop"], config=out, storage=out["s"], env={"A": out["a"]})
        job(task_id="job", lease=lease, function=out["f"], op_args=out["list"], op_kwargs={"a": [out]})
        job(task_id="run", lease=lease, function=None, command=["x", out["a"]], num_slices=out["n"])
        serve(task_id="serve", lease=lease, app=out["app"], args={"a": out}, name=out["name"])

    assert all("before" in dag.get_task(name).upstream_task_ids for name in ("train", "job", "run", "serve"))


def test_more_slices_than_the_lease_has_are_refused_before_there_is_one() -> None:
    words = "^num_slices: 3 were asked for; the lease that mo[a-z]* takes has 2, give 1 to that$"
    with DAG("d", schedule=None), tpu_slices("v4", topology="2x2x1", num_slices="2") as lease:
        job(lease=lease, num_slices="2")
        with pytest.raises(InvalidSpec, match=words):
            train(task_id="more", lease=lease, num_slices=3)
    with DAG("d", schedule=None):
        granted = provision(task_id="provision", num_slices=2).output
        with pytest.raises(InvalidSpec, match=words):
            job(task_id="more", lease=granted, num_slices=3)
        with pytest.raises(InvalidSpec, match=words):
            job(task_id="most", lease=TpuSlicesReadySensor(task_id="whole", lease=granted).output, num_slices=3)


@pytest.mark.parametrize(("there", "wanted"), [(TEMPLATE, 9), (2, TEMPLATE)])
def test_how_many_slices_a_lease_has_may_be_known_only_when_it_is_there(there: Any, wanted: Any) -> None:
    with DAG("d", schedule=None), tpu_slices("v4", topology="2x2x1", num_slices=there) as lease:
        assert job(lease=lease, num_slices=wanted).num_slices == wanted


@pytest.mark.parametrize("make", [job, serve])
def test_a_folder_that_is_missing_is_told_before_anything_else(make: Make) -> None:
    with DAG("d", schedule=None):
        made = make(working_dir="/no/such/folder")

    with pytest.raises(InvalidSpec, match="working_dir '/no/such/folder' is no folder on this machine"):
        made.begin({})
