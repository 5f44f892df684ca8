"""The commands and their options; what they do is in the modules beside this one and in ``demo/``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Ray on Cloud TPU slices from Airflow.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # main() prints our own errors; another one deserves its whole traceback
)
fault_app = typer.Typer(
    help="Inject a fault into the local backend, to see what a DAG makes of it.", no_args_is_help=True
)
app.add_typer(fault_app, name="fault")


def _checked_root(root: Path | None) -> Path:
    """The root that is meant; a folder that is none of ours is refused: it would look like one without faults."""
    from raytpu_ops.backends.local.layout import Root as LocalRoot

    found = LocalRoot(root)
    found.check_ours()
    return found.path


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
# The backend reads the variable: it says where local leases are, and not that the local ones are meant.
_ROOT: dict[str, Any] = {"help": "local: its root folder; default $RAYTPU_LOCAL_ROOT.", "show_default": False}
Root = Annotated[Path | None, typer.Option("--root", **_ROOT)]
FaultRoot = Annotated[Path | None, typer.Option("--root", callback=_checked_root, **_ROOT)]
Slice = Annotated[int, typer.Option("--slice", min=0, help="Number of the slice in the lease.")]
Worker = Annotated[int, typer.Option("--worker", min=0, help="Worker id of the host in its slice.")]
Times = Annotated[int, typer.Option("--times", min=1, help="How many of the next leases it strikes.")]


def _said(param: typer.CallbackParam, value: Any) -> Any:
    """Refuse an empty text, as a variable of a shell that is not set leaves it: it would count as left out."""
    if any(isinstance(text, str) and not text.strip() for text in (value if isinstance(value, list) else [value])):
        from raytpu_ops.tpu.errors import InvalidSpec

        raise InvalidSpec(f"{param.opts[0]}: is empty: give it a value, or leave it out")
    return value


def _option(name: str, help_: str, default: str | bool = False) -> Any:
    return typer.Option(name, help=help_, show_default=default, callback=_said)


_CONNECTION = "An Airflow connection that says the rest."
Backend = Annotated[str | None, _option("--backend", "Which backend; default the connection's.", "local")]
LeaseBackend = Annotated[str | None, _option("--backend", "Which backend; default the connection's, else local.")]
LeaseConnId = Annotated[str | None, _option("--conn-id", _CONNECTION, "ray_tpu_default, where that is")]
PlanBackend = Annotated[str | None, _option("--backend", "Which backend; default the connection's.", "gke")]
Kubeconfig = Annotated[str | None, _option("--kubeconfig", "gke: the file; default $KUBECONFIG.")]
Context = Annotated[str | None, _option("--context", "gke: of the kubeconfig; default its own.")]
Namespace = Annotated[str | None, _option("--namespace", "gke: of the RayClusters.", "default")]
ConnId = Annotated[str | None, _option("--conn-id", _CONNECTION)]
Project = Annotated[str | None, _option("--project", "At Google; default the credentials' own.")]
Cluster = Annotated[str | None, _option("--cluster", "gke: projects/…/locations/…/clusters/…")]
Zones = Annotated[list[str] | None, _option("--zone", "Where slices may be; repeatable.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from raytpu_ops import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Ray on Cloud TPU slices from Airflow."""


@app.command()
def demo(
    generation: Annotated[str, typer.Option(help="TPU generation that this machine plays.")] = "v4",
    topology: Annotated[str, typer.Option(help="Topology of each slice.")] = "2x2x2",
    slices: Annotated[int, typer.Option(min=1, max=8, help="Slices to train on.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, max=100, help="Epochs of training.")] = 8,
    home: Annotated[
        Path | None, typer.Option(help="Keep Airflow's home and the checkpoints in this folder.", show_default=False)
    ] = None,
    deadline: Annotated[float, typer.Option(min=10, help="Seconds until the run must be over.")] = 900,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live table.")] = False,
) -> None:
    """Provision, label, train, serve, evaluate and release: a whole run in a real Airflow, on this machine."""
    from rich.console import Console

    from raytpu_ops.demo.show import run_demo
    from raytpu_ops.tpu.spec import SliceSpec

    spec = SliceSpec.of(generation, topology, num_slices=slices)  # a slip shows now, not after Airflow's start
    params = {
        "backend": "local",
        "generation": spec.generation,
        "topology": spec.topology,
        "slices": slices,
        "epochs": epochs,
    }
    sys.exit(run_demo(Console(), params, home=home, plain=plain, deadline_s=deadline))


@app.command()
def ui(
    home: Annotated[Path, typer.Option(help="Airflow's home; it stays.")] = Path(".airflow"),
    port: Annotated[
        int | None, typer.Option(min=1024, max=65535, help="Port on 127.0.0.1.", show_default=False)
    ] = None,
) -> None:
    """Keep an Airflow with the example DAGs up until Ctrl-C."""
    from rich.console import Console

    from raytpu_ops.demo.ui import run_ui

    sys.exit(run_ui(Console(), home=home, port=port))


@app.command()
def doctor(
    backend: Backend = None,
    root: Root = None,
    conn_id: Annotated[
        str | None, _option("--conn-id", "gke, tpu_vm: an Airflow connection that says the rest.")
    ] = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
    project: Project = None,
    zone: Zones = None,
    as_json: Json = False,
) -> None:
    """Check what a backend needs, of this machine, a cluster or Google; say what is missing and how to get it."""
    from raytpu_ops.cli.backends import backend_name
    from raytpu_ops.cli.doctor import look, report

    found = look(
        backend_name(backend, conn_id, "local"),
        root=root,
        conn_id=conn_id,
        kubeconfig=kubeconfig,
        context=context,
        namespace=namespace,
        project=project,
        zones=zone or [],
    )
    sys.exit(report(found, as_json=as_json))


@app.command()
def shapes(
    generation: Annotated[str | None, typer.Argument(help="Only this one: v4, v5e, v5p, v6e, 7x.")] = None,
    as_json: Json = False,
) -> None:
    """List every slice shape and what follows from it."""
    from raytpu_ops.cli.shapes import show

    show(generation, as_json=as_json)


@app.command()
def plan(
    generation: Annotated[str, typer.Argument(help="v4, v5e, v5p, v6e or 7x, or a pod type such as v6e-16.")],
    topology: Annotated[str | None, typer.Option(help="Topology of each slice.", show_default=False)] = None,
    num_slices: Annotated[int, typer.Option("--num-slices", min=1, help="How many slices, each whole.")] = 1,
    machine_type: Annotated[
        str | None, typer.Option("--machine-type", help="Where the topology leaves a choice.", show_default=False)
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            help="A rung: on_demand, spot, reservation=NAME, flex_start=24h, queued=2h; repeat it for a ladder.",
            show_default="on_demand",
        ),
    ] = None,
    backend: PlanBackend = None,
    conn_id: ConnId = None,
    project: Project = None,
    cluster: Cluster = None,
    zone: Zones = None,
    namespace: Namespace = None,
    root: Root = None,
    lease_hours: Annotated[float, typer.Option("--lease-hours", min=0.01, help="How long the lease lasts.")] = 24,
    price: Annotated[
        float | None, typer.Option("--price-per-chip-hour", help="What a chip costs for an hour.", show_default=False)
    ] = None,
    dag_id: Annotated[str, typer.Option("--dag-id", help="Whose names are shown.")] = "my_dag",
    task_id: Annotated[str, typer.Option("--task-id", help="Whose names are shown.")] = "provision",
    as_json: Json = False,
) -> None:
    """Say what a lease would be made of, what speaks against it and what it may cost. Nothing is made."""
    from raytpu_ops.cli.backends import Where, backend_name
    from raytpu_ops.cli.plan import Google, show
    from raytpu_ops.tpu.deadlines import as_duration
    from raytpu_ops.tpu.lease import Owner
    from raytpu_ops.tpu.spec import SliceSpec

    show(
        SliceSpec.of(generation, topology, num_slices=num_slices, machine_type=machine_type),
        capacity or [],
        Where(backend_name(backend, conn_id, "gke"), root, namespace=namespace),
        Google(conn_id, project, cluster, zone or [], price),
        lease_for=as_duration(lease_hours * 3600, "--lease-hours"),
        owner=Owner(dag_id=dag_id, run_id="manual", task_id=task_id),
        as_json=as_json,
    )


@app.command()
def leases(
    backend: LeaseBackend = None,
    root: Root = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
    conn_id: LeaseConnId = None,
    project: Project = None,
    zone: Zones = None,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say what is missing, too.")] = False,
) -> None:
    """List the leases there are, found on the real objects."""
    from raytpu_ops.cli.backends import Where
    from raytpu_ops.cli.leases import show

    sys.exit(
        show(
            Where.of_leases(backend, root, kubeconfig, context, namespace, conn_id, project, zone),
            as_json=as_json,
            verbose=verbose,
        )
    )


@app.command()
def release(
    lease: Annotated[str, typer.Argument(help="The lease's id, as `raytpu leases` shows it.")],
    backend: LeaseBackend = None,
    root: Root = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
    conn_id: LeaseConnId = None,
    project: Project = None,
    zone: Zones = None,
) -> None:
    """Give a lease back."""
    from raytpu_ops.cli.backends import Where
    from raytpu_ops.cli.leases import release as give_back

    sys.exit(
        give_back(
            lease,
            Where.of_leases(backend, root, kubeconfig, context, namespace, conn_id, project, zone),
        )
    )


@app.command()
def reap(
    backend: LeaseBackend = None,
    root: Root = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
    conn_id: LeaseConnId = None,
    project: Project = None,
    zone: Zones = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Release nothing, say what would be.")] = False,
) -> None:
    """Give back every lease that has expired."""
    from raytpu_ops.cli.backends import Where
    from raytpu_ops.cli.leases import reap as reap_expired

    sys.exit(
        reap_expired(
            Where.of_leases(backend, root, kubeconfig, context, namespace, conn_id, project, zone),
            dry_run=dry_run,
        )
    )


@fault_app.command("no-capacity")
def no_capacity(
    times: Times = 1,
    rung: Annotated[
        list[str] | None, typer.Option("--rung", help="Refuse only this kind of capacity, such as spot; repeatable.")
    ] = None,
    root: FaultRoot = None,
) -> None:
    """The next leases find no capacity."""
    from raytpu_ops.backends.local import faults

    faults.no_capacity(times, rungs=tuple(rung or ()), root=root)
    print(f"the next {times} acquires below {root} find no capacity{' for ' + ', '.join(rung) if rung else ''}")


@fault_app.command("slow-host")
def slow_host(
    slice_: Slice = 0,
    worker: Worker = 0,
    seconds: Annotated[float, typer.Option(min=0, max=3600, help="How late.")] = 30,
    times: Times = 1,
    root: FaultRoot = None,
) -> None:
    """A host of the next lease starts late."""
    from raytpu_ops.backends.local import faults

    faults.slow_host(slice_, worker, seconds, times=times, root=root)
    print(f"worker {worker} of slice {slice_} of the next lease below {root} starts {seconds:g} s late")


@fault_app.command("duplicate-worker-id")
def duplicate_worker_id(slice_: Slice = 0, worker: Worker = 1, times: Times = 1, root: FaultRoot = None) -> None:
    """A host of the next lease shows the worker id of the host before it."""
    from raytpu_ops.backends.local import faults

    faults.duplicate_worker_id(slice_, worker, times=times, root=root)
    print(f"worker {worker} of slice {slice_} of the next lease below {root} shows another's id")


@fault_app.command("kill-host")
def kill_host(
    lease: Annotated[str, typer.Argument(help="The lease's id.")],
    slice_: Slice = 0,
    worker: Worker = 0,
    root: FaultRoot = None,
) -> None:
    """Kill everything on one host of a lease."""
    from raytpu_ops.backends.local import faults

    print(f"killed: {', '.join(faults.kill_host(lease, slice_, worker, root=root))}")


@fault_app.command("preempt-slice")
def preempt_slice(
    lease: Annotated[str, typer.Argument(help="The lease's id.")],
    slice_: Slice = 0,
    root: FaultRoot = None,
) -> None:
    """Kill every host of one slice, as a preemption without notice does."""
    from raytpu_ops.backends.local import faults

    print(f"killed: {', '.join(faults.preempt_slice(lease, slice_, root=root))}")


@fault_app.command("list")
def list_faults(root: FaultRoot = None) -> None:
    """List faults that wait for a lease."""
    from raytpu_ops.backends.local import faults

    waiting = faults.waiting(root)
    for fault in waiting:
        print(fault.model_dump_json())
    if not waiting:
        print(f"no fault waits below {root}")


@fault_app.command("clear")
def clear_faults(root: FaultRoot = None) -> None:
    """Forget the faults that wait."""
    from raytpu_ops.backends.local import faults

    faults.clear(root)
    print(f"no fault waits below {root} any more")
