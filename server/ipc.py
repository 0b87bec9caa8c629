"""The socket between the front end and the engine process: frames, msgpack messages, and both ends."""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from operator import attrgetter
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgpack

from specdec.core.types import Delta, Failed, Finished, RequestEvent, Started

MAX_VALUE_BYTES = 1 << 30  # of a text in a frame


class Frame(StrEnum):
    """The kinds of frame and what follows each.

    To the engine process: ``SUBMIT`` request, seconds that it has waited; ``ABORT`` request id; ``ADMIN`` number of the
    call, command, its arguments; ``CLOSE``.
    From it: ``PROGRESS`` label, done, total; ``READY`` info; ``EVENTS`` list, one frame per step or refused request;
    ``ADMIN`` number of the call, error or None, result; ``ALIVE`` load; ``KV_EVENTS`` a payload to publish; ``DIED``
    whether it was a refusal to start, message.
    """

    SUBMIT = "submit"
    ABORT = "abort"
    ADMIN = "admin"
    CLOSE = "close"
    PROGRESS = "progress"
    READY = "ready"
    EVENTS = "events"
    ALIVE = "alive"
    KV_EVENTS = "kv_events"
    DIED = "died"


class FrameError(ValueError):
    """The peer sent bytes that are not a frame; the connection is unusable."""


def pack_frame(*parts: Any) -> bytes:
    """One frame holding ``parts``, ready to send. Records among and inside them are packed as by `pack`."""
    frame: bytes = msgpack.packb(parts, use_bin_type=True, default=pack)
    return frame


class FrameReader:
    """Splits a byte stream into frames."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=MAX_VALUE_BYTES)

    def feed(self, data: bytes) -> list[list[Any]]:
        """Add ``data`` and return every complete frame.

        Raises:
            FrameError: it is not msgpack, not an array, or has a value that is too long.
        """
        try:
            self._unpacker.feed(data)
            frames = list(self._unpacker)
        except Exception as error:  # the library raises several unrelated types for malformed input
            raise FrameError(f"frame is not msgpack: {error or type(error).__name__}") from None
        if not all(isinstance(frame, list) and frame for frame in frames):
            raise FrameError("frame is not a non-empty array")
        return frames


Record = TypeVar("Record")


def pack(record: Any) -> tuple[Any, ...]:
    """The fields of a record, which must have two or more: `attrgetter` of one returns no tuple."""
    kind: Any = type(record)
    return _reader(kind)(record)


def unpack(kind: type[Record], parts: Sequence[Any]) -> Record:
    """The inverse of `pack`, after msgpack made lists of tuples and text of enums."""
    made = list(parts)
    for place, convert in _unpacking(cast(Any, kind)):
        made[place] = convert(made[place])
    return kind(*made)


_EVENTS: dict[int, Any] = {0: Delta, 1: Started, 2: Finished, 3: Failed}
_KINDS = {kind: number for number, kind in _EVENTS.items()}


def pack_event(event: RequestEvent) -> tuple[Any, ...]:
    """``event`` as a tuple that begins with its kind and request id."""
    return (_KINDS[type(event)], *pack(event))


def unpack_event(parts: Sequence[Any]) -> RequestEvent:
    """The inverse of `pack_event`."""
    kind, *rest = parts
    event: RequestEvent = unpack(_EVENTS[kind], rest)
    return event


Convert = Callable[[Any], Any]


@cache
def _reader(kind: Any) -> attrgetter[tuple[Any, ...]]:
    """A getter of a record's fields."""
    return attrgetter(*(f.name for f in fields(kind)))


@cache
def _unpacking(kind: Any) -> list[tuple[int, Convert]]:
    """By position in a record, the converters of fields that msgpack unpacks as another type."""
    hints = get_type_hints(kind)
    return [(i, convert) for i, f in enumerate(fields(kind)) if (convert := _unpacker(hints[f.name])) is not None]


def _unpacker(hint: Any) -> Convert | None:
    """The converter of a type; None: values stay unchanged."""
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(unpack, hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint
    args, origin = get_args(hint), get_origin(hint)
    inner = _unpacker(args[-1 if origin is dict else 0]) if args else None
    if origin is tuple:
        return tuple if inner is None else lambda value: tuple(map(inner, value))
    if inner is None:
        return None
    if origin is dict:
        return lambda value: {name: inner(part) for name, part in value.items()}
    if origin is list:
        return lambda values: [inner(value) for value in values]
    return (lambda value: None if value is None else inner(value)) if origin in (Union, UnionType) else None


class FrameLink(asyncio.Protocol):
    """The front end's end of the socket. Passes frames on in the callback that receives their bytes, which saves the
    wake-up of a reading task. Belongs to one event loop."""

    _transport: asyncio.Transport  # from `connection_made` on

    def __init__(self, take: Callable[[list[Any]], None]) -> None:
        """take: called with every frame; if it raises, it gets no further one."""
        self._take = take
        self._cut = FrameReader()
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last_frame_s = time.monotonic()  # when bytes last arrived

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The socket is open."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """The next bytes arrived."""
        self.last_frame_s = time.monotonic()
        if not self._gone.done():
            try:
                for frame in self._cut.feed(data):
                    self._take(frame)
            except Exception as error:  # raised by `closed` instead of in the event loop
                self._gone.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process closed the socket, or died."""
        if not self._gone.done():
            self._gone.set_result(None)

    async def closed(self) -> None:
        """Wait until the process closes the socket. Cancelling it drops all further frames.

        Raises:
            FrameError: the process sent bytes that are not a frame.
            Exception: raised by ``take``.
        """
        await self._gone

    def send(self, *parts: Any) -> None:
        """Queue one frame for the process; `closed` detects a dead process."""
        if not self._transport.is_closing():
            self._transport.write(pack_frame(*parts))

    def close(self) -> None:
        """Close this end."""
        self._transport.close()


_CHUNK_BYTES = 1 << 18


class ParentGoneError(Exception):
    """The front end closed the socket or died."""


class ParentLink:
    """The engine process's end of the socket. Sending blocks, which is the back-pressure."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._readable = selectors.DefaultSelector()  # not `select`, which ends at descriptor 1023
        self._readable.register(sock, selectors.EVENT_READ)
        self._reader = FrameReader()

    def send(self, *parts: Any) -> None:
        """Send one frame.

        Raises:
            ParentGoneError: the front end does not read any more.
        """
        try:
            self._sock.sendall(pack_frame(*parts))
        except OSError as error:
            raise ParentGoneError from error

    def receive(self, timeout_s: float) -> list[list[Any]]:
        """Every frame that has arrived, after waiting up to ``timeout_s`` seconds for the first.

        Raises:
            ParentGoneError: the socket is closed.
        """
        frames: list[list[Any]] = []
        while self._readable.select(0.0 if frames else timeout_s):
            try:
                data = self._sock.recv(_CHUNK_BYTES)
            except OSError as error:
                raise ParentGoneError from error
            if not data:
                raise ParentGoneError
            frames += self._reader.feed(data)
            if frames and len(data) < _CHUNK_BYTES:
                break  # there was no more
        return frames
