"""What runs on a lease, as plain JSON: the Airflow side writes it, ``runtime/`` on the cluster reads it.

The wire is a job's environment (one variable with this JSON) on the way in, and lines of the
driver's log on the way out; both ends use this module, so it has the only copy of the format.
Nothing of it is ever part of a command line.
"""

from __future__ import annotations

import json
import re
from keyword import iskeyword
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from raytpu_ops.tpu.errors import FailureClass, InvalidSpec
from raytpu_ops.tpu.fields import Count, Flag, Line, PlainDict, PlainJson, Seconds, Text, Word
from raytpu_ops.tpu.problems import Checked, read, refused
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.tpu.words import shown

#: The command of every job that we submit. Ray hands it to a shell, so it is a constant.
ENTRYPOINT = "python -m raytpu_ops.runtime"
#: The environment variable that carries the work's JSON.
WORK_VARIABLE = "RAYTPU_WORK"
#: One variable may hold 128 KiB on Linux (MAX_ARG_STRLEN); a longer work is refused before it is submitted.
WORK_LIMIT_BYTES = 120_000

_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z", re.ASCII)
_RUN_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_APPLICATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")
_ROUTE = re.compile(r"/([A-Za-z0-9_~-][A-Za-z0-9._~-]*(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*)?\Z")
#: A scheme and at least one character more.
_STORAGE_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/@\s][^@\s]*\Z")
#: Variables that are not the user's: the wire itself, and what Ray labels hosts from.
_OURS = frozenset({WORK_VARIABLE, "TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY"})
#: How the names of Ray's variables begin that say whether it asks for a token, and which one.
_AUTH = "RAY_AUTH_"


def is_reserved(variable: str) -> bool:
    """Whether an environment variable of a host or of its work is not the user's to set.

    :param variable: its name.
    """
    return variable in _OURS or variable.startswith(_AUTH)


def check_target(value: str, what: str) -> str:
    """A ``package.module:attribute`` that names user code.

    :raises ValueError: when it is not of that form.
    """
    parts = re.split(r"[.:]", value) if _TARGET.match(value) else []
    if not parts or any(iskeyword(part) for part in parts):
        raise ValueError(f"{what} must be 'package.module:function', such as 'digits.train:loop'")
    return value


class _Work(Checked):
    """What all work has.

    :raises InvalidSpec: by the constructor and by :meth:`of`: one line, before anything starts.
    """

    #: Which slices are reserved for it: whole ones, ``num_slices`` of them.
    spec: SliceSpec
    #: Seconds until it must run on every host that it reserved.
    start_timeout_s: Seconds = 600.0
    #: Environment of the processes on the hosts. It travels as plain JSON: no place for secrets.
    env: dict[str, Text] = Field(default_factory=dict)

    @field_validator("env")
    @classmethod
    def _is_environment(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not _VARIABLE.match(name):
                # What stands after a "=" was meant to be the value.
                what = shown(name.partition("=")[0])
                raise ValueError(f"names of variables must be letters, digits and underscores, {what} is none")
            if is_reserved(name):
                raise ValueError(f"{name} is set for each host and must not be given")
        return value

    @classmethod
    def of(cls, value: object = None, **fields: Any) -> Self:
        """Read the work from an object, a dict or keyword arguments.

        :raises InvalidSpec: one line: where, what is wrong, what would be right.
        """
        if value is not None and fields:
            raise InvalidSpec(f"{cls.__name__}: give either a dict or keyword arguments, not both")
        return read(cls, fields if value is None else value, cls.__name__)


class TrainWork(_Work):
    """A training loop, run by Ray's JaxTrainer with one worker on each host.

    :param train_loop: ``module:function``; called with ``config`` on each worker.
    :param config: plain JSON for the loop.
    :param storage: absolute folder or URL (``gs://…``) under which the run keeps its checkpoints.
    :param run_name: the folder of this run below ``storage``; a retry of the same run finds it again.
    :param resume: go on from the last checkpoint where there is one.
    :param keep_checkpoints: how many checkpoints are kept.
    """

    kind: Literal["train"] = "train"
    train_loop: Word
    config: PlainDict = Field(default_factory=dict)
    storage: Line
    run_name: Word
    resume: Flag = True
    keep_checkpoints: Count = Field(default=2, ge=1, le=10_000)

    @field_validator("train_loop")
    @classmethod
    def _is_target(cls, value: str) -> str:
        return check_target(value, "it")

    @field_validator("storage")
    @classmethod
    def _is_storage(cls, value: str) -> str:
        if not (value.startswith("/") or _STORAGE_URL.match(value)):
            raise ValueError(
                "must be an absolute folder or a URL without credentials, such as '/mnt/runs' or 'gs://bucket/runs'"
            )
        if ".." in value.split("/"):
            raise ValueError("must not contain '..'")
        return value

    @field_validator("run_name")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if not _RUN_NAME.match(value):
            raise ValueError("must be lower-case letters, digits and dashes, at most 63")
        return value


class FunctionWork(_Work):
    """A function, run once on each host of the reserved slices.

    :param function: ``module:function``; called with ``args`` and ``kwargs`` on each host.
    """

    kind: Literal["function"] = "function"
    function: Word
    args: list[PlainJson] = Field(default_factory=list)
    kwargs: PlainDict = Field(default_factory=dict)

    @field_validator("function")
    @classmethod
    def _is_target(cls, value: str) -> str:
        return check_target(value, "it")

    @field_validator("kwargs")
    @classmethod
    def _is_keywords(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not name.isidentifier() or iskeyword(name):
                raise ValueError("names of arguments must be Python identifiers")
        return value


class CommandWork(_Work):
    """A program, run once on each host of the reserved slices, without a shell.

    :param argv: the program and its arguments; nothing in them is interpreted.
    """

    kind: Literal["command"] = "command"
    argv: list[Text] = Field(min_length=1)

    @field_validator("argv", mode="before")
    @classmethod
    def _is_list(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(  # noqa: TRY004  pydantic turns only ValueError into a refusal
                "must be a list of the program and its arguments, such as ['echo', 'hi']: no shell takes one line apart"
            )
        return value

    @field_validator("argv")
    @classmethod
    def _has_program(cls, value: list[str]) -> list[str]:
        if not value[0].strip():
            raise ValueError("the first item must be a program")
        return value


class ServeApp(Checked):
    """An application that Ray Serve runs on a lease, as far as a DAG author says it.

    :param name: the application's name, unique on its Ray cluster.
    :param app: ``module:builder`` of the user's application.
    :param args: plain JSON for the builder.
    :param route_prefix: the path below which it answers.
    """

    name: str
    app: Word
    args: PlainDict = Field(default_factory=dict)
    route_prefix: str

    @field_validator("name")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if not _APPLICATION.match(value):
            raise ValueError("must be letters, digits, dashes and underscores, at most 63, such as 'digits'")
        return value

    @field_validator("app")
    @classmethod
    def _is_target(cls, value: str) -> str:
        return check_target(value, "app")

    @field_validator("route_prefix")
    @classmethod
    def _is_route(cls, value: str) -> str:
        if not _ROUTE.match(value):
            raise ValueError(
                "must be a path of letters, digits, '.', '_', '~' and '-' that begins with '/' and does not end with "
                "it, such as '/digits'"
            )
        return value


class Code(Checked):
    """Where the user's code and what it needs come from.

    :param working_dir: a folder, or a URI that Ray takes.
    :param runtime_env: Ray's runtime environment.
    """

    working_dir: Line | None = None
    runtime_env: PlainDict = Field(default_factory=dict)

    @field_validator("runtime_env")
    @classmethod
    def _has_modules(cls, value: dict[str, Any]) -> dict[str, Any]:
        modules = value.get("py_modules") or []
        if not isinstance(modules, list):
            raise InvalidSpec(f"runtime_env: py_modules must be a list of URIs, got a {type(modules).__name__}")
        return value

    @field_validator("runtime_env")
    @classmethod
    def _has_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Ray hands them on to every process of the work, on whichever host, as it does with ``env``."""
        variables = value.get("env_vars") or {}
        if not isinstance(variables, dict) or not all(isinstance(text, str) for text in variables.values()):
            raise InvalidSpec("runtime_env: env_vars must be an object of texts, such as {'LOG_LEVEL': 'debug'}")
        if ours := sorted(filter(is_reserved, variables)):
            raise InvalidSpec(f"runtime_env: env_vars: {', '.join(ours)}: set for each host, must not be given")
        return value

    @model_validator(mode="after")
    def _is_named_once(self) -> Self:
        if self.working_dir is not None and "working_dir" in self.runtime_env:
            raise InvalidSpec("working_dir is set twice: as working_dir=… and in runtime_env; leave one out")
        return self


AnyWork = Annotated[TrainWork | FunctionWork | CommandWork, Field(discriminator="kind")]
_ANY_WORK: TypeAdapter[Any] = TypeAdapter(AnyWork, config=ConfigDict(defer_build=True))


def dump_work(work: TrainWork | FunctionWork | CommandWork) -> str:
    """The work as one line of JSON for :data:`WORK_VARIABLE`.

    :raises InvalidSpec: when it is too long for an environment variable.
    """
    # Ray expands `$NAME` in the variables of a runtime environment (`_private/utils.py`, 2.60).
    text = work.model_dump_json().replace("$", "\\u0024")
    if len(text.encode()) > WORK_LIMIT_BYTES:
        raise InvalidSpec(
            f"{work.kind}: its parameters take {len(text.encode())} bytes as JSON, at most {WORK_LIMIT_BYTES} "
            "can be handed over; put large data into a file and pass its path"
        )
    return text


def load_work(text: str) -> TrainWork | FunctionWork | CommandWork:
    """Read what :func:`dump_work` wrote.

    :raises InvalidSpec: when it is something else.
    """
    try:
        work: TrainWork | FunctionWork | CommandWork = _ANY_WORK.validate_json(text)
    except ValidationError as error:
        raise refused(error, "work") from None
    return work


class Event(BaseModel):
    """A line that the runtime's driver prints for the Airflow side.

    ``started``: the work runs on every host. ``result``: it ended well, ``data`` is the result.
    ``failed``: it did not, for the reason in ``failure_class`` and ``message``.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    event: Literal["started", "result", "failed"]
    data: dict[str, Any] = Field(default_factory=dict)
    failure_class: FailureClass | None = None
    message: str = ""

    @property
    def slices(self) -> list[str]:
        """Names of the slices that ``started`` work runs on, as Ray's labels have them; empty where it says none."""
        hosts = self.data.get("workers") or self.data.get("hosts")
        names = [host.get("slice") for host in hosts if isinstance(host, dict)] if isinstance(hosts, list) else []
        return sorted({name for name in names if isinstance(name, str)})


#: Begins a machine-readable line. Ray puts a prefix before whatever a worker prints, so only the
#: driver can begin a line with it.
EVENT_MARK = "raytpu-event: "


def dump_event(event: Event) -> str:
    """The event as one line, without the newline. NaN and infinities arrive as null: JSON has neither."""
    return EVENT_MARK + json.dumps(event.model_dump(mode="json", exclude_defaults=True), separators=(",", ":"))


def parse_event(line: str) -> Event | None:
    """The event in a line of the driver's log; None for any other line."""
    if not line.startswith(EVENT_MARK):
        return None
    try:
        return Event.model_validate_json(line[len(EVENT_MARK) :])
    except ValidationError:
        return None
