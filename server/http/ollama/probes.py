"""GET /, by which clients find out that a server is there, and GET /api/version."""

from __future__ import annotations

from server.http.call import Call

# The release of Ollama whose API is answered here: clients refuse to talk to one that is too old.
LEVEL = "0.12.6"


async def alive(call: Call) -> None:
    """The server runs."""
    await call.reply_data(200, b"Ollama is running", b"text/plain; charset=utf-8")


async def version(call: Call) -> None:
    """Which API this is."""
    await call.reply(200, {"version": LEVEL})
