"""Claims of the blocking client: the same answers without an event loop, and nothing left open."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator

import pytest

from raytpu_ops.ray.client import BlockingRayClient, RayClient
from raytpu_ops.ray.states import JobStatus, JobSubmission
from tests.unit.ray.fake_ray import FakeJob, FakeRay, application_row


@pytest.fixture
def far_side() -> Iterator[FakeRay]:
    """A played Ray on a loop of its own, so that this thread may block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    fake = asyncio.run_coroutine_threadsafe(FakeRay().__aenter__(), loop).result(30)
    yield fake
    asyncio.run_coroutine_threadsafe(fake.__aexit__(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


def test_it_answers_without_an_event_loop(far_side, tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    far_side.jobs["done"] = FakeJob(status="SUCCEEDED", log="a\nb\n")
    far_side.serve["applications"]["x"] = application_row("x", "RUNNING", config={"name": "x", "import_path": "m:a"})
    with BlockingRayClient(RayClient(far_side.address)) as client:
        assert client.version().ray_version == "2.60.0"
        assert client.nodes() == client.holders() == []
        assert client.usage() == {}
        assert client.submit_job(JobSubmission("a-1", "python x.py")) == "a-1"
        assert client.stop_job("a-1") is True
        job = client.job("a-1")
        assert job is not None
        assert job.status is JobStatus.STOPPED
        assert len(client.jobs()) == 3
        assert client.job_logs("done") == "a\nb\n"
        assert list(client.follow_logs("done", skip=1)) == ["b"]
        assert client.upload_package(tmp_path).startswith("gcs://_ray_pkg_")
        client.deploy({"name": "y", "import_path": "m:y"})
        assert sorted(client.serve_applications()) == ["x", "y"]
        assert client.delete_application("y") is True


def test_leaving_a_log_early_closes_it(far_side):
    far_side.jobs["a-1"] = FakeJob(status="RUNNING", log="a\nb\n")
    with BlockingRayClient(RayClient(far_side.address)) as client:
        for line in client.follow_logs("a-1"):
            assert line == "a"
            break


def test_it_must_be_open():
    client = BlockingRayClient(RayClient("http://127.0.0.1:1"))
    with pytest.raises(RuntimeError, match="with client"):
        client.version()
    assert repr(client) == "BlockingRayClient(RayClient('http://127.0.0.1:1'))"


def test_it_has_every_method_that_a_person_needs():
    """A method of the other one is here too, with the same parameters; those for followers and tests aside."""
    aside = {"rest_of_logs"}
    for name, method in inspect.getmembers(RayClient, inspect.isfunction):
        if name.startswith("_") or name in aside:
            continue
        mine = inspect.signature(getattr(BlockingRayClient, name)).parameters
        theirs = inspect.signature(method).parameters
        assert set(theirs) - {"clock", "sleep", "cursor"} == set(mine), name
