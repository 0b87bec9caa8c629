"""The front end's end of the engine's socket: every frame, in order, however it is split; errors reach the listener."""

from __future__ import annotations

import asyncio
import fcntl
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from server.ipc import Frame, FrameError, FrameLink, FrameReader, ParentGoneError, ParentLink, pack_frame


@asynccontextmanager
async def linked(take: Callable[[list[Any]], None]) -> AsyncIterator[tuple[FrameLink, socket.socket]]:
    """A link, and the engine's end of its socket."""
    ours, theirs = socket.socketpair()
    _, link = await asyncio.get_running_loop().create_unix_connection(partial(FrameLink, take), sock=ours)
    with theirs:
        yield link, theirs
    link.close()


async def test_frames_arrive_in_order() -> None:
    taken: list[list[Any]] = []
    async with linked(taken.append) as (link, engine):
        frames = [[Frame.PROGRESS, "x" * n, n] for n in (0, 1, 300, 70_000)]
        data = b"".join(pack_frame(*frame) for frame in frames)
        for start in range(0, len(data), 20_001):
            await asyncio.to_thread(engine.sendall, data[start : start + 20_001])
        engine.close()
        await link.closed()
    assert taken == frames


async def test_sent_frames_arrive_and_a_closed_link_sends_nothing() -> None:
    async with linked(print) as (link, engine):
        link.send(Frame.ABORT, "a")
        assert FrameReader().feed(await asyncio.to_thread(engine.recv, 1 << 16)) == [[Frame.ABORT, "a"]]
        link.close()
        link.send(Frame.ABORT, "b")
        assert await asyncio.to_thread(engine.recv, 1 << 16) == b""


async def test_an_invalid_frame_or_an_error_of_take_closes_the_link() -> None:
    for data, error in ((b"\xff" * 100, FrameError), (pack_frame(Frame.CLOSE) * 2, KeyError)):
        taken: list[list[Any]] = []

        def take(frame: list[Any], taken: list[list[Any]] = taken) -> None:
            taken.append(frame)
            raise KeyError(frame[0])

        async with linked(take) as (link, engine):
            engine.sendall(data)
            with pytest.raises(error):
                await link.closed()
            engine.sendall(pack_frame(Frame.CLOSE))
            await asyncio.sleep(0.01)
        assert len(taken) <= 1


async def test_a_cancelled_wait_drops_further_frames() -> None:
    taken: list[list[Any]] = []
    async with linked(taken.append) as (link, engine):
        listening = asyncio.create_task(link.closed())
        await asyncio.sleep(0)
        listening.cancel()
        await asyncio.wait([listening])
        engine.sendall(pack_frame(Frame.CLOSE))
        await asyncio.sleep(0.01)
    assert not taken


def test_the_engines_end_works_with_any_descriptor() -> None:
    """A server with a thousand connections gives its next engine a descriptor number that `select` does not support."""
    high = 2000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= high:
        pytest.skip(f"this process may have {hard} descriptors at most")
    if soft <= high:
        resource.setrlimit(resource.RLIMIT_NOFILE, (high + 1, hard))
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD, high - 1)) as engine:
        assert engine.fileno() > 1023
        link = ParentLink(engine)
        assert link.receive(0.0) == []
        ours.sendall(pack_frame(Frame.ABORT, "a") + pack_frame(Frame.CLOSE))
        assert link.receive(1.0) == [[Frame.ABORT, "a"], [Frame.CLOSE]]
        ours.close()
        with pytest.raises(ParentGoneError):
            link.receive(1.0)
