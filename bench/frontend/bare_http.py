"""A client of the HTTP face over a bare socket: it waits in the system call in which an answer comes in."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import orjson

from bench.frontend.readers import Message, ReaderError
from bench.frontend.stamp import now_ns

_DATA, _LAST = b"data: {", b"0\r\n\r\n"
_ROOM = 1 << 16


class BareHttp:
    """POST /v1/completions, one after the other over one connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, prompt: str, max_tokens: int) -> Iterator[Message]:
        """The messages that have text.

        Raises:
            ReaderError: the answer is not 200, or breaks off.
        """
        body = orjson.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True})
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        self._socket.sendall(head.encode() + b"\r\n\r\n" + body)
        told, rest = False, b""
        while not rest.endswith(_LAST):
            data = self._socket.recv(_ROOM)
            at_ns = now_ns()
            if not data:
                raise ReaderError("the server closed the connection")
            rest += data
            if not told:
                if b"\r\n\r\n" not in rest:
                    continue
                status, _, rest = rest.partition(b"\r\n\r\n")
                if b" 200 " not in status.partition(b"\r\n")[0]:
                    raise ReaderError(status.partition(b"\r\n")[0].decode("latin-1"))
                told = True
            # A chunk's length has a line of its own, so lines of ours are whole.
            *lines, last = rest.split(b"\n")
            for line in lines:
                if line.startswith(_DATA):
                    text = orjson.loads(line[len(_DATA) - 1 :])["choices"][0]["text"]
                    if text:
                        yield at_ns, text
            rest = _LAST if rest.endswith(_LAST) else last

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
