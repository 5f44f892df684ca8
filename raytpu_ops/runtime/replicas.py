"""What answers: a replica with a whole slice of several hosts, and one that lives on a single host.

Hosts of a slice compute together, so all of them must get the same requests in the same order: a
request goes to every host in one go, with nothing awaited in between, and each host answers one by
one. A host that dies breaks them all; Serve sees only the replica, so the replica's health check
covers every host. Serve then starts the replica anew, which reserves a slice that is whole.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from raytpu_ops.runtime import place
from raytpu_ops.runtime.cluster import SLICE_NAME, WORKER_ID, lost_hosts
from raytpu_ops.runtime.place import CurrentHost
from raytpu_ops.runtime.reserve import Reservation, reserve
from raytpu_ops.runtime.targets import import_target, last_line, plain
from raytpu_ops.tpu.errors import DeadlineExceeded
from raytpu_ops.tpu.shapes import SliceShape
from raytpu_ops.tpu.spec import SliceSpec

#: How long an idle host may take to answer a ping.
_PING_S = 5.0


@dataclass(frozen=True)
class ReplicaSettings:
    """What a replica is made from; see ``serve.slice_app``.

    :param model: ``module:Class`` of the user's model.
    :param init_args: what it is constructed with.
    :param init_kwargs: keyword arguments for the same.
    :param spec: the one slice of each replica.
    :param start_timeout_s: seconds until the model must be up.
    :param request_timeout_s: seconds without an answer, while requests wait, that mean that hosts hang.
    """

    model: str
    init_args: list[Any]
    init_kwargs: dict[str, Any]
    spec: SliceSpec
    start_timeout_s: float
    request_timeout_s: float


class ModelOnHost:
    """The user's model on one host: an actor beside its peers, or part of a single-host replica."""

    def __init__(self) -> None:
        self._model: Any = None

    def listen(self, address: str) -> str:
        """Where JAX of the other hosts finds this one."""
        return f"{address}:{place.free_port(address)}"

    def start(self, settings: ReplicaSettings, host: CurrentHost, coordinator: str | None) -> None:
        """Connect JAX over all hosts and construct the model."""
        place.enter(CurrentHost(**{**vars(host), "_coordinator": lambda: coordinator}))
        place.current_host().initialize_jax()
        model = import_target(settings.model, "model")
        self._model = model(*settings.init_args, **settings.init_kwargs)

    def ask(self, payload: Any) -> Any:
        """The model's answer, or what it raised: every host computes it, the first one's counts."""
        try:
            return {"answer": plain(self._model(payload), "the model's answer")}
        except Exception as error:  # noqa: BLE001 - the user's model; it travels to who asked
            return {"error": last_line(error), "client": isinstance(error, ValueError | KeyError | TypeError)}

    def ping(self) -> None:
        """Answered in turn, after the requests before it."""


class _Answering:
    """How a replica answers: over HTTP with JSON, and to Serve handles by :meth:`ask`."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._hosts: list[CurrentHost] = []
        #: Why this replica can answer no more; Serve replaces it at its next health check.
        self._broken: str | None = None
        self._asked_at: dict[int, float] = {}
        self._answered_at = 0.0
        self._count = 0

    async def __call__(self, request: Any) -> Any:
        """Answer over HTTP: POST asks the model, GET says who answers."""
        from starlette.responses import JSONResponse

        if request.method == "GET":
            return JSONResponse(self.describe())
        if request.method != "POST":
            return JSONResponse({"error": "POST a JSON body, or GET"}, status_code=405, headers={"Allow": "GET, POST"})
        try:
            payload = await request.json()
        except ValueError as error:
            return JSONResponse({"error": f"the body is no JSON: {error}"}, status_code=400)
        answer = await self._ask(payload)
        if "answer" in answer:
            return JSONResponse(answer["answer"])
        status = 503 if self._broken else 400 if answer.get("client") else 500
        return JSONResponse({"error": answer["error"]}, status_code=status)

    async def ask(self, payload: Any) -> Any:
        """Answer a call through a Serve handle.

        :raises RuntimeError: with what the model raised, or why no host can answer.
        """
        answer = await self._ask(payload)
        if "answer" not in answer:
            raise RuntimeError(answer["error"])
        return answer["answer"]

    async def _ask(self, payload: Any) -> dict[str, Any]:
        if self._broken:
            return {"error": self._broken}
        self._count += 1
        number = self._count
        self._asked_at[number] = time.monotonic()
        try:
            return await self._answer(payload)
        finally:
            del self._asked_at[number]
            self._answered_at = time.monotonic()

    async def _answer(self, payload: Any) -> dict[str, Any]:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Which model answers, and from where."""
        return {
            "model": self._settings.model,
            "slice": self._hosts[0].slice_name if self._hosts else None,
            "hosts": [{"slice": h.slice_name, "worker_id": h.worker_id, "ip": h.address} for h in self._hosts],
        }

    def _check_pace(self) -> None:
        """Raise where this replica is broken, or where requests wait and none has been answered for long."""
        if self._broken:
            raise RuntimeError(self._broken)
        if not self._asked_at:
            return
        since = max(min(self._asked_at.values()), self._answered_at)
        if time.monotonic() - since > self._settings.request_timeout_s:
            raise RuntimeError(f"no request has been answered for {self._settings.request_timeout_s:.0f} s")


class SliceReplica(_Answering):
    """A replica that owns a slice of several hosts and has one worker on each."""

    @staticmethod
    def placement(_shape: SliceShape) -> dict[str, Any]:
        """On Ray's head: on a host of a slice it would die with it, and take a CPU that the slice needs."""
        return {"ray_actor_options": {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}}

    def __init__(self, settings: ReplicaSettings) -> None:
        import ray

        super().__init__(settings)
        until = time.monotonic() + settings.start_timeout_s
        context = ray.get_runtime_context()
        name = f"raytpu-serve-{context.get_actor_id()[:12]}"
        self._reservation: Reservation | None = None
        self._workers: list[Any] = []
        try:
            self._reservation = reserve(settings.spec, until, name, context.gcs_address)
            self._start(until)
        except BaseException:
            self._release()
            raise

    def _start(self, until: float) -> None:
        import ray

        assert self._reservation is not None
        places = self._reservation.places
        self._hosts = [
            CurrentHost(
                rank=rank,
                num_hosts=len(places),
                slice_name=at.host.slice_name,
                slice_index=0,
                num_slices=1,
                worker_id=at.host.worker_id,
                address=at.host.address,
            )
            for rank, at in enumerate(places)
        ]
        actor = ray.remote(ModelOnHost)
        self._workers = [actor.options(max_restarts=0, **at.options()).remote() for at in places]
        try:
            left = max(1.0, until - time.monotonic())
            coordinator = ray.get(self._workers[0].listen.remote(self._hosts[0].address), timeout=left)
            started = [
                worker.start.remote(self._settings, host, coordinator)
                for worker, host in zip(self._workers, self._hosts, strict=True)
            ]
            ray.get(started, timeout=max(1.0, until - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineExceeded(
                f"{self._settings.model}: not up on {self._hosts[0].slice_name} after "
                f"{self._settings.start_timeout_s:.0f} s; see the logs of its workers on the Ray dashboard"
            ) from error

    async def _answer(self, payload: Any) -> dict[str, Any]:
        # To every host, before anything is awaited: another order on another host would hang them all.
        calls = [asyncio.wrap_future(worker.ask.remote(payload).future()) for worker in self._workers]
        done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((call.exception() for call in done if call.exception()), None)
        if failed is not None:
            self._broken = f"a host of {self._hosts[0].slice_name} is lost ({type(failed).__name__})"
            for call in pending:
                call.cancel()
            return {"error": self._broken}
        return self._first_of([call.result() for call in calls])

    def _first_of(self, answers: list[dict[str, Any]]) -> dict[str, Any]:
        first: dict[str, Any] = answers[0]
        if any(("error" in answer) != ("error" in first) for answer in answers):
            # Some raised and some did not: their next collectives would not meet.
            self._broken = f"hosts of {self._hosts[0].slice_name} are out of step: one raised where another did not"
        return first

    async def check_health(self) -> None:
        """Every host, as Serve asks for it.

        :raises RuntimeError: naming the host that is lost, or saying what hangs.
        """
        self._check_pace()
        assert self._reservation is not None
        if lost := await asyncio.to_thread(lost_hosts, self._reservation.hosts):
            self._broken = f"lost {', '.join(str(host) for host in lost)}"
            raise RuntimeError(self._broken)
        if not self._asked_at:  # else requests are on their way, and each of them is a sign of life
            pings = [asyncio.wrap_future(worker.ping.remote().future()) for worker in self._workers]
            try:
                await asyncio.wait_for(asyncio.gather(*pings), _PING_S)
            except Exception as error:
                name = self._hosts[0].slice_name
                raise RuntimeError(f"a worker of {name} does not answer: {last_line(error)}") from error

    def _release(self) -> None:
        import ray

        for worker in self._workers:
            ray.kill(worker)
        self._workers = []
        if self._reservation is not None:
            self._reservation.release()

    def __del__(self) -> None:
        """Serve calls it when the replica stops."""
        self._release()


class HostReplica(_Answering):
    """A replica that lives on a single-host slice, with the model in its own process."""

    @staticmethod
    def placement(shape: SliceShape) -> dict[str, Any]:
        """All chips of a host of exactly this shape."""
        return {
            "ray_actor_options": {"num_cpus": 0, "resources": {"TPU": shape.chips_per_host}},
            "placement_group_bundles": [{"TPU": shape.chips_per_host}],
            "placement_group_bundle_label_selector": [shape.ray_labels],
        }

    def __init__(self, settings: ReplicaSettings) -> None:
        import ray

        super().__init__(settings)
        labels = place.labels()
        host = CurrentHost(
            rank=0,
            num_hosts=1,
            slice_name=labels[SLICE_NAME],
            slice_index=0,
            num_slices=1,
            worker_id=int(labels[WORKER_ID]),
            address=ray.util.get_node_ip_address(),
        )
        self._turn = asyncio.Lock()
        self._model = ModelOnHost()
        self._model.start(settings, host, None)
        self._hosts = [host]

    async def _answer(self, payload: Any) -> dict[str, Any]:
        async with self._turn:  # one by one, but the replica still answers health checks meanwhile
            return await asyncio.to_thread(self._model.ask, payload)

    async def check_health(self) -> None:
        """Whether requests are answered; the host itself is where this runs.

        :raises RuntimeError: saying what hangs.
        """
        self._check_pace()
