"""Length-prefixed msgpack frames: four bytes of little-endian length, then one msgpack array ``[kind, ...]``."""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import Any

import msgpack

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30


class Frame(StrEnum):
    """The kinds of frame and what follows each.

    To the engine process: ``SUBMIT`` request, ``ABORT`` request id, ``TRACE`` number of the call, steps at most,
    ``ADMIN`` number of the call, command, its arguments; ``CLOSE``.
    From it: ``PROGRESS`` label, done, total; ``READY`` info; ``EVENTS`` list, one frame per step;
    ``REFUSED`` request id, error; ``TRACE`` number of the call, list of steps or None where the engine could not tell;
    ``ADMIN`` number of the call, error or None, result; ``ALIVE`` load;
    ``DIED`` whether it was a refusal to start, message.
    """

    SUBMIT = "submit"
    ABORT = "abort"
    TRACE = "trace"
    ADMIN = "admin"
    CLOSE = "close"
    PROGRESS = "progress"
    READY = "ready"
    EVENTS = "events"
    REFUSED = "refused"
    ALIVE = "alive"
    DIED = "died"


class FrameError(ValueError):
    """The peer sent bytes that are no frame; the connection can not go on."""


def pack_frame(*parts: Any) -> bytes:
    """One frame holding ``parts``, ready to send.

    Raises:
        FrameError: it exceeds ``MAX_FRAME_BYTES``.
    """
    body = msgpack.packb(parts, use_bin_type=True)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frames; feed it whatever arrived."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """Take ``data`` and return every frame that is complete now.

        Raises:
            FrameError: a length is absurd, or a body is not a msgpack array.
        """
        self._buffer += data
        frames: list[list[Any]] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"frame length {length} exceeds {MAX_FRAME_BYTES}")
            body = start + _LENGTH.size
            if len(self._buffer) < body + length:
                break
            start = body + length
            frames.append(_unpack(bytes(self._buffer[body:start])))
        del self._buffer[:start]
        return frames


def _unpack(body: bytes) -> list[Any]:
    try:
        parts = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except Exception as error:  # the library raises several unrelated types for malformed input
        raise FrameError(f"frame is not msgpack: {error}") from None
    if not isinstance(parts, list) or not parts:
        raise FrameError("frame is not a non-empty array")
    return parts
