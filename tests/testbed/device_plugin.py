"""GKE's TPU device plugin, played: a real plugin of each kubelet that has chips to offer.

Speaks `k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1`; the messages it needs are described here, so
nothing is generated. Runs outside the nodes, one server for each: a node's socket is in its folder.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from raytpu_ops.tpu.shapes import SliceShape

_RESOURCE = "google.com/tpu"
#: By so much at most the clock of files is behind.
_TICK_S = 0.05
_STRING, _MESSAGE, _BOOL = 9, 11, 8
_ONE, _MANY = 1, 3
#: message -> its fields: name, number, type, one or many, type of a message field.
_MESSAGES: dict[str, list[tuple[str, int, int, int, str]]] = {
    "Empty": [],
    "DevicePluginOptions": [("pre_start_required", 1, _BOOL, _ONE, "")],
    "RegisterRequest": [
        ("version", 1, _STRING, _ONE, ""),
        ("endpoint", 2, _STRING, _ONE, ""),
        ("resource_name", 3, _STRING, _ONE, ""),
        ("options", 4, _MESSAGE, _ONE, "DevicePluginOptions"),
    ],
    "Device": [("ID", 1, _STRING, _ONE, ""), ("health", 2, _STRING, _ONE, "")],
    "ListAndWatchResponse": [("devices", 1, _MESSAGE, _MANY, "Device")],
    "ContainerAllocateRequest": [("devices_ids", 1, _STRING, _MANY, "")],
    "AllocateRequest": [("container_requests", 1, _MESSAGE, _MANY, "ContainerAllocateRequest")],
    # On the wire a map is a list of key and value.
    "Variable": [("key", 1, _STRING, _ONE, ""), ("value", 2, _STRING, _ONE, "")],
    "ContainerAllocateResponse": [("envs", 1, _MESSAGE, _MANY, "Variable")],
    "AllocateResponse": [("container_responses", 1, _MESSAGE, _MANY, "ContainerAllocateResponse")],
}


def _message_types() -> dict[str, Any]:
    package = "raytpu.testbed.v1beta1"
    file = descriptor_pb2.FileDescriptorProto(name="raytpu-testbed-deviceplugin.proto", package=package)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, label, of in fields:
            message.field.add(
                name=field,
                number=number,
                type=kind,  # type: ignore[arg-type]
                label=label,  # type: ignore[arg-type]
                type_name=f".{package}.{of}" if of else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in _MESSAGES
    }


class DevicePlugin:
    """The plugin of one node.

    :param kubelet: the node's folder that is `/var/lib/kubelet` within it.
    :param shape: of the slice that the node is a host of.
    """

    def __init__(self, kubelet: Path, shape: SliceShape) -> None:
        self._folder = kubelet / "device-plugins"
        self._handle = -1
        self._shape = shape
        self._types = _message_types()
        self._server: grpc.aio.Server | None = None
        self._numbers = itertools.count()
        self._socket = self._folder / "none"
        self._registration: asyncio.Task[None] | None = None
        self._healthy = True
        self._changed = asyncio.Event()
        self._told_at: float | None = None

    async def start(self) -> None:
        """Register with the kubelet as soon as and whenever it starts, and serve it."""
        self._folder.mkdir(parents=True, exist_ok=True)  # the kubelet's own, which may be later
        for stale in self._folder.glob("*.sock"):
            stale.unlink()  # of a kubelet that was killed
        self._handle = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        self._registration = asyncio.create_task(self._keep_registered())

    async def stop(self) -> None:
        """End, with the node or before it."""
        if self._registration is not None:
            self._registration.cancel()
        await self._end_server()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    async def _end_server(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def _serve(self) -> None:
        kind = self._types
        empty, answer = kind["Empty"], grpc.unary_unary_rpc_method_handler
        handlers = {
            "GetDevicePluginOptions": answer(self._options, empty.FromString, _bytes),
            "Allocate": answer(self._allocate, kind["AllocateRequest"].FromString, _bytes),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._devices, empty.FromString, _bytes),
        }
        # A new name each time: a server that ends removes its socket some time later.
        self._socket = self._folder / f"tpu-{next(self._numbers)}.sock"
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", handlers),))
        self._server.add_insecure_port(self._address(self._socket))
        await self._server.start()

    @property
    def is_known(self) -> bool:
        """The kubelet of this boot has taken in what it was told of the chips: it writes that down."""
        written = self._folder / "kubelet_internal_checkpoint"
        return self._told_at is not None and written.exists() and written.stat().st_mtime >= self._told_at - _TICK_S

    def _address(self, socket: Path) -> str:
        """Of a socket in the node's folder; its path may be longer than the 107 bytes that sockets take."""
        return f"unix:/proc/self/fd/{self._handle}/{socket.name}"

    def set_healthy(self, healthy: bool) -> None:
        """What is said of the chips from now on.

        :param healthy: or not.
        """
        self._healthy = healthy
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep_registered(self) -> None:
        """A kubelet that starts removes all sockets there and forgets its plugins."""
        kubelet = self._folder / "kubelet.sock"
        while True:
            if kubelet.exists() and (self._server is None or not self._socket.exists()):
                await self._end_server()
                await self._serve()
                try:
                    await self._register(kubelet)
                except grpc.aio.AioRpcError:
                    await self._end_server()  # the kubelet went away over it; the next one is asked
            await asyncio.sleep(0.2)

    async def _register(self, kubelet: Path) -> None:
        request = self._types["RegisterRequest"](version="v1beta1", endpoint=self._socket.name, resource_name=_RESOURCE)
        async with grpc.aio.insecure_channel(self._address(kubelet)) as channel:
            register = channel.unary_unary("/v1beta1.Registration/Register", _bytes, self._types["Empty"].FromString)
            await register(request, wait_for_ready=True, timeout=10)

    async def _options(self, request: Any, context: Any) -> Any:
        return self._types["DevicePluginOptions"]()

    async def _devices(self, request: Any, context: Any) -> AsyncIterator[Any]:
        device = self._types["Device"]
        while True:
            changed = self._changed
            health = "Healthy" if self._healthy else "Unhealthy"
            chips = [device(ID=f"tpu-{number}", health=health) for number in range(self._shape.chips_per_host)]
            self._told_at = time.time()
            yield self._types["ListAndWatchResponse"](devices=chips)
            await changed.wait()

    async def _allocate(self, request: Any, context: Any) -> Any:
        environment = {
            "TPU_ACCELERATOR_TYPE": self._shape.pod_type,
            "TPU_TOPOLOGY": self._shape.topology,
            "TPU_SKIP_MDS_QUERY": "true",
        }
        variable, one = self._types["Variable"], self._types["ContainerAllocateResponse"]
        envs = [variable(key=key, value=value) for key, value in environment.items()]
        return self._types["AllocateResponse"](container_responses=[one(envs=envs) for _ in request.container_requests])


def _bytes(message: Any) -> bytes:
    return bytes(message.SerializeToString())
