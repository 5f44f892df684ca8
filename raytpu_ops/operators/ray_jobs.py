"""Operators that run a job on reserved slices: training, or anything else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from raytpu_ops.hooks.ray_tpu import RayTpuHook
from raytpu_ops.links.ray_dashboard import DASHBOARD_KEY, RayDashboardLink
from raytpu_ops.operators.base import (
    RayTpuOperator,
    epoch_of,
    has_template,
    in_scope,
    owner_of,
    settled,
    slices_of,
    whole_number,
)
from raytpu_ops.tpu.deadlines import Deadlines, Phase, Schedule, as_poll
from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.lease import SliceLease
from raytpu_ops.tpu.naming import submission_prefix
from raytpu_ops.tpu.problems import read
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.tpu.words import shown
from raytpu_ops.tpu.work import Code, CommandWork, FunctionWork, TrainWork, dump_work

if TYPE_CHECKING:
    from airflow.sdk import Context

    from raytpu_ops.backends.base import Backend
    from raytpu_ops.flows.jobs import JobRequest
    from raytpu_ops.triggers.ray_work import RayJobTrigger


Work = TrainWork | FunctionWork | CommandWork

#: What is right in every field, in the place of what a template decides.
_STAND_INS: dict[str, Any] = {
    "spec": SliceSpec.of("v4", "2x2x1"),
    "train_loop": "module:function",
    "function": "module:function",
    "config": {},
    "storage": "/storage",
    "run_name": "run",
    "args": [],
    "kwargs": {},
    "argv": ["program"],
}
#: Fields of the work that are parameters of another name here.
_CALLED = {"argv": "command", "args": "op_args", "kwargs": "op_kwargs"}


class RaySliceJobOperator(RayTpuOperator):
    """Base of the operators that run a job on reserved slices.

    The job is submitted once: a retry adopts what an earlier try left running, a clear by a person
    stops it and starts again. A slice that broke since is replaced whole before the job is
    submitted. What the job prints appears in the task's log as it is written.

    What is wrong as written is refused when the DAG file is parsed; what a template decides, when the
    task runs and before anything else does.

    :param lease: the output of ``TpuSlicesReadySensor`` or ``ProvisionTpuSlicesOperator``. (templated)
    :param working_dir: folder with the user's code, uploaded once for each content; or a URI that Ray
        takes (``gs://…zip``). (templated)
    :param num_slices: how many of the lease's slices are reserved for it, all by default. (templated)
    :param env: environment of the processes on the hosts; plain JSON that Airflow and Ray show, so no place for
        secrets: ``docs/gke.md`` and ``docs/google.md`` say how code gets those. (templated)
    :param runtime_env: Ray's runtime environment, ``pip`` and the like. (templated)
    :param deadlines: ``starting`` and ``running``, and for slices that have to be replaced ``queued``,
        ``provisioning`` and ``labelled``; each a ``timedelta`` or seconds.
    :param poll_interval: seconds between two looks at the job, at most 600.
    :param multiple_outputs: each field of the result is an XCom too: ``train.output["checkpoint"]``.
    """

    template_fields: Sequence[str] = ("lease", "working_dir", "num_slices", "env", "runtime_env")
    operator_extra_links = [RayDashboardLink()]  # noqa: RUF012 - typed so by Airflow
    phases = (Phase.QUEUED, Phase.PROVISIONING, Phase.LABELLED, Phase.STARTING, Phase.RUNNING)

    def __init__(
        self,
        *,
        lease: Any,
        working_dir: str | None = None,
        num_slices: int | str | None = None,
        env: dict[str, str] | None = None,
        runtime_env: dict[str, Any] | None = None,
        poll_interval: float = 2.0,
        multiple_outputs: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(multiple_outputs=multiple_outputs, **kwargs)
        self.lease = in_scope(self.task_id, lease)
        self.working_dir = path_of(working_dir)
        self.num_slices = num_slices
        self.env = env
        self.runtime_env = runtime_env
        self.poll_interval = as_poll(poll_interval, "poll_interval")
        self._running: tuple[Backend, SliceLease, JobRequest] | None = None

    @abstractmethod
    def asked(self, run: str) -> tuple[type[Work], dict[str, Any]]:
        """What runs: the model of the work, and its own fields as the author gave them.

        :param run: a name for the run that retries of this task share.
        :raises InvalidSpec: two things are asked for, or none.
        """

    def check_written(self) -> None:
        """Check what does not depend on a template; for the end of the constructor of what can be instantiated.

        :raises InvalidSpec: what is wrong, and what would be right.
        """
        model, fields = self.asked("run")
        written = {name: settled(value, _STAND_INS.get(name)) for name, value in fields.items()}
        common = {"spec": _STAND_INS["spec"], "env": settled(self.env or {}, {})}
        read(model, {**written, **common}, type(self).__name__, _CALLED)
        check_code(self, self.working_dir, self.runtime_env)
        if not has_template(self.num_slices):
            self._slices(slices_of(self.lease), f"the lease that {self.task_id} takes")

    def begin(self, context: Context) -> dict[str, Any]:
        """Run the job.

        :return: the job's result, with ``submission_id`` and ``lease_id``.
        """
        from raytpu_ops.flows.packages import folder_of

        folder_of(self.working_dir)
        lease = SliceLease.from_xcom(self.lease)
        backend = RayTpuHook.for_lease(lease).backend
        self.check(context, lease)
        return self.proceed(context, self.until_whole(context, backend, lease, self.deadlines))

    def check(self, context: Context, lease: SliceLease) -> str:
        """Check everything that can be checked before anything runs.

        :return: the work, as its JSON.
        :raises InvalidSpec: what is wrong, and what would be right.
        """
        num_slices = self._slices(lease.spec.num_slices, f"lease {lease.id}")
        common = {
            "spec": lease.spec.model_copy(update={"num_slices": num_slices}),
            "env": self.env or {},
            "start_timeout_s": Deadlines.of(self.deadlines).starting.total_seconds(),
        }
        model, fields = self.asked(submission_prefix(owner_of(context), epoch_of(context)).rstrip("-"))
        return dump_work(read(model, {**fields, **common}, type(self).__name__, _CALLED))

    def proceed(self, context: Context, lease: SliceLease) -> dict[str, Any]:
        """Hand the user's code to the cluster and run the job."""
        from raytpu_ops.flows.jobs import run_job

        backend = RayTpuHook.for_lease(lease).backend
        request = self._request(context, backend, lease)
        self._running = (backend, lease, request)
        context["ti"].xcom_push(key=DASHBOARD_KEY, value=lease.ray.address)

        def trigger() -> RayJobTrigger:
            from raytpu_ops.triggers.ray_work import RayJobTrigger

            return RayJobTrigger(
                lease=lease.to_xcom(),
                owner=request.attempt.owner.model_dump(mode="json"),
                request=request.model_dump(mode="json"),
            )

        return self.carry(
            context,
            flow=lambda: run_job(backend, lease, request, emit=self.log.info, say=self.log.info),
            trigger=trigger,
            deferred=self.deferrable,
        )

    def _request(self, context: Context, backend: Backend, lease: SliceLease) -> JobRequest:
        from raytpu_ops.flows.jobs import JobRequest, begin
        from raytpu_ops.flows.packages import runtime_env_with

        work, schedule, say = self.check(context, lease), Schedule.start(self.deadlines), self.log.info
        owner, epoch = owner_of(context), epoch_of(context)
        attempt = self.run_flow(begin(backend, lease, owner, epoch, schedule=schedule, say=say))
        runtime_env = self.run_flow(
            runtime_env_with(backend, lease, self.runtime_env, self.working_dir, schedule=schedule, say=say)
        )
        return JobRequest(
            attempt=attempt, work=work, runtime_env=runtime_env, schedule=schedule, poll_s=self.poll_interval
        )

    def _slices(self, there: int | None, whose: str) -> int:
        """How many slices are reserved.

        :param there: how many the lease has; None while nobody knows, then the least that it must have.
        :param whose: which lease that is, in words.
        """
        wanted = whole_number(self.num_slices)
        if wanted is None or wanted == "":
            return there or 1
        if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
            raise InvalidSpec(f"num_slices: must be a whole number, 1 or more, got {shown(wanted)}")
        if there is not None and wanted > there:
            raise InvalidSpec(f"num_slices: {wanted} were asked for; {whose} has {there}, give 1 to that")
        return wanted

    def finish(self, context: Context, result: dict[str, Any]) -> dict[str, Any]:
        """Point the link at the job's own page."""
        context["ti"].xcom_push(key=DASHBOARD_KEY, value=f"{result.pop('dashboard')}/#/jobs/{result['submission_id']}")
        return result

    async def stop_remote(self) -> None:
        """Stop what this try has under way."""
        if self._running is None:
            return
        from raytpu_ops.flows.jobs import stop_epoch

        for line in await stop_epoch(*self._running):
            self.log.info("Stopped %s", line)


class RayTrainOperator(RaySliceJobOperator):
    """Trains with Ray's JaxTrainer, one worker on each host of the reserved slices.

    Checkpoints live below ``storage``; a retry goes on from the last one, a clear begins anew.

    :param train_loop: ``module:function`` of the user's code, called with ``config`` on each worker. (templated)
    :param config: plain JSON for the loop. (templated)
    :param storage: folder or URL (``gs://…``) that every host can write to. (templated)
    :param run_name: the run's folder below ``storage``; by default one that this task's retries share. (templated)
    :param resume: go on from the run's last checkpoint where there is one.
    :param keep_checkpoints: how many checkpoints are kept.
    :return: ``metrics``, ``checkpoint``, ``workers`` (slice name, worker id and MEGASCALE values of each),
        ``submission_id`` and ``lease_id``.
    """

    template_fields: Sequence[str] = (
        *RaySliceJobOperator.template_fields,
        "train_loop",
        "config",
        "storage",
        "run_name",
    )
    ui_color = "#d9d4fb"

    def __init__(
        self,
        *,
        train_loop: str | Callable[..., Any],
        storage: str,
        config: dict[str, Any] | None = None,
        run_name: str | None = None,
        resume: bool = True,
        keep_checkpoints: int = 2,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.train_loop = train_loop
        self.storage = storage
        self.config = config
        self.run_name = run_name
        self.resume_from_checkpoint = resume
        self.keep_checkpoints = keep_checkpoints
        self.check_written()

    def asked(self, run: str) -> tuple[type[Work], dict[str, Any]]:
        """The training run."""
        return TrainWork, {
            "train_loop": target_of(self.train_loop, "train_loop"),
            "config": self.config or {},
            "storage": self.storage,
            "run_name": self.run_name or run,
            "resume": self.resume_from_checkpoint,
            "keep_checkpoints": self.keep_checkpoints,
        }


class RayTpuJobOperator(RaySliceJobOperator):
    """Runs a function or a program once on each host of reserved slices.

    Give ``function`` or ``command``, one of them.

    :param function: ``module:function`` of the user's code, or an importable function. (templated)
    :param op_args: its positional arguments, plain JSON. (templated)
    :param op_kwargs: its keyword arguments, plain JSON. (templated)
    :param command: a program and its arguments, run without a shell. (templated)
    :return: ``hosts`` (slice, worker id, and value or exit code of each), ``submission_id`` and ``lease_id``.
    """

    template_fields: Sequence[str] = (
        *RaySliceJobOperator.template_fields,
        "function",
        "op_args",
        "op_kwargs",
        "command",
    )
    ui_color = "#d4e4fb"

    def __init__(
        self,
        *,
        function: str | Callable[..., Any] | None = None,
        op_args: Sequence[Any] = (),
        op_kwargs: dict[str, Any] | None = None,
        command: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.function = function
        self.op_args = op_args
        self.op_kwargs = op_kwargs
        self.command = command
        self.check_written()

    def asked(self, run: str) -> tuple[type[Work], dict[str, Any]]:
        """The function or the program."""
        if (self.function is None) == (self.command is None):
            raise InvalidSpec("give function='module:function' or command=['program', …], one of them")
        if self.function is None:
            return CommandWork, {"argv": self.command}
        # An XCom of a mapped task arrives as a lazy sequence.
        args: Any = self.op_args
        as_list = isinstance(args, Sequence) and not isinstance(args, str)
        return FunctionWork, {
            "function": target_of(self.function, "function"),
            "args": list(args) if as_list else args,
            "kwargs": self.op_kwargs or {},
        }


def target_of(code: str | Callable[..., Any], what: str) -> str:
    """``module:function`` of a function that the hosts can import.

    :raises InvalidSpec: for a lambda, a nested function, or one that stands in a DAG file.
    """
    if isinstance(code, str) or has_template(code):
        return code  # type: ignore[return-value]  # a template is text when the task runs
    module = getattr(code, "__module__", "")
    name = getattr(code, "__qualname__", "")
    if not name or not name.replace(".", "").isidentifier() or module.startswith(("__main__", "unusual_prefix_")):
        raise InvalidSpec(
            f"{what}: {code!r} cannot be imported on the hosts: put it at the top of a module in working_dir "
            "and give 'module:function'"
        )
    return f"{module}:{name}"


def path_of(working_dir: Any) -> Any:
    """A path as text; what is none as it is, to be judged with the rest."""
    return str(working_dir) if isinstance(working_dir, PurePath) else working_dir


def check_code(operator: RayTpuOperator, working_dir: Any, runtime_env: Any) -> None:
    """Check, as far as no template decides it, where the user's code comes from.

    Not whether the folder exists: the machine that parses DAG files may not have it.

    :raises InvalidSpec: what is wrong, and what would be right.
    """
    code = {"working_dir": settled(working_dir, "folder"), "runtime_env": settled(runtime_env or {}, {})}
    read(Code, code, type(operator).__name__)
