"""`python -m tests.testbed`: a Kubernetes with KubeRay and TPU nodes, up until `down`."""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.testbed import layout as runs
from tests.testbed import parts
from tests.testbed.client import Testbed, TestbedFailed

_NODES = ("cpu", "v4-2x2x2*2")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.testbed", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a run; it stays until `down`")
    up.add_argument(
        "--nodes", action="append", metavar="SPEC", help=f"cpu, v4-2x2x2*2, …; default: {' and '.join(_NODES)}"
    )
    up.add_argument("--control-plane", action="store_true", help="no nodes: admission, RBAC, manifests; seconds")
    up.add_argument("--kueue", action="store_true", help="with Kueue")
    up.add_argument("--autoscale", action="append", default=[], metavar="SPEC", help="slices that come when wanted")
    up.add_argument("--operator-gates", default="", metavar="GATES", help="KubeRay's: RayMultiHostIndexing=false")
    up.add_argument("--nice", type=int, default=0, help="niceness of builds")
    build = commands.add_parser("build", help="build what is absent, start nothing")
    build.add_argument("--control-plane", action="store_true", help="only what it needs")
    build.add_argument("--kueue", action="store_true", help="Kueue too")
    build.add_argument("--if-possible", action="store_true", help="only say why where this machine cannot")
    build.add_argument("--nice", type=int, default=0, help="niceness")
    for name, text in (
        ("down", "end a run, and clear what dead ones left"),
        ("status", "what runs"),
        ("kubeconfig", "path of a run's kubeconfig"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("run", nargs="?", help="its id; not needed if there is one beside those of tests")
        if name == "down":
            command.add_argument("--all", action="store_true", help="every run, those of tests too")
    return parser


def _mine() -> list[Testbed]:
    """Runs that stay until `down`; those of tests end with the test."""
    return [one for one in Testbed.running() if not one.layout.state().get("owner")]


def _pick(run: str | None) -> Testbed:
    found = [one for one in Testbed.running() if run == one.layout.id] if run else _mine()
    if len(found) != 1:
        ids = ", ".join(one.layout.id for one in Testbed.running()) or "none"
        raise TestbedFailed(f"say which run; there are: {ids}")
    return found[0]


def _up(args: argparse.Namespace) -> None:
    began = time.monotonic()
    nodes = () if args.control_plane else tuple(args.nodes or _NODES)
    testbed = Testbed.up(
        *nodes,
        control_plane=args.control_plane,
        kueue=args.kueue,
        operator_gates=args.operator_gates,
        autoscale=args.autoscale,
        owner=0,
        nice=args.nice,
    )
    print(f"run {testbed.layout.id} is up after {time.monotonic() - began:.1f} s")
    print(f"export KUBECONFIG={testbed.kubeconfig}")
    # For the suite: RAYTPU_TEST_KUBECONFIG is the same, and this is where its pods keep checkpoints.
    print(f"export RAYTPU_TEST_STORAGE={testbed.shared}")


def _build(args: argparse.Namespace) -> None:
    nodes = not args.control_plane
    reason = parts.missing(nodes=nodes, kueue=args.kueue)
    if reason and args.if_possible:
        print(f"Not built: {reason}")
        return
    began = time.monotonic()
    parts.ensure(nodes=nodes, kueue=args.kueue, nice=args.nice)
    print(f"Every part of the testbed is built, after {time.monotonic() - began:.0f} s")


def main() -> None:
    args = _parser().parse_args()
    try:
        if args.command == "up":
            _up(args)
        elif args.command == "build":
            _build(args)
        elif args.command == "down":
            for testbed in Testbed.running() if args.all else [_pick(args.run)] if args.run or _mine() else []:
                testbed.down()
                print(f"run {testbed.layout.id} is down")
            runs.sweep()
        elif args.command == "status":
            for testbed in [_pick(args.run)] if args.run else Testbed.running():
                print(json.dumps({"run": testbed.layout.id, **testbed.status()}, indent=1))
        else:
            print(_pick(args.run).kubeconfig)
    except (TestbedFailed, parts.TestbedUnavailable, ValueError) as error:
        sys.exit(f"testbed: {error}")


if __name__ == "__main__":
    main()
