"""One call over an HTTP/1.1 connection, as uvicorn runs it."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, RequestResponseCycle

_LENGTH = b"content-length"


class Exchange(RequestResponseCycle):
    """Uvicorn's own, but for two things. An answer's head goes out together with what follows it at once: each write
    wakes the client, often on the processor that we run on. And pieces of a chunked body are framed here: h11 takes
    longer for that than all else that is done for a message."""

    chunked = False
    head = b""

    async def send(self, message: Any) -> None:
        """ASGI's ``send``."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started and message["type"] == "http.response.start":
            self._begin(message)
            return
        if self.chunked and not self.response_complete and message["type"] == "http.response.body":
            if body := message.get("body", b""):
                head, self.head = self.head, b""
                self.transport.write(b"%b%x\r\n%b\r\n" % (head, len(body), body))
            if message.get("more_body", False):
                return
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        self._send_head()
        await super().send(message)

    def _begin(self, message: Any) -> None:
        """As uvicorn does, but that nothing is written yet."""
        self.response_started, self.waiting_for_100_continue = True, False
        status, headers = message["status"], [*self.default_headers, *message.get("headers", ())]
        if CLOSE_HEADER in self.scope["headers"] and CLOSE_HEADER not in headers:
            headers.append(CLOSE_HEADER)
        response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        self.head = self.conn.send(response) or b""
        self.chunked = self._is_chunked(status, headers)
        asyncio.get_running_loop().call_soon(self._send_head)

    def _send_head(self) -> None:
        head, self.head = self.head, b""
        if head and not self.disconnected:
            self.transport.write(head)

    def _is_chunked(self, status: int, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether the body goes out in chunks, by the rules of RFC 9112 (6.1, 6.3), which h11 follows."""
        return (
            self.scope["http_version"] == "1.1"
            and self.scope["method"] != "HEAD"
            and status not in (204, 304)
            and not any(name.lower() == _LENGTH for name, _ in headers)
        )
