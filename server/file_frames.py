"""Frames of an append-only file: a length, a checksum, a payload, so that a torn or altered frame is noticed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

_HEAD = struct.Struct("<II")  # length of the payload, CRC-32 of length and payload
_LENGTH = struct.Struct("<I")

MAX_PAYLOAD = 16 << 20


def frame(payload: bytes) -> bytes:
    """The payload with its head. The checksum covers the length, so a run of zeros is no frame.

    Raises:
        ValueError: the payload exceeds `MAX_PAYLOAD` bytes.
    """
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a record takes at most {MAX_PAYLOAD} bytes, this one {len(payload)}: leave the prompt out")
    return _HEAD.pack(len(payload), _checksum(payload)) + payload


def frames(data: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """Payloads from ``start`` on, each with the offset behind it, up to the first frame that is torn or altered."""
    while start + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, start)
        begin, start = start + _HEAD.size, start + _HEAD.size + length
        payload = data[begin:start]
        if len(payload) != length or _checksum(payload) != checksum:
            return
        yield payload, start


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))
