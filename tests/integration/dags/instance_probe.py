"""For test_airflow_instance.py: a long log, an XCom, a deferral that waits until it is told, a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow.providers.standard.triggers.file import FileTrigger
from airflow.sdk import DAG, BaseOperator, Param, task


class WaitForFile(BaseOperator):
    """Deferred until a file is there."""

    template_fields = ("path",)

    def __init__(self, *, path: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.path = path

    def execute(self, context: Any) -> None:
        self.defer(trigger=FileTrigger(filepath=self.path, poke_interval=0.2), method_name="there")

    def there(self, context: Any, event: Any = None) -> str:
        return f"found {self.path}"


with DAG("instance_probe", schedule=None, params={"lines": 3, "path": Param("", type="string")}):

    @task
    def talk(**context: Any) -> dict[str, Any]:
        lines = context["params"]["lines"]
        for number in range(lines):
            print(f"line {number}")
        return {"lines": lines, "text": "grüße/+:%"}

    @task(retries=0)
    def fail_unless_there(path: str) -> None:
        if not Path(path).exists():
            raise RuntimeError(f"{path} is not there")

    talk() >> WaitForFile(task_id="wait", path="{{ params.path }}") >> fail_unless_there("{{ params.path }}2")
