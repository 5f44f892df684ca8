"""What the whole test session shares: a private folder, and an environment that points into it.

Imported before anything imports Airflow, which reads AIRFLOW_HOME once, at import.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def _private_folder() -> Path:
    """Shorter than ``tempfile`` makes it: Ray puts sockets below it, and their paths may have 107 characters."""
    while True:
        folder = Path("/tmp") / f"rtt-{secrets.token_hex(2)}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder


SESSION_DIR = _private_folder()
#: Where this session's local backend keeps its leases, in this process and in Airflow's.
LOCAL_ROOT = SESSION_DIR / "local"


def prepare_environment() -> None:
    """Nothing of the caller's Airflow, Ray or leases is seen or touched by a test."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in [name for name in os.environ if name.startswith(("AIRFLOW", "RAY_"))]:
        del os.environ[name]
    os.environ |= {
        "AIRFLOW_HOME": str(SESSION_DIR / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(SESSION_DIR / "airflow" / "dags"),
        "RAYTPU_LOCAL_ROOT": str(LOCAL_ROOT),
        # Whatever is told about usage, tests tell nothing.
        "RAY_USAGE_STATS_ENABLED": "0",
    }
