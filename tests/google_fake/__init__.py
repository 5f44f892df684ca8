"""Google's APIs on loopback: what the real clients see, without Google.

`GoogleFake` speaks the real protos of container and TPU (gRPC over TLS) and compute, resource manager,
IAM credentials and OAuth (HTTPS), with state machines on a clock that the test owns and one call for each
fault. Nothing in the code under test knows of it: `client_options.api_endpoint`, a key file and a CA are all.

Modules: `clock`, `gate` (what every request passes), `faults`, `refusals` (Google's words), `container`,
`tpu`, `compute`, `projects`, `tokens`; `rpc` and `rest` serve them; `fake` is the handle; `boots` and `vms`
let pools and queued resources bring real kubelets and real processes.
Not here: what our code makes of the answers.
"""

from __future__ import annotations

from tests.google_fake.clock import Clock
from tests.google_fake.fake import GoogleFake

__all__ = ["Clock", "GoogleFake"]
