"""Triggers that carry a job or an application on a lease from submission to its end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from raytpu_ops.backends.base import Backend
from raytpu_ops.triggers.base import BEARS_SILENCE, LeaseTrigger

#: Where a trigger notes how far into the job's log the task's log has come.
LINES_KEY = "log_lines"
#: Seconds between two notes: what a triggerer that is killed may write twice.
NOTE_EVERY_S = 5.0


class RequestTrigger(LeaseTrigger):
    """A flow with a request of its own.

    :param request: the request, as plain JSON.
    """

    def __init__(self, *, lease: dict[str, Any], owner: dict[str, Any], request: dict[str, Any]) -> None:
        super().__init__(lease=lease, owner=owner)
        self.request = request

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class's path and its arguments, as plain JSON."""
        path, kwargs = super().serialize()
        return path, {**kwargs, "request": self.request}


class RayJobTrigger(RequestTrigger):
    """Runs a job to its end, its lines in the task's log.

    A triggerer that takes over goes on after the last line that was noted, so a restart neither
    loses a line nor repeats the log; one that was killed repeats a few seconds of it.

    :param request: the :class:`~raytpu_ops.flows.jobs.JobRequest`, as plain JSON.
    """

    #: How far into the job's log the task's log has come, and how far was noted last.
    _position = 0
    _noted = 0
    _submission_id = ""

    async def flow(self, backend: Backend) -> dict[str, Any]:
        """The job's result."""
        from raytpu_ops.flows.jobs import JobRequest, run_job

        request = JobRequest.model_validate(self.request)
        self._submission_id = request.attempt.submission_id
        self._position = self._noted = await asyncio.to_thread(self._read_note)
        notes = asyncio.create_task(self._keep_notes())
        try:
            return await run_job(
                backend,
                self.lease,
                request,
                emit=self._emit,
                say=self.log.info,
                on_position=self._moved,
                skip_lines=self._position,
            )
        finally:
            notes.cancel()
            with suppress(asyncio.CancelledError):
                await notes

    async def cleanup(self) -> None:
        """Leave the last note for the triggerer that takes over."""
        if not self._fired:
            await self._note()

    def _emit(self, line: str) -> None:
        self.log.info("%s", line)

    def _moved(self, position: int) -> None:
        self._position = position

    async def _keep_notes(self) -> None:
        while True:
            await asyncio.sleep(NOTE_EVERY_S)
            await self._note()

    async def _note(self) -> None:
        if self._position == self._noted:
            return
        position = self._position
        try:
            await asyncio.to_thread(self._write_note, position)
        except Exception:  # noqa: BLE001 - whatever keeps Airflow from taking a note, the job goes on
            self.log.warning("Line %s of the log could not be noted; a restart now may repeat lines", position)
        else:
            self._noted = position

    @BEARS_SILENCE
    def _read_note(self) -> int:
        from airflow.sdk.execution_time.xcom import XCom

        note = XCom.get_one(key=LINES_KEY, **self.task_key())
        return int(note["lines"]) if note and note["submission_id"] == self._submission_id else 0

    def _write_note(self, position: int) -> None:
        from airflow.sdk.execution_time.xcom import XCom

        XCom.set(key=LINES_KEY, value={"submission_id": self._submission_id, "lines": position}, **self.task_key())

    async def stop(self, backend: Backend) -> None:
        """Stop what this epoch has under way."""
        from raytpu_ops.flows.jobs import JobRequest, stop_epoch

        for line in await stop_epoch(backend, self.lease, JobRequest.model_validate(self.request)):
            self.log.info("Stopped %s", line)


class RayServeTrigger(RequestTrigger):
    """Deploys an application and waits until it runs.

    :param request: the :class:`~raytpu_ops.flows.serving.ServeRequest`, as plain JSON.
    """

    async def flow(self, backend: Backend) -> dict[str, Any]:
        """Where the application answers."""
        from raytpu_ops.flows.serving import ServeRequest, run_serve

        return await run_serve(backend, self.lease, ServeRequest.model_validate(self.request), say=self.log.info)

    async def ended(self, backend: Backend, state: str | None) -> None:
        """See :class:`LeaseTrigger`; a task that is about to run deploys over what is there, or says that it is up."""
        if state in ("scheduled", "queued"):
            self.log.info("%s is %s: its application stays for it", self.owner.key, state)
            return
        await super().ended(backend, state)

    async def stop(self, backend: Backend) -> None:
        """Take the application away: it holds a slice."""
        from raytpu_ops.flows.serving import remove_application

        self.log.info(
            "%s", await remove_application(backend, self.lease, self.request["name"], self.request.get("owner", ""))
        )
