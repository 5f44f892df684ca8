"""A trigger is done only once its log lines are read."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest
import structlog

from raytpu_ops.triggers.log_channel import wait_until_read


class Factory:
    """What Airflow configures structlog with in a triggerer: a raw file over the socket."""

    def __init__(self, fd: int) -> None:
        self.io = os.fdopen(fd, "wb", buffering=0)


@pytest.fixture
def other_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    factory = Factory(ours.detach())
    monkeypatch.setattr(structlog, "get_config", lambda: {"logger_factory": factory})
    factory.io.write(b"x" * 10_000)
    with theirs, factory.io:
        yield theirs


@pytest.mark.skipif("sys.platform != 'linux'")
async def test_it_waits_until_the_last_byte_is_read(other_end: socket.socket) -> None:
    waiting = asyncio.create_task(wait_until_read())
    other_end.recv(4096)
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()
    other_end.recv(100_000)
    assert await waiting is True


@pytest.mark.skipif("sys.platform != 'linux'")
async def test_it_does_not_wait_for_ever(other_end: socket.socket) -> None:
    assert await wait_until_read(within_s=0.05) is False
    assert other_end.recv(1) == b"x"


async def test_where_no_socket_is_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structlog, "get_config", lambda: {"logger_factory": object()})
    assert await wait_until_read() is True
