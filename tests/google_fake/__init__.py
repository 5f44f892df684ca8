"""Google's APIs on loopback: what the real clients see, without Google.

`GoogleFake` speaks the real protos of container and TPU (gRPC over TLS) and compute, resource manager,
IAM credentials and OAuth (HTTPS), with state machines on a clock that the test owns and one call for each
fault. Nothing in the code under test knows of it: `client_options.api_endpoint`, a key file and a CA are all.

    with GoogleFake() as google:                          # hours pass with google.advance(3600)
        google.faults.stockout(zone="us-central2-b")      # and so on: faults.py, container.*, tpu.*
        google.deny("container.clusters.get")
        google.calls, google.node_pools(), google.queued_resources(), google.nodes()
    with GoogleFake(clock=Clock(speed=20)) as google:     # by itself, for real parts
        google.boots_nodes(testbed); google.boots_vms()

- `fake` is the handle, `clock` the time, `access` who asks, where tokens are not what is tested; `together` lets
  several tasks share the time, in an order that is the same each time
- `gate` is what every request passes: who asks, may he, does it go wrong; it keeps the record of calls. `roles`
  compares that with custom roles, `tokens` hands out and forgets tokens, `refusals` has Google's words
- `container`, `pool_rules`, `pool_life`: requests about node pools, what is refused, what happens by and by
- `tpu`, `tpu_rules`, `tpu_queue`: the same for queued resources; `compute`: reservations, quota, policies
- `rpc` and `rest` serve them on 127.0.0.1, with the certificate of `trust`
- `boots`: node pools bring kubelets of `tests/testbed`. `vms`, `zone`, `zone_inside`, `vm_init`: TPU nodes bring
  namespaces that run the startup script. Of either nothing outlives the test, however that ends

Not here: what our code makes of the answers.
"""

from __future__ import annotations

from tests.google_fake.clock import Clock
from tests.google_fake.fake import GoogleFake

__all__ = ["Clock", "GoogleFake"]
