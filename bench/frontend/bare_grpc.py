"""A client of the gRPC face over a bare socket: as much of HTTP/2 (RFC 9113, 7541) as one call after another needs."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from bench.frontend.readers import Message, ReaderError
from bench.frontend.stamp import now_ns
from specdec.api.v1 import generation_pb2 as pb

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_MOST = (1 << 31) - 1
_METHOD = "/specdec.api.v1.GenerationService/GenerateStream"
_ROOM = 1 << 16


class BareGrpc:
    """GenerateStream over one connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream, self._buffer = -1, b""
        window = struct.pack(">HI", 4, _MOST)  # SETTINGS_INITIAL_WINDOW_SIZE: nothing we get is ever held back
        more = struct.pack(">I", _MOST - 0xFFFF)
        self._socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, window) + _frame(_WINDOW, 0, 0, more)
        )

    def read(self, prompt: str, max_tokens: int) -> Iterator[Message]:
        """The messages that have text.

        Raises:
            ReaderError: the call ends before its last message, or the server gives up.
        """
        request = pb.GenerateStreamRequest(text=prompt)
        request.stopping.max_tokens = max_tokens
        data = request.SerializeToString()
        self._stream += 2
        self._socket.sendall(
            _frame(_HEADERS, _END_HEADERS, self._stream, _HEAD)
            + _frame(_DATA, _END_STREAM, self._stream, struct.pack(">BI", 0, len(data)) + data)
        )
        body, complete = b"", False
        while True:
            kind, flags, stream, payload = self._next()
            at_ns = now_ns()
            if kind == _SETTINGS and not flags & _ACK:
                self._socket.sendall(_frame(_SETTINGS, _ACK, 0))
            elif kind == _PING and not flags & _ACK:
                self._socket.sendall(_frame(_PING, _ACK, 0, payload))
            elif kind in (_RESET, _GOAWAY):
                raise ReaderError(f"the server gave up with frame {kind}")
            elif stream == self._stream and kind == _DATA:
                body += payload
                while len(body) >= 5 and len(body) >= 5 + (size := int.from_bytes(body[1:5], "big")):
                    message = pb.GenerateStreamResponse.FromString(body[5 : 5 + size])
                    body = body[5 + size :]
                    if message.delta.text:
                        yield at_ns, message.delta.text
                    complete = complete or message.HasField("finished")
            elif stream == self._stream and kind == _HEADERS and flags & _END_STREAM:
                if not complete:
                    raise ReaderError("the call ended before its last message")
                return

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def _next(self) -> tuple[int, int, int, bytes]:
        """Kind, flags, stream and payload of the next frame."""
        while len(self._buffer) < 9 or len(self._buffer) < 9 + (size := int.from_bytes(self._buffer[:3], "big")):
            data = self._socket.recv(_ROOM)
            if not data:
                raise ReaderError("the server closed the connection")
            self._buffer += data
        kind, flags = self._buffer[3], self._buffer[4]
        stream = int.from_bytes(self._buffer[5:9], "big") & _MOST
        payload, self._buffer = self._buffer[9 : 9 + size], self._buffer[9 + size :]
        return kind, flags, stream, payload


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()  # below 127 bytes, not Huffman-coded


# By the static table: POST, http, then literals that are not indexed: path, authority, content-type, te.
_HEAD = (
    b"\x83\x86\x04" + _literal(_METHOD) + b"\x01" + _literal("x")
    + b"\x0f\x10" + _literal("application/grpc") + b"\x00" + _literal("te") + _literal("trailers")
)  # fmt: skip
