"""Work that cannot run and leases that are none, each refused in one clear line before anything starts."""

from __future__ import annotations

import math
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest

from raytpu_ops.tpu.lease import Owner, RayEndpoint, SliceLease
from raytpu_ops.tpu.work import CommandWork, FunctionWork, TrainWork, load_work
from tests.unit.tpu.refusals import (
    CUBES,
    GENERATIONS,
    LONG,
    SHELL,
    SPEC,
    Case,
    Rude,
    assert_refused_in_one_clear_line,
    numbered,
)

NAN, INF = math.nan, math.inf


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


TRAIN = {"spec": SPEC, "train_loop": "digits.train:loop", "storage": "gs://bucket/runs", "run_name": "digits"}
FUNCTION = {"spec": SPEC, "function": "digits.tools:probe"}
COMMAND = {"spec": SPEC, "argv": ["hostname"]}


def train(field: str, value: object, right: str, where: str | None = None) -> Case:
    return (lambda: TrainWork.of({**TRAIN, field: value}), where or field, right)


def function(field: str, value: object, right: str) -> Case:
    return (lambda: FunctionWork.of({**FUNCTION, field: value}), field, right)


def command(field: str, value: object, right: str) -> Case:
    return (lambda: CommandWork.of({**COMMAND, field: value}), field, right)


LEASE: dict[str, Any] = {
    "id": "train-provision-0123456789ab",
    "owner": {"dag_id": "train", "run_id": "manual__1", "task_id": "provision"},
    "backend": "local",
    "spec": SPEC,
    "ray": {"address": "http://127.1.2.1:8265"},
    "granted_at": "2026-01-01T00:00:00Z",
    "expires_at": "2026-01-02T00:00:00Z",
}


def lease(path: str, value: object, right: str, where: str | None = None) -> Case:
    """The lease with one value changed; ``path`` is dotted."""
    wire = deepcopy(LEASE)
    *parents, last = path.split(".")
    inner = wire
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    return (lambda: SliceLease.from_xcom(wire), where or last, right)


def lease_without(field: str) -> Case:
    wire = {key: value for key, value in LEASE.items() if key != field}
    return (lambda: SliceLease.from_xcom(wire), field, "missing")


TARGET = "package.module:function"
WORK_CASES = [
    *[
        train("train_loop", value, TARGET)
        for value in ["digits", "digits.train", "digits/train.py:loop", "digits.train:loop()", "os:system('id')"]
    ],
    train("train_loop", SHELL, TARGET),
    train("train_loop", "a:b; import os", TARGET),
    train("train_loop", "a:b --flag", TARGET),
    train("train_loop", "a:b\n", "one line"),
    train("train_loop", "..a:b", TARGET),
    train("train_loop", "a:lambda", TARGET),
    train("train_loop", "", "at least 1"),
    train("train_loop", "a" * 300 + ":b", "at most 250"),
    train("train_loop", None, "string"),
    train("train_loop", print, "string"),
    train("storage", "", "at least 1"),
    train("storage", "runs", "absolute folder or a URL"),
    train("storage", "./runs", "absolute folder or a URL"),
    train("storage", "~/runs", "absolute folder or a URL"),
    train("storage", "gs://", "absolute folder or a URL"),
    train("storage", "gs:/bucket", "absolute folder or a URL"),
    train("storage", "s3://key:hunter2@bucket/runs", "without credentials"),
    train("storage", "/runs/../etc", "'..'"),
    train("storage", "gs://bucket/../other", "'..'"),
    train("storage", "/runs\n/etc", "one line"),
    train("storage", 5, "string"),
    train("run_name", "", "at least 1"),
    train("run_name", "My Run", "lower-case"),
    train("run_name", "../../etc", "lower-case"),
    train("run_name", "a/b", "lower-case"),
    train("run_name", "a" * 64, "at most 63"),
    train("run_name", "-a", "lower-case"),
    train("run_name", "a\n", "one line"),
    train("run_name", SHELL, "lower-case"),
    train("run_name", 5, "string"),
    train("start_timeout_s", 0, "greater than 0"),
    train("start_timeout_s", -5, "greater than 0"),
    train("start_timeout_s", NAN, "finite"),
    train("start_timeout_s", INF, "finite"),
    train("start_timeout_s", 1e12, "less than or equal to"),
    train("start_timeout_s", "600", "number"),
    train("start_timeout_s", 10**400, "number"),
    train("start_timeout_s", True, "number"),
    train("start_timeout_s", timedelta(minutes=5), "number"),
    train("keep_checkpoints", 0, "greater than or equal to 1"),
    train("keep_checkpoints", -2, "greater than or equal to 1"),
    train("keep_checkpoints", 2.5, "integer"),
    train("keep_checkpoints", "2", "integer"),
    train("keep_checkpoints", True, "integer"),
    train("keep_checkpoints", 10**9, "less than or equal to"),
    train("resume", "yes", "boolean"),
    train("resume", 1, "boolean"),
    train("resume", None, "boolean"),
    train("config", [1], "dictionary"),
    train("config", "epochs=3", "dictionary"),
    train("config", {"lr": NAN}, "at lr"),
    train("config", {"lr": {"max": INF}}, "at lr.max"),
    train("config", {"layers": [1, {2, 3}]}, "plain JSON"),
    train("config", {"f": print}, "plain JSON"),
    train("config", {"when": timedelta(1)}, "plain JSON"),
    train("config", {"raw": b"x"}, "plain JSON"),
    train("config", {1: "x"}, "keys must be text"),
    train("config", {"a": {None: 1}}, "keys must be text"),
    train("config", {"a": "\ud800"}, "UTF-8"),
    train("config", {"a": "x\0y"}, "NUL"),
    train("config", {"a": deep(100)}, "deeper than"),
    train("config", {"a": cyclic()}, "deeper than"),
    train("env", ["A=1"], "dictionary"),
    train("env", {"A": 1}, "string"),
    train("env", {"A": None}, "string"),
    train("env", {1: "x"}, "string"),
    train("env", {"": "x"}, "letters, digits and underscores"),
    train("env", {"A=hunter2": "x"}, "letters, digits and underscores, 'A' is none"),
    train("env", {"A B": "x"}, "letters, digits and underscores"),
    train("env", {"A\n": "x"}, "letters, digits and underscores"),
    train("env", {"1A": "x"}, "letters, digits and underscores"),
    train("env", {"A": "x\0"}, "NUL"),
    train("env", {"TPU_NAME": "other"}, "must not be given"),
    train("env", {"TPU_WORKER_ID": "0"}, "must not be given"),
    train("env", {"RAYTPU_WORK": "{}"}, "must not be given"),
    train("env", {"RAY_AUTH_TOKEN": "hunter2"}, "must not be given"),
    train("env", {"RAY_AUTH_MODE": "disabled"}, "must not be given"),
    train("spec", None, "SliceSpec", "spec"),
    train("spec", "v4-16", "SliceSpec", "spec"),
    train("spec", {}, GENERATIONS, "generation"),
    train("spec", {**SPEC, "topology": "4x4"}, CUBES, "topology"),
    train("spec", {**SPEC, "num_slices": 0}, "greater than or equal to 1", "spec.num_slices"),
    train("spec", {**SPEC, "nodes": 2}, "no such field", "spec.nodes"),
    train("kind", "serve", "'train'"),
    train("entrypoint", SHELL, "there are spec, start_timeout_s"),
    train("train_lop", "a:b", "'train_loop'"),
    (lambda: TrainWork.of(), "spec", "missing"),
    (lambda: TrainWork.of(TRAIN, resume=True), "TrainWork", "either a dict or keyword arguments"),
    (lambda: TrainWork.of("train"), "TrainWork", "a dict of its fields"),
    (lambda: TrainWork(**{**TRAIN, "resume": 3}), "resume", "boolean"),
    function("function", "tools.probe", TARGET),
    function("function", SHELL, TARGET),
    function("function", len, "string"),
    function("args", "abc", "list"),
    function("args", {"a": 1}, "list"),
    function("args", [object()], "plain JSON"),
    function("args", [NAN], "nan"),
    function("kwargs", ["a"], "dictionary"),
    function("kwargs", {"not an identifier": 1}, "identifiers"),
    function("kwargs", {"class": 1}, "identifiers"),
    function("kwargs", {"a": {1}}, "plain JSON"),
    command("argv", "rm -rf /", "list"),
    command("argv", [], "at least 1"),
    command("argv", [""], "program"),
    command("argv", [" "], "program"),
    command("argv", ["echo", 5], "string"),
    command("argv", ["echo", None], "string"),
    command("argv", ["echo", "a\0b"], "NUL"),
    command("argv", ["echo", "\udcff"], "UTF-8"),
    command("shell", True, "there are spec, start_timeout_s, env, kind, argv"),
    (lambda: load_work(""), "work", "JSON"),
    (lambda: load_work("{"), "work", "JSON"),
    (lambda: load_work("[]"), "work", "object"),
    (lambda: load_work("null"), "work", "object"),
    (lambda: load_work("{}"), "work", "kind"),
    (lambda: load_work('{"kind": "shell"}'), "work", "'train', 'function', 'command'"),
    (lambda: load_work('{"kind": "command", "argv": ["a"]}'), "spec", "missing"),
]

LEASE_CASES = [
    (lambda: SliceLease.from_xcom(None), "lease", "provision.output"),
    (lambda: SliceLease.from_xcom(""), "lease", "provision.output"),
    (lambda: SliceLease.from_xcom("{{ ti.xcom_pull() }}"), "lease", "provision.output"),
    (lambda: SliceLease.from_xcom(5), "lease", "id, owner, backend"),
    (lambda: SliceLease.from_xcom(True), "lease", "id, owner, backend"),
    (lambda: SliceLease.from_xcom([LEASE]), "lease", "id, owner, backend"),
    (lambda: SliceLease.from_xcom(Rude()), "lease", "id, owner, backend"),
    (lambda: SliceLease.from_xcom({}), "lease", "missing"),
    *[lease_without(field) for field in ("id", "owner", "backend", "ray", "granted_at", "expires_at")],
    (lambda: SliceLease.from_xcom({k: v for k, v in LEASE.items() if k != "spec"}), "spec", "missing"),
    lease("id", "", "at least 1"),
    lease("id", "Train", "lower-case"),
    lease("id", "a" * 41, "at most 40"),
    lease("id", "a/../b", "lower-case"),
    lease("id", SHELL, "lower-case"),
    lease("id", "a\nb", "one line"),
    lease("id", 5, "string"),
    lease("owner", "me", "Owner"),
    lease("owner.dag_id", "", "at least 1"),
    lease("owner.dag_id", "a" * 251, "at most 250"),
    lease("owner.run_id", "a\0b", "one line"),
    lease("owner.task_id", None, "string"),
    lease("owner.map_index", -2, "greater than or equal to -1"),
    lease("owner.map_index", True, "integer"),
    lease("owner.map_index", "0", "integer"),
    lease("owner.user", "root", "no such field"),
    lease("backend", "", "at least 1"),
    lease("spec.topology", "9x9x9", CUBES),
    lease("spec.num_slices", 1.0, "integer"),
    lease("ray", None, "RayEndpoint"),
    lease("ray.address", "", "http://host:8265"),
    lease("ray.address", "localhost:8265", "http://host:8265"),
    lease("ray.address", "ray://host:10001", "http://host:8265"),
    lease("ray.address", "file:///etc/passwd", "http://host:8265"),
    lease("ray.address", "http://", "http://host:8265"),
    lease("ray.address", "http://host:99999", "http://host:8265"),
    lease("ray.address", "http://host:abc", "http://host:8265"),
    lease("ray.address", "http://[::1", "http://host:8265"),
    lease("ray.address", "http://user:hunter2@host:8265", "without a user name or password"),
    lease("ray.address", "http://host:8265/\r\nX-Evil: 1", "one line"),
    lease("ray.address", "http://host/" + LONG, "at most 2000"),
    lease("ray.token", ["hunter2"], "string"),
    lease("ray.password", "hunter2", "no such field"),
    lease("created", ["slice"], "dictionary"),
    lease("created", {"slice": "s0"}, "list", "created.slice"),
    lease("created", {"slice": [5]}, "string", "created.slice"),
    lease("place", {"root": 5}, "string", "place.root"),
    lease("attempts", "none", "list"),
    lease("capacity", {"x": {1, 2}}, "plain JSON"),
    lease("granted_at", "yesterday", "datetime"),
    lease("granted_at", "2026-01-01T00:00:00", "timezone"),
    lease("expires_at", NAN, "expires_at"),
    lease("expires_at", "2025-01-01T00:00:00Z", "before granted_at"),
    lease("token", "hunter2", "no such field"),
    (lambda: Owner(dag_id="a", run_id="b"), "task_id", "missing"),  # type: ignore[call-arg]
    (lambda: Owner(dag_id=5, run_id="b", task_id="c"), "dag_id", "string"),  # type: ignore[arg-type]
    (lambda: RayEndpoint(address=None), "address", "string"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("case", numbered({"work": WORK_CASES, "lease": LEASE_CASES}))
def test_it_is_refused_in_one_clear_line(case: Case):
    assert_refused_in_one_clear_line(case)
