"""One Airflow for all integration tests of a session: its start costs a quarter of a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raytpu_ops.demo.airflow import AirflowInstance
from tests.session import LOCAL_ROOT, SESSION_DIR

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent


@pytest.fixture(scope="session")
def airflow_instance() -> Iterator[AirflowInstance]:
    """A running Airflow with the example DAGs and those of ``tests/integration/dags``.

    Its tasks use the local backend at ``tests.session.LOCAL_ROOT``.
    """
    instance = AirflowInstance(
        SESSION_DIR / "home",
        [HERE / "dags", REPOSITORY / "dags"],
        plugins_folder=HERE / "plugins",
        # The triggerer knows the played backend too, which is no plugin but lies among them.
        settings={"core": {"lazy_load_plugins": "False"}},
        env={"RAYTPU_LOCAL_ROOT": str(LOCAL_ROOT)},
        local_root=LOCAL_ROOT,
        temporary=[SESSION_DIR],
    )
    instance.start()
    try:
        yield instance
    finally:
        assert instance.stop() == []
