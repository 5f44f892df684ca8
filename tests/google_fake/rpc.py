"""gRPC over TLS on loopback, for services whose methods are `gate.Rpc`s."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_status import rpc_status

from tests.google_fake.gate import Gate, Rpc
from tests.google_fake.refusals import CutOff, Refusal
from tests.google_fake.trust import authority

#: gRPC name of a service -> the API whose permissions it needs, and its methods.
Services = Mapping[str, tuple[str, Mapping[str, Rpc]]]


class RpcServer:
    """One port for all services, open from the start until `stop`.

    :param gate: that requests pass.
    :param services: what is served.
    """

    def __init__(self, gate: Gate, services: Services) -> None:
        self._gate = gate
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
        for name, (api, rpcs) in services.items():
            handlers = {method: self._handler(api, method, rpc) for method, rpc in rpcs.items()}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        folder = authority().folder
        pair = ((folder / "localhost.key").read_bytes(), (folder / "localhost.crt").read_bytes())
        port = self._server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        self.endpoint = f"localhost:{port}"
        self._server.start()

    def stop(self) -> None:
        """Close the port and every connection."""
        self._server.stop(grace=None).wait()

    def _handler(self, api: str, method: str, rpc: Rpc) -> Any:
        def serve(request: Any, context: grpc.ServicerContext) -> Any:
            headers = {str(key): str(value) for key, value in context.invocation_metadata()}
            try:
                return self._gate.enter(api, method, rpc.ask(request), request, headers, lambda: rpc.do(request))
            except Refusal as error:
                context.abort_with_status(rpc_status.to_status(error.status))
            except CutOff:
                # What gRPC makes of a connection that ends.
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

        return grpc.unary_unary_rpc_method_handler(
            serve, request_deserializer=_decoder(rpc.request), response_serializer=_encoder(rpc.answer)
        )


def _decoder(message: Any) -> Callable[[bytes], Any]:
    return message.FromString if issubclass(message, Message) else message.deserialize


def _encoder(message: Any) -> Callable[[Any], bytes]:
    return message.SerializeToString if issubclass(message, Message) else message.serialize
