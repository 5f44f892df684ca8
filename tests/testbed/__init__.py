"""A whole Kubernetes on this machine, without Docker, for tests of the `gke` backend.

Real: etcd, API server, controllers, scheduler, kubelets, containerd, CoreDNS, KubeRay, Kueue, Ray.
Played: what only Google has, which is GKE's TPU webhook, its TPU device plugin, its node labels and its
cluster autoscaler.

Use it as `python -m tests.testbed up|down|status|kubeconfig`, through the fixtures in
`tests/cluster/conftest.py`, or as `Testbed.up(...)`. Layout, outermost first:

- `client.py`: `Testbed`, what a test holds; `levers.py` has a method for each fault and `faults.py` those
  that any cluster can have, with namespaces and accounts (`accounts.py`)
- `keeper.py`: one process for each run; ends the run when its owner is gone
- `inside.py`: process 1 of the run's own process, network and mount namespaces; starts all the rest
- `parts.py`: what is built from Go modules, and where it is kept

Not for: anything that a fake API server can show. Those tests belong to `tests/unit`.
"""
