"""A call ends with its client or with the server, whichever ends first, and cancels its work."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.http.app import EndpointApp
from server.http.call import Call, Endpoint
from server.http.openai_format import OPENAI_ERRORS
from tests.server.http.calls import make_context


class Exchange:
    """A call whose body has arrived, and whose client disconnects when `left` is set."""

    def __init__(self, *, stubborn: bool = False) -> None:
        self.left, self.begun, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.sent: list[Any] = []
        self._read, self._stubborn = False, stubborn
        endpoint = Endpoint("POST", "/x", self._answer, OPENAI_ERRORS, "")
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": [], "query_string": b""}
        self.task = asyncio.create_task(EndpointApp([endpoint], make_context())(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": b"{}", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def _answer(self, call: Call) -> None:
        self.begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not self._stubborn:
                raise
            await call.reply(200, {})
        finally:
            self.ended.set()


async def test_a_disconnect_cancels_the_work_and_nothing_is_sent() -> None:
    call = Exchange()
    await call.begun.wait()
    call.left.set()
    await call.task  # and raises nothing
    assert call.ended.is_set()
    assert not call.sent


async def test_a_shutdown_cancels_the_work_and_the_task() -> None:
    call = Exchange()
    await call.begun.wait()
    call.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.task
    assert call.ended.is_set()
    assert not call.sent


@pytest.mark.parametrize("turns", range(6))
async def test_a_shutdown_during_a_disconnect_cancels_the_task(turns: int) -> None:
    call = Exchange()
    await call.begun.wait()
    call.left.set()
    for _ in range(turns):  # meanwhile the task that waits for the client sees it disconnect
        await asyncio.sleep(0)
    call.task.cancel()
    await asyncio.wait([call.task])
    assert call.ended.is_set()
    assert not call.sent
    assert call.task.cancelled() or (turns > 1 and call.task.exception() is None)


async def test_work_that_completes_despite_cancellation_sends_its_answer() -> None:
    call = Exchange(stubborn=True)
    await call.begun.wait()
    call.left.set()
    await call.task
    assert [message["type"] for message in call.sent] == ["http.response.start", "http.response.body"]


async def test_no_disconnect_watcher_remains_after_the_answer() -> None:
    before = asyncio.all_tasks()
    call = Exchange(stubborn=True)
    await call.begun.wait()
    call.left.set()
    await call.task
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
