"""Refusals of clients that do not speak HTTP/1.1, in their own protocol."""

from __future__ import annotations

from collections.abc import Callable

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_TLS_HANDSHAKE = b"\x16\x03"


def other_protocol(first: bytes, *, tls: bool) -> Callable[[bytes], bytes] | None:
    """A function from a client's bytes to the answer, if its ``first`` bytes are of another protocol than HTTP/1.1.

    tls: whether the connection is encrypted.
    """
    if first.startswith(_PREFACE[:16]):
        return Http2Refusal().answer
    if first.startswith(_TLS_HANDSHAKE) and not tls:
        return _answer_to_tls
    return None


def _answer_to_tls(data: bytes) -> bytes:
    if not data.startswith(_TLS_HANDSHAKE):
        return b""
    text = b"this is specdec's HTTP port, which does not speak TLS: use http://, or give the server --tls-cert\n"
    head = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(text), text)


_HEADERS, _SETTINGS = 1, 4
_ACK, _ALL = 0x1, 0x5  # flags; _ALL: end of the stream and of its headers
_LARGEST_FRAME = 1 << 14
_MESSAGE = b"this is specdec's HTTP port, which speaks HTTP/1.1; gRPC has a port of its own, 8400 by default"


class Http2Refusal:
    """Answers every call over HTTP/2 with status 400 and gRPC's UNIMPLEMENTED.

    After a GOAWAY, gRPC's clients would retry until their deadline.
    """

    def __init__(self) -> None:
        self._data = b""
        self._began = False

    def answer(self, data: bytes) -> bytes:
        """The answer to ``data``, which may be empty."""
        data, at, said = self._data + data, 0, []
        if not self._began and len(data) >= len(_PREFACE):
            at, self._began = len(_PREFACE), True
            said.append(_frame(_SETTINGS, 0, 0, b""))
        while self._began and len(data) >= at + 9:
            length = int.from_bytes(data[at : at + 3])
            kind, flags, stream = data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9]) & 0x7FFFFFFF
            if length > _LARGEST_FRAME:
                at = len(data)  # forbidden; the rest of the connection is ignored
            if len(data) < at + 9 + length:
                break
            at += 9 + length
            if kind == _HEADERS:
                said.append(_frame(_HEADERS, _ALL, stream, _REFUSAL))
            elif kind == _SETTINGS and not flags & _ACK:
                said.append(_frame(_SETTINGS, _ACK, 0, b""))
        self._data = data[at:]
        return b"".join(said)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame (RFC 9113, 4.1)."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def _refusal() -> bytes:
    """Headers in HPACK (RFC 7541): status 400 from the static table, the others in full."""
    others = {b"content-type": b"application/grpc", b"grpc-status": b"12", b"grpc-message": _MESSAGE}
    return b"\x8c" + b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in others.items()
    )


_REFUSAL = _refusal()
